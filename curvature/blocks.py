"""What a parameter is by its name: which layer it belongs to, and which kind it is."""

from __future__ import annotations

import re

__all__ = ["kind_of", "layer_of"]

_LAYER = re.compile(r"(?:^|\.)(?:h|layers|blocks|block|layer)\.(\d+)(?:\.|$)")

_KINDS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (kind, re.compile(pattern))
    for kind, pattern in (
        ("norm", r"(^|[._])(ln_?\w*|\w*norm\w*)\.(weight|bias)$"),
        ("position", r"(^|\.)(wpe|\w*position\w*|\w*pos_emb\w*)\."),
        ("head", r"(^|\.)(lm_head|embed_out|output_projection)\."),
        ("embedding", r"(^|\.)(wte|embed_tokens|embed_in|word_embeddings|tok_embeddings)\."),
        ("router", r"(^|\.)(router|gate)\.|router\.layer\."),
        ("qkv", r"(^|\.)(c_attn|query_key_value|qkv|qkv_proj|Wqkv)\."),
        ("q", r"(^|\.)(q_proj|query|q_attn|wq)\."),
        ("k", r"(^|\.)(k_proj|key|wk)\."),
        ("v", r"(^|\.)(v_proj|value|wv)\."),
        ("o", r"(attn|attention|self_attention)\w*\.(c_proj|o_proj|out_proj|dense|wo)\."),
        ("mlp gate", r"(^|\.)(gate_proj|w1)\."),
        ("mlp in", r"(^|\.)(c_fc|up_proj|fc1|fc_in|dense_h_to_4h|gate_up_proj|input_linear|w3)(\.|$)"),
        ("mlp out", r"(^|\.)(c_proj|down_proj|fc2|fc_out|dense_4h_to_h|output_linear|w2)(\.|$)"),
    )
)


def layer_of(name: str) -> int | None:
    """Number of the transformer block that a parameter belongs to, or None outside the blocks.

    Args:
        name: Parameter name, such as "transformer.h.3.attn.c_attn.weight".
    """
    match = _LAYER.search(name)
    return int(match.group(1)) if match else None


def kind_of(name: str) -> str:
    """Kind of a parameter by the naming habits of published models.

    Args:
        name: Parameter name.

    Returns:
        One of norm, position, head, embedding, router, qkv, q, k, v, o, mlp gate, mlp in, mlp out, or other.
    """
    return next((kind for kind, pattern in _KINDS if pattern.search(name)), "other")
