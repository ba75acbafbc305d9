"""The oracle: attention by materializing the score matrix, in plain PyTorch, differentiated by autograd itself.

It shares no code with the fast backends but the mask, so it is what they are tested against, in float64. Memory is
O(B * H * N_Q * N_KV) and every derivative order works.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashbob.dropout import Dropout
from flashbob.geometry import Geometry


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    geometry: Geometry,
    bounds: Tensor | None,
    bias: Tensor | None,
    scale: float,
    softcap: float | None,
    dropout: Dropout | None = None,
) -> Tensor:
    """Attention in one formula: o = dropout(softmax(softcap(scale * q k^T) + bias, over visible keys)) v.

    Args:
        q: [B, H_Q, N_Q, D], any floating dtype.
        k: [B, H_KV, N_KV, D].
        v: [B, H_KV, N_KV, D_v].
        geometry: the band of visible keys.
        bounds: int [B, 2], first and one-past-last valid key of each sequence.
        bias: added to the scores, broadcastable to [B, H_Q, N_Q, N_KV].
        scale: factor on q k^T.
        softcap: c in c * tanh(s / c), applied before the bias.
        dropout: the mask on the attention weights.

    Returns:
        [B, H_Q, N_Q, D_v]; rows that see no key are zero.
    """
    groups = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(groups, dim=1)
    v = v.repeat_interleave(groups, dim=1)
    scores = scale * (q @ k.mT)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias.to(scores.dtype)
    hidden = geometry.hidden(0, geometry.queries, 0, geometry.keys, bounds, q.device)
    if hidden is not None:
        scores = scores.masked_fill(hidden if hidden.ndim == 2 else hidden[:, 0], float("-inf"))
    empty = (scores == float("-inf")).all(dim=-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(empty, 0.0), dim=-1).masked_fill(empty, 0.0)
    if dropout is not None:
        shape = (weights.shape[0], weights.shape[1])
        weights = weights * dropout.factors(shape, 0, geometry.queries, 0, geometry.keys, weights.device, weights.dtype)
    return weights @ v
