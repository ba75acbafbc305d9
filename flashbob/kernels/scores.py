"""What stands between q.k and the attention weights besides the mask: soft-cap, bias, dropout.

All three are compile-time switches; a kernel without them has none of this code. Derivation: flashbob/README.md; the
dropout mask is that of `flashbob.dropout`, bit by bit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from flashbob.dropout import Dropout


class Bias(NamedTuple):
    """A [B, H_Q, N_Q, N_KV] tensor of any strides, also zero."""

    ptr: Any
    stride_b: Any
    stride_h: Any
    stride_m: Any
    stride_n: Any


class Keep(NamedTuple):
    """A `flashbob.dropout.Dropout`: key and threshold (see `_argument`), factor on kept weights, batch."""

    key_low: Any
    key_high: Any
    threshold: Any
    scale: Any
    batch: Any


def bias_operand(bias: Tensor | None, placeholder: Tensor) -> Bias:
    return Bias(placeholder, 0, 0, 0, 0) if bias is None else Bias(bias, *bias.stride())


def keep_operand(dropout: Dropout | None) -> Keep:
    if dropout is None:
        return Keep(0, 0, 0, 1.0, 1)
    words = (dropout.seed & 0xFFFFFFFF, dropout.seed >> 32, dropout.threshold)
    return Keep(*(_argument(word) for word in words), dropout.scale, dropout.batch)


def _argument(word: int) -> int:
    """A 32-bit word as an odd number above 2^33: compilers specialize on one, on multiples of 16, and on the width."""
    return 2 * word + 1 + 2**34


@triton.jit
def _word(argument):
    return (argument >> 1).to(tl.uint32)


@triton.jit
def _tanh(x):
    """Accurate to float32: a series near zero, where the exponential form cancels."""
    size = tl.abs(x)
    u = tl.math.exp2(size * -2.8853900817779268)
    large = (1.0 - u) / (1.0 + u)
    square = x * x
    series = 1.0 + square * (-0.3333333333 + square * (0.1333333333 + square * (-0.0539682540 + square * 0.0218694885)))
    return tl.where(size < 0.3, x * series, tl.where(x < 0, -large, large))


@triton.jit
def score_tile(
    s, qk_scale, softcap, bias, b, h, m0, n0, band,
    BM: tl.constexpr, BN: tl.constexpr, TRANSPOSED: tl.constexpr, SOFTCAP: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Scores in base 2 from s = q.k, and tanh(tau s / softcap) where there is a soft-cap.

    `qk_scale` is tau log2(e), with a soft-cap tau / softcap (see `inner_scale`). The tile is [BM, BN], or transposed.
    """
    t = s
    if SOFTCAP:
        t = _tanh(s * qk_scale)
        s = t * (softcap * 1.4426950408889634)
    else:
        s = s * qk_scale
    if BIAS:
        rows, columns = m0 + tl.arange(0, BM), n0 + tl.arange(0, BN)
        base = bias.ptr + b.to(tl.int64) * bias.stride_b + h.to(tl.int64) * bias.stride_h
        if TRANSPOSED:
            offsets = rows.to(tl.int64)[None, :] * bias.stride_m + columns.to(tl.int64)[:, None] * bias.stride_n
            inside = (rows < band.queries)[None, :] & (columns < band.keys)[:, None]
        else:
            offsets = rows.to(tl.int64)[:, None] * bias.stride_m + columns.to(tl.int64)[None, :] * bias.stride_n
            inside = (rows < band.queries)[:, None] & (columns < band.keys)[None, :]
        s += tl.load(base + offsets, mask=inside, other=0.0).to(tl.float32) * 1.4426950408889634
    return s, t


@triton.jit
def inner_scale(scale, softcap, SOFTCAP: tl.constexpr):
    """The factor on q.k that `score_tile` takes."""
    if SOFTCAP:
        return scale / softcap
    return scale * 1.4426950408889634


@triton.jit
def bent(x, t, SOFTCAP: tl.constexpr):
    """The product of x and the slope of the soft-cap."""
    if SOFTCAP:
        return x * (1.0 - t * t)
    return x


@triton.jit
def bent_twice(gs, raw, ds, t, softcap, SOFTCAP: tl.constexpr):
    """The gradient at q.k from the one at the scores: s' gs + s'' raw ds, with raw = tau (uq.k + q.uk)."""
    if SOFTCAP:
        slope = 1.0 - t * t
        return slope * (gs - (2.0 / softcap) * t * raw * ds)
    return gs


@triton.jit
def kept_tile(
    keep, b, h, heads, m0, n0, BM: tl.constexpr, BN: tl.constexpr, TRANSPOSED: tl.constexpr, DROPOUT: tl.constexpr
):
    """Which weights of a tile dropout keeps. One Philox evaluation serves four keys; n0 is a multiple of four."""
    tile = DROPOUT
    if DROPOUT:
        zero = tl.zeros([BM, BN // 4], tl.uint32)
        quads = zero + (n0 // 4 + tl.arange(0, BN // 4)).to(tl.uint32)[None, :]
        rows = zero + (m0 + tl.arange(0, BM)).to(tl.uint32)[:, None]
        head = zero + ((b % keep.batch) * heads + h).to(tl.uint32)
        w0, w1, w2, w3 = tl.philox_impl(quads, rows, head, zero, _word(keep.key_low), _word(keep.key_high))
        words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [BM, BN])
        if TRANSPOSED:
            words = tl.trans(words)
        tile = words >= _word(keep.threshold)
    return tile


@triton.jit
def kept(x, tile, keep, DROPOUT: tl.constexpr):
    """The product of x and the dropout factors, `tile` being that of `kept_tile`."""
    if DROPOUT:
        return tl.where(tile, x * keep.scale, 0.0)
    return x
