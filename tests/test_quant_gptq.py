"""GPTQ: optimality conditions, fallbacks, padding, experts; input moments by hand."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
from tiny_causal_lms import mixture, tiny_lm, tokens
from torch import nn

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


@pytest.mark.parametrize("name", ["down_proj", "gate_proj"])
def test_padding_is_left_out_of_flattened_inputs(name: str) -> None:
    """The shared expert of Qwen2-MoE gets [tokens, width], not [batch, length, width]."""
    model = mixture("qwen2_moe", moe_intermediate_size=24, shared_expert_intermediate_size=24)
    weights = find_weights(model, rf"layers\.0\.mlp\.shared_expert\.{name}")
    batch = tokens((3, 12), padding=True)
    batch["attention_mask"][2] = 1
    found = input_grams(model, weights, [batch])
    keep = batch["attention_mask"].bool()
    other = batch | {"input_ids": torch.where(keep, batch["input_ids"], 5)}
    assert found.tokens[weights[0].name] == [int(keep.sum())]
    again = input_grams(model, weights, [other])
    torch.testing.assert_close(again.grams[weights[0].name], found.grams[weights[0].name])


DEEPSEEK_V4 = {
    "hidden_size": 32, "head_dim": 16, "num_key_value_heads": 1, "q_lora_rank": 16, "o_groups": 2, "o_lora_rank": 16,
    "qk_rope_head_dim": 8, "n_routed_experts": 4, "index_n_heads": 2, "index_head_dim": 16, "num_hash_layers": 0,
    "hc_mult": 2, "moe_intermediate_size": 24,
}  # fmt: skip
LONGCAT = {
    "hidden_size": 32, "ffn_hidden_size": 24, "expert_ffn_hidden_size": 24, "num_layers": 1, "num_key_value_heads": 4,
    "n_routed_experts": 4, "zero_expert_num": 2, "moe_topk": 2, "q_lora_rank": 16, "kv_lora_rank": 16,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "head_dim": 8,
}  # fmt: skip
MINIMAX_M3 = {"swiglu_limit": 0.05, "head_dim": 16, "hidden_size": 32}
NEMOTRON_H = {
    "layers_block_type": ["attention", "moe"], "n_routed_experts": 4, "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 24, "n_group": 1, "topk_group": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("model_type", "entries"),
    [
        ("mixtral", {}),
        ("deepseek_v4", DEEPSEEK_V4 | {"swiglu_limit": 0.01}),
        ("minimax_m3_vl_text", MINIMAX_M3),
        ("longcat_flash", LONGCAT),
        ("nemotron_h", NEMOTRON_H),
    ],
    ids=["plain gate", "clamped gate", "gate without act_fn", "identity experts", "no gate"],
)
def test_moments_of_experts_are_those_of_their_own_forward(
    model_type: str, entries: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = mixture(model_type, **entries), tokens((2, 24))
    weights = [w for w in find_weights(model, r"\.experts\.") if w.layout == "experts"]
    assert weights
    places = {w.parameter[e].data_ptr(): (w.name, e) for w in weights for e in range(len(w.parameter))}
    seen: dict[tuple[str, int], list[torch.Tensor]] = defaultdict(list)
    linear = nn.functional.linear

    def spy(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if weight.data_ptr() in places:
            seen[places[weight.data_ptr()]].append(x)
        return linear(x, weight, bias)

    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(nn.functional, "linear", spy)
        model(**CausalLMLoss().model_inputs(model, batch))
    found = input_grams(model, weights, [batch])
    for weight in weights:
        assert found.grams[weight.name].shape[0] == len(found.tokens[weight.name]) == len(weight.parameter)
        for expert, count in enumerate(found.tokens[weight.name]):
            x = torch.cat([torch.zeros(0, weight.columns, dtype=torch.float64), *seen[weight.name, expert]])
            assert count == len(x)
            torch.testing.assert_close(found.grams[weight.name][expert], x.T @ x / max(count, 1))
    assert sum(map(len, seen.values()))


def test_experts_are_rounded_by_their_own_moments_where_others_only_pass_tokens_on() -> None:
    """LongCat-Flash: six first matrices, four second ones; the last two experts are the identity."""
    model = mixture("longcat_flash", **LONGCAT)
    weights = [w for w in find_weights(model, r"layers\.0\.mlp\.experts\.") if w.layout == "experts"]
    assert [len(w.parameter) for w in weights] == [6, 4]
    grams = input_grams(model, weights, [tokens((2, 24))])
    quantizer, scheme = GptqQuantizer(grams), Scheme(3, 8)
    for weight, found in zip(weights, quantizer([(w, scheme) for w in weights]), strict=True):
        codes = found.codes.unflatten(0, (len(weight.parameter), -1))
        for matrix, gram, mine in zip(weight.parameter.detach(), grams.grams[weight.name], codes, strict=True):
            assert torch.equal(mine, gptq(matrix, gram, scheme).weight.codes)
    assert quantizer.notices == [
        f"{weights[0].name}: experts 4, 5 saw no calibration token; rounded to nearest",
    ]
    mixed = InputGrams(grams.grams, grams.tokens | {weights[1].name: grams.tokens[weights[0].name]})
    with pytest.raises(ValueError, match=r"down_proj: the moments are of 6 experts, the weight has 4"):
        GptqQuantizer(mixed)([(weights[1], scheme)])


def test_moments_of_experts_of_an_unknown_forward_are_refused() -> None:
    model = mixture("jetmoe", kv_channels=4)
    weights = find_weights(model, r"layers\.0\.mlp\.input_linear")
    with pytest.raises(NotImplementedError, match=r"input_linear\.weight: .*JetMoeParallelExperts.*--quantizer rtn"):
        input_grams(model, weights, [tokens((1, 8))])


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
