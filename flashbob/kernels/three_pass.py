"""The three-pass schedule of the double backward, which `flashbob.rivals` measures the two passes against.

What a tiled schedule does before the row scalars are seen to enter affinely (Givans, Crawshaw and Liu 2026, appendix
G.1): a sweep for alpha alone, a sweep for the row outputs with the delayed correction by E, a sweep for the column
outputs. Symbols: flashbob/README.md.

    row statistics   alpha = sum_j P F, delta = o.do             3 products of scores
    row outputs      gdo = sum_j P uv + P h v                    5 products of scores, 5 accumulations
                     gq = tau (sum_j P (C + h dPs) k + P dPs uk - E0 sum_j P k)
    column outputs   as in `column_pass`                         5 products of scores, 3 accumulations

21 products against 18. Tensors are contiguous [heads, N, D], D a power of two; loops and tiles are those of the general
kernels (an unmasked loop, a masked one at the diagonal and at the end), so that only the schedule differs.
"""

from __future__ import annotations

import os
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class Sweep(NamedTuple):
    """Queries and keys per tile, software-pipeline stages, warps per program."""

    bm: int
    bn: int
    stages: int
    warps: int


# By head size up to 64, 128, 256: those of the general kernels' row and column pass.
HALF = {
    "statistics": {64: Sweep(128, 64, 3, 8), 128: Sweep(128, 64, 2, 8), 256: Sweep(64, 32, 2, 8)},
    "rows": {64: Sweep(128, 64, 3, 8), 128: Sweep(64, 32, 2, 4), 256: Sweep(64, 16, 2, 8)},
    "columns": {64: Sweep(64, 128, 2, 8), 128: Sweep(32, 128, 2, 8), 256: Sweep(32, 64, 1, 8)},
}
SINGLE = {
    "statistics": {64: Sweep(64, 32, 1, 4), 128: Sweep(32, 32, 1, 4), 256: Sweep(32, 16, 1, 8)},
    "rows": {64: Sweep(64, 32, 1, 4), 128: Sweep(32, 16, 1, 4), 256: Sweep(32, 16, 1, 8)},
    "columns": {64: Sweep(32, 64, 1, 4), 128: Sweep(16, 32, 1, 4), 256: Sweep(16, 16, 1, 4)},
}
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _rows(base, start, limit, BLOCK: tl.constexpr, D: tl.constexpr, MASKED: tl.constexpr):
    rows = start + tl.arange(0, BLOCK)
    ptrs = base + (rows[:, None] * D + tl.arange(0, D)[None, :])
    if MASKED:
        return tl.load(ptrs, mask=rows[:, None] < limit, other=0.0)
    return tl.load(ptrs)


@triton.jit
def _scalars(base, start, limit, other, BLOCK: tl.constexpr):
    rows = start + tl.arange(0, BLOCK)
    return tl.load(base + rows, mask=rows < limit, other=other)


@triton.jit
def _put_rows(base, start, limit, value, BLOCK: tl.constexpr, D: tl.constexpr):
    rows = start + tl.arange(0, BLOCK)
    ptrs = base + (rows[:, None] * D + tl.arange(0, D)[None, :])
    tl.store(ptrs, value.to(base.dtype.element_ty), mask=rows[:, None] < limit)


@triton.jit
def _put_scalars(base, start, limit, value, BLOCK: tl.constexpr):
    rows = start + tl.arange(0, BLOCK)
    tl.store(base + rows, value, mask=rows < limit)


@triton.jit
def _hide(p, offs_m, offs_n, keys, CAUSAL: tl.constexpr, MASKED: tl.constexpr):
    if MASKED:
        seen = offs_n < keys
        if CAUSAL:
            seen = seen & (offs_n <= offs_m)
        p = tl.where(seen, p, 0.0)
    return p


@triton.jit
def _key_limits(m0, keys, BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr):
    """End of the keys that all of queries m0 .. m0 + BM see, in whole tiles, and of those that any of them sees."""
    if CAUSAL:
        return tl.minimum(m0, keys) // BN * BN, tl.minimum(m0 + BM, keys)
    return keys // BN * BN, keys


