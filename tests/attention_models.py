"""Tiny random transformers models, one for each way that architectures call attention, kept in float64 throughout."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    GraniteMoeConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    OPTConfig,
    PhiConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

VOCABULARY = 31
BATCH, TOKENS = 3, 11

# The keyword under which models take a cache was renamed during transformers 5.
CACHE = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"

_SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
_GROUPED = {**_SMALL, "num_key_value_heads": 2, "head_dim": 6}
_WINDOWED = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}

CONFIGURATIONS: dict[str, Callable[[], PreTrainedConfig]] = {
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=16,
        n_layer=2,
        n_head=4,
        n_positions=64,
        bos_token_id=0,
        eos_token_id=0,
        scale_attn_by_inverse_layer_idx=True,
    ),
    "llama-gqa": lambda: LlamaConfig(**_GROUPED),
    "qwen2": lambda: Qwen2Config(**{**_GROUPED, **_WINDOWED, "use_sliding_window": True}),
    "qwen3": lambda: Qwen3Config(**_GROUPED),
    "mistral-window": lambda: MistralConfig(**_GROUPED, sliding_window=5),
    "gemma2-softcap-window": lambda: Gemma2Config(
        **_GROUPED, **_WINDOWED, attn_logit_softcapping=0.5, final_logit_softcapping=3.0, query_pre_attn_scalar=5
    ),
    "gemma3-window": lambda: Gemma3TextConfig(**_GROUPED, **_WINDOWED, query_pre_attn_scalar=5),
    "gpt-neox": lambda: GPTNeoXConfig(**_SMALL, use_parallel_residual=True),
    "granite-moe": lambda: GraniteMoeConfig(
        **{**_SMALL, "num_key_value_heads": 2}, num_local_experts=3, num_experts_per_tok=2, attention_multiplier=0.37
    ),
    "opt": lambda: OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        ffn_dim=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        word_embed_proj_dim=16,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    ),
    "phi": lambda: PhiConfig(**_SMALL),
}


def pair(name: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The same float64 model twice, in eval mode: with flashbob and with transformers' eager attention."""
    torch.manual_seed(0)
    models = []
    for implementation in ("flashbob", "eager"):
        # transformers keeps the implementation in the configuration, so the two models must not share one.
        config = copy.deepcopy(CONFIGURATIONS[name]())
        model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
        if hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("eager")  # grouped matrix products do not exist in float64
        models.append(model.to(torch.float64).eval())
        assert model.config._attn_implementation == implementation
    with torch.no_grad():
        for parameter in models[0].parameters():
            parameter.normal_(std=0.4)
    models[1].load_state_dict(models[0].state_dict())
    return models[0], models[1]


class Float64(TorchFunctionMode):
    """Turns every request for float32 into one for float64.

    transformers computes softmax, norms and rotary angles in float32 whatever the model's dtype, which limits two
    float64 runs to an agreement of about 1e-7.
    """

    _CASTS = (torch.Tensor.to, torch.Tensor.type, torch.Tensor.softmax, torch.softmax, torch.nn.functional.softmax)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.float:
            return args[0].double()
        if func in self._CASTS:
            args = tuple(torch.float64 if x is torch.float32 else x for x in args)
            kwargs = {name: torch.float64 if x is torch.float32 else x for name, x in kwargs.items()}
        return func(*args, **kwargs)


def first_and_second(
    model: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """(logits of real tokens, gradient, Hessian-vector product) of the loss over them, by parameter name."""
    generator = torch.Generator().manual_seed(1)
    real = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    with Float64():
        logits = model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False, **kwargs).logits
    assert logits.dtype == torch.float64
    targets = torch.where((real[:, 1:] * real[:, :-1]).bool(), input_ids[:, 1:], -100)
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets.flatten())
    parameters = dict(model.named_parameters())
    gradients = torch.autograd.grad(loss, list(parameters.values()), create_graph=True, materialize_grads=True)
    moving = [(g, torch.randn(g.shape, dtype=g.dtype, generator=generator)) for g in gradients]
    moving = [(g, u) for g, u in moving if g.requires_grad]
    product = torch.autograd.grad(
        [g for g, _ in moving], list(parameters.values()), [u for _, u in moving], materialize_grads=True
    )
    detached = (g.detach() for g in gradients)
    return (
        logits.detach()[real.bool()],
        dict(zip(parameters, detached, strict=True)),
        dict(zip(parameters, product, strict=True)),
    )


def tokens(batch: int = BATCH, length: int = TOKENS) -> Tensor:
    return torch.randint(1, VOCABULARY, (batch, length))


def padding(side: str) -> Tensor | None:
    """A 2D mask over three sequences, the second of them whole."""
    mask = torch.ones(BATCH, TOKENS, dtype=torch.long)
    if side == "none":
        return None
    if side in ("left", "both"):
        mask[0, :4], mask[2, :7] = 0, 0
    if side == "right":
        mask[0, 6:], mask[2, 9:] = 0, 0
    if side == "both":
        mask[0, 9:] = 0
    return mask
