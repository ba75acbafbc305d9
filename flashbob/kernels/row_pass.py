"""Row pass of the double backward: one program owns a block of queries and streams the keys they see.

Derivation and symbols: flashbob/README.md. Per tile five score products (S, F in two, dP, C) and five accumulations:

    alpha = sum_j P F            E0 = sum_j P (C + F dPs)
    acc_o = sum_j P uv + P F v   acc_b = sum_j P k          acc_w = sum_j P (C + F dPs) k + P dPs uk
    gdo   = acc_o - alpha o      gq = tau (acc_w - E0 acc_b) - alpha dq

F stays divided by tau until it meets another factor. Absent parts of the direction (HAS_UQ, HAS_UK, HAS_UV) and
unwanted results (WANT_Q, WANT_DO; CURVED: E0 is read by somebody) take their products with them. `tangent_kernel` is
the part that needs no output gradient.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashbob.kernels.scores import bent, bent_twice, inner_scale, kept, kept_tile, score_tile
from flashbob.kernels.tiles import (
    head_base,
    key_limits,
    load_scalars,
    load_tile,
    store_scalars,
    store_tile,
    valid_keys,
    visible,
)


@triton.jit
def _probabilities(
    q, k, lse2, b, h, m0, n0, band, first, stop, qk_scale, softcap, bias,
    BM: tl.constexpr, BN: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, MASKED: tl.constexpr,
    PRECISION: tl.constexpr, SOFTCAP: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    s, t = score_tile(s, qk_scale, softcap, bias, b, h, m0, n0, band, BM, BN, False, SOFTCAP, BIAS)
    p = tl.math.exp2(s - lse2[:, None])
    if MASKED:
        offs_m = m0 + tl.arange(0, BM)
        offs_n = n0 + tl.arange(0, BN)
        p = tl.where(visible(offs_m[:, None], offs_n[None, :], band, first, stop, LEFT, RIGHT), p, 0.0)
    return p, t


@triton.jit
def _raw(q, uq, k, uk, PRECISION: tl.constexpr, HAS_UQ: tl.constexpr, HAS_UK: tl.constexpr):
    """uq.k + q.uk, of which one part at least is there."""
    if HAS_UQ:
        f = tl.dot(uq, tl.trans(k), input_precision=PRECISION)
        if HAS_UK:
            f = tl.dot(q, tl.trans(uk), f, input_precision=PRECISION)
    else:
        f = tl.dot(q, tl.trans(uk), input_precision=PRECISION)
    return f


@triton.jit
def _row_tiles(
    acc_o, acc_b, acc_w, alpha, e0, q, do, uq, lse2, delta,
    k_base, k_op, v_base, v_op, uk_base, uk_op, uv_base, uv_op,
    b, h, heads, m0, lo, hi, band, first, stop, qk_scale, scale, softcap, bias, keep,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, MASKED: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
    SOFTCAP: tl.constexpr, BIAS: tl.constexpr, DROPOUT: tl.constexpr,
    HAS_UQ: tl.constexpr, HAS_UK: tl.constexpr, HAS_UV: tl.constexpr,
    WANT_Q: tl.constexpr, WANT_DO: tl.constexpr, CURVED: tl.constexpr,
):  # fmt: skip
    HAS_F: tl.constexpr = HAS_UQ or HAS_UK
    for n0 in tl.range(lo, hi, BN, num_stages=STAGES):
        n0 = tl.multiple_of(n0, BN)
        k = load_tile(k_base, k_op, n0, band.keys, BN, D, BLOCK_D, MASKED, WIDE)
        uk = k
        if HAS_F:
            v = load_tile(v_base, v_op, n0, band.keys, BN, DV, BLOCK_DV, MASKED, WIDE)
        if HAS_UK:
            uk = load_tile(uk_base, uk_op, n0, band.keys, BN, D, BLOCK_D, MASKED, WIDE)
        if HAS_UV:
            uv = load_tile(uv_base, uv_op, n0, band.keys, BN, DV, BLOCK_DV, MASKED, WIDE)
        p, t = _probabilities(
            q, k, lse2, b, h, m0, n0, band, first, stop, qk_scale, softcap, bias,
            BM, BN, LEFT, RIGHT, MASKED, PRECISION, SOFTCAP, BIAS,
        )  # fmt: skip
        mask = kept_tile(keep, b, h, heads, m0, n0, BM, BN, False, DROPOUT)
        if HAS_F:
            raw = _raw(q, uq, k, uk, PRECISION, HAS_UQ, HAS_UK)
            f = bent(raw, t, SOFTCAP)
            pf = p * f
            alpha += tl.sum(pf, 1)
            if WANT_DO:
                weights = kept(pf * scale, mask, keep, DROPOUT)
                acc_o = tl.dot(weights.to(v.dtype), v, acc_o, input_precision=PRECISION)
        if WANT_DO and HAS_UV:
            acc_o = tl.dot(kept(p, mask, keep, DROPOUT).to(uv.dtype), uv, acc_o, input_precision=PRECISION)
        if WANT_Q:
            acc_b = tl.dot(bent(p, t, SOFTCAP).to(k.dtype), k, acc_b, input_precision=PRECISION)
        if CURVED:
            if HAS_F:
                ds = tl.dot(do, tl.trans(v), input_precision=PRECISION)
                ds = kept(ds, mask, keep, DROPOUT) - delta[:, None]
            if HAS_UV:
                c = kept(tl.dot(do, tl.trans(uv), input_precision=PRECISION), mask, keep, DROPOUT)
            if HAS_F and HAS_UV:
                g = p * (c + f * (ds * scale))
            elif HAS_F:
                g = p * (f * (ds * scale))
            else:
                g = p * c
            e0 += tl.sum(g, 1)
            if WANT_Q:
                if HAS_F:
                    g = bent_twice(g, raw * scale, p * ds, t, softcap, SOFTCAP)
                else:
                    g = bent(g, t, SOFTCAP)
                acc_w = tl.dot(g.to(k.dtype), k, acc_w, input_precision=PRECISION)
                if HAS_UK:
                    weights = bent(p * ds, t, SOFTCAP)
                    acc_w = tl.dot(weights.to(uk.dtype), uk, acc_w, input_precision=PRECISION)
    return acc_o, acc_b, acc_w, alpha, e0


@triton.jit(do_not_specialize=["band", "heads", "keep"])
def row_pass_kernel(
    q_op, k_op, v_op, o_op, do_op, dq_op, uq_op, uk_op, uv_op, gq_op, gdo_op,
    lse_ptr, alpha_ptr, e0_ptr, delta_ptr, band, heads, scale, softcap, bias, keep,
    GROUPS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, PADDED: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
    SOFTCAP: tl.constexpr, BIAS: tl.constexpr, DROPOUT: tl.constexpr,
    HAS_UQ: tl.constexpr, HAS_UK: tl.constexpr, HAS_UV: tl.constexpr,
    WANT_Q: tl.constexpr, WANT_DO: tl.constexpr, CURVED: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of BM queries, B * H_Q); the longest causal rows start first."""
    m0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM
    b = tl.program_id(1) // heads
    h = tl.program_id(1) % heads
    kv = h // GROUPS
    scalars = tl.program_id(1).to(tl.int64) * band.queries
    queries = band.queries

    q = load_tile(head_base(q_op, b, h), q_op, m0, queries, BM, D, BLOCK_D, True, WIDE)
    uq = q
    if HAS_UQ:
        uq = load_tile(head_base(uq_op, b, h), uq_op, m0, queries, BM, D, BLOCK_D, True, WIDE)
    do = load_tile(head_base(do_op, b, h), do_op, m0, queries, BM, DV, BLOCK_DV, True, WIDE)
    o = load_tile(head_base(o_op, b, h), o_op, m0, queries, BM, DV, BLOCK_DV, True, WIDE)
    lse2 = load_scalars(lse_ptr + scalars, m0, queries, float("inf"), BM, True) * 1.4426950408889634
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)

    acc_o = tl.zeros([BM, BLOCK_DV], tl.float32)
    acc_b = tl.zeros([BM, BLOCK_D], tl.float32)
    acc_w = tl.zeros([BM, BLOCK_D], tl.float32)
    alpha = tl.zeros([BM], tl.float32)
    e0 = tl.zeros([BM], tl.float32)
    k_base, v_base = head_base(k_op, b, kv), head_base(v_op, b, kv)
    uk_base, uv_base = head_base(uk_op, b, kv), head_base(uv_op, b, kv)
    qk_scale = inner_scale(scale, softcap, SOFTCAP)
    first, stop = valid_keys(band, b, PADDED)
    lo, full_lo, full_hi, hi = key_limits(m0, band, first, stop, BM, BN, LEFT, RIGHT)

    if LEFT or PADDED:
        acc_o, acc_b, acc_w, alpha, e0 = _row_tiles(
            acc_o, acc_b, acc_w, alpha, e0, q, do, uq, lse2, delta, k_base, k_op, v_base, v_op, uk_base, uk_op,
            uv_base, uv_op, b, h, heads, m0, lo, tl.minimum(full_lo, hi), band, first, stop,
            qk_scale, scale, softcap, bias, keep,
            BM, BN, D, DV, BLOCK_D, BLOCK_DV, LEFT, RIGHT, True, STAGES, PRECISION, WIDE,
            SOFTCAP, BIAS, DROPOUT, HAS_UQ, HAS_UK, HAS_UV, WANT_Q, WANT_DO, CURVED,
        )  # fmt: skip
    acc_o, acc_b, acc_w, alpha, e0 = _row_tiles(
        acc_o, acc_b, acc_w, alpha, e0, q, do, uq, lse2, delta, k_base, k_op, v_base, v_op, uk_base, uk_op,
        uv_base, uv_op, b, h, heads, m0, full_lo, full_hi, band, first, stop,
        qk_scale, scale, softcap, bias, keep,
        BM, BN, D, DV, BLOCK_D, BLOCK_DV, LEFT, RIGHT, False, STAGES, PRECISION, WIDE,
        SOFTCAP, BIAS, DROPOUT, HAS_UQ, HAS_UK, HAS_UV, WANT_Q, WANT_DO, CURVED,
    )  # fmt: skip
    acc_o, acc_b, acc_w, alpha, e0 = _row_tiles(
        acc_o, acc_b, acc_w, alpha, e0, q, do, uq, lse2, delta, k_base, k_op, v_base, v_op, uk_base, uk_op,
        uv_base, uv_op, b, h, heads, m0, full_hi, hi, band, first, stop,
        qk_scale, scale, softcap, bias, keep,
        BM, BN, D, DV, BLOCK_D, BLOCK_DV, LEFT, RIGHT, True, STAGES, PRECISION, WIDE,
        SOFTCAP, BIAS, DROPOUT, HAS_UQ, HAS_UK, HAS_UV, WANT_Q, WANT_DO, CURVED,
    )  # fmt: skip

    alpha = alpha * scale
    if WANT_DO:
        o = load_tile(head_base(o_op, b, h), o_op, m0, queries, BM, DV, BLOCK_DV, True, WIDE).to(tl.float32)
        store_tile(head_base(gdo_op, b, h), gdo_op, m0, queries, acc_o - alpha[:, None] * o, BM, DV, BLOCK_DV, WIDE)
    if WANT_Q:
        dq = load_tile(head_base(dq_op, b, h), dq_op, m0, queries, BM, D, BLOCK_D, True, WIDE).to(tl.float32)
        gq = scale * (acc_w - e0[:, None] * acc_b) - alpha[:, None] * dq
        store_tile(head_base(gq_op, b, h), gq_op, m0, queries, gq, BM, D, BLOCK_D, WIDE)
    store_scalars(alpha_ptr + scalars, m0, queries, alpha, BM)
    store_scalars(e0_ptr + scalars, m0, queries, e0, BM)
    store_scalars(delta_ptr + scalars, m0, queries, delta, BM)


