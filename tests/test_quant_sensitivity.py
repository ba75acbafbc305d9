"""Scores: against finite differences, dense forms and hand-made gradients; their errors; their file."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_causal_lms import tiny_lm, tokens

from curvature import CausalLMLoss, HessianOperator, trace
from quant import Candidates, find_weights, round_all, schemes, sensitivity
from quant.quadratic import hessians, neighbourhoods, quadratic_forms, sign_blocks
from quant.sensitivity import METRICS, Sensitivity

BATCHES = [tokens((2, 10), seed=seed) for seed in range(3)]
OPTIONS = schemes((2, 4), (8,))


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return tiny_lm("llama")


@pytest.fixture(scope="module")
def candidates(model: torch.nn.Module) -> Candidates:
    # One attention and one output projection: enough for cross terms, few enough for a dense reference.
    return round_all(find_weights(model, r"layers\.[01]\.self_attn\.[qo]_proj"), OPTIONS)


@pytest.fixture(scope="module")
def dense(model: torch.nn.Module, candidates: Candidates) -> np.ndarray[Any, Any]:
    """D_tb.H D_uc for all pairs, by one product per pair of a whole-graph operator."""
    names = [w.name for w in candidates.weights]
    operator = HessianOperator(model, BATCHES, params=names, method="whole")
    directions = []
    for t in range(len(names)):
        for b in range(len(OPTIONS)):
            pieces = [candidates.delta(u, b) if u == t else torch.zeros(w.parameter.shape, dtype=torch.float64)
                      for u, w in enumerate(candidates.weights)]  # fmt: skip
            directions.append(torch.cat([p.reshape(-1) for p in pieces]))
    stack = torch.stack(directions, dim=1)
    return (stack.T @ (operator @ stack)).numpy()


def loss_of(model: torch.nn.Module) -> float:
    with torch.no_grad():
        found = [CausalLMLoss()(model, batch) for batch in BATCHES]
    return float(sum(total for total, _ in found)) / sum(count for _, count in found)


def test_the_dense_reference_is_the_second_difference_of_the_loss(
    model: torch.nn.Module, candidates: Candidates, dense: np.ndarray[Any, Any]
) -> None:
    weight, delta, step = candidates.weights[1], candidates.delta(1, 0), 1e-3
    middle = loss_of(model)
    around = []
    for sign in (1, -1):
        with torch.no_grad():
            weight.parameter.add_(sign * step * delta)
            around.append(loss_of(model))
            weight.parameter.sub_(sign * step * delta)
    assert (sum(around) - 2 * middle) / step**2 == pytest.approx(dense[2, 2], rel=1e-4)


def test_interaction_is_exact(model: torch.nn.Module, candidates: Candidates, dense: np.ndarray[Any, Any]) -> None:
    found = sensitivity(model, candidates, BATCHES, "interaction")
    np.testing.assert_allclose(found.cross, dense, rtol=1e-8, atol=1e-12)
    np.testing.assert_allclose(found.values.reshape(-1), 0.5 * np.diag(dense), rtol=1e-8, atol=1e-12)
    assert found.products == 8 * len(BATCHES)


@pytest.mark.parametrize("draws", [1, 3, 24], ids=lambda n: f"{n}draws")
def test_quadratic_is_within_its_errors(
    draws: int, model: torch.nn.Module, candidates: Candidates, dense: np.ndarray[Any, Any]
) -> None:
    found = sensitivity(model, candidates, BATCHES, "quadratic", draws=draws, method="whole")
    exact = 0.5 * np.diag(dense).reshape(found.values.shape)
    assert found.products == 3 * draws * len(OPTIONS)
    assert found.stderr is not None
    if draws == 24:
        # All windows count equally, so that only the cross terms are noise, and these shrink with the draws.
        np.testing.assert_allclose(found.values, exact, atol=0.1 * np.abs(exact).max())
    windows_error = found.stderr  # between windows: their Hessians differ too, so it is an upper bound
    assert (np.abs(found.values - exact) < 6 * windows_error + 1e-9).all()


def test_a_block_of_draws_cancels_the_cross_terms_of_a_layer(model: torch.nn.Module, candidates: Candidates) -> None:
    one_layer = round_all(find_weights(model, r"layers\.0\.self_attn\.[qo]_proj"), OPTIONS)
    operators = hessians(model, [w.name for w in one_layer.weights], BATCHES[:1], method="whole")
    forms = quadratic_forms(
        operators, one_layer.weights, [lambda t: one_layer.delta(t, 0)], draws=2, beside=lambda t: one_layer.delta(t, 1)
    )
    operator = operators[0]()
    for t, weight in enumerate(one_layer.weights):
        alone = {w.name: torch.zeros_like(w.parameter) for w in one_layer.weights}
        alone[weight.name] = one_layer.delta(t, 0)
        product = (operator @ alone)[weight.name]
        exact = 0.5 * float((product * one_layer.delta(t, 0)).sum())
        assert forms.values[0, t] == pytest.approx(exact, rel=1e-10)
        assert forms.cross[0, t] == pytest.approx(float((product * one_layer.delta(t, 1)).sum()), rel=1e-10)
    assert forms.samples.shape == (1, 2, 1, 2)


@pytest.mark.parametrize("draws", [1, 2, 5, 8, 12])
def test_signs_are_balanced_and_orthogonal_within_neighbourhoods(draws: int) -> None:
    generator = np.random.default_rng(0)
    hoods = [[0, 1, 2, 3], [4, 5, 6, 7], [8]]
    drawn = np.stack([sign_blocks(hoods, draws, generator) for _ in range(600)])
    assert set(np.unique(drawn)) == {-1.0, 1.0}
    assert np.abs(drawn.mean(axis=0)).max() < 0.25
    products = drawn[..., :, None] * drawn[..., None, :]
    off = products.mean(axis=0) - np.eye(9)
    assert np.abs(off).max() < 0.25  # each draw alone is unbiased
    if draws in (8, 12):
        block = drawn[:, :8]
        within = np.einsum("nds,ndt->nst", block, block)[:, :4, :4]
        assert np.abs(within - 8 * np.eye(4)).max() == 0


def test_neighbourhoods_are_layers(model: torch.nn.Module) -> None:
    weights = find_weights(model, r"layers\.|lm_head")
    assert [len(hood) for hood in neighbourhoods(weights)] == [7, 7, 1]


def test_trace_is_half_the_mean_eigenvalue_times_the_squared_error(
    model: torch.nn.Module, candidates: Candidates
) -> None:
    found = sensitivity(model, candidates, BATCHES, "trace", probes=4, seed=3)
    squares = sensitivity(model, candidates, BATCHES, "weight_error").values
    ratio = found.values / squares
    np.testing.assert_allclose(ratio[:, 0], ratio[:, 1], rtol=1e-12)
    operator = HessianOperator(model, BATCHES, params=[w.name for w in candidates.weights])
    traces = trace(operator, probes=4, seed=3).per_block
    for t, weight in enumerate(candidates.weights):
        assert 2 * weight.numel * ratio[t, 0] == pytest.approx(traces[weight.name][0], rel=1e-9)
        assert found.stderr is not None
        assert 2 * weight.numel * found.stderr[t, 0] / squares[t, 0] == pytest.approx(traces[weight.name][1], rel=1e-9)


def test_weight_error_and_first_order_by_hand(model: torch.nn.Module, candidates: Candidates) -> None:
    errors = sensitivity(model, candidates, BATCHES, "weight_error").values
    first = sensitivity(model, candidates, BATCHES, "first_order").values
    delta = candidates.delta(2, 1)
    assert errors[2, 1] == pytest.approx(float(delta.square().sum()), rel=1e-12)
    expected = 0.0
    for batch in BATCHES:
        total, count = CausalLMLoss()(model, batch)
        (gradient,) = torch.autograd.grad(total / count, [candidates.weights[2].parameter])
        expected += float((gradient * delta).abs().sum()) / len(BATCHES)
    assert first[2, 1] == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("name", ["llama", "gpt2", "llama-tied"])
def test_fisher_is_squared_gradients_times_squared_output_errors(name: str) -> None:
    model = tiny_lm(name)
    include = {"llama": r"layers\.1\.mlp\.up_proj", "gpt2": r"h\.1\.mlp\.c_fc\.weight", "llama-tied": "embed_tokens"}
    candidates = round_all(find_weights(model, include[name]), OPTIONS)
    (weight,) = candidates.weights
    found = sensitivity(model, candidates, BATCHES[:1], "fisher").values[0, 0]
    expected = 0.0
    for path in weight.modules:
        seen: list[tuple[torch.Tensor, torch.Tensor]] = []

        def hook(_module: Any, inputs: Any, output: torch.Tensor, seen: Any = seen) -> torch.Tensor:
            probe = torch.zeros_like(output, requires_grad=True)
            seen.append((inputs[0].detach(), probe))
            return output + probe

        handle = model.get_submodule(path).register_forward_hook(hook)
        total, count = CausalLMLoss()(model, BATCHES[0])
        handle.remove()
        ((x, probe),) = seen
        (gradient,) = torch.autograd.grad(total, [probe])
        delta = weight.matrix(candidates.delta(0, 0))
        error = torch.nn.functional.embedding(x, delta) if x.dtype == torch.int64 else x @ delta.T
        expected += float((gradient.square() * error.square()).sum()) / count
    assert found == pytest.approx(expected, rel=1e-9)
    assert not any(p.grad is not None for p in model.parameters())
    assert all(p.requires_grad for p in model.parameters())


def test_padding_and_prompts_do_not_count(model: torch.nn.Module, candidates: Candidates) -> None:
    ids = tokens((1, 9))["input_ids"]
    padded = {
        "input_ids": torch.cat([ids, torch.full((1, 4), 5)], dim=1),
        "attention_mask": torch.cat([torch.ones(1, 9), torch.zeros(1, 4)], dim=1).long(),
    }
    for metric in ("quadratic", "fisher", "first_order"):
        a = sensitivity(model, candidates, [{"input_ids": ids}], metric, draws=2, method="whole").values
        b = sensitivity(model, candidates, [padded], metric, draws=2, method="whole").values
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-12)
    labels = ids.clone()
    labels[:, :6] = -100
    prompt = {"input_ids": ids, "labels": labels}
    a = sensitivity(model, candidates, [{"input_ids": ids}], "first_order").values
    b = sensitivity(model, candidates, [prompt], "first_order").values
    assert not np.allclose(a, b)


def test_bf16_weights_are_scored() -> None:
    found = []
    for dtype in (torch.bfloat16, torch.float64):
        model = tiny_lm("llama", dtype=torch.bfloat16).to(dtype)
        weights = find_weights(model, r"layers\.[01]\.self_attn\.[qo]_proj")
        low = round_all(weights, OPTIONS, scale_dtype=torch.bfloat16)
        found.append(sensitivity(model, low, BATCHES, "quadratic", draws=8, method="whole").values)
    np.testing.assert_allclose(found[0], found[1], atol=0.1 * np.abs(found[1]).max())


def test_experts_have_no_fisher_score() -> None:
    model = tiny_lm("mixtral")
    stacks = round_all(find_weights(model, "experts"), schemes((2,), (8,)))
    with pytest.raises(NotImplementedError, match="experts"):
        sensitivity(model, stacks, BATCHES[:1], "fisher")
    assert np.isfinite(sensitivity(model, stacks, BATCHES[:1], "first_order").values).all()


def test_an_option_that_does_not_fit_has_no_score() -> None:
    model = tiny_lm("llama")
    mixed = round_all(find_weights(model, r"layers\.0\.mlp"), schemes((2, 4), (16,)))  # down_proj has 24 columns
    for metric in METRICS:
        found = sensitivity(model, mixed, BATCHES[:1], metric, draws=2, probes=2, method="whole").values
        for t in range(len(mixed.weights)):
            assert list(np.flatnonzero(np.isfinite(found[t]))) == mixed.available(t)


def test_the_cache_answers_the_same_question_only(
    model: torch.nn.Module, candidates: Candidates, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "scores.safetensors"
    first = sensitivity(model, candidates, BATCHES, "first_order", cache=path)
    read = Sensitivity.load(path)
    for field in dataclasses.fields(Sensitivity):
        np.testing.assert_equal(getattr(read, field.name), getattr(first, field.name))
    module = sys.modules["quant.sensitivity"]  # the package's attribute of that name is the function
    monkeypatch.setattr(module, "first_order_scores", lambda *_: pytest.fail("computed again"))
    assert sensitivity(model, candidates, BATCHES, "first_order", cache=path).fingerprint == first.fingerprint
    with pytest.raises(pytest.fail.Exception, match="computed again"):
        sensitivity(model, candidates, BATCHES[:2], "first_order", cache=path)
    path.write_bytes(b"nonsense")
    with pytest.raises(ValueError, match="cannot be read"):
        sensitivity(model, candidates, BATCHES, "first_order", cache=path)


class Louder(CausalLMLoss):
    """Ten times the loss."""

    def __call__(self, model: torch.nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        total, tokens = super().__call__(model, batch)
        return 10 * total, tokens

    def __repr__(self) -> str:
        return "CausalLMLoss(ignore_index=-100)"


def test_the_fingerprint_tells_every_question_apart(tmp_path: Path) -> None:
    def asked(model: torch.nn.Module, options: Any = OPTIONS, batches: Any = BATCHES[:2], **more: Any) -> str:
        candidates = round_all(find_weights(model, r"layers\.[01]\.self_attn\.[qo]_proj"), options)
        return sensitivity(model, candidates, batches, "weight_error", **more).fingerprint

    first = asked(tiny_lm("llama"))
    assert first == asked(tiny_lm("llama"))
    rows = [{"input_ids": b["input_ids"].reshape(4, 5)} for b in BATCHES[:2]]  # the same tokens in shorter windows
    normed, headed, turned = tiny_lm("llama"), tiny_lm("llama"), tiny_lm("llama")
    with torch.no_grad():
        normed.get_submodule("model.norm").weight.mul_(2)  # type: ignore[union-attr,operator]
        headed.get_submodule("lm_head").weight.neg_()  # type: ignore[union-attr,operator]
    turned.config.sliding_window = 4
    others = {
        "shapes": asked(tiny_lm("llama"), batches=rows),
        "loss": asked(tiny_lm("llama"), loss=Louder()),
        "norm": asked(normed),
        "head": asked(headed),
        "config": asked(turned),
        "dtype": asked(tiny_lm("llama").float()),
        "options": asked(tiny_lm("llama"), options=schemes((2, 4), (-1,))),
        "another option that fits nowhere": asked(tiny_lm("llama"), options=schemes((2, 4), (8, 64))),
    }
    for name, other in others.items():
        assert other != first, name
    assert len(set(others.values())) == len(others)


def test_bad_questions_are_refused(model: torch.nn.Module, candidates: Candidates) -> None:
    with pytest.raises(ValueError, match="metric must be one of"):
        sensitivity(model, candidates, BATCHES, "magic")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="batches: there is none"):
        sensitivity(model, candidates, [], "trace")
    with pytest.raises(ValueError, match="draws times batches"):
        sensitivity(model, candidates, BATCHES[:1], "quadratic", draws=1)
