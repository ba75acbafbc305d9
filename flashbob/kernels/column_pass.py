"""Column pass of the double backward: one program owns a block of keys and streams the queries that see them.

Derivation and symbols: flashbob/README.md. Tiles are transposed, keys by queries. With h = F - alpha, per tile five
score products and three accumulations:

    acc_v = sum_i P h do_i                                   -> gv
    acc_k = sum_i P (C + h dPs - E0) q_i + (P dPs) uq_i      -> gk / tau

alpha, E0 and delta come from the row pass. Query heads that share the key head are summed before the one write. Absent
parts of the direction (HAS_UQ, HAS_UK, HAS_UV) and unwanted results (WANT_K, WANT_V) take their products with them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashbob.kernels.scores import bent, bent_twice, inner_scale, kept, kept_tile, score_tile
from flashbob.kernels.tiles import (
    head_base,
    load_scalars,
    load_tile,
    query_limits,
    store_tile,
    valid_keys,
    visible,
)


@triton.jit
def _raw(k, uk, q, uq, PRECISION: tl.constexpr, HAS_UQ: tl.constexpr, HAS_UK: tl.constexpr):
    """k.uq + uk.q, of which one part at least is there."""
    if HAS_UQ:
        f = tl.dot(k, tl.trans(uq), input_precision=PRECISION)
        if HAS_UK:
            f = tl.dot(uk, tl.trans(q), f, input_precision=PRECISION)
    else:
        f = tl.dot(uk, tl.trans(q), input_precision=PRECISION)
    return f


@triton.jit
def _column_tiles(
    acc_k, acc_v, k, v, uk, uv, q_base, q_op, do_base, do_op, uq_base, uq_op, lse_ptr, alpha_ptr, e0_ptr, delta_ptr,
    b, h, heads, n0, lo, hi, band, first, stop, qk_scale, scale, softcap, bias, keep,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, MASKED: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
    SOFTCAP: tl.constexpr, BIAS: tl.constexpr, DROPOUT: tl.constexpr,
    HAS_UQ: tl.constexpr, HAS_UK: tl.constexpr, HAS_UV: tl.constexpr,
    WANT_K: tl.constexpr, WANT_V: tl.constexpr,
):  # fmt: skip
    HAS_F: tl.constexpr = HAS_UQ or HAS_UK
    for m0 in tl.range(lo, hi, BM, num_stages=STAGES):
        m0 = tl.multiple_of(m0, BM)
        q = load_tile(q_base, q_op, m0, band.queries, BM, D, BLOCK_D, MASKED, WIDE)
        do = load_tile(do_base, do_op, m0, band.queries, BM, DV, BLOCK_DV, MASKED, WIDE)
        uq = q
        if HAS_UQ:
            uq = load_tile(uq_base, uq_op, m0, band.queries, BM, D, BLOCK_D, MASKED, WIDE)
        lse2 = load_scalars(lse_ptr, m0, band.queries, float("inf"), BM, MASKED) * 1.4426950408889634
        if HAS_F:
            alpha = load_scalars(alpha_ptr, m0, band.queries, 0.0, BM, MASKED)
        if WANT_K:
            e0 = load_scalars(e0_ptr, m0, band.queries, 0.0, BM, MASKED)
        if WANT_K and HAS_F:
            delta = load_scalars(delta_ptr, m0, band.queries, 0.0, BM, MASKED)
        s = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        s, t = score_tile(s, qk_scale, softcap, bias, b, h, m0, n0, band, BM, BN, True, SOFTCAP, BIAS)
        p = tl.math.exp2(s - lse2[None, :])
        if MASKED:
            offs_m = m0 + tl.arange(0, BM)
            offs_n = n0 + tl.arange(0, BN)
            p = tl.where(visible(offs_m[None, :], offs_n[:, None], band, first, stop, LEFT, RIGHT), p, 0.0)
        mask = kept_tile(keep, b, h, heads, m0, n0, BM, BN, True, DROPOUT)
        if HAS_F:
            raw = _raw(k, uk, q, uq, PRECISION, HAS_UQ, HAS_UK) * scale
            f = bent(raw, t, SOFTCAP) - alpha[None, :]
            if WANT_V:
                weights = kept(p * f, mask, keep, DROPOUT)
                acc_v = tl.dot(weights.to(do.dtype), do, acc_v, input_precision=PRECISION)
        if WANT_K:
            if HAS_F:
                ds = tl.dot(v, tl.trans(do), input_precision=PRECISION)
                ds = kept(ds, mask, keep, DROPOUT) - delta[None, :]
            if HAS_UV:
                c = kept(tl.dot(uv, tl.trans(do), input_precision=PRECISION), mask, keep, DROPOUT)
            if HAS_F and HAS_UV:
                gs = p * (c + f * ds - e0[None, :])
            elif HAS_F:
                gs = p * (f * ds - e0[None, :])
            else:
                gs = p * (c - e0[None, :])
            if HAS_F:
                gs = bent_twice(gs, raw, p * ds, t, softcap, SOFTCAP)
            else:
                gs = bent(gs, t, SOFTCAP)
            acc_k = tl.dot(gs.to(q.dtype), q, acc_k, input_precision=PRECISION)
            if HAS_UQ:
                weights = bent(p * ds, t, SOFTCAP)
                acc_k = tl.dot(weights.to(uq.dtype), uq, acc_k, input_precision=PRECISION)
    return acc_k, acc_v


@triton.jit(do_not_specialize=["band", "kv_heads", "keep"])
def column_pass_kernel(
    q_op, k_op, v_op, do_op, uq_op, uk_op, uv_op, gk_op, gv_op, lse_ptr, alpha_ptr, e0_ptr, delta_ptr,
    band, kv_heads, scale, softcap, bias, keep,
    GROUPS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, PADDED: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
    SOFTCAP: tl.constexpr, BIAS: tl.constexpr, DROPOUT: tl.constexpr,
    HAS_UQ: tl.constexpr, HAS_UK: tl.constexpr, HAS_UV: tl.constexpr, WANT_K: tl.constexpr, WANT_V: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of BN keys, B * H_KV); the first keys, seen by the most queries, start first."""
    n0 = tl.program_id(0) * BN
    b = tl.program_id(1) // kv_heads
    kv = tl.program_id(1) % kv_heads

    k = load_tile(head_base(k_op, b, kv), k_op, n0, band.keys, BN, D, BLOCK_D, True, WIDE)
    uk, v, uv = k, k, k
    if HAS_UK:
        uk = load_tile(head_base(uk_op, b, kv), uk_op, n0, band.keys, BN, D, BLOCK_D, True, WIDE)
    if HAS_UQ or HAS_UK:
        v = load_tile(head_base(v_op, b, kv), v_op, n0, band.keys, BN, DV, BLOCK_DV, True, WIDE)
    if HAS_UV:
        uv = load_tile(head_base(uv_op, b, kv), uv_op, n0, band.keys, BN, DV, BLOCK_DV, True, WIDE)
    acc_k = tl.zeros([BN, BLOCK_D], tl.float32)
    acc_v = tl.zeros([BN, BLOCK_DV], tl.float32)
    qk_scale = inner_scale(scale, softcap, SOFTCAP)
    first, stop = valid_keys(band, b, PADDED)
    lo, full_lo, full_hi, hi = query_limits(n0, band, BM, BN, LEFT, RIGHT)
    if PADDED:
        if (n0 >= stop) | (n0 + BN <= first):
            full_lo = lo
            full_hi = lo
            hi = lo

    heads = kv_heads * GROUPS
    for g in range(GROUPS):
        h = kv * GROUPS + g
        scalars = (b * kv_heads * GROUPS + h).to(tl.int64) * band.queries
        q_base, do_base, uq_base = head_base(q_op, b, h), head_base(do_op, b, h), head_base(uq_op, b, h)
        lse, alpha, e0, delta = lse_ptr + scalars, alpha_ptr + scalars, e0_ptr + scalars, delta_ptr + scalars
        if RIGHT:
            acc_k, acc_v = _column_tiles(
                acc_k, acc_v, k, v, uk, uv, q_base, q_op, do_base, do_op, uq_base, uq_op, lse, alpha, e0, delta,
                b, h, heads, n0, lo, tl.minimum(full_lo, hi), band, first, stop, qk_scale, scale, softcap, bias, keep,
                BM, BN, D, DV, BLOCK_D, BLOCK_DV, LEFT, RIGHT, True, STAGES, PRECISION, WIDE,
                SOFTCAP, BIAS, DROPOUT, HAS_UQ, HAS_UK, HAS_UV, WANT_K, WANT_V,
            )  # fmt: skip
        acc_k, acc_v = _column_tiles(
            acc_k, acc_v, k, v, uk, uv, q_base, q_op, do_base, do_op, uq_base, uq_op, lse, alpha, e0, delta,
            b, h, heads, n0, full_lo, full_hi, band, first, stop, qk_scale, scale, softcap, bias, keep,
            BM, BN, D, DV, BLOCK_D, BLOCK_DV, LEFT, RIGHT, False, STAGES, PRECISION, WIDE,
            SOFTCAP, BIAS, DROPOUT, HAS_UQ, HAS_UK, HAS_UV, WANT_K, WANT_V,
        )  # fmt: skip
        acc_k, acc_v = _column_tiles(
            acc_k, acc_v, k, v, uk, uv, q_base, q_op, do_base, do_op, uq_base, uq_op, lse, alpha, e0, delta,
            b, h, heads, n0, full_hi, hi, band, first, stop, qk_scale, scale, softcap, bias, keep,
            BM, BN, D, DV, BLOCK_D, BLOCK_DV, LEFT, RIGHT, True, STAGES, PRECISION, WIDE,
            SOFTCAP, BIAS, DROPOUT, HAS_UQ, HAS_UK, HAS_UV, WANT_K, WANT_V,
        )  # fmt: skip

    if PADDED:  # a padded key met unmasked tiles too; whatever it gathered is not its own
        offs_n = n0 + tl.arange(0, BN)
        valid = ((offs_n >= first) & (offs_n < stop))[:, None]
        acc_k = tl.where(valid, acc_k, 0.0)
        acc_v = tl.where(valid, acc_v, 0.0)
    if WANT_K:
        store_tile(head_base(gk_op, b, kv), gk_op, n0, band.keys, acc_k * scale, BN, D, BLOCK_D, WIDE)
    if WANT_V:
        store_tile(head_base(gv_op, b, kv), gv_op, n0, band.keys, acc_v, BN, DV, BLOCK_DV, WIDE)
