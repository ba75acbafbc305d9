"""Formats of a weight as validated data: bits, group size, symmetry, and the bytes that they take in a file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["Scheme", "fitting", "schemes"]

MIN_BITS, MAX_BITS = 2, 8
_WORD = 32


@dataclass(frozen=True, order=True)
class Scheme:
    """How one weight matrix is stored: integer codes with one scale per group of columns.

        W[i, j] = scale[i, j // group_size] * (code[i, j] - zero[i, j // group_size])

    Codes are integers in [-2^(bits-1), 2^(bits-1) - 1]; a symmetric format has no zero points.

    Attributes:
        bits: Bits per code, 2 to 8.
        group_size: Columns (inputs) that share a scale; -1: the whole row.
        symmetric: Whether zero points are absent.

    Raises:
        ValueError: If bits or group_size is out of range.
    """

    bits: int
    group_size: int = -1
    symmetric: bool = True

    def __post_init__(self) -> None:
        if not MIN_BITS <= self.bits <= MAX_BITS:
            raise ValueError(f"bits must be from {MIN_BITS} to {MAX_BITS}, got {self.bits}")
        if self.group_size != -1 and self.group_size < 1:
            raise ValueError(f"group_size must be -1 (the whole row) or at least 1, got {self.group_size}")

    @property
    def lowest(self) -> int:
        """The smallest code, -2^(bits-1)."""
        return -(1 << (self.bits - 1))

    @property
    def highest(self) -> int:
        """The largest code, 2^(bits-1) - 1."""
        return (1 << (self.bits - 1)) - 1

    @property
    def label(self) -> str:
        """A short name, such as "4 bit, group 64"."""
        group = "row" if self.group_size == -1 else f"group {self.group_size}"
        return f"{self.bits} bit, {group}" + ("" if self.symmetric else ", asymmetric")

    def fits(self, columns: int) -> bool:
        """Whether the group size divides this number of columns."""
        return self.group_size == -1 or columns % self.group_size == 0

    def groups(self, columns: int) -> int:
        """Groups per row.

        Raises:
            ValueError: If the group size does not divide the columns.
        """
        if not self.fits(columns):
            raise ValueError(
                f"group_size {self.group_size} does not divide the {columns} columns of the weight; choose a divisor, "
                "or -1 for one scale per row"
            )
        return 1 if self.group_size == -1 else columns // self.group_size

    def packed_bytes(self, rows: int, columns: int, scale_bytes: int) -> int:
        """Exact bytes of the tensors of one weight in a pack-quantized checkpoint.

        Per row ceil(columns * bits / 32) words of 4 bytes, one scale per group, the shape as two int64, and for
        asymmetric formats the zero points, packed along the rows.

        Args:
            rows: Output features.
            columns: Input features.
            scale_bytes: Bytes of one scale.
        """
        groups = self.groups(columns)
        words = rows * -(-columns * self.bits // _WORD)
        zeros = 0 if self.symmetric else -(-rows * self.bits // _WORD) * groups
        return 4 * (words + zeros) + rows * groups * scale_bytes + 16

    def stored_bits(self, rows: int, columns: int, scale_bits: int) -> int:
        """Bits of codes, scales and zero points without padding; what an average over the model is taken of."""
        groups = self.groups(columns)
        return rows * columns * self.bits + rows * groups * (scale_bits + (0 if self.symmetric else self.bits))


def schemes(
    bits: Iterable[int] = (2, 3, 4, 5, 6, 8), group_sizes: Sequence[int] = (64,), symmetric: Sequence[bool] = (True,)
) -> tuple[Scheme, ...]:
    """Every combination of the given bits, group sizes and symmetries, in order of bits, then coarser groups first.

    Raises:
        ValueError: If a list is empty, or a number is out of range.
    """
    found = {Scheme(b, g, s) for b in bits for g in group_sizes for s in symmetric}
    if not found:
        raise ValueError("schemes: there is no combination; give at least one number of bits and one group size")
    return tuple(sorted(found, key=lambda s: (s.bits, s.group_size != -1, -s.group_size, not s.symmetric)))


def fitting(options: Sequence[Scheme], columns: int) -> tuple[Scheme, ...]:
    """The options that a weight of so many columns can take.

    Where no group size divides the columns, each takes one scale per row instead, which always fits; a report names
    such weights.

    Args:
        options: What was asked for.
        columns: Input features of the weight.
    """
    kept = tuple(option for option in options if option.fits(columns))
    if kept:
        return kept
    return tuple(dict.fromkeys(Scheme(option.bits, -1, option.symmetric) for option in options))
