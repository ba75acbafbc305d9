"""Re-linearized allocation: gradient and curvature at the quantized model, moves within a trust region.

Scores taken at the unquantized model miss interactions between weights and all orders beyond the second, and these
decide where many weights have few bits. So the loss is expanded again at the model as quantized by the present plan.
For the step d of one weight t from its option to a neighbouring one (more or fewer bits),

    dL(t, d) = g.d + 1/2 d.H_tt d

with the gradient g, which at a quantized model is more than the noise that it is at a trained one, and H the exact
Hessian there, by the sign trick (`quant.quadratic`). g.d is shrunk as far as its spread between batches says that it is
noise: a program that picks the best of hundreds of moves picks those that these batches happen to like. An integer
program picks the moves of least total change within the budget and a trust region: at most a share of the groups moves.
The new plan is judged by the loss on calibration windows that neither gradient nor curvature saw. A trial costs little
beside an expansion, so the share is halved and the program solved again, until a step helps and then as long as a
shorter one helps more; the best is taken. The next expansion begins at twice its share, at most where the first began.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from curvature.estimate import Progress
from curvature.loss import Batch, CausalLMLoss, Loss
from curvature.operators import HessianOperator, Method
from curvature.vectors import inner
from quant.allocation import Problem, make_plan
from quant.choice import Choice, InfeasibleError, Limit, Table, choose
from quant.linear import shrunk
from quant.perplexity import Perplexity, evaluate_perplexity, rise
from quant.plan import Plan, changes
from quant.quadratic import hessians, quadratic_forms

__all__ = ["Relinearization", "Step", "relinearize"]

_UP, _DOWN = 1, -1


@dataclass(frozen=True)
class Relinearization:
    """Settings of the search.

    Attributes:
        rounds: Linearizations at most.
        share: Share of the groups that may move in one step, to begin with.
        smallest_share: The search ends when the share falls below it, or below one group.
        curvature_batches: Batches that the curvature of moves is taken over, others in every round; the gradient uses
            all batches.
        draws: Sign vectors per curvature batch and direction; as many as a layer has weights cancel their cross terms.
        caution: Standard errors of a move's curvature that count as a cost when moves are chosen. Without them the
            program prefers moves whose curvature was estimated too low.
        seed: Seed of the signs.

    Raises:
        ValueError: If a number is out of range.
    """

    rounds: int = 6
    share: float = 0.5
    smallest_share: float = 0.01
    curvature_batches: int = 4
    draws: int = 4
    caution: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("rounds", "curvature_batches", "draws"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 < self.smallest_share <= self.share <= 1:
            raise ValueError(f"0 < smallest_share <= share <= 1 must hold, got {self.smallest_share} and {self.share}")
        if not (math.isfinite(self.caution) and self.caution >= 0):
            raise ValueError(f"caution must be at least 0 standard errors, got {self.caution}")


@dataclass(frozen=True)
class Step:
    """One trial of the search.

    Attributes:
        round: Which linearization it belongs to.
        share: Trust region.
        moved: Weights whose option differs.
        predicted: Predicted change of the loss, linear plus quadratic terms.
        measured: Measured change on the acceptance windows.
        measured_stderr: Its standard error, paired over windows; None for a single window.
        accepted: Whether it was taken.
    """

    round: int
    share: float
    moved: int
    predicted: float
    measured: float
    measured_stderr: float | None
    accepted: bool


@dataclass(frozen=True, eq=False)
class _Expansion:
    """What single-step moves of the groups are predicted to do: 0 for staying, NaN out of reach.

    Attributes:
        change: Predicted change of the loss [groups, options].
        stderr: Standard error of its curvature term.
        products: Products used.
    """

    change: Table
    stderr: Table
    products: int


@dataclass(eq=False)
class _Search:
    """The state of the search: the best plan so far and how it got there."""

    plan: list[int]
    held_out: Perplexity
    steps: list[Step] = field(default_factory=list)
    products: int = 0


def relinearize(
    model: nn.Module,
    problem: Problem,
    starts: Sequence[Plan],
    batches: Sequence[Batch],
    held_out: Sequence[Batch],
    *,
    settings: Relinearization | None = None,
    loss: Loss | None = None,
    method: Method = "auto",
    progress: Progress | None = None,
) -> Plan:
    """Improve a plan at its own budget; see the module.

    The model is unquantized before and after. Cost of a round: one backward pass over `batches`,
    2 * draws * curvature_batches products, and per trial one forward pass over `held_out`.

    Args:
        model: The model that the problem's candidates were made of.
        problem: The candidates, sizes and groups.
        starts: Plans within the same budget; the search begins with the one of least loss on `held_out`.
        batches: Calibration batches of equal numbers of tokens, for the gradient; some of them for the curvature.
        held_out: Calibration batches that decide whether a step is taken. Not evaluation text.
        settings: See `Relinearization`.
        loss: The loss; `CausalLMLoss` if None.
        method: How Hessian products are computed; see `HessianOperator`.
        progress: Called after each round.

    Returns:
        The best plan; its facts tell the start, every trial, and the losses.

    Raises:
        ValueError: If there is no start, or the starts have different budgets or none in bits or bytes.
    """
    settings = settings or Relinearization()
    budget = _budget(starts)
    if not batches or not held_out:
        raise ValueError("batches, held_out: both must hold at least one calibration batch")
    limit = problem.limit(budget.get("bits"), int(budget["bytes"]) if "bytes" in budget else None)
    loss = CausalLMLoss() if loss is None else loss
    candidates = problem.candidates
    search, start = _begin(model, problem, starts, held_out, loss)
    first = search.held_out
    share = settings.share
    operators = hessians(model, [w.name for w in candidates.weights], batches, loss, method)
    try:
        for number in range(1, settings.rounds + 1):
            candidates.apply(search.plan)
            expansion = _expand(problem, search.plan, operators, settings, number)
            search.products += expansion.products
            before = len(search.steps)
            share = _descend(model, problem, search, expansion, limit, held_out, loss, share, settings, number)
            if progress is not None:
                progress(number, settings.rounds, f"loss {search.held_out.loss:.4f}, share {share:.3f}")
            if not any(step.accepted for step in search.steps[before:]):
                break
    finally:
        candidates.restore()
    change, stderr = rise(search.held_out, first)
    facts: dict[str, Any] = {
        "start": start,
        "steps": [asdict(step) for step in search.steps],
        "held_out_loss_start": first.loss,
        "held_out_loss": search.held_out.loss,
        "held_out_change": change,
        "held_out_change_stderr": stderr if math.isfinite(stderr) else None,
        "products": search.products,
        "relinearization": asdict(settings),
    }
    return make_plan(problem, search.plan, "relinearized", dict(budget), None, facts)


def _budget(starts: Sequence[Plan]) -> dict[str, float]:
    if not starts:
        raise ValueError("starts: there is no plan to begin with; give at least one static plan")
    budget = starts[0].budget
    if any(plan.budget != budget for plan in starts) or not set(budget) <= {"bits", "bytes"}:
        budgets = [plan.budget for plan in starts]
        raise ValueError(f"starts: all must have the same budget in bits or bytes, got {budgets}")
    return budget


def _begin(
    model: nn.Module, problem: Problem, starts: Sequence[Plan], held_out: Sequence[Batch], loss: Loss
) -> tuple[_Search, dict[str, Any]]:
    """The start of least loss on the held-out windows, and the losses of all."""
    losses = []
    for plan in starts:
        with problem.candidates.applied(plan.choices):
            losses.append(evaluate_perplexity(model, held_out, loss=loss))
    best = int(np.argmin([found.loss for found in losses]))
    named = [{"metric": p.metric, "held_out_loss": f.loss} for p, f in zip(starts, losses, strict=True)]
    return _Search(list(starts[best].choices), losses[best]), {"metric": starts[best].metric, "tried": named}


def _descend(
    model: nn.Module, problem: Problem, search: _Search, expansion: _Expansion, limit: Limit,
    held_out: Sequence[Batch], loss: Loss, share: float, settings: Relinearization, number: int,
) -> float:  # fmt: skip
    """Take the best step that one expansion offers, over ever smaller trust regions. Returns the next share."""
    costs = expansion.change + settings.caution * expansion.stderr
    groups, start = len(problem.groups), search.held_out
    current = np.array([search.plan[members[0]] for members in problem.groups])
    taken: tuple[int, list[int], Perplexity] | None = None
    while share >= settings.smallest_share and share * groups >= 1:
        choice = _moved(costs, current, limit, int(share * groups))
        moving = int((choice != current).sum())
        if not moving:
            break  # no move within reach is predicted to help
        share = min(share, moving / groups)
        plan = problem.spread(choice)
        problem.candidates.apply(plan)
        found = evaluate_perplexity(model, held_out, loss=loss)
        change, stderr = rise(found, start)
        predicted = float(expansion.change[np.arange(groups), choice].sum())
        error = stderr if math.isfinite(stderr) else None
        search.steps.append(Step(number, share, changes(plan, search.plan), predicted, change, error, False))
        if found.loss < (start if taken is None else taken[2]).loss:
            taken = len(search.steps) - 1, plan, found
        elif taken is not None:
            break
        share /= 2
    if taken is None:
        return 0.0
    place, search.plan, search.held_out = taken
    search.steps[place] = replace(search.steps[place], accepted=True)
    return min(2 * search.steps[place].share, settings.share)


def _moved(costs: Table, current: Choice, limit: Limit, most: int) -> Choice:
    """The groups' options after at most so many moves of least total predicted change."""
    moves = np.ones_like(limit.amounts)
    moves[np.arange(len(current)), current] = 0
    try:
        return choose(costs, [limit, Limit(moves, most, f"at most {most} moves")])
    except InfeasibleError:
        # The start itself can lie above the limit by rounding only if it was made for another problem.
        raise ValueError("starts: the plan does not keep within its own budget for this problem") from None


