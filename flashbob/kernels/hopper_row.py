"""Row pass on Hopper, head size 64: a warpgroup owns 64 queries and streams the keys they see.

Same sums as `row_pass`. Keys arrive in tiles of BN = 32 through a TMA ring:

    issue   S = q k^T | F = uq k^T + q uk^T | dP = do v^T | C = do uv^T           5 groups in flight
    S done  P = 2^(S - L)             issue acc_b += P k, acc_o += P uv           while F, dP, C run
    F done  PF                        issue acc_o += PF v
    dP done P dPs                     issue acc_w += (P dPs) uk
    C done  G = P C + PF dPs          issue acc_w += G k, at once followed by the scores of the next 32 keys

so the warpgroup always has products queued, and a second program on the same multiprocessor fills what is left. Per
64 x 32 tile: 640 tensor-core cycles (10 products of 64); shared memory 448 (q and do in registers); 410 issue slots a
warp. Registers 254: accumulators 96, q and do 32, scores 64, 16-bit tiles in flight 24. Shared memory 96 KiB.

E0 is summed in float32 from G. Its other form, <do, gdo> in the epilogue, saves the sum but adds the rounding of P and
P F to 16 bits, and with keys of large mean E0 B nearly cancels W (see `What was tried` in flashbob/README.md).
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
    narrow,
    operand_layout,
    own_queries,
    product,
    scalar_offsets,
    scores,
)


@gluon.jit
def _row_tile(
    acc_o, acc_b, acc_w, alpha, e0, q, uq, do, ring, stage, lse2, delta, limit, n0, qk_scale, scale, ahead,
    BN: gl.constexpr, D: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    P: gl.constexpr = operand_layout(D)
    dtype: gl.constexpr = ring[0].dtype
    k = ring[0].index(stage)
    v = ring[1].index(stage)
    uk = ring[2].index(stage)
    uv = ring[3].index(stage)
    s = scores(q, k)
    f = scores(uq, k)
    f = more_scores(q, uk, f)
    ds = scores(do, v)
    c = scores(do, uv)

    s, acc_o, acc_b, acc_w = warpgroup_mma_wait(4, (s, acc_o, acc_b, acc_w))
    gl.thread_barrier()  # all warps are done with the previous tile: its stage may be filled again
    descs, full, spare, b, kv, start, hi = ahead
    fetch_keys(descs, ring, full, spare, b, kv, start, hi)
    p = gl.exp2(s * qk_scale - lse2[:, None])
    if MASKED:
        offs_n = n0 + gl.arange(0, BN, gl.SliceLayout(0, accumulator_layout(BN)))
        p = gl.where(offs_n[None, :] <= limit[:, None], p, 0.0)
    p16 = narrow(p, dtype, P)
    acc_b = product(p16, k, acc_b)
    acc_o = product(p16, uv, acc_o)
    f = warpgroup_mma_wait(4, (f,))
    pf = p * (f * scale)
    alpha += gl.sum(pf, 1)
    acc_o = product(narrow(pf, dtype, P), v, acc_o)
    ds = warpgroup_mma_wait(4, (ds,))
    ds = ds - delta[:, None]
    acc_w = product(narrow(p * ds, dtype, P), uk, acc_w)
    c = warpgroup_mma_wait(1, (c,))  # stricter than needed, to free the registers of P and PF
    g = p * c + pf * ds
    acc_w = product(narrow(g, dtype, P), k, acc_w)
    e0 += gl.sum(g, 1)
    return acc_o, acc_b, acc_w, alpha, e0


@gluon.jit(do_not_specialize=["queries", "keys", "heads", "blocks", "all_heads", "query_blocks"])
def row_kernel(
    q_desc, uq_desc, do_desc, o_desc, dq_desc, k_desc, v_desc, uk_desc, uv_desc, gq_desc, gdo_desc,
    lse_ptr, scalars_ptr, queries, keys, heads, blocks, all_heads, query_blocks, scale,
    GROUPS: gl.constexpr, D: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, SECTION: gl.constexpr,
    CAUSAL: gl.constexpr, BLOCK: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Grid (blocks of 64 queries * B * H_Q,), num_warps = 4."""
    A: gl.constexpr = accumulator_layout(D)
    ROWS: gl.constexpr = gl.SliceLayout(1, accumulator_layout(BN))
    dtype: gl.constexpr = q_desc.dtype
    q_s, uq_s, do_s, o_s = four_tiles(dtype, 64, D)
    ring = key_ring(dtype, STAGES, BN, D)
    ready = barriers(1).index(0)
    full = four_barriers(STAGES)
    fence_async_shared()

    head, b, h, kv, m0, full_hi, hi = own_queries(blocks, all_heads, heads, keys, GROUPS, BN, SECTION, CAUSAL)
    descs = (k_desc, v_desc, uk_desc, uv_desc)
    fetch_four((q_desc, uq_desc, do_desc, o_desc), (q_s, uq_s, do_s, o_s), ready, b, h, m0)
    fetch_first_keys(descs, ring, full, b, kv, hi)

    offs_m = m0 + gl.arange(0, 64, ROWS)
    lse2 = gl.load(lse_ptr + head.to(gl.int64) * queries + offs_m, mask=offs_m < queries, other=float("inf")) * LOG2E
    limit = offs_m
    if not CAUSAL:
        limit = offs_m * 0 + (keys - 1)
    mbarrier.wait(ready, 0)
    delta = gl.convert_layout(gl.sum(o_s.load(A).to(gl.float32) * do_s.load(A).to(gl.float32), 1), ROWS)
    q = q_s.load(operand_layout(BN))
    do = do_s.load(operand_layout(BN))
    alpha = gl.zeros([64], gl.float32, ROWS)
    e0 = gl.zeros([64], gl.float32, ROWS)
    acc_o, acc_b, acc_w = empty_accumulators(D, 3)
    qk_scale = scale * LOG2E
    stage = 0
    phase = 0
    spare = STAGES - 1
    for n0 in range(0, full_hi, BN):
        await_tiles(full, stage, phase)
        ahead = (descs, full, spare, b, kv, n0 + (STAGES - 1) * BN, hi)
        acc_o, acc_b, acc_w, alpha, e0 = _row_tile(
            acc_o, acc_b, acc_w, alpha, e0, q, uq_s, do, ring, stage, lse2, delta, limit, n0, qk_scale, scale, ahead,
            BN, D, False,
        )  # fmt: skip
        spare = stage
        stage, phase = advance(stage, phase, STAGES)
    for n0 in range(full_hi, hi, BN):
        await_tiles(full, stage, phase)
        ahead = (descs, full, spare, b, kv, n0 + (STAGES - 1) * BN, hi)
        acc_o, acc_b, acc_w, alpha, e0 = _row_tile(
            acc_o, acc_b, acc_w, alpha, e0, q, uq_s, do, ring, stage, lse2, delta, limit, n0, qk_scale, scale, ahead,
            BN, D, True,
        )  # fmt: skip
        spare = stage
        stage, phase = advance(stage, phase, STAGES)
    acc_o, acc_b, acc_w = warpgroup_mma_wait(0, (acc_o, acc_b, acc_w))

    gl.thread_barrier()  # uq is free now and takes dq; o and q take the results on their way out
    mbarrier.expect(ready, 64 * D * 2)
    tma.async_copy_global_to_shared(dq_desc, [b, h, m0, 0], ready, uq_s)
    alpha_a = gl.convert_layout(alpha, gl.SliceLayout(1, A))
    gdo = acc_o - alpha_a[:, None] * o_s.load(A).to(gl.float32)
    o_s.store(gdo.to(dtype))
    mbarrier.wait(ready, 1)
    e0_a = gl.convert_layout(e0, gl.SliceLayout(1, A))
    gq = scale * (acc_w - e0_a[:, None] * acc_b) - alpha_a[:, None] * uq_s.load(A).to(gl.float32)
    q_s.store(gq.to(dtype))
    fence_async_shared()
    gl.thread_barrier()
    tma.async_copy_shared_to_global(gdo_desc, [b, h, m0, 0], o_s)
    tma.async_copy_shared_to_global(gq_desc, [b, h, m0, 0], q_s)
    out = scalars_ptr + head.to(gl.int64) * query_blocks * (4 * BLOCK) + scalar_offsets(offs_m, BLOCK)
    gl.store(out, lse2)
    gl.store(out + BLOCK, alpha)
    gl.store(out + 2 * BLOCK, e0)
    gl.store(out + 3 * BLOCK, delta)
    tma.store_wait(0)
