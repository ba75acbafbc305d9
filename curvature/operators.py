"""The exact Hessian of a model's loss as an operator: products, never entries."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from torch import nn

from curvature.chain import Segments
from curvature.linear_operator import LinearOperator
from curvature.loss import Batch, Loss
from curvature.model_operator import Method, ModelOperator
from curvature.streaming import Streaming
from curvature.vectors import Vector
from curvature.whole_graph import BatchDerivatives, WholeGraph

__all__ = ["HessianOperator", "LinearOperator", "Method", "hvp"]


class HessianOperator(ModelOperator):
    """Exact Hessian of a model's loss in its parameters, H = d^2 L / d theta^2; see `ModelOperator` for L.

    Exact up to the rounding of the model's dtype; nothing is estimated. Cost of K columns at once: per batch one
    forward, one backward, and K second backwards; the columns share the graph of the first two.

    Args:
        model: A causal language model, or any module that `loss` can evaluate.
        batches: Batches as Hugging Face collators make them; kept on the model's device.
        loss: What is differentiated.
        params: See `ModelOperator`.
        method: "streamed": segment by segment, in the memory of one (`curvature.streamed`). "whole": reverse over
            reverse through the whole graph. "auto": streamed where the model and the loss decompose into a chain of
            segments, which an inspection of a few tokens finds out, otherwise whole.
        streaming: Settings of the streamed method; what it keeps between products makes further ones cheaper.
    """

    kind: ClassVar[str] = "hessian"

    @property
    def segments(self) -> Segments | None:
        """How the model is cut, given or found by inspection; None where products go through the whole graph."""
        return None if self._streamed is None else self._streamed.segments

    def _differentiate(self, number: int) -> BatchDerivatives:
        if self._streamed is not None:
            return self._streamed.derivatives(number, self.batches[number])
        return WholeGraph(self.model, self.loss, self.batches[number], self._parameters)


def hvp(
    model: nn.Module,
    batches: Iterable[Batch],
    v: Vector,
    *,
    loss: Loss | None = None,
    params: str | Iterable[str] | None = None,
    method: Method = "auto",
    streaming: Streaming | None = None,
) -> Any:
    """One exact Hessian-vector product H v; see `HessianOperator` for the arguments and errors.

    Returns:
        The product in the form of v.
    """
    streaming = streaming or Streaming(keep=False)
    return HessianOperator(model, batches, loss=loss, params=params, method=method, streaming=streaming) @ v
