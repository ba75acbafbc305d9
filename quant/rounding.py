"""Round-to-nearest onto a format's grid, with a search for each group's scale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quant.scheme import Scheme

__all__ = ["QuantizedWeight", "round_each", "round_to_nearest", "search_scales"]

_REFINEMENTS = 3

_TOGETHER = 1 << 24
"""Entries that are rounded in one call: enough to keep a GPU busy, 64 MiB an array."""


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """A weight on its grid.

        W = scale * (codes - zero)

    Attributes:
        codes: int8 [..., rows, columns], in the scheme's range.
        scale: [..., rows, groups] in the dtype that is stored. Scales may be negative: a group then has its one extra
            code on the positive side.
        zero: int8 [..., rows, groups], or None for symmetric formats.
        scheme: The format.
    """

    codes: Tensor = field(repr=False)
    scale: Tensor = field(repr=False)
    zero: Tensor | None = field(repr=False)
    scheme: Scheme

    def dequantize(self) -> Tensor:
        """The weight [..., rows, columns] in the dtype of the scales: one rounding of the exact product."""
        codes = self.codes if self.zero is None else self.codes.to(torch.int16)
        grouped = codes.unflatten(-1, (self.scale.shape[-1], -1))
        if self.zero is not None:
            grouped = grouped - self.zero.to(torch.int16).unsqueeze(-1)
        wide = torch.float64 if self.scale.dtype == torch.float64 else torch.float32
        value: Tensor = (grouped.to(wide) * self.scale.to(wide).unsqueeze(-1)).flatten(-2)
        return value.to(self.scale.dtype)

    def to(self, device: torch.device | str) -> QuantizedWeight:
        """The same on a device."""
        zero = None if self.zero is None else self.zero.to(device)
        return QuantizedWeight(self.codes.to(device), self.scale.to(device), zero, self.scheme)


def round_to_nearest(
    weight: Tensor, scheme: Scheme, *, clip: bool = True, scale_dtype: torch.dtype | None = None
) -> QuantizedWeight:
    """Each entry to the nearest code.

    Args:
        weight: [..., rows, columns], floating point.
        scheme: The format; its group size must divide the columns.
        clip: Search each group's scale for the least squared error; otherwise the group's largest entry sets it.
        scale_dtype: Dtype of stored scales; None: that of the weight. Codes are chosen for the rounded scale.

    Returns:
        The quantized weight.

    Raises:
        TypeError: If the weight is not floating point.
        ValueError: If it holds NaN or infinity, or the group size does not divide its columns.
    """
    scale, zero = search_scales(weight, scheme, clip=clip, scale_dtype=scale_dtype)
    grouped = _grouped(weight, scheme)
    codes = _codes(grouped, scale.to(grouped.dtype), zero, scheme)
    stored_zero = None if zero is None else zero.to(torch.int8)
    return QuantizedWeight(codes.flatten(-2).to(torch.int8), scale, stored_zero, scheme)


def round_each(
    weights: Sequence[Tensor], schemes: Sequence[Scheme], *, scale_dtype: torch.dtype | None = None
) -> list[QuantizedWeight]:
    """`round_to_nearest` for each weight and the format beside it, equal shapes and formats in one call.

    The search takes some three hundred launches whatever the size, so that a GPU rounds many small weights in the time
    of one.

    Args:
        weights: Each [rows, columns].
        schemes: Their formats.
        scale_dtype: See `round_to_nearest`.

    Returns:
        One result per weight.
    """
    alike: dict[tuple[object, ...], list[int]] = {}
    for i, (weight, scheme) in enumerate(zip(weights, schemes, strict=True)):
        alike.setdefault((tuple(weight.shape), weight.dtype, weight.device, scheme), []).append(i)
    found: dict[int, QuantizedWeight] = {}
    for members in alike.values():
        together = max(1, _TOGETHER // max(1, weights[members[0]].numel()))
        for start in range(0, len(members), together):
            kept = members[start : start + together]
            many = torch.stack([weights[i] for i in kept])
            rounded = round_to_nearest(many, schemes[kept[0]], scale_dtype=scale_dtype)
            for place, i in enumerate(kept):
                zero = None if rounded.zero is None else rounded.zero[place]
                found[i] = QuantizedWeight(rounded.codes[place], rounded.scale[place], zero, rounded.scheme)
    return [found[i] for i in range(len(weights))]


def search_scales(
    weight: Tensor, scheme: Scheme, *, clip: bool = True, scale_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor | None]:
    """Scale (and zero point) of every group, least in squared rounding error among those tried.

    Tried are shrunken ranges, for symmetric formats with both signs of the scale (the grid has one code more on one
    side), then a few alternations of codes and the least-squares scale for these codes. Every candidate is rounded to
    the stored dtype before it is judged, so the error never exceeds that of the plain largest-entry scale.

    Args:
        weight: [..., rows, columns].
        scheme: The format.
        clip: False: the plain scale.
        scale_dtype: Dtype of stored scales; None: that of the weight.

    Returns:
        Scales [..., rows, groups] in the stored dtype, and zero points of the same shape or None.
    """
    if not weight.is_floating_point():
        raise TypeError(f"weight must be floating point, got {weight.dtype}")
    if not bool(torch.isfinite(weight).all()):
        raise ValueError("weight holds NaN or infinity; repair it before quantizing")
    scale_dtype = scale_dtype or weight.dtype
    x = _grouped(weight, scheme)
    if scheme.symmetric:
        return _symmetric(x, scheme, clip, scale_dtype), None
    return _asymmetric(x, scheme, clip, scale_dtype)


def _grouped(weight: Tensor, scheme: Scheme) -> Tensor:
    """[..., rows, groups, group] in at least float32."""
    groups = scheme.groups(weight.shape[-1])
    wide = weight if weight.dtype == torch.float64 else weight.float()
    return wide.reshape(*wide.shape[:-1], groups, -1)


def _codes(x: Tensor, scale: Tensor, zero: Tensor | None, scheme: Scheme) -> Tensor:
    q = x / scale.unsqueeze(-1)
    if zero is not None:
        q = q + zero.unsqueeze(-1)
    return q.round_().clamp_(scheme.lowest, scheme.highest)


def _error(x: Tensor, codes: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
    shifted = codes if zero is None else codes - zero.unsqueeze(-1)
    difference: Tensor = shifted * scale.unsqueeze(-1) - x
    squares: Tensor = difference.square().sum(-1)
    return squares


def _shrinkages(scheme: Scheme, clip: bool) -> list[float]:
    """Shares of the full range to try: the fewer the bits, the more of the tails is worth cutting."""
    if not clip:
        return [1.0]
    lowest = {2: 0.35, 3: 0.5, 4: 0.6, 5: 0.7}.get(scheme.bits, 0.8)
    steps = 9
    return [1.0 - (1.0 - lowest) * i / (steps - 1) for i in range(steps)]


def _stored(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The scale as it will be read back; a group of zeros, or one whose scale underflows, gets scale one."""
    rounded = scale.to(dtype).to(scale.dtype)
    return torch.where((rounded == 0) | ~torch.isfinite(rounded), torch.ones_like(rounded), rounded)


