"""Forward and first backward, for the cases that PyTorch's fused attention leaves out. No atomics: bitwise repeatable.

The forward is the online softmax, o = softmax(S) v with lse = log sum_j exp(S). The backward forms dS = P (dP - delta)
twice: a row kernel takes dq = tau dS k from it, a column kernel dk = tau dS^T q and dv = P^T do.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashbob.kernels.scores import bent, inner_scale, kept, kept_tile, score_tile
from flashbob.kernels.tiles import (
    head_base,
    key_limits,
    load_scalars,
    load_tile,
    query_limits,
    store_scalars,
    store_tile,
    valid_keys,
    visible,
)


@triton.jit
def _forward_tiles(
    acc, total, top, q, k_base, k_op, v_base, v_op, b, h, heads, m0, lo, hi, band, first, stop,
    qk_scale, softcap, bias, keep,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, MASKED: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
    SOFTCAP: tl.constexpr, BIAS: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    for n0 in tl.range(lo, hi, BN, num_stages=STAGES):
        n0 = tl.multiple_of(n0, BN)
        k = load_tile(k_base, k_op, n0, band.keys, BN, D, BLOCK_D, MASKED, WIDE)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        s, _ = score_tile(s, qk_scale, softcap, bias, b, h, m0, n0, band, BM, BN, False, SOFTCAP, BIAS)
        if MASKED:
            offs_m = m0 + tl.arange(0, BM)
            offs_n = n0 + tl.arange(0, BN)
            seen = visible(offs_m[:, None], offs_n[None, :], band, first, stop, LEFT, RIGHT)
            s = tl.where(seen, s, float("-inf"))
        new_top = tl.maximum(top, tl.max(s, 1))
        anchor = new_top
        if MASKED or BIAS:
            anchor = tl.where(new_top == float("-inf"), 0.0, new_top)
        p = tl.math.exp2(s - anchor[:, None])
        decay = tl.math.exp2(top - anchor)
        total = total * decay + tl.sum(p, 1)
        acc = acc * decay[:, None]
        v = load_tile(v_base, v_op, n0, band.keys, BN, DV, BLOCK_DV, MASKED, WIDE)
        p = kept(p, kept_tile(keep, b, h, heads, m0, n0, BM, BN, False, DROPOUT), keep, DROPOUT)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
        top = new_top
    return acc, total, top


@triton.jit(do_not_specialize=["band", "heads", "keep"])
def forward_kernel(
    q_op, k_op, v_op, o_op, lse_ptr, band, heads, scale, softcap, bias, keep,
    GROUPS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, PADDED: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
    SOFTCAP: tl.constexpr, BIAS: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of BM queries, B * H_Q). Scores are kept in base 2 until lse is written."""
    m0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM
    b = tl.program_id(1) // heads
    h = tl.program_id(1) % heads
    kv = h // GROUPS
    q = load_tile(head_base(q_op, b, h), q_op, m0, band.queries, BM, D, BLOCK_D, True, WIDE)
    acc = tl.zeros([BM, BLOCK_DV], tl.float32)
    total = tl.zeros([BM], tl.float32)
    top = tl.full([BM], float("-inf"), tl.float32)
    k_base, v_base = head_base(k_op, b, kv), head_base(v_op, b, kv)
    qk_scale = inner_scale(scale, softcap, SOFTCAP)
    first, stop = valid_keys(band, b, PADDED)
    lo, full_lo, full_hi, hi = key_limits(m0, band, first, stop, BM, BN, LEFT, RIGHT)
    if LEFT or PADDED:
        acc, total, top = _forward_tiles(
            acc, total, top, q, k_base, k_op, v_base, v_op,
            b, h, heads, m0, lo, tl.minimum(full_lo, hi), band, first, stop, qk_scale, softcap, bias, keep,
            BM, BN, D, DV, BLOCK_D, BLOCK_DV, LEFT, RIGHT, True, STAGES, PRECISION, WIDE, SOFTCAP, BIAS, DROPOUT,
        )  # fmt: skip
    acc, total, top = _forward_tiles(
        acc, total, top, q, k_base, k_op, v_base, v_op,
        b, h, heads, m0, full_lo, full_hi, band, first, stop, qk_scale, softcap, bias, keep,
        BM, BN, D, DV, BLOCK_D, BLOCK_DV, LEFT, RIGHT, False, STAGES, PRECISION, WIDE, SOFTCAP, BIAS, DROPOUT,
    )  # fmt: skip
    acc, total, top = _forward_tiles(
        acc, total, top, q, k_base, k_op, v_base, v_op,
        b, h, heads, m0, full_hi, hi, band, first, stop, qk_scale, softcap, bias, keep,
        BM, BN, D, DV, BLOCK_D, BLOCK_DV, LEFT, RIGHT, True, STAGES, PRECISION, WIDE, SOFTCAP, BIAS, DROPOUT,
    )  # fmt: skip
    empty = total == 0.0
    o = acc / tl.where(empty, 1.0, total)[:, None]
    store_tile(head_base(o_op, b, h), o_op, m0, band.queries, o, BM, DV, BLOCK_DV, WIDE)
    lse = (top + tl.math.log2(tl.where(empty, 1.0, total))) * 0.6931471805599453
    lse = tl.where(empty, float("inf"), lse)
    store_scalars(lse_ptr + tl.program_id(1).to(tl.int64) * band.queries, m0, band.queries, lse, BM)


