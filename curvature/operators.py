"""Curvature matrices of a model's loss as linear operators: products, never entries."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator as ScipyLinearOperator
from torch import Tensor, nn
from transformers import PreTrainedModel

from curvature.layer_parts import SegmentationError
from curvature.loss import Batch, CausalLMLoss, Loss
from curvature.probes import normal
from curvature.streaming import StreamedBatches, Streaming
from curvature.vectors import ParameterSpace, Vector, inner, norm, select_parameters
from curvature.whole_graph import BatchDerivatives, WholeGraph, batch_gradient

__all__ = ["HessianOperator", "LinearOperator", "Method", "hvp"]

Method: TypeAlias = Literal["auto", "streamed", "whole"]


class LinearOperator(ABC):
    """A real symmetric matrix that is known by its products with vectors.

    Args:
        space: The space that the vectors live in; its blocks name the diagonal blocks of the matrix.
    """

    def __init__(self, space: ParameterSpace) -> None:
        self.space = space

    @property
    def shape(self) -> tuple[int, int]:
        """(P, P) for P parameters."""
        return (self.space.size, self.space.size)

    @property
    def dtype(self) -> torch.dtype:
        """The vectors' dtype: float64 for float64 models, float32 for all others."""
        return self.space.dtype

    @property
    def device(self) -> torch.device:
        """Where vectors live."""
        return self.space.device

    @abstractmethod
    def _apply(self, rows: Tensor) -> Tensor:
        """The products with each row of a contiguous [K, P] tensor, as a new [K, P] tensor."""

    def __matmul__(self, v: Any) -> Any:
        """The product with a vector, in the vector's own form.

        Args:
            v: A flat tensor [P], columns [P, K], a list of tensors, or {name: tensor}; see `curvature.vectors.Vector`.

        Returns:
            The product in the same form, in the operator's dtype.

        Raises:
            TypeError: If v is none of these forms or not real floating point.
            ValueError: If its shape, names or device do not fit.
            FloatingPointError: If the product is not finite; the message names the first such parameter.
        """
        rows, restore = self.space.rows(v)
        product = self._apply(rows)
        self._check_finite(product)
        return restore(product)

    def _check_finite(self, rows: Tensor) -> None:
        if bool(torch.isfinite(rows).all()):
            return
        for row in rows:
            for name, piece in self.space.named(row).items():
                if not bool(torch.isfinite(piece).all()):
                    raise FloatingPointError(
                        f"the product is not finite, first in parameter {name!r}; check the direction, the weights and "
                        "the dtype (bfloat16 and float32 have the range that float16 lacks)"
                    )

    def to_scipy(self) -> ScipyLinearOperator:
        """This operator for scipy: float64 arrays in and out, computed in the operator's own dtype and device."""

        def product(array: np.ndarray[Any, np.dtype[Any]]) -> np.ndarray[Any, np.dtype[np.float64]]:
            v = torch.as_tensor(np.ascontiguousarray(array, dtype=np.float64)).to(self.device, self.dtype)
            result: Tensor = self @ v
            return result.cpu().double().numpy()

        def vector_product(array: np.ndarray[Any, np.dtype[Any]]) -> np.ndarray[Any, np.dtype[np.float64]]:
            return product(array.reshape(-1))

        return ScipyLinearOperator(
            shape=self.shape,
            matvec=vector_product,
            rmatvec=vector_product,
            matmat=product,
            rmatmat=product,
            dtype=np.float64,
        )

    def symmetry_error(self, seed: int = 0) -> float:
        """How far the operator is from symmetric, on one random pair: sqrt(P) |u.Hv - v.Hu| / (|u| |Hv|).

        Random u and e have |u.e| near |u| |e| / sqrt(P), so with that factor the figure reads as the relative error of
        a product, whatever the number of parameters: of the order of the rounding of the model's dtype where the
        product is exact. A wrong second derivative usually breaks the symmetry, which no check of repeatability sees.
        Cost: two products.

        Args:
            seed: Seed of the pair of normal vectors.

        Returns:
            The error, or 0 where Hv is zero.
        """
        u, v = (normal(self.space, seed=seed, index=index) for index in range(2))
        hu, hv = (self @ torch.stack([u, v], dim=1)).T
        scale = norm(u) * norm(hv) / self.space.size**0.5
        return abs(float(inner(u, hv) - inner(v, hu))) / scale if scale else 0.0


