"""Column pass on Hopper, head size 128: one warpgroup makes the scores of 64 keys, another the sums.

The parting of roles of `hopper_row_split`, on the transposed tiles of `hopper_column`. Per tile of 32 queries:

    scores      S, F, dP, C from q, uq, do (k, uk, v, uv in registers) -> P h, P dPs, P (C - E0) + P h dPs to a slot
    accumulate  acc_v += (P h) do, acc_k += (P dPs) uq + (P (C - E0) + P h dPs) q, both operands from shared memory;
                frees the slot, and refills the ring of queries by TMA

Tile of 64 x 32: tensor cores 1024 cycles (8 products of 128), shared memory 1024 (scores 320, slots 96 to write, sums
288, ring 192, row scalars 128), about 270 issue slots. Registers: 128 of 256 | 128 + 64 of 248.
Bound by shared memory and tensor cores alike.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait

from flashbob.kernels.hopper_tiles import (
    LOG2E,
    accumulator_layout,
    advance,
    await_tiles,
    barriers,
    empty_accumulators,
    fetch_four,
    fetch_queries,
    locate,
    more_scores,
    next_queries,
    operand_layout,
    product,
    scores,
    tile_layout,
)


@gluon.jit
def _score_tile(
    k, uk, v, uv, ring, stage, phase, full, slots, slot, turn, filled, drained, offs_n, m0, qk_scale, scale,
    MASKED: gl.constexpr,
):  # fmt: skip
    BM: gl.constexpr = ring[0].shape[1]
    COLS: gl.constexpr = gl.SliceLayout(0, accumulator_layout(BM))
    dtype: gl.constexpr = ring[0].dtype
    await_tiles(full, stage, phase)
    q = ring[0].index(stage)
    do = ring[2].index(stage)
    scalars = ring[3].index(stage)
    s = scores(k, q)
    f = scores(k, ring[1].index(stage))
    f = more_scores(uk, q, f)
    ds = scores(v, do)
    c = scores(uv, do)

    lse2 = scalars.slice(0, BM).load(COLS)
    s = warpgroup_mma_wait(4, (s,))
    p = gl.exp2(s * qk_scale - lse2[None, :])
    if MASKED:
        offs_m = m0 + gl.arange(0, BM, COLS)
        p = gl.where(offs_n[:, None] <= offs_m[None, :], p, 0.0)
    alpha = scalars.slice(BM, BM).load(COLS)
    f = warpgroup_mma_wait(2, (f,))
    ph = p * (f * scale - alpha[None, :])
    mbarrier.wait(drained.index(slot), turn ^ 1)
    slots[0].index(slot).store(ph.to(dtype))
    delta = scalars.slice(3 * BM, BM).load(COLS)
    ds = warpgroup_mma_wait(1, (ds,))
    ds = ds - delta[None, :]
    slots[1].index(slot).store((p * ds).to(dtype))
    e0 = scalars.slice(2 * BM, BM).load(COLS)
    c = warpgroup_mma_wait(0, (c,))
    slots[2].index(slot).store((p * (c - e0[None, :]) + ph * ds).to(dtype))
    fence_async_shared()
    mbarrier.arrive(filled.index(slot))


@gluon.jit
def _score(
    tiles, ring, full, slots, filled, drained, ready, n0, lo, full_lo, queries, scale,
    GROUPS: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    STAGES: gl.constexpr = ring[0].shape[0]
    BM: gl.constexpr = ring[0].shape[1]
    SLOTS: gl.constexpr = slots[0].shape[0]
    P: gl.constexpr = operand_layout(BM)
    k_s, v_s, uk_s, uv_s = tiles
    mbarrier.wait(ready, 0)
    k = k_s.load(P)
    uk = uk_s.load(P)
    v = v_s.load(P)
    uv = uv_s.load(P)
    offs_n = n0 + gl.arange(0, 64, gl.SliceLayout(1, accumulator_layout(BM)))
    qk_scale = scale * LOG2E
    stage = 0
    phase = 0
    slot = 0
    turn = 0
    for _ in range(GROUPS):
        if CAUSAL:
            for m0 in range(lo, full_lo, BM):
                _score_tile(
                    k, uk, v, uv, ring, stage, phase, full, slots, slot, turn, filled, drained, offs_n, m0,
                    qk_scale, scale, True,
                )  # fmt: skip
                stage, phase = advance(stage, phase, STAGES)
                slot, turn = advance(slot, turn, SLOTS)
        for m0 in range(full_lo, queries, BM):
            _score_tile(
                k, uk, v, uv, ring, stage, phase, full, slots, slot, turn, filled, drained, offs_n, m0,
                qk_scale, scale, False,
            )  # fmt: skip
            stage, phase = advance(stage, phase, STAGES)
            slot, turn = advance(slot, turn, SLOTS)


@gluon.jit
def _accumulate(
    descs, results, tiles, ring, full, slots, filled, drained, b, kv, h, head_q, n0, lo, queries, query_blocks, scale,
    ahead, group, GROUPS: gl.constexpr,
):  # fmt: skip
    STAGES: gl.constexpr = ring[0].shape[0]
    BM: gl.constexpr = ring[0].shape[1]
    dtype: gl.constexpr = ring[0].dtype
    acc_k, acc_v = empty_accumulators(ring[0].shape[2], 2)
    stage = 0
    phase = 0
    slot = 0
    turn = 0
    spare = STAGES - 1
    last = 0
    for g in range(GROUPS):
        for m0 in range(lo, queries, BM):
            mbarrier.wait(filled.index(slot), turn)
            acc_v = product(slots[0].index(slot), ring[2].index(stage), acc_v)
            acc_k = warpgroup_mma_wait(1, (acc_k,))  # the previous tile is done: its slot and its stage are free
            gl.thread_barrier()
            mbarrier.arrive(drained.index(last), pred=(g > 0) | (m0 > lo))
            fetch_queries(descs, ring, full, spare, b, h + group, head_q + group, ahead, queries, query_blocks)
            acc_k = product(slots[1].index(slot), ring[1].index(stage), acc_k)
            acc_k = product(slots[2].index(slot), ring[0].index(stage), acc_k)
            ahead, group = next_queries(ahead, group, lo, queries, BM, GROUPS)
            spare = stage
            last = slot
            stage, phase = advance(stage, phase, STAGES)
            slot, turn = advance(slot, turn, slots[0].shape[0])
    acc_k, acc_v = warpgroup_mma_wait(0, (acc_k, acc_v))

    k_s, v_s = tiles[0], tiles[1]
    gk_desc, gv_desc = results
    k_s.store((acc_k * scale).to(dtype))
    v_s.store(acc_v.to(dtype))
    fence_async_shared()
    gl.thread_barrier()
    tma.async_copy_shared_to_global(gk_desc, [b, kv, n0, 0], k_s)
    tma.async_copy_shared_to_global(gv_desc, [b, kv, n0, 0], v_s)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["queries", "heads", "blocks", "all_heads", "query_blocks"])
def column_split_kernel(
    k_desc, v_desc, uk_desc, uv_desc, q_desc, uq_desc, do_desc, scalars_desc, gk_desc, gv_desc,
    queries, heads, blocks, all_heads, query_blocks, scale,
    GROUPS: gl.constexpr, D: gl.constexpr, BM: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr,
    SECTION: gl.constexpr, CAUSAL: gl.constexpr, SCORE_REGISTERS: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """Grid (blocks of 64 keys * B * H_KV,), num_warps = 4 beside the 4 warps of the scores."""
    dtype: gl.constexpr = q_desc.dtype
    T: gl.constexpr = tile_layout(D)
    k_s = gl.allocate_shared_memory(dtype, [64, D], T)
    v_s = gl.allocate_shared_memory(dtype, [64, D], T)
    uk_s = gl.allocate_shared_memory(dtype, [64, D], T)
    uv_s = gl.allocate_shared_memory(dtype, [64, D], T)
    q_s = gl.allocate_shared_memory(dtype, [STAGES, BM, D], T)
    uq_s = gl.allocate_shared_memory(dtype, [STAGES, BM, D], T)
    do_s = gl.allocate_shared_memory(dtype, [STAGES, BM, D], T)
    scalars_s = gl.allocate_shared_memory(gl.float32, [STAGES, 4 * BM], gl.NVMMASharedLayout(0, 32, rank=1))
    ph_s = gl.allocate_shared_memory(dtype, [SLOTS, 64, BM], tile_layout(BM))
    pds_s = gl.allocate_shared_memory(dtype, [SLOTS, 64, BM], tile_layout(BM))
    g_s = gl.allocate_shared_memory(dtype, [SLOTS, 64, BM], tile_layout(BM))
    ready = barriers(1).index(0)
    full = (barriers(STAGES), barriers(STAGES), barriers(STAGES), barriers(STAGES))
    filled = barriers(SLOTS)
    drained = barriers(SLOTS)
    fence_async_shared()

    rank, head = locate(blocks, all_heads, SECTION)
    n0 = rank * 64
    b = head // heads
    kv = head % heads
    lo = 0
    full_lo = 0
    if CAUSAL:
        lo = n0 // BM * BM
        full_lo = gl.minimum(gl.cdiv(n0 + 63, BM), gl.cdiv(queries, BM)) * BM
    descs = (q_desc, uq_desc, do_desc, scalars_desc)
    tiles = (k_s, v_s, uk_s, uv_s)
    ring = (q_s, uq_s, do_s, scalars_s)
    slots = (ph_s, pds_s, g_s)
    h = kv * GROUPS
    head_q = head * GROUPS
    fetch_four((k_desc, v_desc, uk_desc, uv_desc), tiles, ready, b, kv, n0)
    ahead = lo
    group = 0
    for i in gl.static_range(STAGES - 1):
        fetch_queries(descs, ring, full, i, b, h + group, head_q + group, ahead, queries, query_blocks)
        ahead, group = next_queries(ahead, group, lo, queries, BM, GROUPS)
    gl.warp_specialize([
        (_accumulate, (descs, (gk_desc, gv_desc), tiles, ring, full, slots, filled, drained, b, kv, h, head_q, n0, lo,
                       queries, query_blocks, scale, ahead, group, GROUPS)),
        (_score, (tiles, ring, full, slots, filled, drained, ready, n0, lo, full_lo, queries, scale,
                  GROUPS, CAUSAL)),
    ], [4], [SCORE_REGISTERS])  # fmt: skip
