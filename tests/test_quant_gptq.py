"""GPTQ: optimality conditions, fallbacks, padding, experts; input moments by hand."""

from __future__ import annotations

import pytest
import torch
from tiny_causal_lms import tiny_lm, tokens

from curvature import CausalLMLoss
from quant import (
    GptqQuantizer,
    InputGrams,
    Scheme,
    find_weights,
    gptq,
    input_grams,
    round_all,
    round_to_nearest,
    schemes,
)
from quant.gptq import gptq_batch


def correlated(columns: int, samples: int = 400) -> torch.Tensor:
    factor = torch.randn(columns, columns, dtype=torch.float64) / columns**0.5
    return torch.randn(samples, columns, dtype=torch.float64) @ (
        factor @ torch.diag(torch.logspace(0, -2, columns)).double()
    )


def output_error(weight: torch.Tensor, value: torch.Tensor, gram: torch.Tensor) -> float:
    difference = (weight - value).double()
    return float((difference @ gram.double() * difference).sum())


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize("group", [-1, 16], ids=lambda g: f"group{g}")
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_output_errors_fall(bits: int, group: int, symmetric: bool) -> None:
    weight, x = torch.randn(24, 64, dtype=torch.float64), correlated(64)
    gram, scheme = x.T @ x, Scheme(bits, group, symmetric)
    nearest = round_to_nearest(weight, scheme)
    found = gptq(weight, gram, scheme)
    assert found.damping == 0.01
    assert torch.equal(found.weight.scale, nearest.scale)
    assert scheme.lowest <= int(found.weight.codes.min()) <= int(found.weight.codes.max()) <= scheme.highest
    better = output_error(weight, found.weight.dequantize(), gram)
    assert better < 0.7 * output_error(weight, nearest.dequantize(), gram)


def test_columns_follow_the_textbook_recursion() -> None:
    """Against the plain algorithm: after each column, the least-squares update of all later ones."""
    weight, x = torch.randn(6, 10, dtype=torch.float64), correlated(10)
    gram, scheme = x.T @ x, Scheme(3)
    order = torch.argsort(gram.diagonal(), descending=True)
    damped = gram + 0.01 * gram.diagonal().mean() * torch.eye(10, dtype=torch.float64)
    h, w = damped[order][:, order], weight[:, order].clone()
    scale = round_to_nearest(weight, scheme).scale[:, 0]
    codes = torch.empty_like(w)
    for j in range(10):
        codes[:, j] = (w[:, j] / scale).round().clamp(scheme.lowest, scheme.highest)
        error = w[:, j] - codes[:, j] * scale
        # The remaining columns minimize the quadratic form with column j held: -H_rr^-1 H_rj per unit of change.
        if j < 9:
            response = torch.linalg.solve(h[j + 1 :, j + 1 :], h[j + 1 :, j])
            w[:, j + 1 :] += error[:, None] * response
    expected = torch.empty_like(codes)
    expected[:, order] = codes
    assert torch.equal(gptq(weight, gram, scheme).weight.codes, expected.to(torch.int8))


def test_a_diagonal_gram_matrix_means_round_to_nearest() -> None:
    weight = torch.randn(5, 32)
    found = gptq(weight, torch.diag(torch.rand(32) + 0.5), Scheme(3, 8))
    assert torch.equal(found.weight.codes, round_to_nearest(weight, Scheme(3, 8)).codes)


def test_batches_equal_single_weights() -> None:
    weights = [torch.randn(8, 24, dtype=torch.float64) for _ in range(3)]
    grams = [(lambda x: x.T @ x)(correlated(24)) for _ in range(3)]
    grams[1] = torch.zeros(24, 24, dtype=torch.float64)
    formats = [Scheme(2, 8), Scheme(4, -1), Scheme(3, 8, False)]
    together = gptq_batch(weights, grams, formats)
    for w, g, s, found in zip(weights, grams, formats, together, strict=True):
        alone = gptq(w, g, s)
        assert torch.equal(alone.weight.codes, found.weight.codes)
        assert alone.damping == found.damping


def test_a_singular_gram_matrix_is_damped() -> None:
    x = torch.randn(3, 40, dtype=torch.float64)  # rank 3 of 40
    weight = torch.randn(8, 40, dtype=torch.float64)
    found = gptq(weight, x.T @ x, Scheme(4), damping=1e-3)
    assert found.damping is not None
    assert bool(torch.isfinite(found.weight.dequantize()).all())
    # One that rounding has made indefinite takes more damping than was asked for.
    indefinite = x.T @ x - 1e-2 * torch.eye(40, dtype=torch.float64)
    raised = gptq(weight, indefinite, Scheme(4), damping=1e-6)
    assert raised.damping is not None
    assert raised.damping > 1e-6


