"""Layer norm and RMS norm with first and second derivatives in one pass each.

Per row x of D entries, mean m (zero for RMS norm), r = (mean((x - m)^2) + eps)^(-1/2), xhat = r (x - m):

    y = w xhat + b

The derivative of xhat is r J with J(v) = v - [mean v] - xhat mean(v xhat), symmetric ([.] for layer norm only). Hence

    dx = r J(w dy),   dw = sum over rows dy xhat,   db = sum over rows dy

and the gradient of <dx, ux> + <dw, uw> + <db, ub>, with v = w dy and B = r (<v, ux> - [D mean v mean ux] - D p q),
p = mean(v xhat), q = mean(ux xhat):

    by dy:  w r J(ux) + uw xhat + ub
    by w :  sum over rows dy r J(ux)
    by x :  r J(uw dy) - r B xhat / D - r^2 (q J(v) + p J(ux))
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from curvature.layers.unread import are_unread, placeholder
from curvature.precision import one_pass, raised

__all__ = ["MAX_WIDTH", "norm"]

MAX_WIDTH = 8192
"""Widest rows that the GPU kernels hold in registers."""


def norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, centered: bool, rounded: bool = False
) -> Tensor:
    """Layer norm (`centered`) or RMS norm over the last dimension, twice differentiable in reverse mode.

    Half precision is computed in float32. On a GPU every derivative is one pass through memory.

    Args:
        x: [..., D]; on a GPU D is at most `MAX_WIDTH`.
        weight: [D].
        bias: [D] or None.
        eps: Added to the mean square.
        centered: Whether the mean is subtracted.
        rounded: Whether xhat is rounded to x's dtype before it is weighed, as many models do; the derivatives are those
            of the function without that step.

    Raises:
        NotImplementedError: On a third derivative.
    """
    y: Tensor = _Norm.apply(x.reshape(-1, x.shape[-1]), weight, bias, eps, centered, rounded, are_unread())
    return y.view(x.shape)


class _Rows:
    """xhat, r and J of the rows of x."""

    def __init__(self, x: Tensor, eps: float, centered: bool) -> None:
        self._centered = centered
        x = x - x.mean(-1, keepdim=True) if centered else x
        self.r = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
        self.xhat = x * self.r

    def j(self, v: Tensor) -> Tensor:
        w = v - self.xhat * (v * self.xhat).mean(-1, keepdim=True)
        return w - v.mean(-1, keepdim=True) if self._centered else w


class _Norm(Function):
    """(x [n, D], w, b) -> y."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        centered: bool,
        rounded: bool,
        unread: bool,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.settings = eps, centered, unread
        if one_pass(x):
            from curvature.layers import kernels

            return kernels.norm(x, weight, bias, eps, centered, rounded)
        if centered and not rounded:
            return F.layer_norm(x, weight.shape, weight, bias, eps)
        xhat = _Rows(raised(x), eps, centered).xhat
        y = (xhat.to(x.dtype).to(xhat.dtype) if rounded else xhat) * weight
        return (y if bias is None else y + bias).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors
        eps, centered, unread = ctx.settings
        unread = unread and torch.is_grad_enabled()  # create_graph: the backward pass that is differentiated
        found = _NormBackward.apply(x, weight, bias, dy, eps, centered, unread, ctx.needs_input_grad[:3])
        return *found, None, None, None, None


class _NormBackward(Function):
    """(x, w, b, dy) -> (dx, dw, db); b only for its shape."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        dy: Tensor,
        eps: float,
        centered: bool,
        unread: bool,
        needs: tuple[bool, ...],
    ) -> tuple[Tensor | None, ...]:
        ctx.save_for_backward(x, weight, dy)
        ctx.set_materialize_grads(False)
        ctx.settings = eps, centered
        sums = (needs[1] or needs[2]) and not unread
        dx, dweight, dbias = _first(x, weight, dy, eps, centered, sums)
        return (
            dx if needs[0] else None,
            (placeholder(weight) if dweight is None else dweight.to(weight.dtype)) if needs[1] else None,
            (placeholder(bias) if dbias is None else dbias.to(bias.dtype)) if bias is not None and needs[2] else None,
        )

    @staticmethod
    def backward(
        ctx: Any, ux: Tensor | None, uweight: Tensor | None, ubias: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        x, weight, dy = ctx.saved_tensors
        gx, gweight, gdy = _NormSecond.apply(x, weight, dy, ux, uweight, ubias, *ctx.settings)
        needs = ctx.needs_input_grad
        return gx if needs[0] else None, gweight if needs[1] else None, None, gdy if needs[3] else None, *(None,) * 4


def _first(
    x: Tensor, weight: Tensor, dy: Tensor, eps: float, centered: bool, sums: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The gradient by x and, if `sums`, those by w and b."""
    if one_pass(x):
        from curvature.layers import kernels

        return kernels.norm_backward(x, weight, dy, eps, centered, sums)
    rows, up = _Rows(raised(x), eps, centered), raised(dy)
    dx = (rows.r * rows.j(up * weight)).to(x.dtype)
    return (dx, (up * rows.xhat).sum(0), up.sum(0)) if sums else (dx, None, None)


class _NormSecond(Function):
    """(x, w, dy, ux, uw, ub) -> gradients of <dx, ux> + <dw, uw> + <db, ub> by x, w and dy."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        dy: Tensor,
        ux: Tensor | None,
        uweight: Tensor | None,
        ubias: Tensor | None,
        eps: float,
        centered: bool,
    ) -> tuple[Tensor | None, ...]:
        if one_pass(x):
            from curvature.layers import kernels

            return kernels.norm_second(x, weight, dy, ux, uweight, ubias, eps, centered)
        rows, up, d = _Rows(raised(x), eps, centered), raised(dy), x.shape[-1]
        gx, gdy = torch.zeros_like(up), torch.zeros_like(up)
        gweight = None
        if ux is not None:
            u, v = raised(ux), up * weight
            p, q = ((t * rows.xhat).mean(-1, keepdim=True) for t in (v, u))
            moved = rows.r * rows.j(u)
            both = (v * u).sum(-1, keepdim=True) - d * p * q
            if centered:
                both = both - d * v.mean(-1, keepdim=True) * u.mean(-1, keepdim=True)
            gx -= rows.r.square() * (both * rows.xhat / d + q * rows.j(v)) + rows.r * p * moved
            gdy += weight * moved
            gweight = (up * moved).sum(0).to(weight.dtype)
        if uweight is not None:
            gx += rows.r * rows.j(up * uweight)
            gdy += rows.xhat * uweight
        if ubias is not None:
            gdy += ubias
        return gx.to(x.dtype), gweight, gdy.to(dy.dtype)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        raise NotImplementedError("the third derivative of `norm` is not implemented; use torch's own for it")
