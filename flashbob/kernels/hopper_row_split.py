"""Row pass on Hopper, head size 128: one warpgroup makes the scores of 64 queries, another the sums.

The three [64, 128] accumulators are 192 registers a thread, which leaves one warpgroup none for scores; with narrow
score tiles (16 keys) the products starve for shared memory instead. So the roles part. Per tile of BN = 32 keys:

    scores      S, F, dP, C from k, v, uk, uv (q, uq, do in registers) -> P, PF, P dPs, G as 16-bit tiles to a slot
    accumulate  acc_b += P k, acc_o += P uv + PF v, acc_w += (P dPs) uk + G k, both operands from shared memory;
                frees the slot, and refills the ring of keys by TMA

The accumulating warpgroup does nothing but queue products, so the tensor cores have work while the other one does its
exponentials (and sums E0, where it makes G). Tile of 64 x 32: tensor cores 1280 cycles (10 products of 128), shared
memory 1184 (scores 320, slots 128 to write, sums 480, ring 256), about 350 issue slots. Registers: 192 of 256 |
96 + 64 of 240. Shared memory 225 KiB.
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
    fetch_first_keys,
    fetch_four,
    fetch_keys,
    four_barriers,
    four_tiles,
    key_ring,
    more_scores,
    operand_layout,
    own_queries,
    product,
    scalar_offsets,
    scores,
    tile_layout,
)


@gluon.jit
def _score_tile(
    alpha, e0, q, uq, do, ring, stage, phase, full, slots, slot, turn, filled, drained, lse2, delta, limit, n0,
    qk_scale, scale, MASKED: gl.constexpr,
):  # fmt: skip
    BN: gl.constexpr = ring[0].shape[1]
    dtype: gl.constexpr = ring[0].dtype
    await_tiles(full, stage, phase)
    k = ring[0].index(stage)
    s = scores(q, k)
    f = scores(uq, k)
    f = more_scores(q, ring[2].index(stage), f)
    ds = scores(do, ring[1].index(stage))
    c = scores(do, ring[3].index(stage))

    s = warpgroup_mma_wait(4, (s,))
    p = gl.exp2(s * qk_scale - lse2[:, None])
    if MASKED:
        offs_n = n0 + gl.arange(0, BN, gl.SliceLayout(0, accumulator_layout(BN)))
        p = gl.where(offs_n[None, :] <= limit[:, None], p, 0.0)
    mbarrier.wait(drained.index(slot), turn ^ 1)
    slots[0].index(slot).store(p.to(dtype))
    f = warpgroup_mma_wait(2, (f,))
    pf = p * (f * scale)
    slots[1].index(slot).store(pf.to(dtype))
    alpha += gl.sum(pf, 1)
    ds = warpgroup_mma_wait(1, (ds,))
    ds = ds - delta[:, None]
    slots[2].index(slot).store((p * ds).to(dtype))
    c = warpgroup_mma_wait(0, (c,))
    g = p * c + pf * ds
    slots[3].index(slot).store(g.to(dtype))
    fence_async_shared()
    mbarrier.arrive(filled.index(slot))
    e0 += gl.sum(g, 1)
    return alpha, e0


@gluon.jit
def _score(
    tiles, ring, full, slots, filled, drained, ready, done, alpha_s, e0_s, lse_ptr, out, head, m0, queries, keys,
    full_hi, hi, scale, CAUSAL: gl.constexpr, BLOCK: gl.constexpr,
):  # fmt: skip
    BN: gl.constexpr = ring[0].shape[1]
    A: gl.constexpr = accumulator_layout(ring[0].shape[2])
    ROWS: gl.constexpr = gl.SliceLayout(1, accumulator_layout(BN))
    q_s, uq_s, do_s, o_s = tiles
    local = gl.arange(0, 64, ROWS)
    offs_m = m0 + local
    lse2 = gl.load(lse_ptr + head.to(gl.int64) * queries + offs_m, mask=offs_m < queries, other=float("inf")) * LOG2E
    limit = offs_m
    if not CAUSAL:
        limit = offs_m * 0 + (keys - 1)
    mbarrier.wait(ready, 0)
    delta = gl.convert_layout(gl.sum(o_s.load(A).to(gl.float32) * do_s.load(A).to(gl.float32), 1), ROWS)
    q = q_s.load(operand_layout(BN))
    uq = uq_s.load(operand_layout(BN))
    do = do_s.load(operand_layout(BN))
    alpha = gl.zeros([64], gl.float32, ROWS)
    e0 = gl.zeros([64], gl.float32, ROWS)
    qk_scale = scale * LOG2E
    stage = 0
    phase = 0
    slot = 0
    turn = 0
    for n0 in range(0, full_hi, BN):
        alpha, e0 = _score_tile(
            alpha, e0, q, uq, do, ring, stage, phase, full, slots, slot, turn, filled, drained, lse2, delta, limit, n0,
            qk_scale, scale, False,
        )  # fmt: skip
        stage, phase = advance(stage, phase, ring[0].shape[0])
        slot, turn = advance(slot, turn, slots[0].shape[0])
    for n0 in range(full_hi, hi, BN):
        alpha, e0 = _score_tile(
            alpha, e0, q, uq, do, ring, stage, phase, full, slots, slot, turn, filled, drained, lse2, delta, limit, n0,
            qk_scale, scale, True,
        )  # fmt: skip
        stage, phase = advance(stage, phase, ring[0].shape[0])
        slot, turn = advance(slot, turn, slots[0].shape[0])
    alpha_s.store(alpha)
    e0_s.store(e0)
    mbarrier.arrive(done)
    out += scalar_offsets(local, BLOCK)
    gl.store(out, lse2)
    gl.store(out + BLOCK, alpha)
    gl.store(out + 2 * BLOCK, e0)
    gl.store(out + 3 * BLOCK, delta)


@gluon.jit
def _accumulate(
    descs, results, tiles, ring, full, slots, filled, drained, ready, done, alpha_s, e0_s, b, h, kv, m0, hi, scale,
):  # fmt: skip
    STAGES: gl.constexpr = ring[0].shape[0]
    BN: gl.constexpr = ring[0].shape[1]
    D: gl.constexpr = ring[0].shape[2]
    A: gl.constexpr = accumulator_layout(D)
    dtype: gl.constexpr = ring[0].dtype
    acc_o, acc_b, acc_w = empty_accumulators(D, 3)
    stage = 0
    phase = 0
    slot = 0
    turn = 0
    spare = STAGES - 1
    last = 0
    for n0 in range(0, hi, BN):
        mbarrier.wait(filled.index(slot), turn)
        p = slots[0].index(slot)
        k = ring[0].index(stage)
        acc_b = product(p, k, acc_b)
        acc_o = product(p, ring[3].index(stage), acc_o)
        acc_o = product(slots[1].index(slot), ring[1].index(stage), acc_o)
        acc_w = warpgroup_mma_wait(3, (acc_w,))  # the previous tile is done: its slot and its stage are free
        gl.thread_barrier()
        mbarrier.arrive(drained.index(last), pred=n0 > 0)
        fetch_keys(descs, ring, full, spare, b, kv, n0 + (STAGES - 1) * BN, hi)
        acc_w = product(slots[2].index(slot), ring[2].index(stage), acc_w)
        acc_w = product(slots[3].index(slot), k, acc_w)
        spare = stage
        last = slot
        stage, phase = advance(stage, phase, STAGES)
        slot, turn = advance(slot, turn, slots[0].shape[0])
    acc_o, acc_b, acc_w = warpgroup_mma_wait(0, (acc_o, acc_b, acc_w))

    q_s, uq_s, _, o_s = tiles
    dq_desc, gq_desc, gdo_desc = results
    mbarrier.wait(ready, 0)
    mbarrier.wait(done, 0)  # the scores are over: uq takes dq; o and q take the results on their way out
    mbarrier.expect(ready, 64 * D * 2)
    tma.async_copy_global_to_shared(dq_desc, [b, h, m0, 0], ready, uq_s)
    alpha = alpha_s.load(gl.SliceLayout(1, A))
    gdo = acc_o - alpha[:, None] * o_s.load(A).to(gl.float32)
    o_s.store(gdo.to(dtype))
    mbarrier.wait(ready, 1)
    e0 = e0_s.load(gl.SliceLayout(1, A))
    gq = scale * (acc_w - e0[:, None] * acc_b) - alpha[:, None] * uq_s.load(A).to(gl.float32)
    q_s.store(gq.to(dtype))
    fence_async_shared()
    gl.thread_barrier()
    tma.async_copy_shared_to_global(gdo_desc, [b, h, m0, 0], o_s)
    tma.async_copy_shared_to_global(gq_desc, [b, h, m0, 0], q_s)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["queries", "keys", "heads", "blocks", "all_heads", "query_blocks"])
def row_split_kernel(
    q_desc, uq_desc, do_desc, o_desc, dq_desc, k_desc, v_desc, uk_desc, uv_desc, gq_desc, gdo_desc,
    lse_ptr, scalars_ptr, queries, keys, heads, blocks, all_heads, query_blocks, scale,
    GROUPS: gl.constexpr, D: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr,
    SECTION: gl.constexpr, CAUSAL: gl.constexpr, BLOCK: gl.constexpr, SCORE_REGISTERS: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """Grid (blocks of 64 queries * B * H_Q,), num_warps = 4 beside the 4 warps of the scores."""
    dtype: gl.constexpr = q_desc.dtype
    tiles = four_tiles(dtype, 64, D)
    ring = key_ring(dtype, STAGES, BN, D)
    slots = (
        gl.allocate_shared_memory(dtype, [SLOTS, 64, BN], tile_layout(BN)),
        gl.allocate_shared_memory(dtype, [SLOTS, 64, BN], tile_layout(BN)),
        gl.allocate_shared_memory(dtype, [SLOTS, 64, BN], tile_layout(BN)),
        gl.allocate_shared_memory(dtype, [SLOTS, 64, BN], tile_layout(BN)),
    )
    alpha_s = gl.allocate_shared_memory(gl.float32, [64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    e0_s = gl.allocate_shared_memory(gl.float32, [64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ready = barriers(1).index(0)
    done = barriers(1).index(0)
    full = four_barriers(STAGES)
    filled = barriers(SLOTS)
    drained = barriers(SLOTS)
    fence_async_shared()

    head, b, h, kv, m0, full_hi, hi = own_queries(blocks, all_heads, heads, keys, GROUPS, BN, SECTION, CAUSAL)
    descs = (k_desc, v_desc, uk_desc, uv_desc)
    fetch_four((q_desc, uq_desc, do_desc, o_desc), tiles, ready, b, h, m0)
    fetch_first_keys(descs, ring, full, b, kv, hi)
    out = scalars_ptr + (head.to(gl.int64) * query_blocks * BLOCK + m0) * 4
    results = (dq_desc, gq_desc, gdo_desc)
    gl.warp_specialize([
        (_accumulate, (descs, results, tiles, ring, full, slots, filled, drained, ready, done, alpha_s, e0_s,
                       b, h, kv, m0, hi, scale)),
        (_score, (tiles, ring, full, slots, filled, drained, ready, done, alpha_s, e0_s, lse_ptr, out, head, m0,
                  queries, keys, full_hi, hi, scale, CAUSAL, BLOCK)),
    ], [4], [SCORE_REGISTERS])  # fmt: skip
