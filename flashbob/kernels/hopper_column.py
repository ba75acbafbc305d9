"""Column pass on Hopper, head size 64: a warpgroup owns 64 keys and streams the queries that see them.

Same sums as `column_pass`, tiles transposed (keys by queries). Queries arrive in tiles of BM through a TMA ring, with
their row scalars (lse, alpha, E0, delta, packed by the row pass), and are worked off BS = 32 at a time:

    issue   S = k q^T | F = k uq^T + uk q^T | dP = v do^T | C = uv do^T          5 groups in flight
    S done  P = 2^(S - L)
    F done  P h, h = F - alpha        issue acc_v += (P h) do
    dP done P dPs                     issue acc_k += (P dPs) uq
    C done  P (C - E0) + P h dPs      issue acc_k += that q, at once followed by the scores of the next 32 queries

Two programs share a multiprocessor, one's products running beside the other's exponentials. Per 64 x 32 tile: 512
tensor-core cycles (8 products of 64); shared memory 430 with all of k, uk, v, uv in registers (scores 160, sums 96,
ring 48, row scalars 128); 310 issue slots a warp. Registers 244: accumulators 64, operands 64, scores 64, 16-bit tiles
in flight 24. Shared memory 107 KiB.
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
    narrow,
    next_queries,
    operand_layout,
    own_keys,
    product,
    query_ring,
    scores,
)


@gluon.jit
def _column_tile(
    acc_k, acc_v, k, uk, v, uv, ring, stage, offs_n, m0, qk_scale, scale, ahead,
    SUB: gl.constexpr, BS: gl.constexpr, D: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    COLS: gl.constexpr = gl.SliceLayout(0, accumulator_layout(BS))
    P: gl.constexpr = operand_layout(D)
    BM: gl.constexpr = ring[0].shape[1]
    dtype: gl.constexpr = ring[0].dtype
    q = ring[0].index(stage).slice(SUB * BS, BS)
    uq = ring[1].index(stage).slice(SUB * BS, BS)
    do = ring[2].index(stage).slice(SUB * BS, BS)
    scalars = ring[3].index(stage)
    s = scores(k, q)
    f = scores(k, uq)
    f = more_scores(uk, q, f)
    ds = scores(v, do)
    c = scores(uv, do)

    lse2 = scalars.slice(SUB * BS, BS).load(COLS)
    s, acc_k, acc_v = warpgroup_mma_wait(4, (s, acc_k, acc_v))
    if SUB == 0:  # all warps are done with the previous tile: its stage may be filled again
        fence_async_shared()
        gl.thread_barrier()
        descs, full, spare, b, h, head, start, queries, query_blocks = ahead
        fetch_queries(descs, ring, full, spare, b, h, head, start, queries, query_blocks)
    p = gl.exp2(s * qk_scale - lse2[None, :])
    if MASKED:
        offs_m = m0 + SUB * BS + gl.arange(0, BS, COLS)
        p = gl.where(offs_n[:, None] <= offs_m[None, :], p, 0.0)
    alpha = scalars.slice(BM + SUB * BS, BS).load(COLS)
    f = warpgroup_mma_wait(2, (f,))
    ph = p * (f * scale - alpha[None, :])
    acc_v = product(narrow(ph, dtype, P), do, acc_v)
    delta = scalars.slice(3 * BM + SUB * BS, BS).load(COLS)
    ds = warpgroup_mma_wait(2, (ds,))
    ds = ds - delta[None, :]
    acc_k = product(narrow(p * ds, dtype, P), uq, acc_k)
    e0 = scalars.slice(2 * BM + SUB * BS, BS).load(COLS)
    c = warpgroup_mma_wait(2, (c,))
    acc_k = product(narrow(p * (c - e0[None, :]) + ph * ds, dtype, P), q, acc_k)
    return acc_k, acc_v


@gluon.jit(do_not_specialize=["queries", "heads", "blocks", "all_heads", "query_blocks"])
def column_kernel(
    k_desc, v_desc, uk_desc, uv_desc, q_desc, uq_desc, do_desc, scalars_desc, gk_desc, gv_desc,
    queries, heads, blocks, all_heads, query_blocks, scale,
    GROUPS: gl.constexpr, D: gl.constexpr, BM: gl.constexpr, BS: gl.constexpr, STAGES: gl.constexpr,
    SECTION: gl.constexpr, CAUSAL: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Grid (blocks of 64 keys * B * H_KV,), num_warps = 4."""
    P: gl.constexpr = operand_layout(BS)
    dtype: gl.constexpr = q_desc.dtype
    k_s, v_s, uk_s, uv_s = four_tiles(dtype, 64, D)
    ring = query_ring(dtype, STAGES, BM, D)
    ready = barriers(1).index(0)
    full = four_barriers(STAGES)
    fence_async_shared()

    head, b, kv, n0, lo, full_lo = own_keys(blocks, all_heads, heads, queries, BM, SECTION, CAUSAL)
    descs = (q_desc, uq_desc, do_desc, scalars_desc)
    h = kv * GROUPS
    head_q = head * GROUPS
    fetch_four((k_desc, v_desc, uk_desc, uv_desc), (k_s, v_s, uk_s, uv_s), ready, b, kv, n0)
    ahead, group = fetch_first_queries(descs, ring, full, b, h, head_q, lo, queries, query_blocks, GROUPS)
    mbarrier.wait(ready, 0)
    k = k_s.load(P)
    uk = uk_s.load(P)
    v = v_s.load(P)
    uv = uv_s.load(P)
    offs_n = n0 + gl.arange(0, 64, gl.SliceLayout(1, accumulator_layout(BS)))
    acc_k, acc_v = empty_accumulators(D, 2)
    qk_scale = scale * LOG2E
    stage = 0
    phase = 0
    spare = STAGES - 1
    for _ in range(GROUPS):
        if CAUSAL:
            for m0 in range(lo, full_lo, BM):
                await_tiles(full, stage, phase)
                fetch = (descs, full, spare, b, h + group, head_q + group, ahead, queries, query_blocks)
                for sub in gl.static_range(BM // BS):
                    acc_k, acc_v = _column_tile(
                        acc_k, acc_v, k, uk, v, uv, ring, stage, offs_n, m0, qk_scale, scale, fetch,
                        sub, BS, D, True,
                    )  # fmt: skip
                ahead, group = next_queries(ahead, group, lo, queries, BM, GROUPS)
                spare = stage
                stage, phase = advance(stage, phase, STAGES)
        for m0 in range(full_lo, queries, BM):
            await_tiles(full, stage, phase)
            fetch = (descs, full, spare, b, h + group, head_q + group, ahead, queries, query_blocks)
            for sub in gl.static_range(BM // BS):
                acc_k, acc_v = _column_tile(
                    acc_k, acc_v, k, uk, v, uv, ring, stage, offs_n, m0, qk_scale, scale, fetch,
                    sub, BS, D, False,
                )  # fmt: skip
            ahead, group = next_queries(ahead, group, lo, queries, BM, GROUPS)
            spare = stage
            stage, phase = advance(stage, phase, STAGES)
    acc_k, acc_v = warpgroup_mma_wait(0, (acc_k, acc_v))

    gl.thread_barrier()
    k_s.store((acc_k * scale).to(dtype))
    v_s.store(acc_v.to(dtype))
    fence_async_shared()
    gl.thread_barrier()
    tma.async_copy_shared_to_global(gk_desc, [b, kv, n0, 0], k_s)
    tma.async_copy_shared_to_global(gv_desc, [b, kv, n0, 0], v_s)
    tma.store_wait(0)
