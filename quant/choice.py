"""One option per group at least cost within limits: a multiple-choice knapsack, solved exactly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

__all__ = ["InfeasibleError", "Limit", "choose"]

Table = npt.NDArray[np.float64]
Amounts = npt.NDArray[np.int64]
Choice = npt.NDArray[np.int64]

_TYPICAL = 1e3
"""Median of the nonzero costs as the solver sees them: its tolerances are absolute, and costs in nats are tiny."""

_TIGHTENINGS = 20


class InfeasibleError(ValueError):
    """No choice keeps within the limits."""


@dataclass(frozen=True)
class Limit:
    """sum of amounts[g, choice[g]] <= most.

    Attributes:
        amounts: Non-negative integers [groups, options].
        most: The limit.
        name: For messages.
    """

    amounts: Amounts
    most: int
    name: str

    def total(self, choice: Choice) -> int:
        """What a choice takes, in exact integers."""
        return sum(int(row[c]) for row, c in zip(self.amounts, choice, strict=True))


def choose(costs: Table, limits: Sequence[Limit], *, seconds: float = 60.0) -> Choice:
    """The choice of least total cost within the limits.

    Solved to proven optimality by HiGHS (`scipy.optimize.milp`) with a gap of zero, on costs that are shifted to zero
    at each group's cheapest option and scaled to a median of 1e3: without the scaling it stops at its absolute
    tolerances. The solver keeps limits up to a relative 1e-6; the answer is checked in integers and the limit tightened
    until it holds exactly.

    Args:
        costs: [groups, options]; NaN where a group does not have the option.
        limits: Each with amounts of the same shape.
        seconds: Time limit; an answer that is then not proven optimal is an error.

    Returns:
        int64 [groups].

    Raises:
        InfeasibleError: If there is none.
        ValueError: If a group has no option at all.
        RuntimeError: If the solver gives no proof in time.
    """
    available = np.isfinite(costs)
    if not available.any(axis=1).all():
        raise ValueError(f"group {int(np.argmin(available.any(axis=1)))} has no option to choose from")
    most = [limit.most for limit in limits]
    for _ in range(_TIGHTENINGS):
        choice = _solve(costs, available, limits, most, seconds)
        excess = [limit.total(choice) - limit.most for limit in limits]
        if max(excess, default=0) <= 0:
            return choice
        most = [m - max(0, e) for m, e in zip(most, excess, strict=True)]
    raise RuntimeError(f"the solver does not keep within the limits ({', '.join(limit.name for limit in limits)})")


def _solve(
    costs: Table, available: npt.NDArray[np.bool_], limits: Sequence[Limit], most: Sequence[int], seconds: float
) -> Choice:
    groups, options = costs.shape
    rows, columns = np.nonzero(available)
    shifted = (costs - np.nanmin(np.where(available, costs, np.nan), axis=1, keepdims=True))[available]
    positive = shifted[shifted > 0]
    objective = shifted * (_TYPICAL / np.median(positive)) if positive.size else shifted
    one_each = csr_array((np.ones(len(rows)), (rows, np.arange(len(rows)))), shape=(groups, len(rows)))
    constraints = [LinearConstraint(one_each, 1, 1)]
    for limit, bound in zip(limits, most, strict=True):
        amounts = limit.amounts[available].astype(np.float64)
        unit = max(float(amounts.max()), 1.0)
        constraints.append(LinearConstraint(csr_array(amounts[None] / unit), -np.inf, bound / unit))
    found = milp(
        objective,
        integrality=np.ones(len(rows), dtype=np.int64),
        bounds=Bounds(0, 1),
        constraints=constraints,
        options={"mip_rel_gap": 0.0, "time_limit": seconds},
    )
    if found.status == 2:
        raise InfeasibleError(f"no choice keeps within {', '.join(limit.name for limit in limits)}")
    if found.status != 0 or found.x is None:
        raise RuntimeError(f"the integer program was not solved: {found.message}")
    scores = np.full((groups, options), -1.0)
    scores[rows, columns] = found.x
    best: Choice = scores.argmax(axis=1).astype(np.int64)
    return best
