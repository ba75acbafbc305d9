"""Derivatives along a direction: a part of a model pushed forward along tangents of its inputs and parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn
from torch.func import functional_call

from curvature.directions import pull
from curvature.layers.substitutes import own_code

__all__ = ["ForwardMode", "Push", "reverse_mode"]


class Push(Protocol):
    """A way to compute f(inputs) together with its derivative along a direction."""

    def __call__(
        self,
        function: Callable[..., Tensor],
        inputs: Sequence[Tensor],
        along: Sequence[Tensor | None],
        parameters: Sequence[nn.Parameter],
        tangents: Sequence[Tensor | None],
    ) -> tuple[Tensor, Tensor | None]:
        """Push a direction through a function; exact.

        Args:
            function: Maps the inputs to one tensor; it may read any parameters of the model.
            inputs: Its arguments.
            along: The direction in each input, of the input's shape and dtype, or None where it is zero.
            parameters: Parameters that the function may read.
            tangents: The direction in each of them, or None where it is zero.

        Returns:
            The value and the derivative, without graphs; the derivative is None where it is zero.

        Raises:
            NotImplementedError: If an operation has no rule for this mode.
        """
        ...


class ForwardMode:
    """`Push` by forward-mode differentiation: one pass with values and tangents side by side, no graph.

    Args:
        model: The model whose parameters the functions read.
        parameters: Those that may have a tangent.
    """

    def __init__(self, model: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        wanted = set(parameters)
        self._run = _Run(model)
        self._names: Mapping[nn.Parameter, str] = {p: n for n, p in self._run.named_parameters() if p in wanted}

    def __call__(
        self,
        function: Callable[..., Tensor],
        inputs: Sequence[Tensor],
        along: Sequence[Tensor | None],
        parameters: Sequence[nn.Parameter],
        tangents: Sequence[Tensor | None],
    ) -> tuple[Tensor, Tensor | None]:
        """See `Push`."""
        # Fused layers exist for second derivatives, and have no rule for this mode.
        with torch.no_grad(), own_code(), forward_ad.dual_level():
            moved = [_dual(x, t) for x, t in zip(inputs, along, strict=True)]
            weights = {
                self._names[p]: _dual(p.detach(), t) for p, t in zip(parameters, tangents, strict=True) if t is not None
            }
            call = lambda: function(*moved)  # noqa: E731
            value = functional_call(self._run, weights, (call,)) if weights else call()
            primal, tangent = forward_ad.unpack_dual(value)
        return primal, tangent


def reverse_mode(
    function: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    along: Sequence[Tensor | None],
    parameters: Sequence[nn.Parameter],
    tangents: Sequence[Tensor | None],
) -> tuple[Tensor, Tensor | None]:
    """`Push` by two backward passes, for functions with an operation that forward mode does not know.

    The pull-back J^T w is linear in w, and its derivative by w along the direction is J times the direction.
    """
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_(t is not None) for x, t in zip(inputs, along, strict=True)]
        value = function(*leaves)
        w = torch.zeros_like(value, requires_grad=True)
        pulled = pull([value], [*leaves, *parameters], [w], create_graph=True)
        return value.detach(), pull(pulled, [w], [*along, *tangents])[0]


class _Run(nn.Module):
    """Runs any function with some of the model's parameters replaced, by way of `functional_call`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[[], Tensor]) -> Tensor:
        return function()


def _dual(x: Tensor, tangent: Tensor | None) -> Tensor:
    if tangent is None:
        return x
    dual: Tensor = forward_ad.make_dual(x, tangent)
    return dual