def _expand(
    problem: Problem, plan: Sequence[int], operators: Sequence[Callable[[], HessianOperator]],
    settings: Relinearization, number: int,
) -> _Expansion:  # fmt: skip
    """Predicted change of the loss for every single-step move of a group.

    Members of a group move together: their linear terms and their own curvatures add, cross terms between them do not
    enter.
    """
    candidates = problem.candidates
    up, down = (_neighbours(problem, plan, way) for way in (_UP, _DOWN))
    linear = _linear(problem, plan, operators, (up, down))
    first = number * settings.curvature_batches
    windows = [operators[(first + i) % len(operators)] for i in range(settings.curvature_batches)]

    def step(targets: Sequence[int]) -> Callable[[int], Tensor]:
        return lambda t: candidates.delta(t, targets[t], plan[t])

    forms = quadratic_forms(
        windows,
        candidates.weights,
        [step(up), step(down)],
        draws=max(settings.draws, 2 if settings.curvature_batches == 1 else 1),
        seed=settings.seed + number,
        beside=lambda t: candidates.delta(t, plan[t]),
    )
    # Curvature over windows and draws: two or three windows alone would tell its error too roughly for a cost. Draws on
    # one window share its text, so that the error is somewhat too small.
    samples = forms.samples.reshape(-1, *forms.values.shape)
    errors = samples.std(axis=0, ddof=1) / math.sqrt(len(samples))
    expected = forms.values + _steadied(linear, forms.cross)
    change = np.full((len(problem.groups), len(candidates.options)), np.nan)
    stderr = change.copy()
    for g, members in enumerate(problem.groups):
        change[g, plan[members[0]]] = stderr[g, plan[members[0]]] = 0.0
        for way, targets in enumerate((up, down)):
            target = targets[members[0]]
            if target != plan[members[0]]:
                change[g, target] = sum(expected[way, i] for i in members)
                stderr[g, target] = math.hypot(*(errors[way, i] for i in members))
    return _Expansion(change, stderr, forms.products)


