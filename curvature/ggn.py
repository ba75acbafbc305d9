"""Gauss-Newton matrices: J^T Lambda J with the Jacobian J of the logits, over batches."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Iterable
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from curvature.gauss_newton import HandedLogits, WholeGaussNewton
from curvature.layer_parts import SegmentationError
from curvature.loss import Batch, CausalLMLoss, Loss
from curvature.model_operator import Method, ModelOperator, inspect
from curvature.precision import roundoff
from curvature.probes import rademacher
from curvature.segments import ChainedLoss
from curvature.storage import Allowance, spare_bytes
from curvature.streamed_gauss_newton import StreamedGaussNewton
from curvature.streaming import StreamedBatches, Streaming
from curvature.tangents import ForwardMode, Push, reverse_mode
from curvature.token_curvature import LossCurvature, TokenCurvature
from curvature.vectors import norm
from curvature.whole_graph import BatchDerivatives

__all__ = ["GGNOperator", "OutputCurvatureOperator"]

_PROBE_TOKENS = 12


class OutputCurvatureOperator(ModelOperator):
    """1 / tokens * sum_t J_t^T Lambda_t J_t over the counted tokens t: curvature that enters through the logits only.

    J_t = d logits_t / d theta; subclasses say what Lambda_t is. Weights, batches and tied parameters as in
    `ModelOperator`. Exact for the given Lambda up to the rounding of the model's dtype.

    Cost of a product: streamed, one forward pass with tangents, one forward and one backward pass, and one activation
    [B, N, width] per segment; the logits exist in stretches of tokens only. Whole: a graph of two passes, and whole
    logits.

    Args:
        model: A causal language model.
        batches: Batches as Hugging Face collators make them.
        loss: A loss of the logits, token by token (`curvature.segments.ChainedLoss`); None: `CausalLMLoss()`.
        params: See `ModelOperator`.
        method: "streamed", "whole", or "auto": streamed where the model decomposes into a chain of segments.
        streaming: Settings of the streamed method. Hand-written segments are not supported, since their head answers
            with the loss. `keep` has no effect: nothing is kept between products.

    Attributes:
        forward_mode_reason: Why the streamed method does not push directions forward by forward-mode differentiation
            but by two backward passes (an operation without a forward rule), or None.

    Raises:
        TypeError: If the loss does not separate the logits from what is made of them.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Iterable[Batch],
        *,
        loss: Loss | None = None,
        params: str | Iterable[str] | None = None,
        method: Method = "auto",
        streaming: Streaming | None = None,
    ) -> None:
        loss = CausalLMLoss() if loss is None else loss
        if not isinstance(loss, ChainedLoss):
            raise TypeError(
                f"loss must be a function of the logits, token by token (targets, token_sum, model_inputs; see "
                f"curvature.segments.ChainedLoss), got {type(loss).__name__}; the Hessian takes any loss"
            )
        self._handed = HandedLogits(loss)
        self.forward_mode_reason: str | None = None
        self._push: Push = reverse_mode
        super().__init__(model, batches, loss=loss, params=params, method=method, streaming=streaming)

    @abstractmethod
    def _token_curvature(self, number: int) -> TokenCurvature:
        """Lambda of batch number `number`."""

    def _inspect(self, batch: Batch) -> StreamedBatches:
        if self.streaming.segments is not None:
            raise SegmentationError("the head of hand-written segments answers with the loss, and not with the logits")
        find = partial(inspect, self.model, self._handed, self._parameters)
        self._segments = find(batch)
        self._choose_push(batch)
        settings = dataclasses.replace(self.streaming, keep=False)
        return StreamedBatches(self.model, self._parameters, settings, find, self._segments)

    def _choose_push(self, batch: Batch) -> None:
        """Forward mode, if it gives the product of two backward passes on a few tokens; otherwise the latter."""
        ids = batch["input_ids"][:1, :_PROBE_TOKENS]
        curvature = LossCurvature(self._handed.token_sum, self._handed.targets({"input_ids": ids}))
        direction = self.space.split(rademacher(self.space, seed=0, index=0))

        def product(push: Push) -> Tensor:
            found = self._stream({"input_ids": ids}, curvature, push).product(direction)
            pieces = [torch.zeros_like(d) if f is None else f for f, d in zip(found, direction, strict=True)]
            return self.space.flatten(pieces)

        expected = product(reverse_mode)
        forward = ForwardMode(self.model, self._parameters)
        try:
            difference = norm(product(forward) - expected)
        except NotImplementedError as error:
            self.forward_mode_reason = " ".join(str(error).split())
            return
        eps = roundoff(self._parameters)
        if not difference <= eps**0.5 * norm(expected):
            self.forward_mode_reason = f"it is off by {difference / norm(expected):.1e} on {ids.shape[1]} tokens"
            return
        self._push = forward

    def _differentiate(self, number: int) -> BatchDerivatives:
        batch, curvature = self.batches[number], self._token_curvature(number)
        if self._streamed is None:
            return WholeGaussNewton(self.model, self._handed, batch, curvature, self._parameters)
        segments = self._streamed.current(batch)
        if segments is not self._segments:
            self._segments, self._push, self.forward_mode_reason = segments, reverse_mode, None
            self._choose_push(batch)
        return self._stream(batch, curvature, self._push)

    def _stream(self, batch: Batch, curvature: TokenCurvature, push: Push) -> StreamedGaussNewton:
        chain, budget = self._segments(batch), self.streaming.reuse_bytes
        return StreamedGaussNewton(
            dataclasses.replace(chain, head=self._handed.asked(chain.head)),
            curvature,
            self._parameters,
            push,
            stretches=self.streaming.stretches,
            allowance=Allowance(spare_bytes(self.device) // 3 if budget is None else budget),
            offload=self.streaming.offload,
        )


class GGNOperator(OutputCurvatureOperator):
    """Generalised Gauss-Newton matrix of the loss.

        G = 1 / tokens * sum_t J_t^T (d^2 l_t / d logits^2) J_t

    For the cross-entropy the inner matrix is diag(p) - p p^T, with p the model's probabilities: G is positive
    semi-definite, it does not depend on the labels, and it equals the Fisher information. It is the Hessian less
    sum_t (dl_t / dlogits) . d^2 logits_t / dtheta^2. See `OutputCurvatureOperator` for arguments, cost and errors.

    Source: Schraudolph, Fast curvature matrix-vector products for second-order gradient descent (2002).
    """

    kind: ClassVar[str] = "ggn"

    def _token_curvature(self, number: int) -> TokenCurvature:
        return LossCurvature(self._handed.token_sum, self._handed.targets(self.batches[number]))
