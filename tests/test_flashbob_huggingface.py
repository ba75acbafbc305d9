"""transformers models with flashbob against their own eager attention: value, gradient, Hessian product, decoding."""

import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, PreTrainedModel, masking_utils, modeling_utils
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface
from transformers.utils import generic

from flashbob import huggingface, register_attention, sdpa_bob
from tests.attention_models import (
    BATCH,
    CACHE,
    CONFIGURATIONS,
    TOKENS,
    VOCABULARY,
    Float64,
    first_and_second,
    padding,
    pair,
    tokens,
)


@pytest.fixture(autouse=True)
def registered() -> None:
    register_attention()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Records what each layer passes to `sdpa_bob`."""
    seen: list[dict[str, Any]] = []

    def recording(q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> Tensor:
        seen.append({"q": q, "k": k, "v": v, **kwargs})
        return sdpa_bob(q, k, v, **kwargs)

    monkeypatch.setattr(huggingface, "sdpa_bob", recording)
    return seen


def assert_same(found: Any, exact: Any) -> None:
    torch.testing.assert_close(found, exact, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("side", ["none", "left", "right", "both"])
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_models_equal_their_eager_selves(name: str, side: str, calls: list[dict[str, Any]]) -> None:
    """Logits of real tokens, gradient and Hessian-vector product."""
    model, eager = pair(name)
    ids, mask = tokens(), padding(side)
    found, exact = first_and_second(model, ids, mask), first_and_second(eager, ids, mask)
    assert len(calls) == 2, "both layers of the first model, and no other, run flashbob"
    assert all((call["key_starts"] is None) == (side == "none") for call in calls)
    assert_same(found, exact)
    assert max(float(h.norm()) for h in exact[2].values()) > 1e-2


def test_windows_and_soft_caps_reach_the_operator(calls: list[dict[str, Any]]) -> None:
    for name, windows, softcap in [
        ("mistral-window", [5, 5], None),
        ("qwen2", [4, 0], None),
        ("gemma2-softcap-window", [4, 0], 0.5),
        ("gemma3-window", [4, 0], None),
        ("llama-gqa", [0, 0], None),
    ]:
        calls.clear()
        pair(name)[0](tokens())
        assert [call["window_size"] for call in calls] == windows
        assert all(call["softcap"] == softcap and call["is_causal"] for call in calls)


def test_grouped_heads_are_not_repeated(calls: list[dict[str, Any]]) -> None:
    pair("llama-gqa")[0](tokens())
    assert [(call["q"].shape[1], call["k"].shape[1], call["v"].shape[1]) for call in calls] == [(4, 2, 2)] * 2


def test_a_mask_of_ones_costs_nothing(calls: list[dict[str, Any]]) -> None:
    """Without padding the call stays the plain causal one, which the fused kernels cover."""
    pair("gpt2")[0](tokens(), attention_mask=torch.ones(BATCH, TOKENS))
    assert all(call["key_starts"] is None and call["key_lengths"] is None for call in calls)


@pytest.mark.parametrize("backend", ["reference", "blocked"])
def test_the_backend_can_be_chosen(backend: Any, calls: list[dict[str, Any]]) -> None:
    model, eager = pair("llama-gqa")
    ids = tokens()
    register_attention(backend=backend)
    with Float64():
        assert_same(model(ids).logits, eager(ids).logits)
    assert [call["backend"] for call in calls] == [backend] * 2


@pytest.fixture
def training() -> PreTrainedModel:
    """GPT-2 in training mode with dropout in its attention alone."""
    model = pair("gpt2")[0].train()
    for layer in model.transformer.h:
        layer.attn.attn_dropout.p = 0.4
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout) and module.p != 0.4:
            module.p = 0.0
    return model


def test_attention_dropout_in_training_mode(training: PreTrainedModel, calls: list[dict[str, Any]]) -> None:
    """Value, gradient and Hessian product are those of the materializing reference under the same generator state."""
    ids, mask, results = tokens(), padding("left"), []
    for backend in ("auto", "reference"):
        register_attention(backend=backend)
        torch.manual_seed(5)
        results.append(first_and_second(training, ids, mask))
    assert_same(*results)
    assert [call["dropout_p"] for call in calls] == [0.4] * 4
    torch.manual_seed(6)
    assert not torch.allclose(first_and_second(training, ids, mask)[0], results[0][0])
    with Float64():
        assert_same(training.eval()(ids).logits, pair("gpt2")[1](ids).logits)


def test_checkpointing_repeats_the_dropout_mask(training: PreTrainedModel) -> None:
    """The recomputed forward draws the seeds of the first one again."""
    ids, gradients = tokens(), []

    def logits(x: Tensor) -> Tensor:
        return training(x, use_cache=False).logits

    for checkpointed in (False, True):
        torch.manual_seed(5)
        with Float64():
            out = checkpoint(logits, ids, use_reentrant=False) if checkpointed else logits(ids)
            gradients.append(torch.autograd.grad(out.sin().sum(), list(training.parameters())))
    assert_same(*gradients)


def test_the_output_is_laid_out_as_transformers_expects() -> None:
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8)
    attend = AttentionInterface()["flashbob"]
    module = torch.nn.Module()
    module.is_causal = True  # type: ignore[assignment]
    out, weights = attend(module, q, k, torch.randn(2, 2, 5, 3), None)
    assert out.shape == (2, 5, 4, 3)
    assert out.is_contiguous()
    assert weights is None


# Caches


def stepped(model: PreTrainedModel, ids: Tensor, mask: Tensor | None, cuts: list[int], cache: Any) -> Tensor:
    """Logits of `ids` fed in pieces through a cache."""
    pieces, start = [], 0
    for stop in [*cuts, ids.shape[1]]:
        seen = None if mask is None else mask[:, :stop]
        with Float64(), torch.no_grad():
            out = model(ids[:, start:stop], attention_mask=seen, use_cache=True, **{CACHE: cache})
        pieces.append(out.logits)
        start = stop
    return torch.cat(pieces, dim=1)


@pytest.mark.parametrize("cuts", [[10], [1, 2, 3], [6, 9]], ids=["last-token", "from-the-first", "chunks"])
@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("name", ["gpt2", "llama-gqa", "mistral-window", "gemma2-softcap-window", "opt"])
def test_decoding_with_a_growing_cache(name: str, side: str, cuts: list[int]) -> None:
    model, eager = pair(name)
    ids, mask = tokens(), padding(side)
    real = torch.ones_like(ids).bool() if mask is None else mask.bool()
    found, exact = (
        stepped(m, ids, mask, cuts, transformers.DynamicCache(config=m.config))[real] for m in (model, eager)
    )
    assert_same(found, exact)
    with Float64(), torch.no_grad():
        at_once = model(ids, attention_mask=mask, use_cache=False).logits[real]
    assert_same(found, at_once)


@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("name", ["llama-gqa", "mistral-window", "gemma2-softcap-window"])
def test_decoding_with_a_static_cache(name: str, side: str) -> None:
    """Slots that are not written yet stand after every query, or beyond the window, and are hidden."""
    model, eager = pair(name)
    ids, mask = tokens(), padding(side)
    real = torch.ones_like(ids).bool() if mask is None else mask.bool()
    found, exact = (
        stepped(m, ids, mask, [7, 8], transformers.StaticCache(config=m.config, max_cache_len=TOKENS + 6))[real]
        for m in (model, eager)
    )
    assert_same(found, exact)


@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("name", ["gpt2", "llama-gqa", "mistral-window"])
def test_generate(name: str, side: str) -> None:
    model, eager = pair(name)
    mask = padding(side)
    mask = torch.ones(BATCH, TOKENS, dtype=torch.long) if mask is None else mask
    ids = tokens()
    with Float64():
        found, exact = (
            m.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0, eos_token_id=None)
            for m in (model, eager)
        )
    assert torch.equal(found, exact)


def test_gradients_through_a_cache() -> None:
    """The prefix's keys and values carry gradient into the second call."""
    gradients = []
    for model in pair("llama-gqa"):
        torch.manual_seed(3)
        ids = tokens()
        with Float64():
            prefix = model(ids[:, :6], use_cache=True)
            logits = model(ids[:, 6:], use_cache=True, **{CACHE: prefix[CACHE]}).logits
        gradients.append(torch.autograd.grad(logits.square().sum(), list(model.parameters()), materialize_grads=True))
    assert_same(*gradients)


