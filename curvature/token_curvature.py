"""Curvature of the token losses in the logits: the inner matrix of Gauss-Newton and Fisher products.

All of them have the form J^T Lambda J, with J the Jacobian of the logits and Lambda block-diagonal, one block
[vocabulary, vocabulary] per counted token. The blocks are applied, never formed. With p = softmax(logits):

    Gauss-Newton        Lambda_t = d^2 l_t / dlogits^2                      for the cross-entropy diag(p) - p p^T
    Fisher, sampled     Lambda_t = 1/S sum_s r_ts r_ts^T,  r_ts = d l_t(y_ts) / dlogits = p - e(y_ts),   y_ts ~ p
    Fisher, empirical   Lambda_t = r_t r_t^T,              r_t = p - e(label_t)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from curvature.precision import raised

__all__ = ["LossCurvature", "ScoreCurvature", "TokenCurvature", "TokenSum", "sampled_labels"]

TokenSum = Callable[[Tensor, Tensor], Tensor]
"""(logits [B, n, vocabulary], labels [B, n]) -> the loss summed over the counted tokens."""


class TokenCurvature(Protocol):
    """Lambda of one batch."""

    def product(self, logits: Tensor, u: Tensor, start: int) -> Tensor:
        """Lambda times u on a stretch of positions.

        Args:
            logits: [B, n, vocabulary], of the positions start..start + n.
            u: The same shape.
            start: The first position.

        Returns:
            The product, of the same shape; float64 for float64 logits, otherwise float32. Zero where no token is
            counted.
        """
        ...


class LossCurvature:
    """Lambda_t is the Hessian of the token's loss in its logits.

    Args:
        token_sum: The loss.
        labels: int64 [B, N].
    """

    def __init__(self, token_sum: TokenSum, labels: Tensor) -> None:
        self._token_sum, self._labels = token_sum, labels

    def product(self, logits: Tensor, u: Tensor, start: int) -> Tensor:
        """See `TokenCurvature.product`."""
        with torch.enable_grad():
            leaf = raised(logits).detach().requires_grad_()
            total = self._token_sum(leaf, self._labels[:, start : start + logits.shape[1]])
            [slope] = torch.autograd.grad(total, leaf, create_graph=True)
            if not slope.requires_grad:  # a loss that is linear in the logits
                return torch.zeros_like(leaf)
            return torch.autograd.grad(slope, leaf, u.to(slope.dtype))[0]


class ScoreCurvature:
    """Lambda_t is the mean of outer products of the token loss's gradients at given labels.

    Args:
        token_sum: The loss.
        labels: Maps logits [B, n, vocabulary] and the first position to labels [S, B, n].
    """

    def __init__(self, token_sum: TokenSum, labels: Callable[[Tensor, int], Tensor]) -> None:
        self._token_sum, self._labels = token_sum, labels

    def product(self, logits: Tensor, u: Tensor, start: int) -> Tensor:
        """See `TokenCurvature.product`."""
        leaf, u = raised(logits).detach().requires_grad_(), raised(u)
        labels = self._labels(leaf.detach(), start)
        result = torch.zeros_like(leaf, requires_grad=False)
        for sample in labels:
            with torch.enable_grad():
                [score] = torch.autograd.grad(self._token_sum(leaf, sample), leaf)
            result.addcmul_(score, (score * u).sum(-1, keepdim=True), value=1 / len(labels))
        return result


def sampled_labels(
    targets: Tensor, ignore_index: int, *, samples: int, seed: int, number: int
) -> Callable[[Tensor, int], Tensor]:
    """Labels drawn from the model's own distribution, for `ScoreCurvature`.

    Each token takes the inverse of its cumulative distribution at uniform numbers of its own: the same labels in every
    product, however the positions are cut into stretches, and, up to rounding at the edge between two labels, on any
    device.

    Args:
        targets: int64 [B, N]; only where they are `ignore_index` matters, and there nothing is drawn.
        ignore_index: The target that is not counted.
        samples: Labels per token.
        seed: Seed of the draws, 0 <= seed < 2**64.
        number: Number of the batch, which is part of the seed.
    """
    generator = np.random.Generator(np.random.Philox(key=np.array([seed, number], dtype=np.uint64)))
    uniforms = torch.from_numpy(generator.random((*targets.shape, samples))).to(targets.device)

    def labels(logits: Tensor, start: int) -> Tensor:
        stretch = slice(start, start + logits.shape[1])
        cumulative = logits.double().softmax(-1).cumsum(-1)
        drawn = torch.searchsorted(cumulative, uniforms[:, stretch] * cumulative[..., -1:])
        drawn = drawn.clamp_max_(logits.shape[-1] - 1).movedim(-1, 0)
        return drawn.masked_fill(targets[:, stretch] == ignore_index, ignore_index)

    return labels
