"""Formats, rounding, and which weights of a model are rounded."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from tiny_causal_lms import mixture, tiny_lm, tokens
from torch import nn

from quant import Scheme, evaluate_perplexity, find_weights, round_to_nearest, schemes, sharing_groups
from quant.candidates import round_all
from quant.perplexity import rise
from quant.rounding import round_each
from quant.scheme import fitting

BITS = range(2, 9)


def squared_error(weight: torch.Tensor, scheme: Scheme, **options: object) -> float:
    return float((round_to_nearest(weight, scheme, **options).dequantize().double() - weight).square().sum())  # type: ignore[arg-type]


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize("group", [-1, 8, 1], ids=lambda g: f"group{g}")
@pytest.mark.parametrize("bits", BITS, ids=lambda b: f"{b}bit")
def test_codes_are_the_nearest_on_the_stored_grid(bits: int, group: int, symmetric: bool) -> None:
    weight = torch.randn(5, 24, dtype=torch.float64)
    scheme = Scheme(bits, group, symmetric)
    found = round_to_nearest(weight, scheme, scale_dtype=torch.float32)
    assert found.codes.dtype == torch.int8
    assert found.scale.dtype == torch.float32
    assert scheme.lowest <= int(found.codes.min()) <= int(found.codes.max()) <= scheme.highest
    assert found.scale.shape == (5, scheme.groups(24))
    # No other code of the same scale is nearer, entry by entry.
    repeats = 24 // found.scale.shape[1]
    scale = found.scale.double().repeat_interleave(repeats, 1)
    zero = 0 if found.zero is None else found.zero.double().repeat_interleave(repeats, 1)
    every = torch.arange(scheme.lowest, scheme.highest + 1, dtype=torch.float64)
    grid = (every - (zero[..., None] if found.zero is not None else 0)) * scale[..., None]
    nearest = (grid - weight[..., None]).abs().amin(-1)
    error = ((found.codes - zero) * scale - weight).abs()
    torch.testing.assert_close(error, nearest, rtol=1e-9, atol=1e-12)
    assert (symmetric and found.zero is None) or (not symmetric and found.zero is not None)


@pytest.mark.parametrize(("bits", "symmetric"), list(itertools.product(BITS, [True, False])))
def test_the_search_never_does_worse_than_the_largest_entry(bits: int, symmetric: bool) -> None:
    weight = torch.randn(64, 64, dtype=torch.float64)
    scheme = Scheme(bits, 16, symmetric)
    assert squared_error(weight, scheme) <= squared_error(weight, scheme, clip=False) * (1 + 1e-12)


def test_the_search_nears_the_best_uniform_quantizer_of_a_gaussian() -> None:
    weight = torch.randn(200, 512, dtype=torch.float64)
    # Max (1960), uniform output levels: 0.1188 at 2 bits, 0.03744 at 3; a group's own scale may do a little better.
    assert squared_error(weight, Scheme(2, 64)) / weight.numel() < 0.13
    assert squared_error(weight, Scheme(3, 64)) / weight.numel() < 0.038


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_dequantized_values_are_scale_times_code_rounded_once(dtype: torch.dtype) -> None:
    weight = torch.randn(7, 32).to(dtype)
    found = round_to_nearest(weight, Scheme(4, 16))
    exact = found.codes.double() * found.scale.double().repeat_interleave(16, 1)
    assert found.dequantize().dtype == dtype
    assert torch.equal(found.dequantize(), exact.to(dtype))
    # On its own grid a weight is left as it is.
    again = round_to_nearest(found.dequantize().float(), Scheme(4, 16), clip=True)
    torch.testing.assert_close(again.dequantize(), found.dequantize().float(), rtol=2e-2, atol=1e-3)


def test_many_weights_at_once_are_rounded_as_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two shapes and three formats in any order, more of them than one call takes."""
    import quant.rounding

    monkeypatch.setattr(quant.rounding, "_TOGETHER", 2 * 6 * 16)
    weights = [torch.randn(6, 16, dtype=torch.float64) if i % 3 else torch.randn(4, 8).double() for i in range(12)]
    formats = [(Scheme(2, 8), Scheme(4, -1), Scheme(3, 8, False))[i % 4 % 3] for i in range(12)]
    together = round_each(weights, formats, scale_dtype=torch.float32)
    for weight, scheme, found in zip(weights, formats, together, strict=True):
        alone = round_to_nearest(weight, scheme, scale_dtype=torch.float32)
        assert found.scheme == scheme
        assert torch.equal(found.codes, alone.codes)
        assert torch.equal(found.scale, alone.scale)
        assert (found.zero is None) == (alone.zero is None) == scheme.symmetric
        assert found.zero is None or torch.equal(found.zero, alone.zero)