def test_gradient_checkpointing() -> None:
    """The description of the mask survives recomputation in the backward pass."""
    model, ids = pair("llama-gqa")[0].train(), tokens()
    # Renamed during transformers 5.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    gradients = []
    for checkpointed in (False, True):
        if checkpointed:
            enable({"use_reentrant": False})
        loss = model(ids, attention_mask=padding("left"), use_cache=False).logits[1].square().sum()
        gradients.append(torch.autograd.grad(loss, list(model.parameters())))
    assert_same(*gradients)


# Attention that is not causal


@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_an_encoder(side: str, calls: list[dict[str, Any]]) -> None:
    config = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    models = []
    for implementation in ("flashbob", "eager"):
        torch.manual_seed(0)
        made = transformers.BertModel._from_config(
            transformers.BertConfig(**config, intermediate_size=24), attn_implementation=implementation
        )
        models.append(made.double().eval())
    ids, mask = tokens(), padding(side)
    real = torch.ones_like(ids).bool() if mask is None else mask.bool()
    with Float64():
        found, exact = (m(ids, attention_mask=mask).last_hidden_state[real] for m in models)
    assert_same(found, exact)
    assert [call["is_causal"] for call in calls] == [False, False]


@pytest.mark.parametrize("side", ["none", "right"])
def test_cross_attention(side: str, calls: list[dict[str, Any]]) -> None:
    config: dict[str, Any] = {
        "vocab_size": VOCABULARY, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 24,
        "decoder_ffn_dim": 24, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
        "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1,
        "decoder_start_token_id": 2, "forced_eos_token_id": None,
    }  # fmt: skip
    models = []
    for implementation in ("flashbob", "eager"):
        torch.manual_seed(0)
        made = transformers.BartModel._from_config(
            transformers.BartConfig(**config), attn_implementation=implementation
        )
        models.append(made.double().eval())
    ids, mask, decoded = tokens(), padding(side), tokens(length=7)
    results = []
    for m in models:
        with Float64():
            hidden = m(ids, attention_mask=mask, decoder_input_ids=decoded, use_cache=False).last_hidden_state
        results.append(
            (hidden, torch.autograd.grad(hidden.square().sum(), list(m.parameters()), materialize_grads=True))
        )
    assert_same(*results)
    shapes = [(call["is_causal"], call["q"].shape[2], call["k"].shape[2]) for call in calls]
    assert shapes == [(False, TOKENS, TOKENS), (True, 7, 7), (False, 7, TOKENS)]


