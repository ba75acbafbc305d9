"""Codes of 2 to 8 bits packed densely into 32-bit words, in the layout of compressed-tensors 0.18 and later."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["pack", "unpack"]

_WORD = 32


def pack(codes: Tensor, bits: int) -> Tensor:
    """Rows of signed codes as rows of words.

    Code c of column j, shifted to c + 2^(bits-1), takes the bits from position j * bits on, least significant first;
    codes cross word borders, and a row is padded with zeros to whole words.

    Args:
        codes: int8 [rows, columns] in [-2^(bits-1), 2^(bits-1) - 1].
        bits: 1 to 8.

    Returns:
        int32 [rows, ceil(columns * bits / 32)].

    Raises:
        ValueError: If a code is out of range.
    """
    half = 1 << (bits - 1)
    if codes.numel() and not -half <= int(codes.min()) <= int(codes.max()) < half:
        raise ValueError(
            f"codes must lie in [{-half}, {half - 1}] for {bits} bits, got {int(codes.min())} to {int(codes.max())}"
        )
    rows, columns = codes.shape
    words = -(-columns * bits // _WORD)
    values = codes.to(torch.int64) + half
    start = torch.arange(columns, device=codes.device) * bits
    word, offset = start // _WORD, start % _WORD
    packed = torch.zeros(rows, words + 1, dtype=torch.int64, device=codes.device)
    # The two halves of a code share no bit with any other, so that sums are bitwise ors.
    shifted = values << offset
    packed.index_add_(1, word, shifted & 0xFFFFFFFF)
    packed.index_add_(1, word + 1, shifted >> _WORD)
    packed = packed[:, :words]
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32)


def unpack(packed: Tensor, bits: int, columns: int) -> Tensor:
    """The codes that `pack` packed: int8 [rows, columns]."""
    wide = packed.to(torch.int64) & 0xFFFFFFFF
    wide = torch.nn.functional.pad(wide, (0, 1))
    start = torch.arange(columns, device=packed.device) * bits
    word, offset = start // _WORD, start % _WORD
    joined = wide[:, word] | (wide[:, word + 1] << _WORD)
    return (((joined >> offset) & ((1 << bits) - 1)) - (1 << (bits - 1))).to(torch.int8)
