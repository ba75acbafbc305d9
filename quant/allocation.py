"""Static allocation: a format for every weight from a table of scores and a budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from quant.candidates import Candidates
from quant.choice import Amounts, Choice, InfeasibleError, Limit, Table, choose
from quant.interaction import improve, objective
from quant.plan import Plan, averages, scale_bits
from quant.rivals import weight_errors
from quant.scheme import Scheme
from quant.sensitivity import Sensitivity
from quant.storage import Storage

__all__ = ["Problem", "allocate"]

_TRIFLE = 1e-7
"""Share of the largest cost that settles ties."""

_LOWER = 0.95
"""Largest share of a ceiling of the loss that the next lower one is."""

_FINE = 1_000_000
"""Predicted losses as integers: the smallest change that a loss ceiling sees is the ceiling over this."""


@dataclass(frozen=True, eq=False)
class Problem:
    """Candidates, how they are stored, and which of them share a format.

    Attributes:
        candidates: The weights at all options.
        storage: Exact sizes.
        groups: A partition of the weights' indices; members take the same option.

    Raises:
        ValueError: If members of a group have no option in common.
    """

    candidates: Candidates
    storage: Storage
    groups: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if sorted(i for g in self.groups for i in g) != list(range(len(self.candidates.weights))):
            raise ValueError("groups must be a partition of the weights' indices")
        for members, row in zip(self.groups, self.available, strict=True):
            if not row.any():
                names = ", ".join(self.candidates.weights[i].name for i in members)
                raise ValueError(
                    f"groups: {names} must share a format, but have none in common; fix the same format for all of "
                    "them, or allow different ones (share=False)"
                )

    @property
    def available(self) -> npt.NDArray[np.bool_]:
        """Which options all members of a group have: [groups, options]."""
        count = len(self.candidates.options)
        return np.array(
            [[all(b in self.candidates.rounded[i] for i in members) for b in range(count)] for members in self.groups]
        )

    @cached_property
    def ladders(self) -> list[list[int]]:
        """Each group's options from small to large, without those that are no nearer to the weights than a smaller one.

        Near is meant in squared error. Without them a step among several group sizes could lead from 2 bits with fine
        groups to 3 bits with coarse ones, which take more and hold less.
        """
        sizes = self.stored_bits()
        errors = self.grouped(weight_errors(self.candidates))
        found = []
        for row, amounts, squares in zip(self.available, sizes, errors, strict=True):
            ladder: list[int] = []
            for b in sorted((int(b) for b in np.flatnonzero(row)), key=lambda b: (int(amounts[b]), squares[b], b)):
                if not ladder or (squares[b] < squares[ladder[-1]] and amounts[b] > amounts[ladder[-1]]):
                    ladder.append(b)
            found.append(ladder)
        return found

    def grouped(self, table: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Sums over the members of each group: [groups, options]."""
        return np.stack([table[list(members)].sum(axis=0) for members in self.groups])

    def amounts(self, of: Callable[[int, Scheme], int]) -> Amounts:
        """A size of every group at every option; 0 where there is none."""
        table = np.zeros((len(self.candidates.weights), len(self.candidates.options)), dtype=np.int64)
        for t, kept in enumerate(self.candidates.rounded):
            for b in kept:
                table[t, b] = of(t, self.candidates.options[b])
        grouped: Amounts = np.where(self.available, self.grouped(table), 0)
        return grouped

    def stored_bits(self) -> Amounts:
        """Bits of codes, scales and zero points, without padding."""
        weights, width = self.candidates.weights, scale_bits(self.candidates)
        return self.amounts(lambda t, s: s.stored_bits(weights[t].rows, weights[t].columns, width))

    def stored_bytes(self) -> Amounts:
        """Bytes of the tensors as they are written."""
        weights = self.candidates.weights
        return self.amounts(lambda t, s: self.storage.weight_bytes(weights[t], s))

    def spread(self, choice: Sequence[int] | Choice) -> list[int]:
        """One option per weight from one per group."""
        plan = [0] * len(self.candidates.weights)
        for members, option in zip(self.groups, choice, strict=True):
            for i in members:
                plan[i] = int(option)
        return plan

    def file_bytes(self, plan: Sequence[int]) -> int:
        """Exact size of what a plan writes."""
        return self.storage.file_bytes([self.candidates.options[b] for b in plan])

    def limit(self, bits: float | None, size: int | None) -> Limit:
        """The budget as a limit on the groups' choices.

        An average of b bits allows b bits per code; scales and zero points count beyond those of the weight's coarsest
        groups, so that finer ones have to be paid for with fewer bits. A size in bytes allows what it leaves after all
        other tensors and the longest header that the options can give; every choice within the limit keeps it. Where
        that leaves too little though the smallest file fits, the smallest is the only choice.

        Raises:
            InfeasibleError: If even the smallest choice exceeds it; the message says how much that is.
        """
        if (bits is None) == (size is None):
            raise ValueError(f"give exactly one of bits and bytes, got bits={bits} and bytes={size}")
        return self._bit_limit(bits) if bits is not None else self._byte_limit(int(size or 0))

    def _bit_limit(self, bits: float) -> Limit:
        if not (math.isfinite(bits) and bits > 0):
            raise ValueError(f"bits must be positive, got {bits}")
        amounts = self.amounts(self._counted_bits)
        entries = sum(w.numel for w in self.candidates.weights)
        least = self._least(amounts)
        if least > entries * bits:
            smallest = math.ceil(least / entries * 1000) / 1000
            raise InfeasibleError(
                f"bits: an average of {bits:g} bits cannot be reached; the smallest that the choices and fixed formats "
                f"allow is {smallest:.3f}"
            )
        return Limit(amounts, math.floor(entries * bits + 1e-6), f"an average of {bits:g} bits")

    def _counted_bits(self, weight: int, scheme: Scheme) -> int:
        """Bits of a weight's codes, and of its scales and zero points beyond those of its coarsest groups."""
        matrix, width = self.candidates.weights[weight], scale_bits(self.candidates)
        options = [self.candidates.options[b] for b in self.candidates.available(weight)]
        # Zero points have the bits of their codes; they are allowed for where every option has them.
        zeros = 0 if any(option.symmetric for option in options) else scheme.bits
        coarsest = matrix.rows * min(option.groups(matrix.columns) for option in options)
        return scheme.stored_bits(matrix.rows, matrix.columns, width) - coarsest * (width + zeros)

    def _byte_limit(self, size: int) -> Limit:
        amounts, available, options = self.stored_bytes(), self.available, self.candidates.options
        smallest = np.where(available, amounts, np.iinfo(np.int64).max).argmin(axis=1)
        least, real = self._least(amounts), self.file_bytes(self.spread(smallest))
        if real > size:
            raise InfeasibleError(
                f"bytes: {size:,} bytes cannot be reached; the smallest that the choices and fixed formats allow is "
                f"{real:,}, of which {real - least:,} are unquantized tensors and the file's header"
            )
        kept: list[list[Scheme]] = [[] for _ in self.candidates.weights]
        for members, row in zip(self.groups, available, strict=True):
            for i in members:
                kept[i] = [options[b] for b in np.flatnonzero(row)]
        room = size - self.storage.rest_bytes(kept)
        if room < least:  # the smallest file has a shorter header than others can have
            others = np.arange(len(options)) != smallest[:, None]
            return Limit(amounts + others, least, f"{size:,} bytes")
        return Limit(amounts, room, f"{size:,} bytes")

    def _least(self, amounts: Amounts) -> int:
        return int(np.where(self.available, amounts, np.iinfo(np.int64).max).min(axis=1).sum())


