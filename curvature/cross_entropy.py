"""Summed cross-entropy whose first and second derivatives hold few arrays of the size of the logits.

With p = softmax(logits), y the one-hot targets, m = 1 where a target is counted and 0 elsewhere, row by row:

    total = sum m (logsumexp(logits) - logits[y])
    dlogits = c m (p - y)                                    c the upstream gradient, a scalar
    pulled back along U:   d/dlogits = c m (p U - p <p, U>),   d/dc = sum m (<p, U> - U[y])

PyTorch's own keeps log p in float32 beside the logits and goes through six further arrays of that size in the double
backward. Here the logits are kept in their own dtype, and at most two arrays in float32 exist at a time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

__all__ = ["cross_entropy_sum"]


def cross_entropy_sum(logits: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
    """Cross-entropy summed over the counted targets, twice differentiable in reverse mode; exact.

    Args:
        logits: [..., vocabulary], any floating dtype; bf16 and fp16 are computed in float32.
        targets: Integers of shape [...]; rows where they are `ignore_index` are not counted.
        ignore_index: The target that is not counted.

    Returns:
        A scalar, float64 for float64 logits, otherwise float32.

    Raises:
        NotImplementedError: On a third derivative, and in forward mode.
    """
    total: Tensor = _Sum.apply(logits.flatten(0, -2), targets.flatten(), ignore_index)
    return total


def _dtype(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


class _Sum(Function):
    """(logits, targets) -> total."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
        counted = targets != ignore_index
        index = targets.masked_fill(~counted, 0)[:, None]
        ctx.save_for_backward(logits, counted, index)
        rows = torch.log_softmax(logits, -1, dtype=_dtype(logits)).gather(-1, index)[:, 0]
        return -rows.masked_fill(~counted, 0).sum()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        logits, counted, index = ctx.saved_tensors
        return _Gradient.apply(logits, upstream, counted, index), None, None


class _Gradient(Function):
    """(logits, c) -> c m (p - y)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, upstream: Tensor, counted: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(logits, upstream, counted, index)
        p = torch.softmax(logits, -1, dtype=_dtype(logits))
        p.scatter_add_(-1, index, p.new_full((), -1.0).expand(index.shape))
        return p.mul_((upstream * counted)[:, None]).to(logits.dtype)

    @staticmethod
    def backward(ctx: Any, u: Tensor) -> tuple[Tensor | None, ...]:
        by_logits, by_upstream = _Second.apply(*ctx.saved_tensors, u)
        return by_logits, by_upstream, None, None


class _Second(Function):
    """(logits, c, U) -> the gradient of <c m (p - y), U> by the logits and by c."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, upstream: Tensor, counted: Tensor, index: Tensor, u: Tensor
    ) -> tuple[Tensor, Tensor]:
        p = torch.softmax(logits, -1, dtype=_dtype(logits))
        pulled = p * u
        mean = pulled.sum(-1, keepdim=True)
        by_upstream = ((mean - u.gather(-1, index)) * counted[:, None]).sum()
        pulled.addcmul_(p, mean, value=-1).mul_((upstream * counted)[:, None])
        return pulled.to(logits.dtype), by_upstream

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        raise NotImplementedError(
            "the third derivative of the summed cross-entropy is not implemented; use torch's cross_entropy for it"
        )
