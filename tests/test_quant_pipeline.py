"""The whole way: settings, plans, comparisons, pictures, what is written."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from fitted_llama import BATCHES, INCLUDE, SEARCH, fitted_llama, loss_of
from tiny_causal_lms import tiny_lm
from torch import Tensor, nn

from quant import (
    GptqQuantizer,
    InfeasibleError,
    Relinearization,
    Scheme,
    Settings,
    allocate,
    evaluate_perplexity,
    find_weights,
    input_grams,
    pipeline,
    quantize_model,
    round_all,
    schemes,
)
from quant.comparison import frontier, single_weights
from quant.figures import bits_figure, frontier_figure, prediction_figure


@pytest.fixture(scope="module")
def trained() -> nn.Module:
    return fitted_llama()


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
