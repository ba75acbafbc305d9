"""Gradient descent inside a computation, which can itself be differentiated."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from curvature.whole_graph import named_operations

__all__ = ["descend"]


def descend(
    loss: Callable[[dict[str, Tensor]], Tensor],
    start: Mapping[str, Tensor],
    *,
    rates: float | Mapping[str, float | Tensor],
    steps: int = 1,
    create_graph: bool = True,
) -> dict[str, Tensor]:
    """Plain gradient descent whose end is a differentiable function of its start, its rates, and all that loss uses.

        x_{i+1} = x_i - rate * d loss(x_i) / d x_i

    Test-time training, learned initializations (MAML) and memory that is written by gradients are of this form: an
    outer loss of the end is differentiated back through the steps, which takes the second derivative of `loss`. With
    `create_graph=False` the gradients count as constants instead (the first-order approximation).

    Cost of the outer gradient: per step one double backward; memory: the graphs of all steps.

    Args:
        loss: A scalar from values by name. Sum over the examples where each has values of its own.
        start: The values at the start; they need not be leaves.
        rates: Step size, one for all or by name; a tensor that broadcasts against the value can be learned.
        steps: Number of steps, at least 0.
        create_graph: Whether the end keeps its dependence through the gradients.

    Returns:
        The values at the end.

    Raises:
        ValueError: If `steps` is negative, or a rate is missing.
        NotImplementedError: If an operation of `loss` has no second derivative and this shows in a step itself.
    """
    if steps < 0:
        raise ValueError(f"steps must be at least 0, got {steps}")
    if isinstance(rates, Mapping) and (missing := sorted(start.keys() - rates.keys())):
        raise ValueError(f"rates: none for {missing}; give one per value, or a single number")
    values = dict(start)
    for _ in range(steps):
        with torch.enable_grad(), named_operations():
            values = {name: x if x.requires_grad else x.detach().requires_grad_() for name, x in values.items()}
            found = torch.autograd.grad(
                loss(values), list(values.values()), create_graph=create_graph, allow_unused=True
            )
            moved = {}
            for (name, x), g in zip(values.items(), found, strict=True):
                rate = rates[name] if isinstance(rates, Mapping) else rates
                moved[name] = x if g is None else x - rate * g
            values = moved
    return values