def allocate(
    scores: Sensitivity,
    problem: Problem,
    *,
    bits: float | None = None,
    bytes: int | None = None,
    max_loss_rise: float | None = None,
    redraws: int = 0,
    seed: int = 0,
) -> Plan:
    """The plan of least total score within a budget, or of fewest bytes below a predicted rise of the loss.

    Exact for the given scores. Negative predictions, which are noise of the estimate, count as zero. With "interaction"
    scores the separable optimum is improved by exact local search over single and paired changes with all cross terms.
    Under a ceiling of the loss it is taken for lower ceilings instead, until the prediction with cross terms keeps
    below the one that was asked for. The plan's facts hold that prediction, the one without cross terms, and the
    objective that the search or the lowering began with.

    Args:
        scores: The table.
        problem: What it is about.
        bits: Average bits per code; see `Problem.limit`.
        bytes: Size of what is written, everything included.
        max_loss_rise: Nats per token; needs a metric that predicts.
        redraws: How often to solve again with scores redrawn within their standard errors; the plan's facts then tell
            for each weight in which share of them its bits differ.
        seed: Seed of the redraws.

    Returns:
        The plan.

    Raises:
        InfeasibleError: If the budget is too small; the message names the smallest feasible one, or, for a ceiling with
            cross terms, the smallest prediction that was found.
        ValueError: If not exactly one budget is given, or the scores do not fit the problem.
    """
    given = {"bits": bits, "bytes": bytes, "max_loss_rise": max_loss_rise}
    budget = {name: value for name, value in given.items() if value is not None}
    if len(budget) != 1:
        raise ValueError(f"give exactly one of bits, bytes and max_loss_rise, got {budget or 'none'}")
    if scores.weights != tuple(w.name for w in problem.candidates.weights):
        raise ValueError("scores: they are for other weights than the problem's")
    if scores.values.shape[1] != len(problem.candidates.options):
        raise ValueError("scores: they are for other options than the problem's")
    solve = _ceiling(scores, problem, max_loss_rise) if max_loss_rise is not None else _budgeted(problem, bits, bytes)
    choice = solve(scores.values)
    facts: dict[str, Any] = {}
    if scores.cross is not None:
        cross = _grouped_cross(problem, scores.cross)
        first = objective(choice, cross)
        if max_loss_rise is None:
            choice = improve(choice, problem.available, cross, problem.limit(bits, bytes)).choice
        else:
            choice, solve = _below(scores, problem, choice, solve, cross, max_loss_rise)
        facts |= {"separable_with_interaction": first, "predicted_with_interaction": objective(choice, cross)}
    plan = problem.spread(choice)
    if scores.cross is not None:
        facts["predicted_without_interaction"] = float(scores.values[np.arange(len(plan)), plan].sum())
    if redraws:
        facts["stability"] = _stability(scores, problem, solve, plan, redraws, seed)
    return make_plan(problem, plan, scores.metric, {k: float(v) for k, v in budget.items()}, scores, facts)