class HessianOperator(LinearOperator):
    """Exact Hessian of a model's loss in its parameters.

        H = d^2 L / d theta^2,   L = sum_b total_b / sum_b tokens_b

    with (total_b, tokens_b) what `loss` gives for batch b: unequal and padded batches count token by token. Tied
    parameters count once. Products are exact up to the rounding of the model's dtype; nothing is estimated.

    Dropout is off: each product runs the model in evaluation mode and then restores every module's own mode. A model
    that is handed over in training mode with an active dropout is announced by a warning.

    Products are computed in the parameters' dtype and accumulated over batches in the vectors' dtype (float64 for
    float64 models, otherwise float32). Cost of K columns at once: per batch one forward, one backward, and K second
    backwards; the columns share the graph of the first two.

    Args:
        model: A causal language model, or any module that `loss` can evaluate.
        batches: Batches as Hugging Face collators make them; kept on the model's device.
        loss: What is differentiated.
        params: None (all parameters that require a gradient), a regular expression, or a list of names; see
            `curvature.vectors.select_parameters`. The Hessian is restricted to them: its diagonal block.
        method: "streamed": segment by segment, in the memory of one (`curvature.streamed`). "whole": reverse over
            reverse through the whole graph. "auto": streamed where the model and the loss decompose into a chain of
            segments, which an inspection of a few tokens finds out, otherwise whole.
        streaming: Settings of the streamed method; what it keeps between products makes further ones cheaper.

    Attributes:
        method: The method in use, "streamed" or "whole".
        method_reason: Why "auto" has not chosen the streamed method, or None.

    Raises:
        ValueError: If nothing is selected, a weight is not finite, there is no batch, a token id lies outside the
            vocabulary, `method` is unknown, or it is "streamed" and the model or loss does not decompose.
        NotImplementedError: If the parameters lie on several devices.
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
        if method not in get_args(Method):
            raise ValueError(f"method must be one of {', '.join(get_args(Method))}, got {method!r}")
        parameters = select_parameters(model, params)
        super().__init__(ParameterSpace.of(parameters))
        _check_weights(model)
        self.model = model
        self.loss: Loss = CausalLMLoss() if loss is None else loss
        self.batches = _check_batches(batches, model, self.device)
        self._parameters = list(parameters.values())
        if _has_active_dropout(model):
            warnings.warn(
                "the model is in training mode with active dropout; products are computed in evaluation mode, dropout "
                "off (call model.eval() to say so yourself)",
                stacklevel=2,
            )
        self._streamed: StreamedBatches | None = None
        self.method_reason: str | None = None
        if method != "whole":
            self._inspect(streaming or Streaming(), required=method == "streamed")
        self.method: Literal["streamed", "whole"] = "whole" if self._streamed is None else "streamed"

    def _inspect(self, streaming: Streaming, *, required: bool) -> None:
        longest = max(self.batches, key=lambda batch: getattr(batch.get("input_ids"), "shape", (0,))[-1])
        try:
            with _evaluation(self.model, self._parameters):
                self._streamed = StreamedBatches(self.model, self.loss, self._parameters, longest, streaming)
        except SegmentationError as error:
            if required:
                raise SegmentationError(f"method='streamed' does not apply: {error}; use method='whole'") from error
            self.method_reason = str(error)

    def _differentiate(self, number: int) -> BatchDerivatives:
        if self._streamed is not None:
            return self._streamed.derivatives(number, self.batches[number])
        return WholeGraph(self.model, self.loss, self.batches[number], self._parameters)

    def release(self) -> None:
        """Give back the memory of what the streamed method keeps between products; it comes back as it is needed."""
        if self._streamed is not None:
            self._streamed.release()

    def _apply(self, rows: Tensor) -> Tensor:
        result, total = torch.zeros_like(rows), 0
        with _evaluation(self.model, self._parameters):
            for number in range(len(self.batches)):
                derivatives = self._differentiate(number)
                if derivatives.tokens == 0:
                    continue
                total += derivatives.tokens
                products = derivatives.products([self.space.split(row) for row in rows], keep=False)
                for accumulated, pieces in zip(result, products, strict=True):
                    _accumulate(self.space.split(accumulated), pieces, derivatives.tokens)
                del derivatives  # before the next batch's graph is built
        return result.div_(_counted(total))

    def gradient(self) -> Tensor:
        """Gradient dL/dtheta as a flat vector [P]. Cost: one forward and one backward per batch."""
        return self._loss_and_gradient()[1]

    def loss_value(self) -> float:
        """The loss L: the mean over all counted tokens of all batches. Cost: one forward per batch."""
        if self._streamed is not None:
            return self._loss_and_gradient()[0]
        total, tokens = 0.0, 0
        with torch.no_grad(), _evaluation(self.model, self._parameters):
            for batch in self.batches:
                batch_total, batch_tokens = self.loss(self.model, batch)
                total, tokens = total + float(batch_total), tokens + batch_tokens
        return total / _counted(tokens)

    def _loss_and_gradient(self) -> tuple[float, Tensor]:
        result = torch.zeros(self.space.size, dtype=self.dtype, device=self.device)
        loss, total = 0.0, 0
        with _evaluation(self.model, self._parameters):
            for number, batch in enumerate(self.batches):
                if self._streamed is None:
                    pieces, mean, tokens = batch_gradient(self.model, self.loss, batch, self._parameters)
                else:
                    pieces, mean, tokens = self._streamed.gradient(number, batch)
                _accumulate(self.space.split(result), pieces, tokens)
                loss, total = loss + mean * tokens, total + tokens
        result.div_(_counted(total))
        self._check_finite(result.reshape(1, -1))
        return loss / total, result


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


def _accumulate(into: Sequence[Tensor], pieces: Sequence[Tensor | None], weight: int) -> None:
    for target, piece in zip(into, pieces, strict=True):
        if piece is not None:
            target.add_(piece, alpha=weight)


def _counted(tokens: int) -> int:
    if tokens == 0:
        raise ValueError(
            "batches: no token is counted (every label is ignored or padding, or sequences hold a single token); "
            "the loss is a mean over counted tokens"
        )
    return tokens


@contextmanager
def _evaluation(model: nn.Module, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Evaluation mode, with only these parameters requiring a gradient; both are restored at the end.

    Autograd then records nothing ahead of the first selected parameter, and no gradient of a parameter that is not
    asked for. An embedding's `padding_idx` is off meanwhile: PyTorch drops the gradient of that row, although the loss
    depends on it wherever the token is used as a token.
    """
    modes = [(module, module.training) for module in model.modules()]
    paddings = [(m, m.padding_idx) for m in model.modules() if isinstance(m, nn.Embedding)]
    others = {p for p in model.parameters() if p.requires_grad} - set(parameters)
    try:
        model.eval()
        for embedding, _ in paddings:
            embedding.padding_idx = None
        for parameter in others:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in others:
            parameter.requires_grad_(True)
        for embedding, padding_idx in paddings:
            embedding.padding_idx = padding_idx
        for module, training in modes:
            module.training = training


