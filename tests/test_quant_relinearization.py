"""The re-linearized search: what its moves are predicted to do, which steps it takes, and its budgets."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from fitted_llama import BATCHES, ROWS, SEARCH, fitted_llama, loss_of, problem_of
from torch import nn

from curvature import HessianOperator
from quant import (
    PackedStorage,
    Problem,
    Relinearization,
    allocate,
    find_weights,
    relinearization,
    relinearize,
    round_all,
    schemes,
    sensitivity,
    uniform_plan,
)
from quant.allocation import make_plan
from quant.quadratic import hessians
from quant.relinearization import _expand, _steadied


@pytest.fixture(scope="module")
def trained() -> nn.Module:
    return fitted_llama()


@pytest.fixture(scope="module")
def problem(trained: nn.Module) -> Problem:
    return problem_of(trained)


def test_the_expansion_predicts_small_moves(trained: nn.Module, problem: Problem) -> None:
    """g.d + d.Hd/2 at the quantized model against the loss after the move itself."""
    candidates = problem.candidates
    plan = uniform_plan(candidates, 4)
    candidates.apply(plan)
    settings = Relinearization(curvature_batches=1, draws=16)
    joined = [{"input_ids": torch.cat([batch["input_ids"] for batch in BATCHES])}]  # of one batch all of g.d is kept
    operators = hessians(trained, [w.name for w in candidates.weights], joined, method="whole")
    found = _expand(problem, plan, operators, settings, 0)
    candidates.restore()
    costs = found.change
    assert found.products == 2 * 16
    assert np.array_equal(np.isfinite(costs), np.isfinite(found.stderr))
    with candidates.applied(plan):
        start = loss_of(trained)
    predicted, measured = [], []
    for g in range(len(problem.groups)):
        assert costs[g, plan[g]] == found.stderr[g, plan[g]] == 0
        assert set(np.flatnonzero(np.isfinite(costs[g]))) == {plan[g] - 1, plan[g], plan[g] + 1}
        for option in (plan[g] - 1, plan[g] + 1):
            moved = list(plan)
            moved[g] = option
            with candidates.applied(moved):
                measured.append(loss_of(trained) - start)
            predicted.append(costs[g, option])
    assert np.corrcoef(predicted, measured)[0, 1] > 0.95
    assert sum(predicted) == pytest.approx(sum(measured), rel=0.3)


def test_without_a_gradient_a_move_is_predicted_by_the_weight_s_own_error(
    trained: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where all that batches say is called noise: e.H_tt d + d.H_tt d/2, exact where the signs of a layer cancel."""
    monkeypatch.setattr(relinearization, "shrunk", lambda samples: (0 * samples[0], 0 * samples[0]))
    weights = find_weights(trained, r"layers\.0\.self_attn\.[qo]_proj")
    names = [w.name for w in weights]
    candidates = round_all(weights, schemes((2, 3, 4), (8,)))
    small = Problem(
        candidates, PackedStorage(trained, weights, torch.float64), tuple((i,) for i in range(len(weights)))
    )
    plan, settings = uniform_plan(candidates, 3), Relinearization(curvature_batches=3, draws=2)
    with candidates.applied(plan):
        found = _expand(small, plan, hessians(trained, names, BATCHES[:3], method="whole"), settings, 0)
        operator = HessianOperator(trained, BATCHES[:3], params=names, method="whole")
        for t, weight in enumerate(weights):
            for target in (plan[t] - 1, plan[t] + 1):
                step = candidates.delta(t, target, plan[t])
                still = {w.name: torch.zeros_like(w.parameter) for w in weights}
                product = (operator @ (still | {weight.name: step}))[weight.name]
                expected = float((product * (candidates.delta(t, plan[t]) + step / 2)).sum())
                assert found.change[t, target] == pytest.approx(expected, rel=1e-9)


def test_noise_between_batches_is_left_out_of_a_prediction() -> None:
    """g.d is drawn towards the step's effect on the weight's own error, and as far as batches disagree."""
    generator = np.random.default_rng(0)
    own = np.array([[-1.0, -2.0, -3.0]])
    truth = own + np.array([[0.0, 0.0, -5.0]])
    errors, plain = [], []
    for _ in range(300):
        linear = truth + generator.normal(size=(9, 1, 3)) * np.array([6.0, 0.0, 3.0])
        found = _steadied(linear, own)
        assert (np.abs(found - own) <= np.abs(linear.mean(axis=0) - own) + 1e-12).all()
        errors.append(found - truth)
        plain.append(linear.mean(axis=0) - truth)
    spread, before = np.square(errors).mean(axis=0)[0], np.square(plain).mean(axis=0)[0]
    assert spread[0] < 0.6 * before[0]  # nothing but noise
    assert spread[1] == 0
    assert spread[2] < 1.3 * before[2]  # a signal of five standard errors is kept
    np.testing.assert_array_equal(_steadied(truth[None], own), truth)


