"""Products J^T Lambda J z of one batch through the whole graph, and the logits that they begin with.

J is the Jacobian of the logits and Lambda the curvature of the token losses in them (`curvature.token_curvature`).
`J z` comes from two backward passes (the pull-back J^T w is linear in w), `J^T` from a third, all exact and all through
one graph of the forward pass. The streamed form is in `curvature.streamed_gauss_newton`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from curvature.directions import pull
from curvature.loss import Batch
from curvature.precision import keep_double
from curvature.segments import ChainedLoss
from curvature.token_curvature import TokenCurvature

__all__ = ["HandedLogits", "WholeGaussNewton", "model_logits"]


def model_logits(model: nn.Module, loss: ChainedLoss, batch: Batch) -> Tensor:
    """Logits [B, N, vocabulary] of a batch; in float64 throughout for a float64 model."""
    with keep_double(model):
        output = model(**loss.model_inputs(model, batch))
    logits: Tensor = output if isinstance(output, Tensor) else output.logits
    return logits


class WholeGaussNewton:
    """J^T Lambda J / tokens of one batch: a `curvature.whole_graph.BatchDerivatives`.

    Cost: construction one forward and one backward pass; a product one backward through both and one first backward.
    Memory: the graph of both passes and whole logits.

    Args:
        model: The model, in evaluation mode.
        loss: Says what the model is given and which positions count.
        batch: One batch on the model's device.
        curvature: Lambda.
        parameters: The parameters to differentiate.

    Raises:
        NotImplementedError: If an operation of the model has no second derivative.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: ChainedLoss,
        batch: Batch,
        curvature: TokenCurvature,
        parameters: Sequence[nn.Parameter],
    ) -> None:
        self._parameters, self._curvature = list(parameters), curvature
        self.tokens = int((loss.targets(batch) != loss.ignore_index).sum())
        with torch.enable_grad():
            self._logits = model_logits(model, loss, batch)
            self._w = torch.zeros_like(self._logits, requires_grad=True)
            self._pulled = pull([self._logits], self._parameters, [self._w], create_graph=True)

    def products(
        self, directions: Sequence[Sequence[Tensor]], *, keep: bool = True
    ) -> Iterator[Sequence[Tensor | None]]:
        """See `BatchDerivatives.products`."""
        for k, direction in enumerate(directions):
            yield self.product(direction, keep=keep or k + 1 < len(directions))

    def product(self, direction: Sequence[Tensor], *, keep: bool = True) -> Sequence[Tensor | None]:
        """See `BatchDerivatives.product`."""
        [u] = pull(self._pulled, [self._w], direction, retain=True)
        if u is None:
            return [None] * len(self._parameters)
        cotangent = self._curvature.product(self._logits.detach(), u, 0).div_(self.tokens)
        return pull([self._logits], self._parameters, [cotangent], retain=keep)


class HandedLogits:
    """A loss that can show the logits which it is handed.

    A chain's head (`curvature.segments`) runs the model's end and hands the logits of a stretch to `token_sum`. Found
    with this loss, the chain is compared with the model as ever, and its head can be asked for the logits afterwards.

    Args:
        loss: The loss itself.
    """

    def __init__(self, loss: ChainedLoss) -> None:
        self._loss, self.ignore_index, self._asked = loss, loss.ignore_index, False

    def __call__(self, model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        """The loss itself."""
        return self._loss(model, batch)

    def targets(self, batch: Batch) -> Tensor:
        """The loss's own."""
        return self._loss.targets(batch)

    def model_inputs(self, model: nn.Module, batch: Batch) -> dict[str, Any]:
        """The loss's own."""
        return self._loss.model_inputs(model, batch)

    def token_sum(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The loss's own, or the logits where they are asked for."""
        return logits if self._asked else self._loss.token_sum(logits, targets)

    def asked(self, head: Callable[[Tensor, int, int], Tensor]) -> Callable[[Tensor, int, int], Tensor]:
        """The head that answers with logits in place of the loss."""

        def logits(x: Tensor, start: int, stop: int) -> Tensor:
            self._asked = True
            try:
                return head(x, start, stop)
            finally:
                self._asked = False

        return logits