# Registration


def test_registering_twice_changes_nothing() -> None:
    checks = modeling_utils.is_flash_attention_requested  # type: ignore[attr-defined]
    register_attention()
    register_attention()
    assert modeling_utils.is_flash_attention_requested is checks  # type: ignore[attr-defined]
    assert AttentionInterface()["flashbob"].keywords == {"backend": "auto"}
    assert AttentionMaskInterface()["flashbob"] is huggingface.key_mask


@pytest.mark.parametrize("name", ["flashbob", "bob", "my-flash"])
def test_models_are_loaded_by_name(name: str, tmp_path: Path) -> None:
    register_attention(name)
    pair("llama-gqa")[0].save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=name)
    assert model.config._attn_implementation == name
    model.set_attn_implementation("eager")
    model.set_attn_implementation(name)
    assert model(tokens()).logits.isfinite().all()


def test_no_module_takes_flashbob_for_a_flash_attention_package() -> None:
    """Wherever the check is bound, before and after the registration."""
    from transformers.models.falcon import modeling_falcon

    holders = [m for m in list(sys.modules.values()) if "is_flash_attention_requested" in getattr(m, "__dict__", {})]
    assert {generic, masking_utils, modeling_utils, modeling_falcon} <= set(holders)
    for module in holders:
        assert not module.is_flash_attention_requested(requested_attention_implementation="flashbob"), module


def test_real_flash_attention_is_still_recognized() -> None:
    requested = modeling_utils.is_flash_attention_requested  # type: ignore[attr-defined]
    for name, expected in [("flash_attention_2", True), ("flashbob", False), ("flashboom", True), ("sdpa", False)]:
        assert requested(requested_attention_implementation=name) == expected
        config = transformers.LlamaConfig()
        config._attn_implementation_internal = name
        assert requested(config) == expected
    assert requested(requested_attention_implementation="flash_attention_3", version=3)
    assert not requested(requested_attention_implementation=None)


@pytest.mark.parametrize("name", ["eager", "sdpa", "flash_attention_2"])
def test_names_of_others_are_not_taken(name: str) -> None:
    with pytest.raises(ValueError, match=rf"name='{name}' already belongs to another attention implementation"):
        register_attention(name)


def test_an_unknown_backend() -> None:
    with pytest.raises(ValueError, match="backend must be one of auto, triton, blocked, reference, got 'fast'"):
        register_attention(backend="fast")  # type: ignore[arg-type]


def test_a_layer_without_a_mask_goes_by_its_own_word() -> None:
    q, k = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 7, 4)
    attend = AttentionInterface()["flashbob"]
    module = torch.nn.Module()
    for is_causal in (True, False):
        module.is_causal = is_causal  # type: ignore[assignment]
        exact = sdpa_bob(q, k, k, is_causal=is_causal).transpose(1, 2)
        torch.testing.assert_close(attend(module, q, k, k, None)[0], exact)
    exact = sdpa_bob(q, k, k, window_size=2, scale=0.3, softcap=2.0).transpose(1, 2)
    found = attend(module, q, k, k, None, is_causal=True, sliding_window=2, scaling=0.3, softcap=2.0)[0]
    torch.testing.assert_close(found, exact)


def test_a_padded_query_that_sees_nothing_stays_finite() -> None:
    model = pair("llama-gqa")[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        logits = model(tokens(), attention_mask=padding("left")).logits
    gradients = torch.autograd.grad(logits.square().sum(), list(model.parameters()))
    assert logits.isfinite().all()
    assert all(g.isfinite().all() for g in gradients)
