"""The whole way: re-linearized search, settings, comparisons, pictures."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_causal_lms import tiny_lm, tokens
from torch import Tensor, nn

from curvature import HessianOperator
from quant import (
    GptqQuantizer,
    InfeasibleError,
    PackedStorage,
    Problem,
    Relinearization,
    Scheme,
    Settings,
    allocate,
    evaluate_perplexity,
    find_weights,
    input_grams,
    pipeline,
    quantize_model,
    relinearization,
    relinearize,
    round_all,
    schemes,
    sensitivity,
    uniform_plan,
)
from quant.allocation import make_plan
from quant.comparison import frontier, single_weights
from quant.figures import bits_figure, frontier_figure, prediction_figure
from quant.quadratic import hessians
from quant.relinearization import _expand, _steadied

BATCHES = [tokens((4, 12), seed=seed) for seed in range(4)]
ROWS = [{"input_ids": row[None]} for batch in BATCHES[:3] for row in batch["input_ids"]]
INCLUDE = r"layers\.[01]\.(self_attn\.[qov]_proj|mlp\.down_proj)"
SEARCH = Relinearization(rounds=2, share=0.5, curvature_batches=1, draws=4)


@pytest.fixture(scope="module")
def trained() -> nn.Module:
    """A model whose weights matter: fitted to the calibration text, so that rounding raises the loss."""
    model = tiny_lm("llama")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(12):
        optimizer.zero_grad()
        ids = torch.cat([b["input_ids"] for b in BATCHES])
        logits = model(input_ids=ids).logits
        nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()
    return model.requires_grad_(True).eval()


@pytest.fixture(scope="module")
def problem(trained: nn.Module) -> Problem:
    weights = find_weights(trained, INCLUDE)
    candidates = round_all(weights, schemes((2, 3, 4, 8), (8,)))
    return Problem(candidates, PackedStorage(trained, weights, torch.float64), tuple((i,) for i in range(len(weights))))


def loss_of(model: nn.Module, batches: Any = BATCHES) -> float:
    return evaluate_perplexity(model, batches).loss


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


@pytest.mark.parametrize("metric", ["relinearized", "quadratic", "uniform", "random"])
@pytest.mark.parametrize("quantizer", ["rtn", "gptq"])
def test_a_model_is_set_to_its_plan(metric: str, quantizer: str, trained: nn.Module) -> None:
    settings = Settings(
        bits=3.0, metric=metric, quantizer=quantizer, choices=(2, 3, 4), group_sizes=(8,), include=INCLUDE, draws=1,
        relinearization=Relinearization(rounds=1, curvature_batches=1, draws=2), method="whole", redraws=2,
    )  # type: ignore[arg-type] # fmt: skip
    before = loss_of(trained)
    found = quantize_model(trained, BATCHES, settings)  # type: ignore[arg-type]
    try:
        for t, weight in enumerate(found.candidates.weights):
            expected = found.candidates.value(t, found.plan.choices[t])
            assert torch.equal(weight.matrix(), expected)
        assert found.plan.average_bits <= 3.0
        assert found.plan.metric == metric
        assert loss_of(trained) != before
        assert (found.plan.predicted_loss_change is None) == (metric in ("uniform", "random"))
    finally:
        found.restore()
    assert loss_of(trained) == before


def test_gptq_may_round_by_other_text_than_is_scored(trained: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    grams = pipeline.input_grams
    monkeypatch.setattr(pipeline, "input_grams", lambda m, w, b, **kw: (seen.append(b), grams(m, w, b, **kw))[1])
    settings = Settings(
        bits=3.0, metric="fisher", quantizer="gptq", choices=(2, 3, 4), group_sizes=(8,), include=INCLUDE
    )
    for rounding, told in ((BATCHES[3:], "rounds by 1 batches of other text"), (None, "predicted rises are too low")):
        found = quantize_model(trained, BATCHES[:3], settings, rounding=rounding)  # type: ignore[arg-type]
        found.restore()
        assert [told in notice for notice in found.notices] == [True]
    assert [len(batches) for batches in seen] == [1, 3]


def test_gptq_keeps_more_of_the_model_than_rounding(trained: nn.Module) -> None:
    losses = {}
    for quantizer in ("rtn", "gptq"):
        settings = Settings(
            bits=2,
            metric="uniform",
            quantizer=quantizer,
            group_sizes=(8,),
            choices=(2, 3),  # type: ignore[arg-type]
        )
        found = quantize_model(trained, BATCHES, settings)  # type: ignore[arg-type]
        losses[quantizer] = loss_of(trained)
        found.restore()
    assert losses["gptq"] < losses["rtn"]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, "exactly one budget"), ({"bits": 3.0, "bytes": 1000}, "exactly one budget"),
        ({"bits": 3.0, "metric": "magic"}, "metric"), ({"bits": 3.0, "quantizer": "awq"}, "quantizer"),
        ({"bits": 3.0, "export": "onnx"}, "export"), ({"max_loss_rise": 0.1}, "max_loss_rise"),
        ({"bits": 3.5, "metric": "uniform"}, "uniform"), ({"bits": 3.0, "starts": ("best",)}, "starts"),
    ],
    ids=lambda v: "-".join(f"{k}={x}" for k, x in v.items()) or "none" if isinstance(v, dict) else "",
)  # fmt: skip
def test_settings_are_validated(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Settings(**given)


def test_too_little_is_refused_before_the_work(trained: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    import quant.pipeline

    monkeypatch.setattr(quant.pipeline, "score", lambda *_, **__: pytest.fail("scored"))
    with pytest.raises(InfeasibleError, match="smallest"):
        quantize_model(trained, BATCHES, Settings(bits=2.0, choices=(3, 4), group_sizes=(8,)))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least 2 calibration batches"):
        quantize_model(trained, BATCHES[:1], Settings(bits=4.0))  # type: ignore[arg-type]


def test_comparisons_and_pictures(trained: nn.Module, tmp_path: Path) -> None:
    settings = Settings(
        bits=3.0, metric="quadratic", choices=(2, 3, 4), group_sizes=(8,), include=INCLUDE, draws=4, method="whole"
    )
    found = quantize_model(trained, BATCHES, settings)  # type: ignore[arg-type]
    found.restore()
    before = evaluate_perplexity(trained, BATCHES)
    rows = frontier(found, BATCHES, BATCHES, before, ["uniform", "weight_error"])
    assert {row["metric"] for row in rows} == {"uniform", "weight_error", "quadratic"}
    uniform = {round(row["average_bits"]): row["rise"] for row in rows if row["metric"] == "uniform"}
    assert uniform[2] > uniform[3] > uniform[4]
    singles = single_weights(found, BATCHES, 8)
    assert singles is not None
    assert singles["spearman"] > 0.7
    assert 0.5 < singles["sum_ratio"] < 2
    misses = [abs(row["misses_by"]) for row in singles["weights"]]
    assert misses == sorted(misses, reverse=True)
    assert evaluate_perplexity(trained, BATCHES).loss == before.loss
    picture = prediction_figure(
        [r["predicted"] for r in singles["weights"]], None, [r["measured"] for r in singles["weights"]], title="t"
    )
    for figure in (bits_figure(found.plan, title="t"), frontier_figure(rows, title="t"), picture):
        figure.savefig(tmp_path / "f.png")
    with pytest.raises(ValueError, match="magic"):
        frontier(found, BATCHES, BATCHES, before, ["magic"])


def test_padded_calibration_is_that_of_its_sequences(trained: nn.Module) -> None:
    settings = Settings(bits=3.0, metric="fisher", quantizer="gptq", choices=(2, 3, 4), group_sizes=(8,))
    plain = [{"input_ids": b["input_ids"][:1]} for b in BATCHES]
    plans: list[tuple[Any, Tensor]] = []
    for batches in (plain, [_padded(b) for b in plain]):
        found = quantize_model(trained, batches, settings)  # type: ignore[arg-type]
        plans.append((found.plan.choices, found.candidates.rounded[3][0].codes))
        found.restore()
    assert plans[0][0] == plans[1][0]
    assert torch.equal(plans[0][1], plans[1][1])


def _padded(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    ids = batch["input_ids"]
    mask = torch.cat([torch.ones_like(ids), torch.zeros(len(ids), 3, dtype=ids.dtype)], dim=1)
    return {"input_ids": nn.functional.pad(ids, (0, 3), value=7), "attention_mask": mask}


def test_a_fixed_format_survives_the_search(trained: nn.Module) -> None:
    settings = Settings(
        bits=3.5, choices=(2, 3, 4), group_sizes=(8,), include=INCLUDE + "|lm_head", fixed={"lm_head": Scheme(8)},
        draws=1, relinearization=Relinearization(rounds=1, curvature_batches=1, draws=2), method="whole",
    )  # fmt: skip
    with pytest.raises(InfeasibleError, match="fixed formats"):
        quantize_model(trained, BATCHES, settings)  # type: ignore[arg-type]
    roomy = Settings(**{**vars(settings), "bits": 5.0})
    found = quantize_model(trained, BATCHES, roomy)  # type: ignore[arg-type]
    found.restore()
    chosen = dict(zip(found.plan.weights, found.plan.schemes, strict=True))
    assert chosen["lm_head.weight"] == Scheme(8)
    assert found.plan.average_bits <= 5.0


def test_the_record_says_which_plan_was_redrawn_and_which_text_was_scored(trained: nn.Module) -> None:
    settings = Settings(bits=4.0, include=INCLUDE, group_sizes=(8,), redraws=3, draws=4, relinearization=SEARCH)
    found = quantize_model(trained, BATCHES, settings)  # type: ignore[arg-type]
    found.restore()
    assert [id(b) for b in found.calibration] == [id(b) for b in BATCHES[:3]]
    stability = found.plan.facts["stability"]
    static = allocate(found.scores["quadratic"], found.problem, bits=4.0)
    assert (stability["metric"], stability["bits"]) == ("quadratic", [scheme.bits for scheme in static.schemes])


def test_uniform_bits_with_fixed_formats_above_them_are_told(trained: nn.Module) -> None:
    settings = Settings(
        bits=4.0, metric="uniform", include=INCLUDE, group_sizes=(8,), fixed={"v_proj": Scheme(8, 8)}, share=False
    )
    found = quantize_model(trained, BATCHES, settings)  # type: ignore[arg-type]
    found.restore()
    assert found.plan.average_bits > 4
    assert any("more than the budget" in notice for notice in found.notices)


def test_a_budget_above_all_choices_is_told(trained: nn.Module) -> None:
    settings = Settings(bits=5.0, metric="weight_error", include=INCLUDE, choices=(2, 4), group_sizes=(8,))
    found = quantize_model(trained, BATCHES, settings)  # type: ignore[arg-type]
    found.restore()
    assert found.plan.average_bits == 4
    assert "5 bits are more than the largest choice, 4 bits" in found.notices


def test_what_is_written_dense_is_told(trained: nn.Module, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    falcon = tiny_lm("falcon", dtype=torch.float32)
    for model, export, reason in (
        (trained, "dense", "^the checkpoint is dense"),
        (falcon, "compressed-tensors", "^transformers does not read packed weights of FalconForCausalLM; the"),
    ):
        settings = Settings(bits=4.0, metric="weight_error", group_sizes=(8,), export=export)  # type: ignore[arg-type]
        found = quantize_model(model, BATCHES, settings)  # type: ignore[arg-type]
        found.restore()
        assert found.write(tmp_path / export, None, BATCHES[0]).export == "dense"
        assert re.search(reason, found.notices[-1])
        assert "the plan's bytes are those of a packed one" in found.notices[-1]


@pytest.mark.parametrize("quantizer", ["rtn", "gptq"])
def test_a_mixture_of_experts_in_bf16_is_quantized(quantizer: str, tmp_path: Path) -> None:
    """All experts of a layer share a format, routers stay, and the checkpoint is dense."""
    model = tiny_lm("mixtral", dtype=torch.bfloat16)
    routers = {name: p.detach().clone() for name, p in model.named_parameters() if ".gate." in name}
    settings = Settings(
        bits=3.0, quantizer=quantizer, choices=(2, 3, 4), group_sizes=(8,), draws=1, method="whole",
        starts=("fisher", "quadratic"), relinearization=Relinearization(rounds=1, curvature_batches=1, draws=2),
    )  # type: ignore[arg-type] # fmt: skip
    found = quantize_model(model, BATCHES, settings)  # type: ignore[arg-type]
    formats: dict[int, set[Scheme]] = {}
    for name, scheme in zip(found.plan.weights, found.plan.schemes, strict=True):
        if "experts" in name:
            formats.setdefault(int(name.split(".")[2]), set()).add(scheme)
    assert formats
    assert all(len(kinds) == 1 for kinds in formats.values())
    assert set(found.scores) == {"quadratic"}  # the outputs of experts are not a module's, which "fisher" needs
    assert found.plan.average_bits <= 3.0
    assert routers
    assert all(torch.equal(dict(model.named_parameters())[name], before) for name, before in routers.items())
    written = found.write(tmp_path, None, BATCHES[0])
    assert written.export == "dense"
    assert any("experts" in notice for notice in found.notices)


def test_gptq_rounds_conv1d_along_its_inputs() -> None:
    """GPT-2 keeps [inputs, outputs]: the errors at the layers' outputs fall as they do for Linear."""
    model = tiny_lm("gpt2", dtype=torch.float32)
    weights = find_weights(model)
    grams = input_grams(model, weights, BATCHES)
    tuned = round_all(weights, schemes((3,), (8,)), quantizer=GptqQuantizer(grams))
    plain = round_all(weights, schemes((3,), (8,)))
    for t, weight in enumerate(weights):
        assert weight.layout == "conv1d"
        gram = grams.grams[weight.name]
        errors = []
        for candidates in (tuned, plain):
            delta = candidates.value(t, 0) - candidates.original(t)
            errors.append(float((delta @ gram * delta).sum()))
        assert errors[0] < errors[1]
