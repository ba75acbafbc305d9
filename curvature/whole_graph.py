"""Second derivatives of one batch through the whole graph: reverse over reverse.

The first backward is run with `create_graph=True`, and its result g(theta) is differentiated once more:
`H z = d<g, z>/d theta`. Exact. The graph of the forward and of the first backward stays in memory for as long as this
object lives; each further direction then costs one second backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn

from curvature.loss import Batch, Loss

__all__ = ["BatchDerivatives", "WholeGraph", "batch_gradient", "mean_loss", "named_operations"]


class BatchDerivatives(Protocol):
    """What an operator needs from a way to differentiate: the second derivatives of one batch's mean loss.

    An operator makes one per batch, asks for products, and drops it. It runs with the model in evaluation mode and with
    only the selected parameters requiring a gradient.
    """

    tokens: int
    """Number of counted tokens; 0 where the batch has none, and then no product may be asked for."""

    def product(self, direction: Sequence[Tensor], *, keep: bool = True) -> Sequence[Tensor | None]:
        """Hessian of the batch's mean loss times one direction.

        Args:
            direction: One tensor per selected parameter, of its shape, in the vectors' dtype.
            keep: False promises that this is the last product, so that memory can be released on the way.

        Returns:
            One tensor per selected parameter, or None where the product is zero.
        """
        ...

    def products(
        self, directions: Sequence[Sequence[Tensor]], *, keep: bool = True
    ) -> Iterator[Sequence[Tensor | None]]:
        """Products with several directions, one after the other, or several at once where that saves work.

        Args:
            directions: The directions, each as in `product`.
            keep: False promises that these are the last products.

        Yields:
            The product with each direction, in order.
        """
        ...


class WholeGraph:
    """Reverse over reverse through one graph; see `BatchDerivatives`.

    Cost: construction one forward and one backward pass, each product one backward through both.

    Args:
        model: The model, in evaluation mode.
        loss: The loss.
        batch: One batch on the model's device.
        parameters: The parameters to differentiate.

    Raises:
        FloatingPointError: If the loss is not finite.
    """

    def __init__(self, model: nn.Module, loss: Loss, batch: Batch, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._gradients: list[tuple[int, Tensor]] = []
        with torch.enable_grad():
            mean, self.tokens = mean_loss(model, loss, batch)
            if mean is None or not mean.requires_grad:
                return
            gradients = torch.autograd.grad(mean, parameters, create_graph=True, allow_unused=True)
        # A gradient without a graph is constant in the parameters (a last bias under a linear loss, say): no curvature.
        self._gradients = [(i, g) for i, g in enumerate(gradients) if _has_graph(g)]

    def products(
        self, directions: Sequence[Sequence[Tensor]], *, keep: bool = True
    ) -> Iterator[Sequence[Tensor | None]]:
        """See `BatchDerivatives.products`."""
        for k, direction in enumerate(directions):
            yield self.product(direction, keep=keep or k + 1 < len(directions))

    def product(self, direction: Sequence[Tensor], *, keep: bool = True) -> Sequence[Tensor | None]:
        """See `BatchDerivatives.product`."""
        if not self._gradients:
            return [None] * len(self._parameters)
        return torch.autograd.grad(
            [g for _, g in self._gradients],
            self._parameters,
            [direction[i].to(g.dtype) for i, g in self._gradients],
            retain_graph=keep,
            allow_unused=True,
        )


@contextmanager
def named_operations() -> Iterator[None]:
    """Say what to do where autograd meets an operation without a second derivative.

    Raises:
        NotImplementedError: In place of autograd's own error.
    """
    try:
        yield
    except RuntimeError as error:
        if "derivative for" not in str(error) and "not differentiable twice" not in str(error):
            raise
        raise NotImplementedError(
            f"an operation of this model has no second derivative ({str(error).splitlines()[0]}); "
            "load it with attn_implementation='flashbob' or 'eager'"
        ) from error


def batch_gradient(
    model: nn.Module, loss: Loss, batch: Batch, parameters: Sequence[nn.Parameter]
) -> tuple[Sequence[Tensor | None], float, int]:
    """Gradient of one batch's mean loss.

    Returns:
        One tensor per parameter (None where it is zero), the mean loss, and the number of counted tokens.

    Raises:
        FloatingPointError: If the loss is not finite.
    """
    with torch.enable_grad():
        mean, tokens = mean_loss(model, loss, batch)
    if mean is None or not mean.requires_grad:
        return [None] * len(parameters), 0.0 if mean is None else float(mean), tokens
    return torch.autograd.grad(mean, parameters, allow_unused=True), float(mean.detach()), tokens


def _has_graph(gradient: Tensor | None) -> bool:
    return gradient is not None and gradient.requires_grad


def mean_loss(model: nn.Module, loss: Loss, batch: Batch) -> tuple[Tensor | None, int]:
    """A batch's mean loss (None without counted tokens) and its number of counted tokens.

    Derivatives are taken of the batch's mean and not of its sum, whose gradients would leave the range of fp16.
    """
    total, tokens = loss(model, batch)
    if tokens == 0:
        return None, 0
    if not bool(torch.isfinite(total.detach())):
        raise FloatingPointError(f"the loss of a batch is {float(total.detach())}; check the weights and the dtype")
    return total / tokens, tokens
