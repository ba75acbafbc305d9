"""Every weight rounded to every option, once; and the model moved between plans."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from quant.rounding import QuantizedWeight, round_each
from quant.scheme import Scheme, fitting
from quant.weights import WeightMatrix

__all__ = ["Candidates", "Quantizer", "round_all"]

Quantizer: TypeAlias = Callable[[Sequence[tuple[WeightMatrix, Scheme]]], list[QuantizedWeight]]
"""Rounds each weight to the format beside it."""


@dataclass(eq=False)
class Candidates:
    """The rounded forms of every weight, and the weights as they were.

    The codes stay on the weights' device as int8: one byte per entry and option.

    Attributes:
        weights: The weights.
        options: All options; column b of a table of scores belongs to options[b].
        rounded: For each weight, {option index: rounded weight}; an option that does not fit is absent.
        replaced: Names of weights whose columns no requested group size divides; they take one scale per row.
        notices: Remarks for the report, such as layers that a quantizer could not handle.
    """

    weights: list[WeightMatrix]
    options: tuple[Scheme, ...]
    rounded: list[dict[int, QuantizedWeight]] = field(repr=False)
    replaced: list[str]
    notices: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._originals = [w.matrix().clone() for w in self.weights]

    def original(self, weight: int) -> Tensor:
        """The unquantized weight as [rows, columns]."""
        return self._originals[weight]

    def value(self, weight: int, option: int | None) -> Tensor:
        """The weight at an option, or unquantized, as [rows, columns] in the parameter's dtype."""
        if option is None:
            return self._originals[weight]
        return self.rounded[weight][option].dequantize().to(self._originals[weight].dtype)

    def delta(self, weight: int, option: int | None, start: int | None = None) -> Tensor:
        """Perturbation of the parameter, in its own shape: value at `option` minus value at `start`.

        Args:
            weight: Which weight.
            option: Where it goes; None: unquantized.
            start: Where it comes from; None: unquantized.
        """
        # In the parameter's dtype, so that it is the step that the model itself takes.
        difference = self.value(weight, option) - self.value(weight, start)
        return self.weights[weight].tensor(difference)

    def available(self, weight: int) -> list[int]:
        """Indices of the options that a weight can take."""
        return sorted(self.rounded[weight])

    def apply(self, plan: Sequence[int | None]) -> None:
        """Set every weight to its option of the plan; None: unquantized."""
        if len(plan) != len(self.weights):
            raise ValueError(f"plan must have one option for each of {len(self.weights)} weights, got {len(plan)}")
        for index, option in enumerate(plan):
            self.weights[index].write(self.value(index, option))

    def restore(self) -> None:
        """Set every weight back to what it was."""
        self.apply([None] * len(self.weights))

    @contextmanager
    def applied(self, plan: Sequence[int | None]) -> Iterator[None]:
        """The model at a plan inside the block, unquantized afterwards."""
        try:
            self.apply(plan)
            yield
        finally:
            self.restore()

    @contextmanager
    def single(self, weight: int, option: int) -> Iterator[None]:
        """One weight at an option inside the block, all others as they are."""
        kept = self.weights[weight].matrix().clone()
        try:
            self.weights[weight].write(self.value(weight, option))
            yield
        finally:
            self.weights[weight].write(kept)


def round_all(
    weights: Sequence[WeightMatrix],
    options: Sequence[Scheme],
    *,
    quantizer: Quantizer | None = None,
    scale_dtype: torch.dtype | None = None,
    fixed: Mapping[str, Scheme] | None = None,
    groups: Sequence[Sequence[int]] | None = None,
) -> Candidates:
    """Round every weight to every option that fits it.

    Args:
        weights: The weights.
        options: The formats to choose from.
        quantizer: Rounds weights to formats; None: round-to-nearest with the scale search.
        scale_dtype: Dtype of stored scales for the default quantizer; None: the weights' own.
        fixed: {name: format} of weights whose format is not to be chosen.
        groups: Weights that will share a format (`quant.weights.sharing_groups`): they get options that fit them all.

    Returns:
        The candidates; formats that stand in for options that do not fit are further options.

    Raises:
        ValueError: If a weight is not finite; the message names it.
    """
    if not weights or not options:
        raise ValueError("weights, options: there must be at least one of each")
    fixed = dict(fixed or {})
    wanted = _wanted(weights, options, fixed, groups or [(i,) for i in range(len(weights))])
    every = tuple(dict.fromkeys([*options, *(s for kept in wanted for s in kept)]))
    every = tuple(sorted(every, key=lambda s: (s.bits, s.group_size != -1, -s.group_size, not s.symmetric)))
    for weight in weights:
        if not bool(torch.isfinite(weight.parameter).all()):
            raise ValueError(f"weight {weight.name!r} holds NaN or infinity; repair it, or leave it out with include")

    jobs = [(t, every.index(scheme)) for t, kept in enumerate(wanted) for scheme in kept]
    asked = [(weights[t], every[b]) for t, b in jobs]
    found = _nearest(asked, scale_dtype) if quantizer is None else quantizer(asked)
    rounded: list[dict[int, QuantizedWeight]] = [{} for _ in weights]
    for (t, b), quantized in zip(jobs, found, strict=True):
        rounded[t][b] = quantized
    replaced = [
        w.name for w, kept in zip(weights, wanted, strict=True) if w.name not in fixed and not set(kept) & set(options)
    ]
    return Candidates(list(weights), every, rounded, replaced)


def _wanted(
    weights: Sequence[WeightMatrix],
    options: Sequence[Scheme],
    fixed: Mapping[str, Scheme],
    groups: Sequence[Sequence[int]],
) -> list[tuple[Scheme, ...]]:
    """The formats that each weight is rounded to."""
    wanted: list[tuple[Scheme, ...]] = [()] * len(weights)
    for members in groups:
        kept = tuple(options)
        for columns in {weights[i].columns for i in members}:
            kept = fitting(kept, columns)
        for i in members:
            wanted[i] = (fixed[weights[i].name],) if weights[i].name in fixed else kept
    return wanted


def _nearest(jobs: Sequence[tuple[WeightMatrix, Scheme]], scale_dtype: torch.dtype | None) -> list[QuantizedWeight]:
    return round_each([w.matrix() for w, _ in jobs], [s for _, s in jobs], scale_dtype=scale_dtype)
