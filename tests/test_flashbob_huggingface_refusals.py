"""What flashbob does not compute inside a transformers model is refused with the reason; it never becomes a number."""

import inspect
from typing import Any

import pytest
import torch
import transformers
from transformers.masking_utils import (
    create_bidirectional_mask,
    create_bidirectional_sliding_window_mask,
    create_causal_mask,
    create_chunked_causal_mask,
    create_sliding_window_causal_mask,
)
from transformers.modeling_utils import AttentionInterface

from flashbob import huggingface, register_attention
from flashbob.huggingface import KeyMask
from tests.attention_models import BATCH, CACHE, TOKENS, VOCABULARY, pair, tokens


@pytest.fixture(autouse=True)
def registered() -> None:
    register_attention()


def refuses(message: str, error: type[Exception] = NotImplementedError) -> Any:
    return pytest.raises(error, match=message)


@pytest.mark.parametrize("name", ["gpt2", "llama-gqa", "mistral-window"])
def test_holes_in_a_mask_are_found_where_the_mask_is_made(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface, "sdpa_bob", lambda *_, **__: pytest.fail("a layer ran"))
    mask = torch.ones(BATCH, TOKENS, dtype=torch.long)
    mask[1, 4:6] = 0
    with refuses(r"attention_mask must be 1 over one unbroken stretch.* row 1 has 9 ones", ValueError):
        pair(name)[0](tokens(), attention_mask=mask)


def test_packed_sequences() -> None:
    model = pair("llama-gqa")[0]
    packed = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1, 2, 3]])
    with refuses("sequences packed into one row"):
        model(tokens(1), position_ids=packed, use_cache=False)
    model(tokens(1), position_ids=torch.arange(TOKENS)[None], use_cache=False)
    lengths = torch.tensor([0, 4, 7, 11], dtype=torch.int32)
    with refuses("cu_seq_lens_q: sequences packed into one row"):
        model(tokens(1), cu_seq_lens_q=lengths, cu_seq_lens_k=lengths, max_length_q=4, max_length_k=4)


def test_ready_made_masks() -> None:
    mask = torch.zeros(BATCH, 1, TOKENS, TOKENS, dtype=torch.float64)
    with refuses(r"a ready-made mask \(Tensor of shape \(3, 1, 11, 11\)\) reached the attention"):
        pair("llama-gqa")[0](tokens(), attention_mask=mask)
    x = torch.randn(1, 2, 5, 4)
    with refuses(r"a ready-made mask \(object of shape \(\)\) reached the attention"):
        AttentionInterface()["flashbob"](torch.nn.Module(), x, x, x, object())


def mask_arguments(name: str = "flashbob", **settings: Any) -> dict[str, Any]:
    config = transformers.LlamaConfig(hidden_size=16, num_attention_heads=4, **settings)
    config._attn_implementation_internal = name
    return {"config": config, "inputs_embeds": torch.zeros(2, 6, 16), "attention_mask": None, CACHE: None}


def test_masks_that_are_described() -> None:
    assert create_causal_mask(**mask_arguments()) == KeyMask(6, 6, True, 0, 0, 0)
    assert create_bidirectional_mask(**mask_arguments()) == KeyMask(6, 6, False, 0, 0, 0)
    assert create_sliding_window_causal_mask(**mask_arguments(sliding_window=3)) == KeyMask(6, 6, True, 3, 0, 0)


def test_masks_that_cannot_be_described() -> None:
    message = "supports causal, sliding-window causal and full masks; this model asks for another one"
    for overlay in ({"or_mask_function": lambda b, h, q, k: q == k}, {"and_mask_function": lambda b, h, q, k: k > 0}):
        for create in (create_causal_mask, create_bidirectional_mask):
            with refuses(message):
                create(**mask_arguments(), **overlay)
    with refuses(message):
        create_chunked_causal_mask(**mask_arguments(attention_chunk_size=4))
    with refuses(message):
        create_bidirectional_sliding_window_mask(**mask_arguments(sliding_window=2))
    with refuses("2D attention_mask"):
        create_causal_mask(**{**mask_arguments(), "attention_mask": torch.ones(2, 6, 6)})


def test_a_mask_function_is_not_recognized_by_its_looks() -> None:
    """One with the right code but another window, or that closes over a tensor, is another function."""
    from transformers import masking_utils

    for function, local in [
        (masking_utils.sliding_window_causal_mask_function(4), 3),
        (masking_utils.sliding_window_causal_mask_function(4), None),
        (masking_utils.and_masks(masking_utils.causal_mask_function), 4),
        (masking_utils.padding_mask_function(torch.ones(2, 6, dtype=torch.bool)), None),
        (lambda batch_idx, head_idx, q_idx, kv_idx: kv_idx <= q_idx, None),
    ]:
        with refuses("supports causal, sliding-window causal and full masks"):
            huggingface.key_mask(2, 6, 6, mask_function=function, local_size=local)


