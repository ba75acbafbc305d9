"""The linear map y = x W^T + b with a second derivative that makes no product more than it must."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from curvature.layers.unread import are_unread, placeholder

__all__ = ["linear"]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, *, transposed: bool = False) -> Tensor:
    """Y = x W^T + b, twice differentiable in reverse mode.

    Products of 2 * rows * in * out FLOP: forward 1, first backward 2 (1 where the parameters' gradients are unread),
    double backward 4.

    Args:
        x: [..., in].
        weight: [out, in], or [in, out] if `transposed` (Conv1D of transformers).
        bias: [out] or None.
        transposed: Whether the weight is stored input first.

    Returns:
        [..., out].

    Raises:
        NotImplementedError: On a third derivative.
    """
    y: Tensor = _Linear.apply(x.flatten(0, -2), weight, bias, transposed, are_unread())
    return y.view(*x.shape[:-1], -1)


class _Linear(Function):
    """(x, W, b) -> y."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool, unread: bool) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.set_materialize_grads(False)
        ctx.transposed, ctx.unread = transposed, unread
        return F.linear(x, weight.T if transposed else weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        if dy is None:
            return (None,) * 5
        x, weight, bias = ctx.saved_tensors
        needs = ctx.needs_input_grad[:3]
        unread = ctx.unread and torch.is_grad_enabled()  # create_graph: the backward pass that is differentiated
        found = _LinearBackward.apply(x, weight, bias, dy, ctx.transposed, unread, needs)
        return *found, None, None


class _LinearBackward(Function):
    """(x, W, b, dy) -> (dx, dW, db); b only for its shape."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        dy: Tensor,
        transposed: bool,
        unread: bool,
        needs: tuple[bool, ...],
    ) -> tuple[Tensor | None, ...]:
        ctx.save_for_backward(x, weight, dy)
        ctx.set_materialize_grads(False)
        ctx.transposed = transposed
        dx = dweight = dbias = None
        if needs[0]:
            dx = dy @ (weight.T if transposed else weight)
        if needs[1]:
            dweight = placeholder(weight) if unread else x.T @ dy if transposed else dy.T @ x
        if needs[2] and bias is not None:
            dbias = placeholder(bias) if unread else dy.sum(0)
        return dx, dweight, dbias

    @staticmethod
    def backward(
        ctx: Any, ux: Tensor | None, uweight: Tensor | None, ubias: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        x, weight, dy = ctx.saved_tensors
        needs_x, needs_weight, _, needs_dy = ctx.needs_input_grad[:4]
        gx, gweight, gdy = _LinearSecond.apply(
            x, weight, dy, ux, uweight, ubias, ctx.transposed, (needs_x, needs_weight, needs_dy)
        )
        return gx, gweight, None, gdy, None, None, None


class _LinearSecond(Function):
    """(x, W, dy, ux, uW, ub) -> gradients of <dx, ux> + <dW, uW> + <db, ub> by x, W and dy."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        dy: Tensor,
        ux: Tensor | None,
        uweight: Tensor | None,
        ubias: Tensor | None,
        transposed: bool,
        needs: tuple[bool, bool, bool],
    ) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        gx = gweight = gdy = None
        if needs[0] and uweight is not None:
            gx = dy @ (uweight.T if transposed else uweight)
        if needs[1] and ux is not None:
            gweight = ux.T @ dy if transposed else dy.T @ ux
        if needs[2]:
            gdy = _tangent(x, uweight, ubias, transposed)
            if ux is not None:
                matrix = weight if transposed else weight.T
                gdy = ux @ matrix if gdy is None else torch.addmm(gdy, ux, matrix)
        return gx, gweight, gdy

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        raise NotImplementedError("the third derivative of `linear` is not implemented; use torch's own for it")


def _tangent(x: Tensor, uweight: Tensor | None, ubias: Tensor | None, transposed: bool) -> Tensor | None:
    """X uW^T + ub, of what there is."""
    if uweight is not None:
        return F.linear(x, uweight.T if transposed else uweight, ubias)
    return None if ubias is None else ubias.expand(x.shape[0], -1)