@triton.jit
def _dq_tiles(
    acc, q, do, lse2, delta, k_base, k_op, v_base, v_op, b, h, heads, m0, lo, hi, band, first, stop,
    qk_scale, softcap, bias, keep,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, MASKED: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
    SOFTCAP: tl.constexpr, BIAS: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    for n0 in tl.range(lo, hi, BN, num_stages=STAGES):
        n0 = tl.multiple_of(n0, BN)
        k = load_tile(k_base, k_op, n0, band.keys, BN, D, BLOCK_D, MASKED, WIDE)
        v = load_tile(v_base, v_op, n0, band.keys, BN, DV, BLOCK_DV, MASKED, WIDE)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        s, t = score_tile(s, qk_scale, softcap, bias, b, h, m0, n0, band, BM, BN, False, SOFTCAP, BIAS)
        p = tl.math.exp2(s - lse2[:, None])
        if MASKED:
            offs_m = m0 + tl.arange(0, BM)
            offs_n = n0 + tl.arange(0, BN)
            p = tl.where(visible(offs_m[:, None], offs_n[None, :], band, first, stop, LEFT, RIGHT), p, 0.0)
        mask = kept_tile(keep, b, h, heads, m0, n0, BM, BN, False, DROPOUT)
        dp = kept(tl.dot(do, tl.trans(v), input_precision=PRECISION), mask, keep, DROPOUT)
        ds = bent(p * (dp - delta[:, None]), t, SOFTCAP)
        acc = tl.dot(ds.to(k.dtype), k, acc, input_precision=PRECISION)
    return acc


@triton.jit(do_not_specialize=["band", "heads", "keep"])
def dq_kernel(
    q_op, k_op, v_op, o_op, do_op, dq_op, lse_ptr, delta_ptr, band, heads, scale, softcap, bias, keep,
    GROUPS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, PADDED: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
    SOFTCAP: tl.constexpr, BIAS: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """dq, and delta for the column kernel. Grid (blocks of BM queries, B * H_Q)."""
    m0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM
    b = tl.program_id(1) // heads
    h = tl.program_id(1) % heads
    kv = h // GROUPS
    scalars = tl.program_id(1).to(tl.int64) * band.queries
    q = load_tile(head_base(q_op, b, h), q_op, m0, band.queries, BM, D, BLOCK_D, True, WIDE)
    do = load_tile(head_base(do_op, b, h), do_op, m0, band.queries, BM, DV, BLOCK_DV, True, WIDE)
    o = load_tile(head_base(o_op, b, h), o_op, m0, band.queries, BM, DV, BLOCK_DV, True, WIDE)
    lse2 = load_scalars(lse_ptr + scalars, m0, band.queries, float("inf"), BM, True) * 1.4426950408889634
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    store_scalars(delta_ptr + scalars, m0, band.queries, delta, BM)
    acc = tl.zeros([BM, BLOCK_D], tl.float32)
    k_base, v_base = head_base(k_op, b, kv), head_base(v_op, b, kv)
    qk_scale = inner_scale(scale, softcap, SOFTCAP)
    first, stop = valid_keys(band, b, PADDED)
    lo, full_lo, full_hi, hi = key_limits(m0, band, first, stop, BM, BN, LEFT, RIGHT)
    if LEFT or PADDED:
        acc = _dq_tiles(
            acc, q, do, lse2, delta, k_base, k_op, v_base, v_op,
            b, h, heads, m0, lo, tl.minimum(full_lo, hi), band, first, stop, qk_scale, softcap, bias, keep,
            BM, BN, D, DV, BLOCK_D, BLOCK_DV, LEFT, RIGHT, True, STAGES, PRECISION, WIDE, SOFTCAP, BIAS, DROPOUT,
        )  # fmt: skip
    acc = _dq_tiles(
        acc, q, do, lse2, delta, k_base, k_op, v_base, v_op,
        b, h, heads, m0, full_lo, full_hi, band, first, stop, qk_scale, softcap, bias, keep,
        BM, BN, D, DV, BLOCK_D, BLOCK_DV, LEFT, RIGHT, False, STAGES, PRECISION, WIDE, SOFTCAP, BIAS, DROPOUT,
    )  # fmt: skip
    acc = _dq_tiles(
        acc, q, do, lse2, delta, k_base, k_op, v_base, v_op,
        b, h, heads, m0, full_hi, hi, band, first, stop, qk_scale, softcap, bias, keep,
        BM, BN, D, DV, BLOCK_D, BLOCK_DV, LEFT, RIGHT, True, STAGES, PRECISION, WIDE, SOFTCAP, BIAS, DROPOUT,
    )  # fmt: skip
    store_tile(head_base(dq_op, b, h), dq_op, m0, band.queries, acc * scale, BM, D, BLOCK_D, WIDE)


@triton.jit
def _dkv_tiles(
    acc_k, acc_v, k, v, q_base, q_op, do_base, do_op, lse_ptr, delta_ptr, b, h, heads, n0, lo, hi,
    band, first, stop, qk_scale, softcap, bias, keep,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, MASKED: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
    SOFTCAP: tl.constexpr, BIAS: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    for m0 in tl.range(lo, hi, BM, num_stages=STAGES):
        m0 = tl.multiple_of(m0, BM)
        q = load_tile(q_base, q_op, m0, band.queries, BM, D, BLOCK_D, MASKED, WIDE)
        do = load_tile(do_base, do_op, m0, band.queries, BM, DV, BLOCK_DV, MASKED, WIDE)
        lse2 = load_scalars(lse_ptr, m0, band.queries, float("inf"), BM, MASKED) * 1.4426950408889634
        delta = load_scalars(delta_ptr, m0, band.queries, 0.0, BM, MASKED)
        s = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        s, t = score_tile(s, qk_scale, softcap, bias, b, h, m0, n0, band, BM, BN, True, SOFTCAP, BIAS)
        p = tl.math.exp2(s - lse2[None, :])
        if MASKED:
            offs_m = m0 + tl.arange(0, BM)
            offs_n = n0 + tl.arange(0, BN)
            p = tl.where(visible(offs_m[None, :], offs_n[:, None], band, first, stop, LEFT, RIGHT), p, 0.0)
        mask = kept_tile(keep, b, h, heads, m0, n0, BM, BN, True, DROPOUT)
        acc_v = tl.dot(kept(p, mask, keep, DROPOUT).to(do.dtype), do, acc_v, input_precision=PRECISION)
        dp = kept(tl.dot(v, tl.trans(do), input_precision=PRECISION), mask, keep, DROPOUT)
        ds = bent(p * (dp - delta[None, :]), t, SOFTCAP)
        acc_k = tl.dot(ds.to(q.dtype), q, acc_k, input_precision=PRECISION)
    return acc_k, acc_v


@triton.jit(do_not_specialize=["band", "kv_heads", "keep"])
def dkv_kernel(
    q_op, k_op, v_op, do_op, dk_op, dv_op, lse_ptr, delta_ptr, band, kv_heads, scale, softcap, bias, keep,
    GROUPS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, PADDED: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
    SOFTCAP: tl.constexpr, BIAS: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """Compute dk and dv, summed over the query heads of a group. Grid (blocks of BN keys, B * H_KV)."""
    n0 = tl.program_id(0) * BN
    b = tl.program_id(1) // kv_heads
    kv = tl.program_id(1) % kv_heads
    k = load_tile(head_base(k_op, b, kv), k_op, n0, band.keys, BN, D, BLOCK_D, True, WIDE)
    v = load_tile(head_base(v_op, b, kv), v_op, n0, band.keys, BN, DV, BLOCK_DV, True, WIDE)
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
        q_base, do_base = head_base(q_op, b, h), head_base(do_op, b, h)
        lse, delta = lse_ptr + scalars, delta_ptr + scalars
        if RIGHT:
            acc_k, acc_v = _dkv_tiles(
                acc_k, acc_v, k, v, q_base, q_op, do_base, do_op, lse, delta,
                b, h, heads, n0, lo, tl.minimum(full_lo, hi), band, first, stop, qk_scale, softcap, bias, keep,
                BM, BN, D, DV, BLOCK_D, BLOCK_DV, LEFT, RIGHT, True, STAGES, PRECISION, WIDE, SOFTCAP, BIAS, DROPOUT,
            )  # fmt: skip
        acc_k, acc_v = _dkv_tiles(
            acc_k, acc_v, k, v, q_base, q_op, do_base, do_op, lse, delta,
            b, h, heads, n0, full_lo, full_hi, band, first, stop, qk_scale, softcap, bias, keep,
            BM, BN, D, DV, BLOCK_D, BLOCK_DV, LEFT, RIGHT, False, STAGES, PRECISION, WIDE, SOFTCAP, BIAS, DROPOUT,
        )  # fmt: skip
        acc_k, acc_v = _dkv_tiles(
            acc_k, acc_v, k, v, q_base, q_op, do_base, do_op, lse, delta,
            b, h, heads, n0, full_hi, hi, band, first, stop, qk_scale, softcap, bias, keep,
            BM, BN, D, DV, BLOCK_D, BLOCK_DV, LEFT, RIGHT, True, STAGES, PRECISION, WIDE, SOFTCAP, BIAS, DROPOUT,
        )  # fmt: skip
    if PADDED:
        offs_n = n0 + tl.arange(0, BN)
        valid = ((offs_n >= first) & (offs_n < stop))[:, None]
        acc_k = tl.where(valid, acc_k, 0.0)
        acc_v = tl.where(valid, acc_v, 0.0)
    store_tile(head_base(dk_op, b, kv), dk_op, n0, band.keys, acc_k * scale, BN, D, BLOCK_D, WIDE)
    store_tile(head_base(dv_op, b, kv), dv_op, n0, band.keys, acc_v, BN, DV, BLOCK_DV, WIDE)