def test_a_description_is_not_a_tensor() -> None:
    mask = create_causal_mask(**mask_arguments())
    assert (mask.ndim, tuple(mask.shape)) == (4, (1, 1, 6, 6))
    with refuses("flashbob's mask has no 'dtype'.*attn_implementation='eager'", AttributeError):
        mask.dtype  # noqa: B018
    assert huggingface.key_mask(2, 6, 6, attention_mask=mask) is mask, "a mask made in advance is passed through"


@pytest.mark.parametrize("label", ["s_aux", "position_bias", "head_mask", "sinks", "indices", "a_new_argument"])
def test_tensors_that_would_change_the_result(label: str) -> None:
    reasons = {
        "s_aux": "attention sinks",
        "position_bias": "an additive position bias",
        "head_mask": "masking of heads",
    }
    x = torch.randn(1, 2, 5, 4)
    attend = AttentionInterface()["flashbob"]
    with refuses(rf"{label}: {reasons.get(label, '')}.*not supported by flashbob"):
        attend(torch.nn.Module(), x, x, x, KeyMask(5, 5), **{label: torch.zeros(2)})
    attend(torch.nn.Module(), x, x, x, KeyMask(5, 5), position_ids=torch.arange(5), **{label: None})


def test_attention_sinks_of_a_model() -> None:
    config = transformers.GptOssConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, num_local_experts=2, num_experts_per_tok=1, max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4}, pad_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = transformers.GptOssForCausalLM._from_config(config, attn_implementation="flashbob").eval()
    with refuses("s_aux: attention sinks"):
        model(tokens())
    layer = torch.nn.Module()
    layer.sinks = torch.nn.Parameter(torch.zeros(2))
    x = torch.randn(1, 2, 5, 4)
    with refuses("sinks: attention sinks"):
        AttentionInterface()["flashbob"](layer, x, x, x, KeyMask(5, 5))


def test_position_bias_of_a_model() -> None:
    config = transformers.T5Config(vocab_size=VOCABULARY, d_model=16, d_kv=4, d_ff=24, num_layers=1, num_heads=4)
    try:
        model = transformers.T5EncoderModel._from_config(config, attn_implementation="flashbob").eval()
    except ValueError:
        pytest.skip("this version of transformers computes T5's attention itself")
    if "ALL_ATTENTION_FUNCTIONS" not in inspect.getsource(inspect.getmodule(type(model))):  # type: ignore[arg-type]
        pytest.skip("this version of transformers computes T5's attention itself")
    with refuses("position_bias: an additive position bias"):
        model(tokens())


@pytest.mark.parametrize("name", ["flashbob", "bob"])
@pytest.mark.parametrize("family", ["falcon", "gpt_neo"])
def test_families_with_attention_classes_of_their_own(family: str, name: str) -> None:
    register_attention(name)
    config = transformers.AutoConfig.for_model(
        family,
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_heads=4,
        num_attention_heads=4,
        bos_token_id=0,
        eos_token_id=0,
    )
    with refuses(rf"models of type '{family}' compute attention in classes of their own"):
        transformers.AutoModelForCausalLM.from_config(config, attn_implementation=name)


@pytest.mark.parametrize("name", ["gpt2", "llama-gqa", "opt"])
def test_attention_weights_asked_for(name: str) -> None:
    model = pair(name)[0]
    with refuses("output_attentions=True: flashbob never forms the attention weights"):
        model(tokens(), output_attentions=True)
    assert len(model(tokens(), output_hidden_states=True).hidden_states) == 3


def test_contradictions_between_a_layer_and_its_mask() -> None:
    x = torch.randn(1, 2, 5, 4)
    attend = AttentionInterface()["flashbob"]
    module = torch.nn.Module()
    with refuses(r"made for 5 queries and 5 keys, but the layer attends with 5 queries and 4 keys"):
        attend(module, x, x[:, :, :4], x[:, :, :4], KeyMask(5, 5))
    with refuses(r"is_causal=False contradicts the mask"):
        attend(module, x, x, x, KeyMask(5, 5), is_causal=False)
    with refuses(r"sliding_window=2 contradicts the mask's \(3\)"):
        attend(module, x, x, x, KeyMask(5, 5, window_size=3), sliding_window=2)
    attend(module, x, x, x, KeyMask(5, 5), sliding_window=5)
    with refuses(r"Module was given no mask and has no attribute is_causal"):
        attend(module, x, x, x, None)
    with refuses(r"a sliding window \(2\) that is not causal"):
        attend(module, x, x, x, None, is_causal=False, sliding_window=2)