def make_plan(
    problem: Problem, plan: Sequence[int], metric: str, budget: dict[str, float], scores: Sensitivity | None,
    facts: dict[str, Any] | None = None,
) -> Plan:  # fmt: skip
    """A plan with its sizes and, where scores predict, its predictions."""
    candidates = problem.candidates
    codes, stored = averages(candidates, plan)
    predicted = stderr = None
    if scores is not None and scores.predicts:
        rows = np.arange(len(plan))
        predicted = tuple(float(v) for v in scores.values[rows, list(plan)])
        if scores.stderr is not None:
            stderr = tuple(float(v) for v in scores.stderr[rows, list(plan)])
    return Plan(
        weights=tuple(w.name for w in candidates.weights), choices=tuple(plan),
        schemes=tuple(candidates.options[b] for b in plan), metric=metric, budget=budget, average_bits=codes,
        average_stored_bits=stored, bytes=problem.file_bytes(plan), predicted=predicted, predicted_stderr=stderr,
        facts=dict(facts or {}),
    )  # fmt: skip


def _costs(problem: Problem, values: Table) -> Table:
    """Non-negative costs of the groups; NaN where there is no option.

    Among options that cost nothing, because noise has made their predictions negative, the one with more bits is
    cheaper by less than any prediction can tell.
    """
    costs = problem.grouped(np.maximum(values, 0.0))
    bits = np.array([option.bits for option in problem.candidates.options], dtype=np.float64)
    entries = np.array([sum(problem.candidates.weights[i].numel for i in members) for members in problem.groups])
    largest = np.nanmax(np.where(problem.available, costs, 0.0), initial=0.0)
    trifle = (largest or 1.0) * _TRIFLE * (entries / entries.sum())[:, None] * 4.0**-bits
    return np.where(problem.available, costs + trifle, np.nan)


