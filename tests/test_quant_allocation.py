"""Allocation: against a dynamic program and full enumeration; budgets, groups, fixed formats, stability."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_causal_lms import tiny_lm

from quant import InfeasibleError, PackedStorage, Problem, Scheme, allocate, find_weights, round_all, schemes
from quant.allocation import make_plan
from quant.choice import Limit, choose
from quant.gguf_file import write_gguf
from quant.interaction import improve, objective
from quant.plan import Plan, fixed_formats, scale_bits, uniform_plan
from quant.rivals import weight_errors
from quant.sensitivity import Sensitivity
from quant.storage import GgufStorage
from quant.weights import sharing_groups

CHOICES = schemes((2, 3, 4, 8), (8,))


def least_cost(costs: np.ndarray[Any, Any], sizes: np.ndarray[Any, Any], most: int) -> float:
    """The dynamic program over exact sizes: a different algorithm with the same answer."""
    best = {0: 0.0}
    for row, size in zip(costs, sizes, strict=True):
        following: dict[int, float] = {}
        for used, cost in best.items():
            for c, s in zip(row, size, strict=True):
                if np.isfinite(c) and used + int(s) <= most:
                    total = cost + float(c)
                    if total < following.get(used + int(s), np.inf):
                        following[used + int(s)] = total
        best = following
    return min(best.values(), default=np.inf)


@pytest.mark.parametrize("scale", [1.0, 1e-9, 1e9], ids=lambda s: f"costs{s:g}")
@pytest.mark.parametrize("seed", range(6))
def test_the_integer_program_is_optimal(seed: int, scale: float) -> None:
    generator = np.random.default_rng(seed)
    groups, options = 12, 4
    bits = np.array([2, 3, 4, 8])
    numel = generator.integers(1, 40, size=groups)
    costs = (
        scale * generator.lognormal(sigma=2.5, size=(groups, 1)) * 4.0**-bits * generator.uniform(0.5, 2, (groups, 4))
    )
    costs[generator.uniform(size=(groups, options)) < 0.15] = np.nan
    costs[:, 0] = np.where(np.isfinite(costs).any(axis=1), costs[:, 0], scale)
    sizes = numel[:, None] * bits
    for average in (2.5, 3.0, 4.1, 7.9):
        most = int(numel.sum() * average)
        expected = least_cost(costs, sizes, most)
        if not np.isfinite(expected):
            with pytest.raises(InfeasibleError):
                choose(costs, [Limit(sizes, most, "size")])
            continue
        choice = choose(costs, [Limit(sizes, most, "size")])
        assert sizes[np.arange(groups), choice].sum() <= most
        assert costs[np.arange(groups), choice].sum() == pytest.approx(expected, rel=1e-12)


def test_1200_groups_take_under_three_seconds() -> None:
    generator = np.random.default_rng(0)
    bits = np.array([2, 3, 4, 5, 6, 8])
    numel = generator.choice([576 * 576, 192 * 576, 1536 * 576], 1200)
    costs = np.exp(2 * generator.normal(size=(1200, 1))) * 4.0**-bits * np.exp(0.2 * generator.normal(size=(1200, 6)))
    started = time.process_time()
    choice = choose(costs, [Limit(numel[:, None] * bits, int(numel.sum() * 3.5), "size")])
    assert time.process_time() - started < 3
    assert (numel * bits[choice]).sum() <= numel.sum() * 3.5


def quadratic(choice: tuple[int, ...], cross: np.ndarray[Any, Any]) -> float:
    return objective(np.array(choice), cross)


@pytest.mark.parametrize("seed", range(4))
def test_local_search_ends_where_no_pair_of_changes_helps(seed: int) -> None:
    generator = np.random.default_rng(seed)
    groups, options = 5, 3
    factors = generator.normal(size=(groups * options, 4)) * np.tile([4.0, 2.0, 1.0], groups)[:, None]
    cross = (factors @ factors.T).reshape(groups, options, groups, options)
    amounts = np.tile([2, 3, 4], (groups, 1)).astype(np.int64)
    limit = Limit(amounts, 15, "size")
    own = np.array([[cross[g, b, g, b] for b in range(options)] for g in range(groups)])
    start = choose(own, [limit])
    found = improve(start, np.ones((groups, options), dtype=bool), cross, limit)
    assert limit.total(found.choice) <= 15
    assert found.start == pytest.approx(objective(start, cross))
    assert found.value == pytest.approx(objective(found.choice, cross))
    assert found.value <= found.start
    for places in itertools.combinations(range(groups), 2):
        for new in itertools.product(range(options), repeat=2):
            other = found.choice.copy()
            other[list(places)] = new
            if limit.total(other) <= 15:
                assert objective(other, cross) >= found.value - 1e-9
    feasible = [c for c in itertools.product(range(options), repeat=groups) if sum(np.array([2, 3, 4])[list(c)]) <= 15]
    assert found.value <= np.median([quadratic(c, cross) for c in feasible])


# Plans of models


@pytest.fixture(scope="module")
def problem() -> Problem:
    return problem_of("llama")


def problem_of(name: str, *, share: bool = False, fixed: dict[str, Scheme] | None = None, include: str | None = None,
               options: tuple[Scheme, ...] = CHOICES, dtype: torch.dtype = torch.bfloat16,
               **entries: int) -> Problem:  # fmt: skip
    model = tiny_lm(name, dtype=torch.float32, **entries)
    weights = find_weights(model, include)
    groups = sharing_groups(weights) if share else [(i,) for i in range(len(weights))]
    rules = fixed_formats([w.name for w in weights], fixed or {})
    candidates = round_all(weights, options, fixed=rules, groups=groups, scale_dtype=dtype)
    return Problem(candidates, PackedStorage(model, weights, dtype), tuple(groups))


def scores_for(
    problem: Problem, metric: str = "quadratic", seed: int = 0, error: float = 0.0, **named: float
) -> Sensitivity:
    """Made-up scores that fall fourfold a bit; `named` raises those of weights whose names hold the key."""
    generator = np.random.default_rng(seed)
    candidates = problem.candidates
    bits = np.array([o.bits for o in candidates.options])
    weight = generator.lognormal(sigma=1.5, size=len(candidates.weights)) * 1e-3
    for key, factor in named.items():
        weight *= [factor if key in w.name else 1.0 for w in candidates.weights]
    values = weight[:, None] * 4.0 ** -(bits - 2.0)
    for t in range(len(candidates.weights)):
        values[t, [b for b in range(len(bits)) if b not in candidates.available(t)]] = np.nan
    stderr = None if error == 0 else error * np.abs(values)
    names = tuple(w.name for w in candidates.weights)
    options = tuple({"bits": o.bits} for o in candidates.options)
    return Sensitivity(metric, names, options, values, stderr, None, 0, 0.0, "", {})  # type: ignore[arg-type]


@pytest.mark.parametrize("bits", [2.0, 2.5, 3.0, 4.0, 6.3, 8.0])
def test_average_bits_are_kept(bits: float, problem: Problem) -> None:
    plan = allocate(scores_for(problem), problem, bits=bits)
    assert plan.average_bits <= bits + 1e-9
    assert plan.average_bits > bits - 0.5
    assert plan.predicted is not None
    assert plan.predicted_loss_change == pytest.approx(sum(plan.predicted))
    if bits in (2.0, 3.0, 4.0, 8.0):
        uniform = make_plan(problem, uniform_plan(problem.candidates, int(bits)), "uniform", {}, scores_for(problem))
        assert plan.predicted_loss_change <= (uniform.predicted_loss_change or 0) + 1e-15


def test_ladders_rise_in_size_and_fall_in_error() -> None:
    """Every option off the ladder is no nearer to the weights than one on it that is no larger."""
    problem = problem_of("llama", share=True, options=schemes((2, 3, 4), (-1, 8, 2)))
    sizes, errors = problem.stored_bits(), problem.grouped(weight_errors(problem.candidates))
    left_out = 0
    for ladder, row, size, error in zip(problem.ladders, problem.available, sizes, errors, strict=True):
        assert np.all(np.diff(size[ladder]) > 0)
        assert np.all(np.diff(error[ladder]) < 0)
        for option in set(np.flatnonzero(row)) - set(ladder):
            left_out += 1
            assert any(size[b] <= size[option] and error[b] <= error[option] for b in ladder)
    assert left_out
    # With one group size there is nothing to leave out.
    plain = problem_of("llama", options=schemes((2, 3, 4, 8), (8,)))
    assert all(ladder == [0, 1, 2, 3] for ladder in plain.ladders)


def test_finer_groups_are_paid_for_with_fewer_bits() -> None:
    problem = problem_of("llama", options=schemes((2, 3, 4), (-1, 8)))
    plan = allocate(scores_for(problem), problem, bits=3.0)
    coarse = sum(w.numel * 3 + w.rows * 16 for w in problem.candidates.weights)
    stored = sum(
        s.stored_bits(w.rows, w.columns, scale_bits(problem.candidates))
        for w, s in zip(problem.candidates.weights, plan.schemes, strict=True)
    )
    assert stored <= coarse


@pytest.mark.parametrize("spare", [0, 1, 500, 3000])
def test_a_budget_in_bytes_is_never_overshot(spare: int, problem: Problem) -> None:
    smallest = problem.file_bytes([problem.candidates.available(t)[0] for t in range(len(problem.candidates.weights))])
    size = smallest + 16 * 14 + 64 + spare
    plan = allocate(scores_for(problem), problem, bytes=size)
    assert plan.bytes <= size
    assert plan.bytes == problem.file_bytes(plan.choices)
    assert plan.budget == {"bytes": size}


@pytest.mark.parametrize("formats", [((2, 1), (2, 4), (6, -1), (6, 16)), ((2, 1), (7, 2), (7, 16), (8, 2))], ids=str)
def test_every_choice_within_a_limit_in_bytes_keeps_it(formats: tuple[tuple[int, int], ...]) -> None:
    """Options that are no product of bits and group sizes, so that no single plan has the longest header."""
    options = tuple(Scheme(bits, size) for bits, size in formats)
    problem = problem_of("llama", options=options, hidden_size=64, intermediate_size=64)
    generator, inside = np.random.default_rng(0), 0
    for number in range(60):
        choice = np.array([generator.choice(np.flatnonzero(row)) for row in problem.available])
        file = problem.file_bytes(problem.spread(choice))
        limit = problem.limit(None, file - 1)
        assert limit.total(choice) > limit.most
        limit = problem.limit(None, file + 300)
        inside += limit.total(choice) <= limit.most
        if number % 8 == 0:
            assert allocate(scores_for(problem), problem, bytes=file).bytes <= file
    assert inside == 60


@pytest.mark.parametrize(
    "options", [CHOICES, (Scheme(2, 1), Scheme(7, 2), Scheme(7, 16), Scheme(8, 2))], ids=["product", "any"]
)
def test_the_smallest_file_is_reached_and_named(options: tuple[Scheme, ...]) -> None:
    problem = problem_of("llama", options=options)
    amounts = np.where(problem.available, problem.stored_bytes(), np.iinfo(np.int64).max)
    smallest = problem.file_bytes(problem.spread(amounts.argmin(axis=1)))
    for spare in (0, 1, 64):
        assert smallest <= allocate(scores_for(problem), problem, bytes=smallest + spare).bytes <= smallest + spare
    with pytest.raises(InfeasibleError, match=f"allow is {smallest:,}, of which"):
        allocate(scores_for(problem), problem, bytes=smallest - 1)


@pytest.mark.parametrize("group_sizes", [(8,), (-1, 8)], ids=["one-size", "two-sizes"])
def test_asymmetric_zero_points_do_not_narrow_an_average(group_sizes: tuple[int, ...]) -> None:
    problem = problem_of("llama", options=schemes((2, 4), group_sizes, (False,)))
    coarsest = uniform_plan(problem.candidates, 4)
    limit = problem.limit(4.0, None)
    assert limit.total(np.array(coarsest)) == limit.most
    plan = allocate(scores_for(problem), problem, bits=4.0)
    assert plan.average_bits <= 4.0
    assert limit.total(np.array(plan.choices)) <= limit.most
    if len(group_sizes) == 1:
        assert plan.average_bits == 4.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_stored_bits_are_those_of_the_file(dtype: torch.dtype) -> None:
    problem = problem_of("llama", options=schemes((4,), (-1, 8)), dtype=dtype)
    weights, options = problem.candidates.weights, problem.candidates.options
    plan = make_plan(problem, uniform_plan(problem.candidates, 4, 8), "uniform", {}, None)
    shape = 16  # bytes of a weight's shape, beside its codes and scales
    tensors = sum(problem.storage.weight_bytes(w, s) - shape for w, s in zip(weights, plan.schemes, strict=True))
    assert plan.average_stored_bits == 8 * tensors / sum(w.numel for w in weights)
    fine, coarse = (next(b for b, o in enumerate(options) if o.group_size == g) for g in (8, -1))
    limit = problem.limit(5.0, None)
    for amounts, weight in zip(limit.amounts, weights, strict=True):
        scales = weight.rows * (weight.columns // 8 - 1)
        assert amounts[fine] - amounts[coarse] == 8 * dtype.itemsize * scales


def test_infeasible_budgets_name_the_smallest_feasible_one(problem: Problem) -> None:
    with pytest.raises(InfeasibleError, match=r"smallest .* is 2\.000"):
        allocate(scores_for(problem), problem, bits=1.9)
    with pytest.raises(InfeasibleError, match="smallest") as told:
        allocate(scores_for(problem), problem, bytes=1000)
    named = int(str(told.value).split("allow is ")[1].split(",  ")[0].split(", of")[0].replace(",", ""))
    assert allocate(scores_for(problem), problem, bytes=named).bytes <= named
    with pytest.raises(InfeasibleError, match="smallest predicted rise"):
        allocate(scores_for(problem), problem, max_loss_rise=1e-12)


def test_least_bytes_below_a_ceiling(problem: Problem) -> None:
    scores = scores_for(problem)
    tight, loose = (allocate(scores, problem, max_loss_rise=rise) for rise in (1e-3, 1e-2))
    assert (tight.predicted_loss_change or 1) <= 1e-3
    assert (loose.predicted_loss_change or 1) <= 1e-2
    assert tight.bytes > loose.bytes
    with pytest.raises(ValueError, match="metric that predicts"):
        allocate(scores_for(problem, "fisher"), problem, max_loss_rise=1e-2)


def test_groups_share_a_format_though_they_want_different_ones() -> None:
    free, shared = problem_of("llama"), problem_of("llama", share=True)
    wants = {"v_proj": 1e4, "k_proj": 1e-4}
    apart = allocate(scores_for(free, **wants), free, bits=3.5)
    together = allocate(scores_for(shared, **wants), shared, bits=3.5)
    bits = {name: s.bits for name, s in zip(apart.weights, apart.schemes, strict=True)}
    assert bits["model.layers.0.self_attn.v_proj.weight"] > bits["model.layers.0.self_attn.k_proj.weight"]
    for members in shared.groups:
        assert len({together.schemes[i] for i in members}) == 1
    assert together.average_bits <= 3.5


def test_a_fixed_head_never_makes_the_budget_overshoot() -> None:
    include = r"layers\.|lm_head"
    problem = problem_of("llama", fixed={"lm_head": Scheme(8)}, include=include)
    entries = sum(w.numel for w in problem.candidates.weights)
    head = next(w.numel for w in problem.candidates.weights if w.name.startswith("lm_head"))
    least = (2 * (entries - head) + 8 * head) / entries
    plan = allocate(scores_for(problem), problem, bits=least + 0.01)
    assert plan.average_bits <= least + 0.01
    chosen = dict(zip(plan.weights, plan.schemes, strict=True))
    assert chosen["lm_head.weight"] == Scheme(8)
    with pytest.raises(InfeasibleError, match=f"smallest .* is {np.ceil(least * 1000) / 1000:.3f}"):
        allocate(scores_for(problem), problem, bits=least - 0.01)


def test_fixed_formats_by_expression() -> None:
    names = ["a.q_proj.weight", "a.k_proj.weight"]
    assert fixed_formats(names, {"q_proj": Scheme(8), "proj": Scheme(4)}) == {names[0]: Scheme(8), names[1]: Scheme(4)}
    with pytest.raises(ValueError, match="matches no weight"):
        fixed_formats(names, {"lm_head": Scheme(8)})
    with pytest.raises(ValueError, match="regular expression"):
        fixed_formats(names, {"[": Scheme(8)})
    with pytest.raises(ValueError, match="share=False"):
        problem_of("llama", share=True, fixed={"q_proj": Scheme(8)})


def test_stability_tells_sure_from_unsure_choices(problem: Problem) -> None:
    sure = allocate(scores_for(problem, error=1e-6), problem, bits=3.5, redraws=10).facts["stability"]
    unsure = allocate(scores_for(problem, error=1.0), problem, bits=3.5, redraws=10).facts["stability"]
    assert sure["mean_share_changed"] == 0
    assert 0.05 < unsure["mean_share_changed"] < 1
    assert len(unsure["share_changed"]) == len(problem.candidates.weights)
    assert allocate(scores_for(problem), problem, bits=3.5, redraws=10).facts["stability"] is None


def test_cross_terms_change_the_plan_for_the_better(problem: Problem) -> None:
    base = scores_for(problem)
    count, options = base.values.shape
    direction = np.sqrt(2 * base.values).reshape(-1)
    generator = np.random.default_rng(1)
    mixed = generator.normal(size=(count, 6))
    mixed /= np.linalg.norm(mixed, axis=1, keepdims=True)
    cross = np.outer(direction, direction) * np.kron(mixed @ mixed.T, np.ones((options, options)))
    table = Sensitivity("interaction", base.weights, base.options, base.values, None, cross, 0, 0.0, "", {})
    plan = allocate(table, problem, bits=3.2)
    assert plan.facts["predicted_with_interaction"] <= plan.facts["separable_with_interaction"]
    assert plan.predicted_loss_change == plan.facts["predicted_with_interaction"]
    grid = cross.reshape(count, options, count, options)
    assert plan.predicted_loss_change == pytest.approx(objective(np.array(plan.choices), grid))
    assert plan.average_bits <= 3.2


def test_a_ceiling_of_the_loss_holds_with_cross_terms(problem: Problem) -> None:
    """Errors that all point the same way: what they do together is more than the sum of what each does."""
    base = scores_for(problem)
    direction = np.sqrt(2 * base.values).reshape(-1)
    same = Sensitivity(
        "interaction", base.weights, base.options, base.values, None, np.outer(direction, direction), 0, 0.0, "", {}
    )
    most = 0.01
    plan = allocate(same, problem, max_loss_rise=most)
    assert plan.predicted is not None
    assert plan.facts["separable_with_interaction"] > most
    assert plan.predicted_loss_change == plan.facts["predicted_with_interaction"] <= most
    assert plan.predicted_loss_change > 0.5 * most  # no lower than need be
    assert plan.facts["predicted_without_interaction"] == pytest.approx(sum(plan.predicted))
    alone = allocate(base, problem, max_loss_rise=most)
    assert plan.bytes > alone.bytes
    with pytest.raises(InfeasibleError, match=r"cross terms .* smallest predicted rise that was found is"):
        allocate(same, problem, max_loss_rise=2 * float(base.values[:, -1].sum()))


@pytest.mark.parametrize(
    "budget",
    [{}, {"bits": 3.0, "bytes": 10}, {"bits": -1.0}, {"max_loss_rise": -1.0}],
    ids=lambda b: "+".join(b) or "none",
)
def test_budgets_are_validated(budget: dict[str, Any], problem: Problem) -> None:
    with pytest.raises(ValueError, match=r"exactly one|must be positive"):
        allocate(scores_for(problem), problem, **budget)


def test_plans_are_written_and_read(problem: Problem, tmp_path: Any) -> None:
    plan = allocate(scores_for(problem, error=0.1), problem, bits=3.0)
    plan.save(tmp_path / "plan.json")
    assert Plan.schemes_in(tmp_path / "plan.json") == dict(zip(plan.weights, plan.schemes, strict=True))
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(ValueError, match="cannot be read"):
        Plan.schemes_in(tmp_path / "plan.json")


def test_gguf_sizes_and_types() -> None:
    model = tiny_lm("llama", hidden_size=32, intermediate_size=64, dtype=torch.float32)
    weights = find_weights(model)
    storage = GgufStorage(model, weights)
    assert storage.weight_bytes(weights[0], Scheme(4, 32)) == weights[0].numel // 32 * 18
    with pytest.raises(ValueError, match="no GGUF type"):
        storage.weight_bytes(weights[0], Scheme(3, 32))


def test_a_budget_in_bytes_is_that_of_the_whole_gguf_file(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    model = tiny_lm("llama", hidden_size=32, intermediate_size=64, head_dim=8, dtype=torch.float32)
    weights = find_weights(model)
    candidates = round_all(weights, schemes((4, 8), (32,)), scale_dtype=torch.float16)
    problem = Problem(candidates, GgufStorage(model, weights), tuple((t,) for t in range(len(weights))))
    smallest = problem.file_bytes([0] * len(weights))
    for size in (smallest, smallest + 5000):
        plan = allocate(scores_for(problem), problem, bytes=size)
        written = write_gguf(model, None, candidates, plan.choices, tmp_path)
        assert written.bytes == plan.bytes == (tmp_path / "model.gguf").stat().st_size
        assert size - 2000 < plan.bytes <= size
