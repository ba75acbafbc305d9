"""Independent probes, one by one in their order, until the standard error of what they say is small enough.

Whoever computes a sample, and however often the run was interrupted: the rule looks at the samples in the order of
their probes, so that the same ones are used and summed up in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from curvature.distributed import ALONE, Processes
from curvature.estimate import Progress, mean_and_stderr, with_error
from curvature.state import Part, Saved

__all__ = ["Collected", "check_rule", "collect"]

_Floats: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Collected:
    """Samples that were enough, or as many as were allowed.

    Attributes:
        rows: float64 [samples, columns].
        value: What their totals estimate.
        stderr: Its standard error.
        converged: Whether that is at most `tol` times the absolute value.
    """

    rows: _Floats
    value: float
    stderr: float
    converged: bool


def check_rule(tol: float, least: int, most: int, names: str = "min_products <= max_products") -> None:
    """Refuse a stopping rule that cannot be followed.

    Raises:
        ValueError: If the tolerance is not positive and finite, or 2 <= least <= most does not hold.
    """
    if not (tol > 0 and math.isfinite(tol)):
        raise ValueError(f"tol must be positive and finite, got {tol}")
    if not 2 <= least <= most:
        raise ValueError(f"2 <= {names} must hold (one probe has no standard error), got {least} and {most}")


def collect(
    sample: Callable[[int], _Floats],
    *,
    tol: float,
    least: int,
    most: int,
    columns: int | None = None,
    value_of: Callable[[float, float], tuple[float, float]] = lambda mean, stderr: (mean, stderr),
    progress: Progress | None = None,
    part: Part | None = None,
    processes: Processes = ALONE,
) -> Collected:
    """Samples until the standard error of the value that their totals estimate is at most `tol` times that value.

    Args:
        sample: The sample of one probe, float64 [columns], by the probe's number. Independent of all others.
        tol: Relative standard error at which to stop.
        least: Do not stop before.
        most: Stop there in any case.
        columns: How many of the first columns make up a sample's total; None: all.
        value_of: The value and its standard error by the mean of the totals and the standard error of that.
        progress: Called after each sample.
        part: Where the samples are saved as they come, and continued from.
        processes: Who shares the probes; every process gets all samples, the same ones for any number of processes.
            What came after the probe that the rule stops at is left out.
    """
    rule = _Rule(_saved(part), columns, tol, least, most, value_of, progress)

    def own() -> _Floats | None:
        index = len(rule.rows) + processes.rank
        return sample(index) if index < most else None

    with nullcontext() if part is None or not processes.leads else part.saving():
        while not rule.done:
            for row in processes.gather(own):
                if row is not None and not rule.done:
                    rule.add(row)
            if part is not None and processes.leads:
                part.offer(rule.snapshot)
    return Collected(np.stack(rule.rows), rule.value, rule.stderr, rule.converged)


class _Rule:
    """The samples in order, and the rule that says when they are enough."""

    def __init__(
        self,
        saved: list[_Floats],
        columns: int | None,
        tol: float,
        least: int,
        most: int,
        value_of: Callable[[float, float], tuple[float, float]],
        progress: Progress | None,
    ) -> None:
        self.rows: list[_Floats] = []
        self._totals: list[float] = []
        self._columns, self._value_of = columns, value_of
        self._tol, self._least, self._most = tol, least, most
        self._progress: Progress | None = None
        self.value, self.stderr, self.converged, self.done = math.nan, math.nan, False, False
        for row in saved:
            self.add(row)
        self._progress = progress

    def add(self, row: _Floats) -> None:
        self.rows.append(row)
        self._totals.append(float(row[: self._columns].sum()))
        self.value, self.stderr = self._value_of(*mean_and_stderr(np.array(self._totals)))
        self.converged = self.stderr <= self._tol * abs(self.value)
        self.done = len(self.rows) == self._most or (self.converged and len(self.rows) >= self._least)
        if self._progress is not None:
            self._progress(len(self.rows), self._most, with_error(self.value, self.stderr))

    def snapshot(self) -> Saved:
        # An interruption may have come between the two lists.
        rows = self.rows[: len(self._totals)]
        return Saved({"samples": len(rows)}, {"samples": torch.from_numpy(np.stack(rows))})


def _saved(part: Part | None) -> list[_Floats]:
    return [row for piece in part.pieces for row in piece["samples"].numpy()] if part is not None else []