def test_groups_of_zeros_stay_zero() -> None:
    weight = torch.zeros(3, 16)
    weight[1, 8:] = torch.randn(8)
    for symmetric in (True, False):
        value = round_to_nearest(weight, Scheme(3, 8, symmetric)).dequantize()
        assert bool((value[0] == 0).all())
        assert bool((value[1, :8] == 0).all())
        assert bool(torch.isfinite(value).all())


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
def test_weights_that_are_not_finite_are_refused(value: float) -> None:
    weight = torch.randn(4, 8)
    weight[2, 3] = value
    with pytest.raises(ValueError, match="NaN or infinity"):
        round_to_nearest(weight, Scheme(4))
    with pytest.raises(TypeError, match="floating point"):
        round_to_nearest(torch.zeros(2, 2, dtype=torch.int8), Scheme(4))


def test_a_group_size_that_does_not_divide_is_refused_and_replaced() -> None:
    with pytest.raises(ValueError, match="group_size 16 does not divide the 24 columns"):
        round_to_nearest(torch.randn(4, 24), Scheme(4, 16))
    assert fitting(schemes((2, 4), (16, 8)), 24) == (Scheme(2, 8), Scheme(4, 8))
    assert fitting(schemes((2, 4), (16,)), 24) == (Scheme(2, -1), Scheme(4, -1))


