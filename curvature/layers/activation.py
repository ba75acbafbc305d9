"""Activations with first and second derivatives in one pass each."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from curvature.precision import one_pass, raised

__all__ = ["ACTIVATIONS", "Name", "activation", "derivatives"]

Name: TypeAlias = Literal["gelu_tanh", "gelu", "silu"]
ACTIVATIONS: tuple[Name, ...] = get_args(Name)

_ROOT_2_OVER_PI, _CUBIC = math.sqrt(2 / math.pi), 0.044715
_Three: TypeAlias = tuple[Tensor, Tensor, Tensor]


def activation(x: Tensor, name: Name) -> Tensor:
    """f(x) elementwise, twice differentiable in reverse mode.

    Half precision is computed in float32 and rounded once. On a GPU every derivative is one pass through memory.

    Args:
        x: Any shape, any floating dtype.
        name: "gelu_tanh": x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))); "gelu": x Phi(x); "silu": x sigmoid(x).

    Raises:
        NotImplementedError: On a third derivative.
    """
    y: Tensor = _Activation.apply(x, name)
    return y


def derivatives(x: Tensor, name: Name) -> _Three:
    """f, f' and f'' at x, in x's dtype."""
    return _FORMULAS[name](x)


def _gelu_tanh(x: Tensor) -> _Three:
    t = torch.tanh(_ROOT_2_OVER_PI * (x + _CUBIC * x**3))
    s = 1 - t * t  # t' = s w
    w = _ROOT_2_OVER_PI * (1 + 3 * _CUBIC * x * x)
    first = 0.5 * (1 + t) + 0.5 * x * s * w
    second = s * w + 0.5 * x * s * (6 * _CUBIC * _ROOT_2_OVER_PI * x - 2 * t * w * w)
    return 0.5 * x * (1 + t), first, second


def _gelu(x: Tensor) -> _Three:
    cdf = 0.5 * (1 + torch.erf(x * math.sqrt(0.5)))
    pdf = torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    return x * cdf, cdf + x * pdf, pdf * (2 - x * x)


def _silu(x: Tensor) -> _Three:
    s = torch.sigmoid(x)
    return x * s, s * (1 + x * (1 - s)), s * (1 - s) * (2 + x * (1 - 2 * s))


def _value(x: Tensor, name: Name) -> Tensor:
    if name == "silu":
        return F.silu(x)
    return F.gelu(x, approximate="tanh" if name == "gelu_tanh" else "none")


def _first(x: Tensor, dy: Tensor, name: Name) -> Tensor:
    if name == "silu":
        return torch.ops.aten.silu_backward(dy, x)  # type: ignore[no-any-return]
    approximate = "tanh" if name == "gelu_tanh" else "none"
    return torch.ops.aten.gelu_backward(dy, x, approximate=approximate)  # type: ignore[no-any-return]


_FORMULAS: dict[Name, Callable[[Tensor], _Three]] = {"gelu_tanh": _gelu_tanh, "gelu": _gelu, "silu": _silu}


class _Activation(Function):
    """x -> f(x)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: Name) -> Tensor:
        ctx.save_for_backward(x)
        ctx.name = name
        if one_pass(x):
            from curvature.layers import kernels

            return kernels.activation(x, name)
        return _value(x, name)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return _ActivationBackward.apply(*ctx.saved_tensors, dy, ctx.name), None


class _ActivationBackward(Function):
    """(x, dy) -> dy f'(x)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dy: Tensor, name: Name) -> Tensor:
        ctx.save_for_backward(x, dy)
        ctx.name = name
        if one_pass(x):
            from curvature.layers import kernels

            return kernels.activation_backward(x, dy, name)
        return _first(x, dy, name)

    @staticmethod
    def backward(ctx: Any, u: Tensor) -> tuple[Tensor | None, ...]:
        return *_ActivationSecond.apply(*ctx.saved_tensors, u, ctx.name), None


class _ActivationSecond(Function):
    """(x, dy, u) -> (u dy f''(x), u f'(x))."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dy: Tensor, u: Tensor, name: Name) -> tuple[Tensor, Tensor]:
        if one_pass(x):
            from curvature.layers import kernels

            return kernels.activation_second(x, dy, u, name)
        _, first, second = derivatives(raised(x), name)
        return (u * dy * second).to(x.dtype), (u * first).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        raise NotImplementedError("the third derivative of `activation` is not implemented; use torch's own for it")