def test_a_hopeless_gram_matrix_is_said_and_rounded_to_nearest() -> None:
    weight = torch.randn(8, 16)
    for gram in (torch.zeros(16, 16), -torch.eye(16)):
        found = gptq(weight, gram, Scheme(4))
        assert found.damping is None
        assert torch.equal(found.weight.codes, round_to_nearest(weight, Scheme(4)).codes)
    model = tiny_lm("llama", dtype=torch.float32)
    weights = find_weights(model, "up_proj")
    zeros = {w.name: torch.zeros(w.columns, w.columns) for w in weights}
    quantizer = GptqQuantizer(InputGrams(zeros, {w.name: [5] for w in weights}))
    quantizer([(w, Scheme(4)) for w in weights])
    assert len(quantizer.notices) == 2
    assert all("rounded to nearest" in notice for notice in quantizer.notices)


def test_bad_gram_matrices_are_refused() -> None:
    with pytest.raises(ValueError, match=r"gram must be \[16, 16\]"):
        gptq(torch.randn(8, 16), torch.eye(8), Scheme(4))
    with pytest.raises(ValueError, match="NaN"):
        gptq(torch.randn(8, 16), torch.full((16, 16), torch.nan), Scheme(4))


# Input moments


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_moments_are_those_of_the_inputs_without_padding(name: str) -> None:
    model = tiny_lm(name)
    weights = find_weights(model)
    batch = tokens((3, 12), padding=True)
    found = input_grams(model, weights, [batch])
    keep = batch["attention_mask"].bool()
    first = weights[0]
    seen: list[torch.Tensor] = []
    handle = model.get_submodule(first.modules[0]).register_forward_pre_hook(lambda _m, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        model(**CausalLMLoss().model_inputs(model, batch))
    handle.remove()
    x = seen[0][keep]
    torch.testing.assert_close(found.grams[first.name], (x.T @ x / len(x)).detach())
    assert found.tokens[first.name] == [int(keep.sum())]
    assert set(found.grams) == {w.name for w in weights}


def test_experts_without_tokens_are_rounded_to_nearest_and_named() -> None:
    model = tiny_lm("mixtral", dtype=torch.float32)
    for layer in model.model.layers:
        # The router never chooses the last expert: its logit is far below all others whatever the token.
        original = layer.mlp.gate.forward

        def without_last(hidden: torch.Tensor, original: object = original) -> tuple[torch.Tensor, ...]:
            logits, scores, chosen = original(hidden)  # type: ignore[operator]
            return logits, scores, torch.where(chosen == 3, (chosen.roll(1, -1) + 1) % 3, chosen)

        layer.mlp.gate.forward = without_last
    weights = find_weights(model, "experts")
    grams = input_grams(model, weights, [tokens((2, 16))])
    for weight in weights:
        assert grams.tokens[weight.name][3] == 0
        assert sum(grams.tokens[weight.name][:3]) > 0
    quantizer = GptqQuantizer(grams)
    found = round_all(weights, schemes((3,), (8,)), quantizer=quantizer)
    assert all("experts 3 saw no calibration token" in notice for notice in quantizer.notices)
    assert len(quantizer.notices) == len(weights)
    nearest = round_all(weights, schemes((3,), (8,)))
    for t, weight in enumerate(weights):
        mine, plain = (c.rounded[t][0].codes.reshape(4, -1, weight.columns) for c in (found, nearest))
        assert torch.equal(mine[3], plain[3])
        assert not torch.equal(mine[0], plain[0])


def test_moments_need_finite_inputs_and_modules() -> None:
    model = tiny_lm("llama")
    with pytest.raises(ValueError, match="batches: there is none"):
        input_grams(model, find_weights(model), [])
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"inputs of 'model\.layers\.0\.self_attn\.o_proj"):
        input_grams(model, find_weights(model), [tokens((1, 8))])
    lookup = tiny_lm("gpt2-untied")
    with pytest.raises(NotImplementedError, match="embedding"):
        input_grams(lookup, find_weights(lookup, "wte"), [tokens((1, 8))])
