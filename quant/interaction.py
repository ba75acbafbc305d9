"""Plans under cross terms between weights: exact local search from a separable optimum."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quant.choice import Choice, Limit, Table

__all__ = ["Improvement", "improve", "objective"]

_MOVES = 10_000


@dataclass(frozen=True, eq=False)
class Improvement:
    """A locally optimal choice.

    Attributes:
        choice: int64 [groups].
        value: Its objective.
        start: The objective of the choice that the search began with.
        moves: Number of moves taken.
    """

    choice: Choice
    value: float
    start: float
    moves: int


def objective(choice: Choice, cross: Table) -> float:
    """1/2 sum_gh cross[g, choice[g], h, choice[h]]: half the quadratic form of the joint perturbation."""
    rows = np.arange(len(choice))
    return 0.5 * float(cross[rows[:, None], choice[:, None], rows[None], choice[None]].sum())


def improve(choice: Choice, available: npt.NDArray[np.bool_], cross: Table, limit: Limit) -> Improvement:
    """Change one group, or two at once, as long as the objective falls within the limit: steepest descent.

    The result cannot be improved by any single change or pair of changes. Each step costs O((groups * options)^2).

    Args:
        choice: Where to begin; within the limit.
        available: [groups, options].
        cross: D_gb.H D_hc, symmetric, [groups, options, groups, options].
        limit: The budget.

    Returns:
        The best choice found; never worse than the beginning.
    """
    groups, options = available.shape
    filled = np.where(np.isfinite(cross), cross, 0.0)
    flat = filled.reshape(groups * options, groups * options)
    rows = np.arange(groups)
    first = start = objective(choice, filled)
    choice = choice.copy()
    moves = 0
    own = np.repeat(rows, options)
    same = own[:, None] == own[None]
    for moves in range(_MOVES):  # noqa: B007 - the count of the moves taken
        current = rows * options + choice
        # H (sum of all current perturbations), seen from every (group, option); and steps away from the current ones.
        field = flat[:, current].sum(axis=1)
        steps = flat - flat[current[own]]
        steps = steps - steps[:, current[own]]  # (D_gb - D_g).H (D_hc - D_h)
        single = field - field[current[own]] + 0.5 * np.diag(steps)
        grown = (limit.amounts - limit.amounts[rows, choice][:, None]).reshape(-1)
        room = limit.most - limit.total(choice)
        allowed = available.reshape(-1)
        pair = single[:, None] + single[None] + steps
        pair = np.where(same | ~allowed[:, None] | ~allowed[None] | (grown[:, None] + grown[None] > room), np.inf, pair)
        alone = np.where(allowed & (grown <= room), single, np.inf)
        best_pair, best_alone = int(pair.argmin()), int(alone.argmin())
        gain = min(float(pair.flat[best_pair]), float(alone[best_alone]))
        if gain >= -1e-12 * max(abs(start), 1e-300):
            break
        changed = [best_alone] if alone[best_alone] <= pair.flat[best_pair] else list(divmod(best_pair, len(own)))
        for place in changed:
            choice[place // options] = place % options
        start = objective(choice, filled)
    return Improvement(choice, start, first, moves)