@triton.jit
def _statistics_tiles(
    alpha, q, uq, lse2, k_base, uk_base, m0, lo, hi, keys, qk_scale,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    offs_m = m0 + tl.arange(0, BM)
    for n0 in tl.range(lo, hi, BN, num_stages=STAGES):
        n0 = tl.multiple_of(n0, BN)
        k = _rows(k_base, n0, keys, BN, D, MASKED)
        uk = _rows(uk_base, n0, keys, BN, D, MASKED)
        p = tl.math.exp2(tl.dot(q, tl.trans(k), input_precision=PRECISION) * qk_scale - lse2[:, None])
        p = _hide(p, offs_m[:, None], (n0 + tl.arange(0, BN))[None, :], keys, CAUSAL, MASKED)
        f = tl.dot(uq, tl.trans(k), input_precision=PRECISION)
        f = tl.dot(q, tl.trans(uk), f, input_precision=PRECISION)
        alpha += tl.sum(p * f, 1)
    return alpha


@triton.jit(do_not_specialize=["queries", "keys"])
def statistics_kernel(
    q_ptr, k_ptr, o_ptr, do_ptr, uq_ptr, uk_ptr, lse_ptr, alpha_ptr, delta_ptr, queries, keys, scale,
    GROUPS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of BM queries, query heads)."""
    m0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM
    head = tl.program_id(1).to(tl.int64)
    own, theirs = head * queries * D, head // GROUPS * keys * D
    q = _rows(q_ptr + own, m0, queries, BM, D, True)
    uq = _rows(uq_ptr + own, m0, queries, BM, D, True)
    do = _rows(do_ptr + own, m0, queries, BM, D, True).to(tl.float32)
    delta = tl.sum(_rows(o_ptr + own, m0, queries, BM, D, True).to(tl.float32) * do, 1)
    lse2 = _scalars(lse_ptr + head * queries, m0, queries, float("inf"), BM) * LOG2E
    full, hi = _key_limits(m0, keys, BM, BN, CAUSAL)
    alpha = tl.zeros([BM], tl.float32)
    alpha = _statistics_tiles(
        alpha, q, uq, lse2, k_ptr + theirs, uk_ptr + theirs, m0, 0, full, keys, scale * LOG2E,
        BM, BN, D, CAUSAL, False, STAGES, PRECISION,
    )  # fmt: skip
    alpha = _statistics_tiles(
        alpha, q, uq, lse2, k_ptr + theirs, uk_ptr + theirs, m0, full, hi, keys, scale * LOG2E,
        BM, BN, D, CAUSAL, True, STAGES, PRECISION,
    )  # fmt: skip
    _put_scalars(alpha_ptr + head * queries, m0, queries, alpha * scale, BM)
    _put_scalars(delta_ptr + head * queries, m0, queries, delta, BM)


@triton.jit
def _row_tiles(
    acc_o, acc_b, acc_w, e0, q, do, uq, lse2, alpha, delta, k_base, v_base, uk_base, uv_base,
    m0, lo, hi, keys, qk_scale, scale,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    offs_m = m0 + tl.arange(0, BM)
    for n0 in tl.range(lo, hi, BN, num_stages=STAGES):
        n0 = tl.multiple_of(n0, BN)
        k = _rows(k_base, n0, keys, BN, D, MASKED)
        v = _rows(v_base, n0, keys, BN, D, MASKED)
        uk = _rows(uk_base, n0, keys, BN, D, MASKED)
        uv = _rows(uv_base, n0, keys, BN, D, MASKED)
        p = tl.math.exp2(tl.dot(q, tl.trans(k), input_precision=PRECISION) * qk_scale - lse2[:, None])
        p = _hide(p, offs_m[:, None], (n0 + tl.arange(0, BN))[None, :], keys, CAUSAL, MASKED)
        f = tl.dot(uq, tl.trans(k), input_precision=PRECISION)
        f = tl.dot(q, tl.trans(uk), f, input_precision=PRECISION)
        h = f * scale - alpha[:, None]
        acc_o = tl.dot((p * h).to(v.dtype), v, acc_o, input_precision=PRECISION)
        acc_o = tl.dot(p.to(uv.dtype), uv, acc_o, input_precision=PRECISION)
        acc_b = tl.dot(p.to(k.dtype), k, acc_b, input_precision=PRECISION)
        ds = tl.dot(do, tl.trans(v), input_precision=PRECISION) - delta[:, None]
        g = p * (tl.dot(do, tl.trans(uv), input_precision=PRECISION) + h * ds)
        e0 += tl.sum(g, 1)
        acc_w = tl.dot(g.to(k.dtype), k, acc_w, input_precision=PRECISION)
        acc_w = tl.dot((p * ds).to(uk.dtype), uk, acc_w, input_precision=PRECISION)
    return acc_o, acc_b, acc_w, e0


@triton.jit(do_not_specialize=["queries", "keys"])
def row_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, uq_ptr, uk_ptr, uv_ptr, gq_ptr, gdo_ptr, lse_ptr, alpha_ptr, delta_ptr, e0_ptr,
    queries, keys, scale,
    GROUPS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of BM queries, query heads)."""
    m0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM
    head = tl.program_id(1).to(tl.int64)
    own, theirs, scalars = head * queries * D, head // GROUPS * keys * D, head * queries
    q = _rows(q_ptr + own, m0, queries, BM, D, True)
    do = _rows(do_ptr + own, m0, queries, BM, D, True)
    uq = _rows(uq_ptr + own, m0, queries, BM, D, True)
    lse2 = _scalars(lse_ptr + scalars, m0, queries, float("inf"), BM) * LOG2E
    alpha = _scalars(alpha_ptr + scalars, m0, queries, 0.0, BM)
    delta = _scalars(delta_ptr + scalars, m0, queries, 0.0, BM)
    full, hi = _key_limits(m0, keys, BM, BN, CAUSAL)
    acc_o = tl.zeros([BM, D], tl.float32)
    acc_b = tl.zeros([BM, D], tl.float32)
    acc_w = tl.zeros([BM, D], tl.float32)
    e0 = tl.zeros([BM], tl.float32)
    acc_o, acc_b, acc_w, e0 = _row_tiles(
        acc_o, acc_b, acc_w, e0, q, do, uq, lse2, alpha, delta, k_ptr + theirs, v_ptr + theirs, uk_ptr + theirs,
        uv_ptr + theirs, m0, 0, full, keys, scale * LOG2E, scale, BM, BN, D, CAUSAL, False, STAGES, PRECISION,
    )  # fmt: skip
    acc_o, acc_b, acc_w, e0 = _row_tiles(
        acc_o, acc_b, acc_w, e0, q, do, uq, lse2, alpha, delta, k_ptr + theirs, v_ptr + theirs, uk_ptr + theirs,
        uv_ptr + theirs, m0, full, hi, keys, scale * LOG2E, scale, BM, BN, D, CAUSAL, True, STAGES, PRECISION,
    )  # fmt: skip
    _put_rows(gdo_ptr + own, m0, queries, acc_o, BM, D)
    _put_rows(gq_ptr + own, m0, queries, scale * (acc_w - e0[:, None] * acc_b), BM, D)
    _put_scalars(e0_ptr + scalars, m0, queries, e0, BM)


@triton.jit
def _column_tiles(
    acc_k, acc_v, k, v, uk, uv, q_base, do_base, uq_base, lse_base, alpha_base, delta_base, e0_base,
    n0, lo, hi, queries, keys, qk_scale, scale,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    offs_n = n0 + tl.arange(0, BN)
    for m0 in tl.range(lo, hi, BM, num_stages=STAGES):
        m0 = tl.multiple_of(m0, BM)
        q = _rows(q_base, m0, queries, BM, D, MASKED)
        do = _rows(do_base, m0, queries, BM, D, MASKED)
        uq = _rows(uq_base, m0, queries, BM, D, MASKED)
        lse2 = _scalars(lse_base, m0, queries, float("inf"), BM) * LOG2E
        alpha = _scalars(alpha_base, m0, queries, 0.0, BM)
        delta = _scalars(delta_base, m0, queries, 0.0, BM)
        e0 = _scalars(e0_base, m0, queries, 0.0, BM)
        p = tl.math.exp2(tl.dot(k, tl.trans(q), input_precision=PRECISION) * qk_scale - lse2[None, :])
        p = _hide(p, (m0 + tl.arange(0, BM))[None, :], offs_n[:, None], keys, CAUSAL, MASKED)
        f = tl.dot(k, tl.trans(uq), input_precision=PRECISION)
        f = tl.dot(uk, tl.trans(q), f, input_precision=PRECISION)
        h = f * scale - alpha[None, :]
        acc_v = tl.dot((p * h).to(do.dtype), do, acc_v, input_precision=PRECISION)
        ds = tl.dot(v, tl.trans(do), input_precision=PRECISION) - delta[None, :]
        gs = p * (tl.dot(uv, tl.trans(do), input_precision=PRECISION) + h * ds - e0[None, :])
        acc_k = tl.dot(gs.to(q.dtype), q, acc_k, input_precision=PRECISION)
        acc_k = tl.dot((p * ds).to(uq.dtype), uq, acc_k, input_precision=PRECISION)
    return acc_k, acc_v


@triton.jit(do_not_specialize=["queries", "keys"])
def column_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, uq_ptr, uk_ptr, uv_ptr, gk_ptr, gv_ptr, lse_ptr, alpha_ptr, delta_ptr, e0_ptr,
    queries, keys, scale,
    GROUPS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of BN keys, key heads); query heads of a group are summed before the one write."""
    n0 = tl.program_id(0) * BN
    kv_head = tl.program_id(1).to(tl.int64)
    own = kv_head * keys * D
    k = _rows(k_ptr + own, n0, keys, BN, D, True)
    v = _rows(v_ptr + own, n0, keys, BN, D, True)
    uk = _rows(uk_ptr + own, n0, keys, BN, D, True)
    uv = _rows(uv_ptr + own, n0, keys, BN, D, True)
    lo, full_lo = 0, 0
    full_hi = queries // BM * BM
    if CAUSAL:
        lo = n0 // BM * BM
        full_lo = tl.minimum((n0 + BN - 1 + BM - 1) // BM * BM, (queries + BM - 1) // BM * BM)
    full_hi = tl.maximum(full_hi, full_lo)
    acc_k = tl.zeros([BN, D], tl.float32)
    acc_v = tl.zeros([BN, D], tl.float32)
    for g in range(GROUPS):
        head = kv_head * GROUPS + g
        theirs, scalars = head * queries * D, head * queries
        if CAUSAL:
            acc_k, acc_v = _column_tiles(
                acc_k, acc_v, k, v, uk, uv, q_ptr + theirs, do_ptr + theirs, uq_ptr + theirs, lse_ptr + scalars,
                alpha_ptr + scalars, delta_ptr + scalars, e0_ptr + scalars, n0, lo, full_lo, queries, keys,
                scale * LOG2E, scale, BM, BN, D, CAUSAL, True, STAGES, PRECISION,
            )  # fmt: skip
        acc_k, acc_v = _column_tiles(
            acc_k, acc_v, k, v, uk, uv, q_ptr + theirs, do_ptr + theirs, uq_ptr + theirs, lse_ptr + scalars,
            alpha_ptr + scalars, delta_ptr + scalars, e0_ptr + scalars, n0, full_lo, full_hi, queries, keys,
            scale * LOG2E, scale, BM, BN, D, CAUSAL, False, STAGES, PRECISION,
        )  # fmt: skip
        acc_k, acc_v = _column_tiles(
            acc_k, acc_v, k, v, uk, uv, q_ptr + theirs, do_ptr + theirs, uq_ptr + theirs, lse_ptr + scalars,
            alpha_ptr + scalars, delta_ptr + scalars, e0_ptr + scalars, n0, full_hi, queries, queries, keys,
            scale * LOG2E, scale, BM, BN, D, CAUSAL, True, STAGES, PRECISION,
        )  # fmt: skip
    _put_rows(gk_ptr + own, n0, keys, acc_k * scale, BN, D)
    _put_rows(gv_ptr + own, n0, keys, acc_v, BN, D)


def constants(sweep: str, head_size: int, dtype: torch.dtype, groups: int, causal: bool) -> dict[str, object]:
    """Compile-time constants of a launch."""
    table = SINGLE if dtype == torch.float32 else HALF
    tiles = Sweep(16, 16, 1, 4) if INTERPRETED else table[sweep][max(64, head_size)]
    return {
        "GROUPS": groups,
        "BM": tiles.bm,
        "BN": tiles.bn,
        "D": head_size,
        "CAUSAL": causal,
        "STAGES": tiles.stages,
        "PRECISION": "tf32x3" if dtype == torch.float32 and not INTERPRETED else "ieee",
        "num_warps": tiles.warps,
    }


def double_backward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, uq: Tensor, uk: Tensor, uv: Tensor,
    scale: float, causal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(gq, gk, gv, gdo); tensors contiguous [B, H, N, D], `lse` float32 [B, H_Q, N_Q]."""
    (queries, head_size), keys, groups = q.shape[2:], k.shape[2], q.shape[1] // k.shape[1]
    gq, gk, gv, gdo = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), torch.empty_like(do)
    alpha, delta, e0 = torch.empty_like(lse), torch.empty_like(lse), torch.empty_like(lse)
    sizes = (queries, keys, scale)
    heads, kv_heads = q.shape[0] * q.shape[1], k.shape[0] * k.shape[1]
    settings = constants("statistics", head_size, q.dtype, groups, causal)
    statistics_kernel[-(-queries // settings["BM"]), heads](q, k, o, do, uq, uk, lse, alpha, delta, *sizes, **settings)
    settings = constants("rows", head_size, q.dtype, groups, causal)
    row_kernel[-(-queries // settings["BM"]), heads](
        q, k, v, do, uq, uk, uv, gq, gdo, lse, alpha, delta, e0, *sizes, **settings
    )
    settings = constants("columns", head_size, q.dtype, groups, causal)
    column_kernel[-(-keys // settings["BN"]), kv_heads](
        q, k, v, do, uq, uk, uv, gk, gv, lse, alpha, delta, e0, *sizes, **settings
    )
    return gq, gk, gv, gdo
