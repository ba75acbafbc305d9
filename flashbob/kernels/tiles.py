"""Pieces that all kernels share: operands with strides, tile loads, the mask of a tile, and the loop limits.

Every loop over tiles comes in three phases: a masked one where the band begins, an unmasked one, and a masked one
where it ends; `key_limits` and `query_limits` say where they part. Symbols: flashbob/README.md.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

LOG2E = 1.4426950408889634


class Operand(NamedTuple):
    """A [B, H, N, d] tensor as a kernel sees it: unit stride in d, any strides elsewhere."""

    ptr: Any
    stride_b: Any
    stride_h: Any
    stride_n: Any


class Band(NamedTuple):
    """A `flashbob.geometry.Geometry` as integers, with the [B, 2] padding bounds (any pointer if unused)."""

    queries: Any
    keys: Any
    shift: Any
    left: Any
    right: Any
    bounds: Any


def operand(x: Tensor) -> Operand:
    stride_b, stride_h, stride_n, _ = x.stride()
    return Operand(x, stride_b, stride_h, stride_n)


def ceil_div(n: int, block: int) -> int:
    """Blocks that cover n. Not `triton.cdiv`, a device function, which costs microseconds when the host calls it."""
    return -(-n // block)


@triton.jit
def head_base(x, b, h):
    """Pointer to the first row of head h in sequence b, in 64-bit arithmetic."""
    return x.ptr + b.to(tl.int64) * x.stride_b + h.to(tl.int64) * x.stride_h


@triton.jit
def row_pointers(base, x, start, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, WIDE: tl.constexpr):
    """Pointers to the [BLOCK, BLOCK_D] tile that starts at row `start`.

    Offsets within a head are 32-bit unless WIDE: with 64-bit ones ptxas serializes the wgmma products of the row pass.
    """
    rows = start + tl.arange(0, BLOCK)
    if WIDE:
        rows = rows.to(tl.int64)
    return base + (rows[:, None] * x.stride_n + tl.arange(0, BLOCK_D)[None, :])


@triton.jit
def load_tile(
    base, x, start, limit, BLOCK: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """[BLOCK, BLOCK_D] tile of rows start .. start + BLOCK; rows past `limit` and columns past D read as zero."""
    ptrs = row_pointers(base, x, start, BLOCK, BLOCK_D, WIDE)
    if MASKED:
        mask = start + tl.arange(0, BLOCK)[:, None] < limit
        if D != BLOCK_D:
            mask = mask & (tl.arange(0, BLOCK_D)[None, :] < D)
        return tl.load(ptrs, mask=mask, other=0.0)
    if D != BLOCK_D:
        return tl.load(ptrs, mask=tl.arange(0, BLOCK_D)[None, :] < D, other=0.0)
    return tl.load(ptrs)


@triton.jit
def store_tile(
    base, x, start, limit, value, BLOCK: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, WIDE: tl.constexpr
):
    """Write the tile, in the tensor's dtype, without its padding."""
    mask = start + tl.arange(0, BLOCK)[:, None] < limit
    if D != BLOCK_D:
        mask = mask & (tl.arange(0, BLOCK_D)[None, :] < D)
    tl.store(row_pointers(base, x, start, BLOCK, BLOCK_D, WIDE), value.to(x.ptr.dtype.element_ty), mask=mask)


@triton.jit
def load_scalars(ptr, start, limit, other, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """[BLOCK] row scalars of one head; past `limit` they read as `other`."""
    offs = start + tl.arange(0, BLOCK)
    if MASKED:
        return tl.load(ptr + offs, mask=offs < limit, other=other)
    return tl.load(ptr + offs)


@triton.jit
def store_scalars(ptr, start, limit, value, BLOCK: tl.constexpr):
    offs = start + tl.arange(0, BLOCK)
    tl.store(ptr + offs, value, mask=offs < limit)


@triton.jit
def valid_keys(band, b, PADDED: tl.constexpr):
    """First and one-past-last valid key of sequence b."""
    if PADDED:
        return tl.load(band.bounds + 2 * b), tl.load(band.bounds + 2 * b + 1)
    return 0, band.keys


@triton.jit
def visible(offs_m, offs_n, band, first, stop, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """Where query offs_m sees key offs_n; the two are broadcast against each other, in either orientation."""
    seen = (offs_n >= first) & (offs_n < stop)
    distance = offs_n - offs_m - band.shift
    if RIGHT:
        seen = seen & (distance <= band.right)
    if LEFT:
        seen = seen & (distance >= -band.left)
    return seen


@triton.jit
def key_limits(m0, band, first, stop, BM: tl.constexpr, BN: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """(lo, full_lo, full_hi, hi) for queries m0 .. m0 + BM, all but hi on tile boundaries.

    Keys before lo and from hi on are seen by none of these queries; those in full_lo .. full_hi by all of them.
    """
    lo = first
    hi = stop
    full_lo = first
    full_hi = stop
    if LEFT:
        lo = tl.maximum(lo, m0 + band.shift - band.left)
        full_lo = tl.maximum(full_lo, tl.minimum(m0 + BM, band.queries) - 1 + band.shift - band.left)
    if RIGHT:
        hi = tl.minimum(hi, tl.minimum(m0 + BM, band.queries) + band.shift + band.right)
        full_hi = tl.minimum(full_hi, m0 + band.shift + band.right + 1)
    lo = lo // BN * BN
    hi = tl.maximum(hi, lo)
    full_lo = tl.minimum((full_lo + BN - 1) // BN * BN, (hi + BN - 1) // BN * BN)
    full_hi = tl.maximum(full_hi // BN * BN, full_lo)
    return lo, full_lo, full_hi, hi


@triton.jit
def query_limits(n0, band, BM: tl.constexpr, BN: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """(lo, full_lo, full_hi, hi) for keys n0 .. n0 + BN: the rows that see some, and all, of these keys."""
    lo = 0
    hi = band.queries
    full_lo = 0
    full_hi = band.queries
    if RIGHT:
        lo = tl.maximum(lo, n0 - band.shift - band.right)
        full_lo = tl.maximum(full_lo, n0 + BN - 1 - band.shift - band.right)
    if LEFT:
        hi = tl.minimum(hi, tl.minimum(n0 + BN, band.keys) - band.shift + band.left)
        full_hi = tl.minimum(full_hi, n0 - band.shift + band.left + 1)
    lo = lo // BM * BM
    hi = tl.maximum(hi, lo)
    full_lo = tl.minimum((full_lo + BM - 1) // BM * BM, (hi + BM - 1) // BM * BM)
    full_hi = tl.maximum(full_hi // BM * BM, full_lo)
    return lo, full_lo, full_hi, hi