def _budgeted(problem: Problem, bits: float | None, size: int | None) -> Callable[[Table], Choice]:
    limit = problem.limit(bits, size)
    return lambda values: choose(_costs(problem, values), [limit])


def _ceiling(scores: Sensitivity, problem: Problem, most: float) -> Callable[[Table], Choice]:
    if not scores.predicts:
        raise ValueError(
            "max_loss_rise needs a metric that predicts the loss (trace, quadratic, taylor, interaction), got "
            f"{scores.metric!r}"
        )
    if not (math.isfinite(most) and most > 0):
        raise ValueError(f"max_loss_rise must be positive, got {most}")
    sizes = problem.stored_bytes()

    def solve(values: Table) -> Choice:
        costs = _costs(problem, values)
        least = float(np.nanmin(costs, axis=1).sum())
        if least > most:
            raise InfeasibleError(
                f"max_loss_rise: {most:g} nats cannot be reached; the smallest predicted rise of the choices and fixed "
                f"formats is {least:.3g}"
            )
        # In integers, rounded up, so that the sum of the predictions themselves keeps below the ceiling.
        rises = np.where(problem.available, np.ceil(np.minimum(costs / most, 2.0) * _FINE), 0).astype(np.int64)
        smallest = int(np.where(problem.available, rises, 2 * _FINE).min(axis=1).sum())
        limit = Limit(rises, max(_FINE, smallest), f"a rise of {most:g} nats")
        return choose(np.where(problem.available, sizes, np.nan).astype(np.float64), [limit])

    return solve


def _grouped_cross(problem: Problem, cross: Table) -> Table:
    """Cross terms between groups: [groups, options, groups, options]; NaN where an option does not exist."""
    weights, options = len(problem.candidates.weights), len(problem.candidates.options)
    table = cross.reshape(weights, options, weights, options)
    rows = np.stack([table[list(m)].sum(axis=0) for m in problem.groups])
    # A group's own option is the same for all members, so that pairs within it share their option.
    return np.stack([rows[:, :, list(m)].sum(axis=2) for m in problem.groups], axis=2)


def _below(
    scores: Sensitivity, problem: Problem, choice: Choice, solve: Callable[[Table], Choice], cross: Table, most: float
) -> tuple[Choice, Callable[[Table], Choice]]:  # fmt: skip
    """The separable optimum of the first lower ceiling whose prediction with cross terms is at most `most`.

    Returns:
        The choice, and how it was solved for.

    Raises:
        InfeasibleError: If the ceiling falls below every separable prediction before that.
    """
    ceiling, smallest = most, math.inf
    while (value := objective(choice, cross)) > most:
        smallest = min(smallest, value)
        ceiling *= min(most / value, _LOWER)
        try:
            solve = _ceiling(scores, problem, ceiling)
            choice = solve(scores.values)
        except InfeasibleError:
            raise InfeasibleError(
                f"max_loss_rise: {most:g} nats cannot be reached with the cross terms between weights; the smallest "
                f"predicted rise that was found is {smallest:.3g}"
            ) from None
    return choice, solve


def _stability(
    scores: Sensitivity,
    problem: Problem,
    solve: Callable[[Table], Choice],
    plan: Sequence[int],
    redraws: int,
    seed: int,
) -> dict[str, Any] | None:
    """How often each weight's bits change when the scores are redrawn; None where scores have no errors."""
    if scores.stderr is None:
        return None
    generator = np.random.default_rng(seed)
    bits = np.array([o.bits for o in problem.candidates.options])
    differs = np.zeros(len(plan))
    done = 0
    for _ in range(redraws):
        redrawn = scores.values + scores.stderr * generator.standard_normal(scores.values.shape)
        try:
            other = problem.spread(solve(redrawn))
        except InfeasibleError:
            continue  # a redrawn table can have no plan below the ceiling
        differs += bits[other] != bits[list(plan)]
        done += 1
    if not done:
        return None
    shares = differs / done
    return {"redraws": done, "mean_share_changed": float(shares.mean()), "share_changed": [float(s) for s in shares]}
