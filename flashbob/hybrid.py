"""The baseline with fused first derivatives: PyTorch's fused forward and backward, its math path for the second.

What remains of `sdpa_bob` when its kernels are taken away: the value and the first gradients come from the same fused
kernels, and only the double backward materializes the scores. A training run with it beside one with `sdpa_bob` tells
the share of the kernels apart from that of fused attention in ordinary steps.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashbob import fused
from flashbob.autocast import lowered
from flashbob.autograd import Attention
from flashbob.geometry import Geometry
from flashbob.graph_break import graph_break
from flashbob.huggingface import KeyMask, key_mask, mask_of_module, refuse_unsupported
from flashbob.plan import Plan, SecondGradients, Wanted

__all__ = ["hybrid_attention", "register_hybrid_attention"]


class _Materializing:
    """Second derivative by PyTorch's math path: forward and first backward once more, with their graphs."""

    name = "torch math"

    def double_backward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        do: Tensor,
        dq: Tensor,
        uq: Tensor | None,
        uk: Tensor | None,
        uv: Tensor | None,
        bounds: Tensor | None,
        bias: Tensor | None,
        plan: Plan,
        wanted: Wanted,
    ) -> SecondGradients:
        """See `flashbob.plan.SecondOrder`. Memory O(B H N^2)."""
        with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
            inputs = [t.detach().requires_grad_() for t in (q, k, v, do)]
            q, k, v, do = inputs
            causal, grouped = plan.geometry.is_square_causal, q.shape[1] != k.shape[1]
            out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=plan.scale, enable_gqa=grouped)
            first = torch.autograd.grad(out, (q, k, v), do, create_graph=True)
            pairs = [(g, u) for g, u in zip(first, (uq, uk, uv), strict=True) if u is not None]
            asked = [i for i, needed in enumerate(wanted) if needed]
            found = torch.autograd.grad(
                [g for g, _ in pairs], [inputs[i] for i in asked], [u for _, u in pairs], allow_unused=True
            )
        result: list[Tensor | None] = [None] * 4
        for i, g in zip(asked, found, strict=True):
            result[i] = g
        return cast(SecondGradients, tuple(result))

    def tangent(self, *_: Any) -> Tensor:
        """Not needed by reverse mode."""
        raise NotImplementedError("hybrid attention has no forward mode; use sdpa_bob")


_SECOND = _Materializing()


@graph_break
def hybrid_attention(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, scale: float | None = None) -> Tensor:
    """Attention with fused value and gradient, and a second derivative that materializes the scores. Exact.

    In a torch.autocast block q, k and v are cast to its dtype first, as in `sdpa_bob`.

    Args:
        q: [B, H_Q, N, D].
        k: [B, H_KV, N, D].
        v: [B, H_KV, N, D].
        is_causal: Whether keys after the query are hidden.
        scale: Factor on the scores; None: 1 / sqrt(D).

    Returns:
        [B, H_Q, N, D].

    Raises:
        NotImplementedError: If PyTorch has no fused attention for the case (float32 on a GPU, say, or a scale that is
            not positive).
    """
    scale = float(q.shape[-1] ** -0.5 if scale is None else scale)
    if scale <= 0:
        raise NotImplementedError(
            f"hybrid: PyTorch's fused attention needs a scale > 0, got {scale}; use another attention"
        )
    q, k, v = lowered(q, k, v)
    geometry = Geometry.build(q.shape[2], k.shape[2], is_causal=is_causal, window_size=0, q_offset=None, k_offset=0)
    first = fused.find(q, k, v, geometry)
    if first is None:
        raise NotImplementedError(
            f"hybrid: PyTorch has no fused attention for {q.dtype} on {q.device.type}, head sizes {q.shape[-1]} and "
            f"{v.shape[-1]}, {q.shape[1]}/{k.shape[1]} heads; use bfloat16 on a GPU, or another attention"
        )
    plan = Plan(geometry, scale, None, first, _SECOND)
    o, _ = cast(tuple[Tensor, Tensor], Attention.apply(q, k, v, None, None, plan))
    return o


def register_hybrid_attention(name: str = "hybrid") -> None:
    """Make `attn_implementation=name` run `hybrid_attention` in models of transformers.

    Causal and full attention without padding, windows, soft-cap or dropout; everything else is refused.

    Args:
        name: The name to register.
    """
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(name, _attend)
    AttentionMaskInterface.register(name, key_mask)


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: KeyMask | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    refuse_unsupported(module, attention_mask, kwargs)
    mask = attention_mask
    if not isinstance(mask, KeyMask):
        mask = mask_of_module(module, query.shape[2], key.shape[2], is_causal, sliding_window)
    asked = {
        "a sliding window": 0 < mask.window_size < key.shape[2],
        "padding": mask.key_starts is not None,
        "attention dropout": dropout > 0,
        "soft-capped scores": softcap is not None,
        "a key/value cache": query.shape[2] != key.shape[2],
    }
    if unsupported := [what for what, is_asked in asked.items() if is_asked]:
        raise NotImplementedError(f"hybrid: {', '.join(unsupported)} is not supported; use attention 'flashbob'")
    out = hybrid_attention(query, key, value, is_causal=mask.is_causal, scale=scaling)
    return out.transpose(1, 2).contiguous(), None