@triton.jit
def _tangent_tiles(
    acc, alpha, q, uq, lse2, k_base, k_op, v_base, v_op, uk_base, uk_op, uv_base, uv_op,
    b, h, heads, m0, lo, hi, band, first, stop, qk_scale, scale, softcap, bias, keep,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, MASKED: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
    SOFTCAP: tl.constexpr, BIAS: tl.constexpr, DROPOUT: tl.constexpr,
    HAS_UQ: tl.constexpr, HAS_UK: tl.constexpr, HAS_UV: tl.constexpr,
):  # fmt: skip
    for n0 in tl.range(lo, hi, BN, num_stages=STAGES):
        n0 = tl.multiple_of(n0, BN)
        k = load_tile(k_base, k_op, n0, band.keys, BN, D, BLOCK_D, MASKED, WIDE)
        uk = k
        if HAS_UQ or HAS_UK:
            v = load_tile(v_base, v_op, n0, band.keys, BN, DV, BLOCK_DV, MASKED, WIDE)
        if HAS_UK:
            uk = load_tile(uk_base, uk_op, n0, band.keys, BN, D, BLOCK_D, MASKED, WIDE)
        if HAS_UV:
            uv = load_tile(uv_base, uv_op, n0, band.keys, BN, DV, BLOCK_DV, MASKED, WIDE)
        p, t = _probabilities(
            q, k, lse2, b, h, m0, n0, band, first, stop, qk_scale, softcap, bias,
            BM, BN, LEFT, RIGHT, MASKED, PRECISION, SOFTCAP, BIAS,
        )  # fmt: skip
        mask = kept_tile(keep, b, h, heads, m0, n0, BM, BN, False, DROPOUT)
        if HAS_UQ or HAS_UK:
            pf = p * bent(_raw(q, uq, k, uk, PRECISION, HAS_UQ, HAS_UK), t, SOFTCAP) * scale
            alpha += tl.sum(pf, 1)
            acc = tl.dot(kept(pf, mask, keep, DROPOUT).to(v.dtype), v, acc, input_precision=PRECISION)
        if HAS_UV:
            acc = tl.dot(kept(p, mask, keep, DROPOUT).to(uv.dtype), uv, acc, input_precision=PRECISION)
    return acc, alpha


