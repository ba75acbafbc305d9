"""Column pass on Hopper, head size 128: one warpgroup makes the scores of 64 keys, another the sums.

The parting of roles of `hopper_row_split`, on the transposed tiles of `hopper_column`. Per tile of 32 queries:

    scores      S, F, dP, C from q, uq, do (k, uk, v, uv in registers) -> P h, P dPs, P (C - E0 + h dPs) to a slot
    accumulate  acc_v += (P h) do, acc_k += (P dPs) uq + (P (C - E0 + h dPs)) q, both operands from shared memory;
                frees the slot, and refills the ring of queries by TMA

The scores run one tile ahead: while those of a tile go through exponentials and FP32, its dP and C are made, then S and
F of the next tile. Results are waited for in the turn of the loop that asked for them, which is what ptxas can follow.

Tile of 64 x 32: tensor cores 1024 cycles (8 products of 128), shared memory 1024 (scores 320, slots 96 to write, sums
288, ring 192, row scalars 128), about 270 issue slots. Registers: 128 of 256 | 128 + 96 of 248.
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
    fetch_first_queries,
    fetch_four,
    fetch_queries,
    four_barriers,
    four_tiles,
    more_scores,
    next_queries,
    operand_layout,
    own_keys,
    product,
    query_ring,
    scores,
    tile_layout,
)


@gluon.jit
def _open_scores(k, uk, ring, stage):
    """S and F of the first tile, made."""
    q = ring[0].index(stage)
    s = scores(k, q)
    f = scores(k, ring[1].index(stage))
    f = more_scores(uk, q, f)
    return warpgroup_mma_wait(0, (s, f))


@gluon.jit
def _score_tile(
    s, f, k, uk, v, uv, ring, stage, phase, full, slots, slot, turn, filled, drained, offs_n, m0, qk_scale, scale,
    more, MASKED: gl.constexpr,
):  # fmt: skip
    BM: gl.constexpr = ring[0].shape[1]
    COLS: gl.constexpr = gl.SliceLayout(0, accumulator_layout(BM))
    dtype: gl.constexpr = ring[0].dtype
    do = ring[2].index(stage)
    scalars = ring[3].index(stage)
    ds = scores(v, do)
    c = scores(uv, do)
    after, phase_after = advance(stage, phase, ring[0].shape[0])

    lse2 = scalars.slice(0, BM).load(COLS)
    p = gl.exp2(s * qk_scale - lse2[None, :])
    if MASKED:
        offs_m = m0 + gl.arange(0, BM, COLS)
        p = gl.where(offs_n[:, None] <= offs_m[None, :], p, 0.0)
    alpha = scalars.slice(BM, BM).load(COLS)
    h = f * scale - alpha[None, :]
    mbarrier.wait(drained.index(slot), turn ^ 1)
    slots[0].index(slot).store((p * h).to(dtype))
    # Past the last tile the scores of a stale stage are made, and never looked at.
    for i in gl.static_range(4):
        mbarrier.wait(full[i].index(after), phase_after, pred=more)
    q = ring[0].index(after)
    s_next = scores(k, q)
    delta = scalars.slice(3 * BM, BM).load(COLS)
    ds = warpgroup_mma_wait(2, (ds,))
    ds = ds - delta[None, :]
    slots[1].index(slot).store((p * ds).to(dtype))
    h = h * ds
    f_next = scores(k, ring[1].index(after))
    f_next = more_scores(uk, q, f_next)
    e0 = scalars.slice(2 * BM, BM).load(COLS)
    c = warpgroup_mma_wait(3, (c,))
    slots[2].index(slot).store((p * (c - e0[None, :] + h)).to(dtype))
    fence_async_shared()
    mbarrier.arrive(filled.index(slot))
    s, f = warpgroup_mma_wait(0, (s_next, f_next))
    return s, f, after, phase_after


@gluon.jit
def _score(
    tiles, ring, full, slots, filled, drained, ready, n0, lo, full_lo, queries, scale,
    GROUPS: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
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
    await_tiles(full, 0, 0)
    s, f = _open_scores(k, uk, ring, 0)
    for group in range(GROUPS):
        if CAUSAL:
            for m0 in range(lo, full_lo, BM):
                more = (m0 + BM < queries) | (group < GROUPS - 1)
                s, f, stage, phase = _score_tile(
                    s, f, k, uk, v, uv, ring, stage, phase, full, slots, slot, turn, filled, drained, offs_n, m0,
                    qk_scale, scale, more, True,
                )  # fmt: skip
                slot, turn = advance(slot, turn, SLOTS)
        for m0 in range(full_lo, queries, BM):
            more = (m0 + BM < queries) | (group < GROUPS - 1)
            s, f, stage, phase = _score_tile(
                s, f, k, uk, v, uv, ring, stage, phase, full, slots, slot, turn, filled, drained, offs_n, m0,
                qk_scale, scale, more, False,
            )  # fmt: skip
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
    tiles = four_tiles(dtype, 64, D)
    ring = query_ring(dtype, STAGES, BM, D)
    slots = (
        gl.allocate_shared_memory(dtype, [SLOTS, 64, BM], tile_layout(BM)),
        gl.allocate_shared_memory(dtype, [SLOTS, 64, BM], tile_layout(BM)),
        gl.allocate_shared_memory(dtype, [SLOTS, 64, BM], tile_layout(BM)),
    )
    ready = barriers(1).index(0)
    full = four_barriers(STAGES)
    filled = barriers(SLOTS)
    drained = barriers(SLOTS)
    fence_async_shared()

    head, b, kv, n0, lo, full_lo = own_keys(blocks, all_heads, heads, queries, BM, SECTION, CAUSAL)
    descs = (q_desc, uq_desc, do_desc, scalars_desc)
    h = kv * GROUPS
    head_q = head * GROUPS
    fetch_four((k_desc, v_desc, uk_desc, uv_desc), tiles, ready, b, kv, n0)
    ahead, group = fetch_first_queries(descs, ring, full, b, h, head_q, lo, queries, query_blocks, GROUPS)
    gl.warp_specialize([
        (_accumulate, (descs, (gk_desc, gv_desc), tiles, ring, full, slots, filled, drained, b, kv, h, head_q, n0, lo,
                       queries, query_blocks, scale, ahead, group, GROUPS)),
        (_score, (tiles, ring, full, slots, filled, drained, ready, n0, lo, full_lo, queries, scale,
                  GROUPS, CAUSAL)),
    ], [4], [SCORE_REGISTERS])  # fmt: skip