def test_the_search_lowers_the_held_out_loss_within_the_budget(trained: nn.Module, problem: Problem) -> None:
    candidates = problem.candidates
    start = make_plan(problem, uniform_plan(candidates, 3), "uniform", {"bits": 3.0}, None)
    before = [w.parameter.detach().clone() for w in candidates.weights]
    found = relinearize(trained, problem, [start], ROWS, BATCHES[3:], settings=SEARCH, method="whole")
    assert all(torch.equal(w.parameter, b) for w, b in zip(candidates.weights, before, strict=True))
    assert found.average_bits <= 3.0
    assert found.facts["held_out_loss"] < found.facts["held_out_loss_start"]
    with candidates.applied(found.choices):
        assert loss_of(trained, BATCHES[3:]) == pytest.approx(found.facts["held_out_loss"])
    taken = [step["measured"] for step in found.facts["steps"] if step["accepted"]]
    assert taken
    assert all(change < 0 for change in taken)
    assert sum(taken) == pytest.approx(found.facts["held_out_change"])
    assert all(step["moved"] <= max(1, int(step["share"] * 8)) for step in found.facts["steps"])


def test_shorter_steps_are_tried_while_they_help_more(trained: nn.Module, problem: Problem) -> None:
    """Of one expansion's trials the best is taken, and the search of its length ends at the first that is worse."""
    start = make_plan(problem, uniform_plan(problem.candidates, 3), "uniform", {"bits": 3.0}, None)
    settings = Relinearization(rounds=3, share=1.0, curvature_batches=2, draws=4)
    found = relinearize(trained, problem, [start], ROWS, BATCHES[3:], settings=settings, method="whole")
    rounds: dict[int, list[Any]] = {}
    for step in found.facts["steps"]:
        rounds.setdefault(step["round"], []).append(step)
    assert any(len(steps) > 1 for steps in rounds.values())
    for steps in rounds.values():
        shares, changes = [step["share"] for step in steps], [step["measured"] for step in steps]
        assert all(later <= earlier / 2 + 1e-12 for earlier, later in itertools.pairwise(shares))
        best = int(np.argmin(changes))
        assert [step["accepted"] for step in steps] == [i == best and changes[best] < 0 for i in range(len(steps))]
        assert len(steps) - 1 <= best + 1 or changes[best] >= 0


def test_a_budget_in_bytes_is_kept_by_the_search(trained: nn.Module, problem: Problem) -> None:
    size = make_plan(problem, uniform_plan(problem.candidates, 3), "uniform", {"bits": 3.0}, None).bytes + 5
    start = allocate(sensitivity(trained, problem.candidates, BATCHES, "weight_error"), problem, bytes=size)
    found = relinearize(trained, problem, [start], ROWS, BATCHES[3:], settings=SEARCH, method="whole")
    assert start.bytes <= size
    assert found.bytes <= size
    assert found.facts["held_out_loss"] <= found.facts["held_out_loss_start"]


def test_a_step_that_does_not_help_is_not_taken(
    trained: nn.Module, problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prediction turned upside down: every step raises the loss, the share is halved, and the start stays."""
    import quant.relinearization

    start = make_plan(problem, uniform_plan(problem.candidates, 3), "uniform", {"bits": 3.0}, None)

    def upside_down(*arguments: Any) -> Any:
        found = _expand(*arguments)
        bits = np.array([o.bits for o in problem.candidates.options])
        worse = np.where(bits[None] < 3, -10.0 - found.change, 5.0)  # fewer bits are promised to help
        told = np.where(np.isfinite(found.change), np.where(found.change == 0, 0.0, worse), np.nan)
        return replace(found, change=told)

    monkeypatch.setattr(quant.relinearization, "_expand", upside_down)
    found = relinearize(trained, problem, [start], ROWS, BATCHES[3:], settings=SEARCH, method="whole")
    rejected = [step for step in found.facts["steps"] if not step["accepted"]]
    assert rejected
    shares = [step["share"] for step in rejected]
    assert shares == sorted(shares, reverse=True)
    assert found.facts["held_out_loss"] <= found.facts["held_out_loss_start"]


def test_searches_with_nothing_to_go_on_are_refused(trained: nn.Module, problem: Problem) -> None:
    start = make_plan(problem, uniform_plan(problem.candidates, 3), "uniform", {"bits": 3.0}, None)
    with pytest.raises(ValueError, match="starts"):
        relinearize(trained, problem, [], BATCHES, BATCHES)
    other = make_plan(problem, start.choices, "uniform", {"bits": 4.0}, None)
    with pytest.raises(ValueError, match="same budget"):
        relinearize(trained, problem, [start, other], BATCHES, BATCHES)
    with pytest.raises(ValueError, match="held_out"):
        relinearize(trained, problem, [start], BATCHES, [])
    with pytest.raises(ValueError, match="share"):
        Relinearization(share=2.0)
    with pytest.raises(ValueError, match="caution"):
        Relinearization(caution=-1.0)


def test_moves_of_uncertain_curvature_wait(
    trained: nn.Module, problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A predicted fall smaller than its standard error is no reason to move; without caution it is."""
    import quant.relinearization

    start = make_plan(problem, uniform_plan(problem.candidates, 3), "uniform", {"bits": 3.0}, None)

    def unsure(*arguments: Any) -> Any:
        found = _expand(*arguments)
        told = np.where(found.change == 0, 0.0, np.where(np.isfinite(found.change), -0.01, np.nan))
        return replace(found, change=told, stderr=np.where(told < 0, 0.02, told))

    monkeypatch.setattr(quant.relinearization, "_expand", unsure)
    steps = {}
    for caution in (0.0, 1.0):
        settings = replace(SEARCH, caution=caution)
        found = relinearize(trained, problem, [start], BATCHES[:3], BATCHES[3:], settings=settings, method="whole")
        steps[caution] = found.facts["steps"]
    assert steps[0.0]
    assert not steps[1.0]