@triton.jit(do_not_specialize=["band", "heads", "keep"])
def tangent_kernel(
    q_op, k_op, v_op, o_op, uq_op, uk_op, uv_op, out_op, lse_ptr, band, heads, scale, softcap, bias, keep,
    GROUPS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, PADDED: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
    SOFTCAP: tl.constexpr, BIAS: tl.constexpr, DROPOUT: tl.constexpr,
    HAS_UQ: tl.constexpr, HAS_UK: tl.constexpr, HAS_UV: tl.constexpr,
):  # fmt: skip
    """Forward-mode derivative of o; grid as in `row_pass_kernel`."""
    m0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM
    b = tl.program_id(1) // heads
    h = tl.program_id(1) % heads
    kv = h // GROUPS
    scalars = tl.program_id(1).to(tl.int64) * band.queries
    queries = band.queries

    q = load_tile(head_base(q_op, b, h), q_op, m0, queries, BM, D, BLOCK_D, True, WIDE)
    uq = q
    if HAS_UQ:
        uq = load_tile(head_base(uq_op, b, h), uq_op, m0, queries, BM, D, BLOCK_D, True, WIDE)
    lse2 = load_scalars(lse_ptr + scalars, m0, queries, float("inf"), BM, True) * 1.4426950408889634
    acc = tl.zeros([BM, BLOCK_DV], tl.float32)
    alpha = tl.zeros([BM], tl.float32)
    k_base, v_base = head_base(k_op, b, kv), head_base(v_op, b, kv)
    uk_base, uv_base = head_base(uk_op, b, kv), head_base(uv_op, b, kv)
    qk_scale = inner_scale(scale, softcap, SOFTCAP)
    first, stop = valid_keys(band, b, PADDED)
    lo, full_lo, full_hi, hi = key_limits(m0, band, first, stop, BM, BN, LEFT, RIGHT)

    if LEFT or PADDED:
        acc, alpha = _tangent_tiles(
            acc, alpha, q, uq, lse2, k_base, k_op, v_base, v_op, uk_base, uk_op, uv_base, uv_op,
            b, h, heads, m0, lo, tl.minimum(full_lo, hi), band, first, stop, qk_scale, scale, softcap, bias, keep,
            BM, BN, D, DV, BLOCK_D, BLOCK_DV, LEFT, RIGHT, True, STAGES, PRECISION, WIDE,
            SOFTCAP, BIAS, DROPOUT, HAS_UQ, HAS_UK, HAS_UV,
        )  # fmt: skip
    acc, alpha = _tangent_tiles(
        acc, alpha, q, uq, lse2, k_base, k_op, v_base, v_op, uk_base, uk_op, uv_base, uv_op,
        b, h, heads, m0, full_lo, full_hi, band, first, stop, qk_scale, scale, softcap, bias, keep,
        BM, BN, D, DV, BLOCK_D, BLOCK_DV, LEFT, RIGHT, False, STAGES, PRECISION, WIDE,
        SOFTCAP, BIAS, DROPOUT, HAS_UQ, HAS_UK, HAS_UV,
    )  # fmt: skip
    acc, alpha = _tangent_tiles(
        acc, alpha, q, uq, lse2, k_base, k_op, v_base, v_op, uk_base, uk_op, uv_base, uv_op,
        b, h, heads, m0, full_hi, hi, band, first, stop, qk_scale, scale, softcap, bias, keep,
        BM, BN, D, DV, BLOCK_D, BLOCK_DV, LEFT, RIGHT, True, STAGES, PRECISION, WIDE,
        SOFTCAP, BIAS, DROPOUT, HAS_UQ, HAS_UK, HAS_UV,
    )  # fmt: skip
    o = load_tile(head_base(o_op, b, h), o_op, m0, queries, BM, DV, BLOCK_DV, True, WIDE).to(tl.float32)
    store_tile(head_base(out_op, b, h), out_op, m0, queries, acc - alpha[:, None] * o, BM, DV, BLOCK_DV, WIDE)
