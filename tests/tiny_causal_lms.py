"""Tiny float64 language models of many architectures, by name, with weights well away from zero."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from flashbob import register_attention

VOCABULARY = 43

_GPT = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}
_WIDE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
_LLAMA = _WIDE | {"intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "gpt2": {"model_type": "gpt2", **_GPT},
    "gpt2-untied": {"model_type": "gpt2", "tie_word_embeddings": False, **_GPT},
    "llama": {"model_type": "llama", **_LLAMA},
    "llama-tied": {"model_type": "llama", "tie_word_embeddings": True, **_LLAMA},
    "qwen2": {"model_type": "qwen2", **_LLAMA},
    "qwen3": {"model_type": "qwen3", **_LLAMA},
    "mistral-window": {"model_type": "mistral", "sliding_window": 5, **_LLAMA},
    "gpt-neox": {"model_type": "gpt_neox", "intermediate_size": 24, **_WIDE},
    "gpt-neox-serial": {"model_type": "gpt_neox", "intermediate_size": 24, "use_parallel_residual": False, **_WIDE},
    "gemma2": {"model_type": "gemma2", "sliding_window": 5, "query_pre_attn_scalar": 4, **_LLAMA},
    "granite-moe": {"model_type": "granitemoe", "residual_multiplier": 0.7, "logits_scaling": 2, **_LLAMA, **_EXPERTS},
    "mixtral": {"model_type": "mixtral", **_LLAMA, **_EXPERTS},
    "opt": {"model_type": "opt", "ffn_dim": 24, "word_embed_proj_dim": 16, **_WIDE},
    "opt-post-norm": {
        "model_type": "opt", "ffn_dim": 24, "word_embed_proj_dim": 8, "do_layer_norm_before": False, **_WIDE,
    },
    "bloom": {"model_type": "bloom", "hidden_size": 16, "n_layer": 2, "n_head": 2},
    "gptj": {"model_type": "gptj", "rotary_dim": 4, **_GPT},
    "falcon": {"model_type": "falcon", **_WIDE},
}  # fmt: skip
"""Configuration entries of each; the last three attend eagerly, since transformers gives them no other way."""

_EAGER_ONLY = {"bloom", "gptj", "falcon"}


def tiny_lm(name: str, *, dtype: torch.dtype = torch.float64, **overrides: Any) -> nn.Module:
    """The model, in evaluation mode."""
    register_attention()
    entries = ARCHITECTURES[name] | overrides
    model_type, experts = entries.pop("model_type"), entries.pop("experts_implementation", None)
    special = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    config = CONFIG_MAPPING[model_type](vocab_size=VOCABULARY, **special, **entries)
    if experts:
        config._experts_implementation = experts
    torch.manual_seed(1)
    attention = "eager" if model_type in _EAGER_ONLY else entries.get("attn_implementation", "flashbob")
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).double().eval()
    for p in model.parameters():
        with torch.no_grad():
            p.copy_(0.25 * torch.randn_like(p) if p.ndim > 1 else p + 0.1 * torch.randn_like(p))
    return model.to(dtype)


def mixture(model_type: str, **entries: Any) -> nn.Module:
    """A small mixture of experts of any architecture that the installed transformers has; the test is skipped else."""
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"the installed transformers has no {model_type}")
    return tiny_lm("mixtral", model_type=model_type, attn_implementation="eager", **entries)


def tokens(shape: tuple[int, int], *, padding: bool = False, seed: int = 0) -> dict[str, torch.Tensor]:
    """A batch of random tokens; with padding, the second row is padded on the right and the third on the left."""
    generator = torch.Generator().manual_seed(seed)
    batch = {"input_ids": torch.randint(3, VOCABULARY, shape, generator=generator)}
    if padding:
        mask = torch.ones(shape, dtype=torch.int64)
        mask[1, shape[1] - 5 :] = 0
        mask[2, :4] = 0
        batch["attention_mask"] = mask
    return batch