def _symmetric(x: Tensor, scheme: Scheme, clip: bool, dtype: torch.dtype) -> Tensor:
    largest = x.abs().amax(-1)
    best = _stored(largest / scheme.highest, dtype)
    best_error = _error(x, _codes(x, best, None, scheme), best, None)
    if not clip:
        return best.to(dtype)

    def improve(candidate: Tensor) -> Tensor:
        codes = _codes(x, candidate, None, scheme)
        error = _error(x, codes, candidate, None)
        better = error < best_error
        torch.where(better, candidate, best, out=best)
        torch.where(better, error, best_error, out=best_error)
        return codes

    for sign in (1.0, -1.0):
        for share in _shrinkages(scheme, clip):
            improve(_stored(sign * share * largest / scheme.highest, dtype))
    for _ in range(_REFINEMENTS):
        codes = _codes(x, best, None, scheme)
        squares = codes.square().sum(-1)
        fitted = torch.where(squares > 0, (codes * x).sum(-1) / squares.clamp_min(1), best)
        improve(_stored(fitted, dtype))
    return best.to(dtype)


def _asymmetric(x: Tensor, scheme: Scheme, clip: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    # Zero stays on the grid: the range always includes it.
    high, low = x.amax(-1).clamp_min(0), x.amin(-1).clamp_max(0)
    best: tuple[Tensor, Tensor, Tensor] | None = None
    for share in _shrinkages(scheme, clip):
        scale = _stored(share * (high - low) / (scheme.highest - scheme.lowest), dtype)
        zero = (scheme.lowest - share * low / scale).round().clamp(scheme.lowest, scheme.highest)
        error = _error(x, _codes(x, scale, zero, scheme), scale, zero)
        if best is None:
            best = (error, scale, zero)
        else:
            better = error < best[0]
            pairs = zip((error, scale, zero), best, strict=True)
            new_error, new_scale, new_zero = (torch.where(better, new, old) for new, old in pairs)
            best = (new_error, new_scale, new_zero)
    if best is None:
        raise ValueError("there is no range to try")
    return best[1].to(dtype), best[2]