def _steadied(linear: npt.NDArray[np.float64], own: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """g.d of every step, with the noise of the text shrunk.

    Most of a gradient's noise is told by its spread between batches. What is certain of g.d is the step's effect on the
    weight's own error e, e.H_tt d: only what differs from it is shrunk. Of one batch, whose noise cannot be told, all
    is kept.

    Args:
        linear: g.d by batch: [batches, ways, weights].
        own: e.H_tt d: [ways, weights].
    """
    return linear[0] if len(linear) == 1 else own + shrunk(linear - own)[0]


def _neighbours(problem: Problem, plan: Sequence[int], way: int) -> list[int]:
    """For each weight the option one step up or down its group's ladder; where there is none, the present one."""
    sizes, targets = problem.stored_bits(), list(plan)
    for members, ladder, amounts in zip(problem.groups, problem.ladders, sizes, strict=True):
        present = amounts[plan[members[0]]]
        reach = [b for b in ladder if (amounts[b] - present) * way > 0]
        if reach:
            for i in members:
                targets[i] = reach[0] if way == _UP else reach[-1]
    return targets


def _linear(
    problem: Problem, plan: Sequence[int], operators: Sequence[Callable[[], HessianOperator]],
    ways: Sequence[Sequence[int]],
) -> npt.NDArray[np.float64]:  # fmt: skip
    """g.d of every weight's step, by the gradient g of every batch: [batches, ways, weights]."""
    candidates = problem.candidates
    places = [(w, t) for w, targets in enumerate(ways) for t in range(len(plan)) if targets[t] != plan[t]]
    steps = [candidates.delta(t, ways[w][t], plan[t]) for w, t in places]
    table = np.zeros((len(operators), len(ways), len(plan)))
    for number, make in enumerate(operators):
        operator = make()
        gradient = operator.space.named(operator.gradient())
        found = [
            inner(step.to(piece.dtype), piece)
            for step, piece in zip(steps, (gradient[candidates.weights[t].name] for _, t in places), strict=True)
        ]
        operator.release()
        if found:
            table[(number, *np.array(places).T)] = torch.stack(found).cpu().numpy()
    return table
