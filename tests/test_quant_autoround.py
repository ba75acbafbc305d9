"""AutoRound through its package: codes read back exactly, the model left alone, refusals."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from quant import AutoRoundQuantizer, Scheme, Settings, evaluate_perplexity, find_weights, quantize_model, round_all
from quant.perplexity import rise

BATCHES = [{"input_ids": torch.randint(0, 64, (4, 32), generator=torch.Generator().manual_seed(i))} for i in range(2)]
installed = pytest.mark.skipif(importlib.util.find_spec("auto_round") is None, reason="auto-round is not installed")
foreign = pytest.mark.filterwarnings("ignore")


def lm() -> LlamaForCausalLM:
    """Two blocks with matrices that the package takes: both dimensions multiples of 32."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False, initializer_range=0.2,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def test_a_missing_package_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'flashbob-curv\[quantizers\]'"):
        AutoRoundQuantizer(lm(), BATCHES)


@pytest.mark.parametrize(
    ("batches", "dtype", "error", "told"),
    [
        ([], None, ValueError, "there is none"),
        ([{"input_ids": torch.ones(1, 8).long()}, {"input_ids": torch.ones(1, 4).long()}], None, ValueError, "equal"),
        ([{"input_ids": torch.ones(1, 2).long(), "attention_mask": torch.tensor([[1, 0]])}], None, ValueError, "paddi"),
        (BATCHES, torch.float64, NotImplementedError, "float64"),
    ],
    ids=["none", "unequal", "padded", "float64"],
)
def test_what_it_cannot_take_is_refused(
    batches: Any, dtype: Any, error: type[Exception], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib, "import_module", lambda _: object())
    with pytest.raises(error, match=told):
        AutoRoundQuantizer(lm(), batches, scale_dtype=dtype)


def test_weights_that_are_not_linear_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib, "import_module", lambda _: object())
    model = lm()
    quantizer = AutoRoundQuantizer(model, BATCHES)
    with pytest.raises(NotImplementedError, match="layout 'embedding'"):
        quantizer([(find_weights(model, "embed_tokens")[0], Scheme(4, 32))])


@installed
@foreign
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_codes_and_scales_are_read_back(dtype: torch.dtype, symmetric: bool) -> None:
    model = lm()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    state = torch.get_rng_state()
    weights = find_weights(model)
    quantizer = AutoRoundQuantizer(model, BATCHES, iterations=3, scale_dtype=dtype)
    scheme = Scheme(3, 32, symmetric)
    found = round_all(weights, (scheme,), quantizer=quantizer)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert quantizer.notices == []
    for t, weight in enumerate(weights):
        rounded = found.rounded[t][0]
        assert rounded.scale.dtype == dtype
        assert (rounded.zero is None) == symmetric
        for part in (rounded.codes, *([] if rounded.zero is None else [rounded.zero])):
            assert scheme.lowest <= int(part.min()) <= int(part.max()) <= scheme.highest
        # Half a step from the rounding, and about as much from the tuned direction.
        step = rounded.scale.float().abs().repeat_interleave(32, 1)
        inside = (rounded.codes > scheme.lowest) & (rounded.codes < scheme.highest)
        error = (rounded.dequantize().float() - weight.matrix()).abs()
        assert bool((error[inside] <= 1.5 * step[inside]).all())


@installed
@foreign
def test_tuning_helps_and_formats_are_tuned_apart() -> None:
    """On the text that it was tuned on, at 2 bits, the model is nearer to itself than after rounding to nearest."""
    model = lm()
    targets = [{"input_ids": b["input_ids"]} for b in BATCHES]
    weights, options = find_weights(model), (Scheme(2, 32), Scheme(4, 32))
    tuned = round_all(weights, options, quantizer=AutoRoundQuantizer(model, BATCHES, iterations=60))
    plain = round_all(weights, options)
    with torch.no_grad():
        wanted = model(targets[0]["input_ids"]).logits
        distance = {}
        for name, candidates in (("tuned", tuned), ("plain", plain)):
            with candidates.applied([0] * len(weights)):
                distance[name] = float((model(targets[0]["input_ids"]).logits - wanted).square().mean())
    assert distance["tuned"] < distance["plain"]
    assert not torch.equal(tuned.rounded[0][0].codes, tuned.rounded[0][1].codes)


@installed
@foreign
def test_a_plan_is_made_with_it() -> None:
    model = lm()
    before = evaluate_perplexity(model, BATCHES)
    settings = Settings(bits=4.0, metric="fisher", quantizer="autoround", choices=(3, 4, 5), group_sizes=(32,))
    found = quantize_model(model, BATCHES, settings)
    assert found.plan.average_bits <= 4.0
    assert abs(rise(evaluate_perplexity(model, BATCHES), before)[0]) < 1.0