@pytest.mark.parametrize(
    ("arguments", "told"), [((1,), "bits"), ((9,), "bits"), ((4, 0), "group_size"), ((4, -2), "group_size")], ids=str
)
def test_formats_are_validated(arguments: tuple[int, ...], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Scheme(*arguments)


@pytest.mark.parametrize("rows", [48, 1, 33], ids=lambda r: f"{r}rows")
@pytest.mark.parametrize("bits", BITS, ids=lambda b: f"{b}bit")
def test_bytes_are_those_of_the_tensors(bits: int, rows: int) -> None:
    scheme = Scheme(bits, 8)
    words = rows * ((40 * bits + 31) // 32)
    assert scheme.packed_bytes(rows, 40, 2) == 4 * words + 2 * rows * 5 + 16
    assert scheme.stored_bits(rows, 40, 16) == rows * 40 * bits + rows * 5 * 16


# Which weights


@pytest.mark.parametrize(
    ("name", "count", "layout"),
    [
        ("llama", 14, "linear"), ("gpt2", 8, "conv1d"), ("gpt-neox", 8, "linear"), ("opt", 12, "linear"),
        ("mixtral", 12, "experts"), ("granite-moe", 12, "experts"),
    ],
)  # fmt: skip
def test_weights_inside_the_blocks_are_found(name: str, count: int, layout: str) -> None:
    model = tiny_lm(name)
    weights = find_weights(model)
    assert len(weights) == count
    assert layout in {w.layout for w in weights}
    assert not [w.name for w in weights if "embed" in w.name or "lm_head" in w.name or "gate.weight" in w.name]
    for weight in weights:
        assert weight.matrix().shape == (weight.rows, weight.columns)
        before = weight.parameter.detach().clone()
        weight.write(weight.matrix().clone())
        assert torch.equal(weight.parameter, before)
        assert torch.equal(weight.tensor(weight.matrix()), before)


def test_matrices_map_inputs_to_outputs() -> None:
    model = tiny_lm("gpt2")
    weight = next(w for w in find_weights(model) if "c_fc" in w.name)
    module = model.get_submodule(weight.modules[0])
    x = torch.randn(3, weight.columns, dtype=torch.float64)
    torch.testing.assert_close(module(x), x @ weight.matrix().T + module.bias)


@pytest.mark.parametrize("model_type", ["llama4_text", "gpt_oss"])
def test_transposed_experts_are_refused(model_type: str) -> None:
    """Llama 4 stores [experts, inputs, outputs] and does not say so; GPT-OSS says so."""
    model = mixture(model_type, hidden_size=32, interleave_moe_layer_step=1, intermediate_size_mlp=24)
    told = r"layers\.0\..*experts\.gate_up_proj: experts .*\[experts, inputs, outputs\].*leave them out with include"
    with pytest.raises(NotImplementedError, match=told):
        find_weights(model)
    assert find_weights(model, "self_attn.*proj.weight")


@pytest.mark.parametrize(
    ("model_type", "entries"),
    [("longcat_flash", {"n_routed_experts": 4, "expert_ffn_hidden_size": 24}), ("jetmoe", {"kv_channels": 4})],
)
def test_experts_whose_order_is_certain_are_found(model_type: str, entries: dict[str, Any]) -> None:
    """LongCat-Flash by its shapes, JetMoE by its class: neither has the attribute `is_transposed`."""
    model = mixture(model_type, **entries)
    stacks = {name for name, parameter in model.named_parameters() if parameter.ndim == 3}
    assert stacks
    assert {w.name for w in find_weights(model) if w.layout == "experts"} == stacks


def test_experts_of_an_unknown_order_are_refused() -> None:
    class SquareExperts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up_proj = nn.Parameter(torch.randn(4, 16, 16))

    model = tiny_lm("mixtral")
    model.model.layers[0].mlp.experts = SquareExperts()
    with pytest.raises(NotImplementedError, match=r"experts\.up_proj: experts "):
        find_weights(model)


def test_tied_weights_are_one_weight_with_two_modules() -> None:
    model = tiny_lm("llama-tied")
    (tied,) = find_weights(model, "embed_tokens|lm_head")
    assert tied.tied
    assert set(tied.modules) == {"model.embed_tokens", "lm_head"}
    assert tied.layout == "linear"


def test_fused_weights_share_a_format() -> None:
    weights = find_weights(tiny_lm("llama"))
    named = [{weights[i].name.split(".")[-2] for i in group} for group in sharing_groups(weights)]
    assert {"q_proj", "k_proj", "v_proj"} in named
    assert {"gate_proj", "up_proj"} in named
    assert sum(map(len, sharing_groups(weights))) == len(weights)
    experts = find_weights(tiny_lm("mixtral"))
    for layer in (0, 1):
        places = {i for i, w in enumerate(experts) if f"layers.{layer}." in w.name and w.layout == "experts"}
        assert tuple(sorted(places)) in sharing_groups(experts)


def test_a_quantized_model_is_refused() -> None:
    model = tiny_lm("llama")
    model.config.quantization_config = {"quant_method": "compressed-tensors"}
    with pytest.raises(ValueError, match="already quantized"):
        find_weights(model)
    model = tiny_lm("llama")
    model.model.layers[0].self_attn.q_proj.register_buffer("weight_packed", torch.zeros(2, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"already quantized.*q_proj.weight_packed"):
        find_weights(model)


@pytest.mark.parametrize(("include", "told"), [("no_such", "no_such"), ("[", "regular expression")])
def test_an_expression_that_finds_nothing_is_refused(include: str, told: str) -> None:
    with pytest.raises(ValueError, match=told.replace("[", r"\[")):
        find_weights(tiny_lm("llama"), include)


def test_nan_in_one_layer_is_named() -> None:
    model = tiny_lm("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.up_proj"):
        round_all(find_weights(model), schemes((4,), (-1,)))


def test_candidates_move_the_model_and_put_it_back() -> None:
    model = tiny_lm("gpt2", dtype=torch.bfloat16)
    weights = find_weights(model)
    before = [w.parameter.detach().clone() for w in weights]
    candidates = round_all(weights, schemes((2, 8), (-1, 8)))
    plan = [t % len(candidates.options) for t in range(len(weights))]
    with candidates.applied(plan):
        for t, weight in enumerate(weights):
            torch.testing.assert_close(weight.parameter.detach() - before[t], candidates.delta(t, plan[t]))
            assert not torch.equal(weight.parameter, before[t])
    with candidates.single(3, 0):
        assert [torch.equal(w.parameter, b) for w, b in zip(weights, before, strict=True)].count(False) == 1
    assert all(torch.equal(w.parameter, b) for w, b in zip(weights, before, strict=True))


def test_members_of_a_group_get_options_that_fit_all_of_them() -> None:
    model = tiny_lm("mixtral")
    weights = find_weights(model)  # experts: 16 and 24 columns
    groups = sharing_groups(weights)
    candidates = round_all(weights, schemes((2, 4), (16,)), groups=groups)
    experts = [t for t, w in enumerate(weights) if w.layout == "experts"]
    assert {candidates.options[b] for t in experts for b in candidates.available(t)} == {Scheme(2), Scheme(4)}
    assert {weights[t].name for t in experts} == set(candidates.replaced)


# Loss


def test_perplexity_counts_tokens_not_batches() -> None:
    model = tiny_lm("llama")
    padded, whole = tokens((3, 12), padding=True), tokens((3, 12), seed=1)
    found = evaluate_perplexity(model, [padded, whole])
    with torch.no_grad():
        total, count = 0.0, 0
        for row in range(3):
            for batch in (padded, whole):
                keep = batch.get("attention_mask", torch.ones(3, 12))[row].bool()
                ids = batch["input_ids"][row][keep][None]
                logits = model(input_ids=ids).logits[0, :-1]
                total += float(nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum"))
                count += ids.shape[1] - 1
    assert found.tokens == count
    assert found.loss == pytest.approx(total / count, rel=1e-6)
    assert found.perplexity == pytest.approx(float(torch.tensor(total / count).exp()), rel=1e-6)
    change, stderr = rise(found, found)
    assert (change, stderr) == (0.0, 0.0)


def test_perplexity_refuses_what_has_no_answer() -> None:
    model = tiny_lm("llama")
    with pytest.raises(ValueError, match="no token is counted"):
        evaluate_perplexity(model, [])
    with torch.no_grad():
        model.model.norm.weight[0] = torch.nan
    with pytest.raises(FloatingPointError, match="batch 0"):
        evaluate_perplexity(model, [tokens((1, 8))])


def test_evaluation_leaves_the_mode_as_it_is() -> None:
    model = tiny_lm("gpt2").train()
    evaluate_perplexity(model, [tokens((1, 8))])
    assert all(module.training for module in model.modules())