def _has_active_dropout(model: nn.Module) -> bool:
    def rate(module: nn.Module) -> float:
        own = module.p if isinstance(module, nn.modules.dropout._DropoutNd) else 0.0
        return max(float(own), float(getattr(module, "attention_dropout", 0.0) or 0.0))

    return any(module.training and rate(module) > 0 for module in model.modules())


def _check_weights(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            raise ValueError(f"model: parameter {name!r} holds NaN or infinite weights; no derivative is defined there")


def _check_batches(batches: Iterable[Batch], model: nn.Module, device: torch.device) -> list[dict[str, Any]]:
    if isinstance(batches, Mapping):
        raise TypeError("batches must be a list of batches, got a single one; pass [batch]")
    checked = [
        {key: value.to(device) if isinstance(value, Tensor) else value for key, value in batch.items()}
        for batch in batches
    ]
    if not checked:
        raise ValueError("batches: there is none; the loss is a mean over at least one counted token")
    embedding = model.get_input_embeddings() if isinstance(model, PreTrainedModel) else None
    if isinstance(embedding, nn.Embedding):
        for number, batch in enumerate(checked):
            _check_token_ids(batch.get("input_ids"), embedding.num_embeddings, number)
    return checked


def _check_token_ids(ids: object, vocabulary: int, number: int) -> None:
    """Look at the ids before a GPU does, whose answer to a wrong one is an error that ends the process."""
    if isinstance(ids, Tensor) and ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
        raise ValueError(
            f"batches[{number}]: token ids reach from {int(ids.min())} to {int(ids.max())}, but the model's "
            f"vocabulary has {vocabulary} entries; is this the model's own tokenizer?"
        )
