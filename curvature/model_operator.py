"""Curvature matrices of a model's loss over batches: what the Hessian and its approximations have in common."""

from __future__ import annotations

import copy
import warnings
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Literal, Self, TypeAlias, get_args

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from curvature.chain import Segments
from curvature.layer_parts import SegmentationError
from curvature.linear_operator import LinearOperator
from curvature.loss import Batch, CausalLMLoss, Loss, count_targets
from curvature.segments import find_segments
from curvature.streaming import StreamedBatches, Streaming
from curvature.vectors import ParameterSpace, select_parameters
from curvature.whole_graph import BatchDerivatives, batch_gradient, mean_loss, named_operations

__all__ = ["Method", "ModelOperator", "evaluation", "inspect"]

Method: TypeAlias = Literal["auto", "streamed", "whole"]

_SMALL = 1 << 20
"""Entries of the largest parameters whose gradients are compared although they are not asked for."""


class ModelOperator(LinearOperator):
    """A curvature matrix of a model's loss over batches, restricted to selected parameters.

        L = sum_b total_b / sum_b tokens_b

    with (total_b, tokens_b) what `loss` gives for batch b: unequal and padded batches count token by token, in the
    loss, its gradient and every product. Tied parameters count once.

    Dropout is off: each product runs the model in evaluation mode and then restores every module's own mode. A model
    that is handed over in training mode with an active dropout is announced by a warning.

    Products are computed in the parameters' dtype and accumulated over batches in the vectors' dtype (float64 for
    float64 models, otherwise float32).

    Args:
        model: A causal language model, or any module that `loss` can evaluate.
        batches: Batches as Hugging Face collators make them; kept on the model's device.
        loss: The loss; None: `CausalLMLoss()`.
        params: None (all parameters that require a gradient), a regular expression, or a list of names; see
            `curvature.vectors.select_parameters`. The matrix is restricted to them: its diagonal block.
        method: "streamed", "whole" or "auto".
        streaming: Settings of the streamed method.

    Attributes:
        kind: What the matrix is, in one word.
        method: The method in use, "streamed" or "whole".
        method_reason: Why "auto" has not chosen the streamed method, or None.

    Raises:
        ValueError: If nothing is selected, a weight is not finite, there is no batch or one without tokens, a token id
            or a label that counts lies outside the vocabulary, `method` is unknown, or it is "streamed" and the model
            or loss does not decompose.
        TypeError: If `batches` is not a list of dicts.
        NotImplementedError: If the parameters lie on several devices; from a product, if an operation of the model has
            no second derivative, such as PyTorch's own fused attention.
    """

    kind: ClassVar[str]

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
        self.batches = _check_batches(batches, model, self.loss, self.device)
        self.streaming = streaming or Streaming()
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
            self._try_streaming(required=method == "streamed")
        self.method: Literal["streamed", "whole"] = "whole" if self._streamed is None else "streamed"

    def _try_streaming(self, *, required: bool) -> None:
        longest = max(self.batches, key=lambda batch: getattr(batch.get("input_ids"), "shape", (0,))[-1])
        try:
            with evaluation(self.model, self._parameters):
                self._streamed = self._inspect(longest)
        except SegmentationError as error:
            if required:
                raise SegmentationError(f"method='streamed' does not apply: {error}; use method='whole'") from error
            self.method_reason = str(error)

    def _inspect(self, batch: Batch) -> StreamedBatches:
        """The streamed derivatives of the loss; a model that does not decompose raises SegmentationError."""
        given = self.streaming.segments
        find = partial(inspect, self.model, self.loss, self._parameters) if given is None else lambda _: given
        return StreamedBatches(self.model, self._parameters, self.streaming, find, find(batch))

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters that are differentiated, in the order of the space's blocks."""
        return list(self._parameters)

    @abstractmethod
    def _differentiate(self, number: int) -> BatchDerivatives:
        """The products of batch number `number`."""

    def restricted(self, names: Iterable[str]) -> Self:
        """The same matrix restricted to some of its parameters: a diagonal block, with products of its own.

        Such a product is cheaper than one of the whole matrix, since nothing ahead of the first of these parameters is
        differentiated.

        Args:
            names: Names of parameters of this operator.

        Raises:
            TypeError: If `names` is a single string.
            ValueError: If a name is not one of this operator's, or there is none.
        """
        if isinstance(names, str):
            raise TypeError(f"names must be a list of names, got the string {names!r}; pass [{names!r}]")
        wanted, own = set(names), dict(zip(self.space.names, self._parameters, strict=True))
        if unknown := sorted(wanted - set(own)):
            raise ValueError(f"names: {unknown[:3]} are not among the operator's {len(own)} parameters")
        if not wanted:
            raise ValueError("names: there is none")
        found = copy.copy(self)
        chosen = {name: parameter for name, parameter in own.items() if name in wanted}
        found.space, found._parameters = ParameterSpace.of(chosen), list(chosen.values())
        found.streaming = replace(self.streaming, recordings=None)
        if self._streamed is not None:
            found._streamed = self._streamed.of(found._parameters)
        return found

    def release(self) -> None:
        """Give back the memory of what the streamed method keeps between products; it comes back as it is needed."""
        if self._streamed is not None:
            self._streamed.release()

    def _apply(self, rows: Tensor) -> Tensor:
        result, total = torch.zeros_like(rows), 0
        with evaluation(self.model, self._parameters):
            for number, batch in enumerate(self.batches):
                with _located(self.model, self.loss, batch, number), named_operations():
                    derivatives = self._differentiate(number)
                    if derivatives.tokens == 0:
                        continue
                    total += derivatives.tokens
                    products = derivatives.products([self.space.split(row) for row in rows], keep=False)
                    for accumulated, pieces in zip(result, products, strict=True):
                        _accumulate(self.space.split(accumulated), pieces, derivatives.tokens)
                    del derivatives, products  # before the next batch's graph is built
        return result.div_(_counted(total))

    def gradient(self) -> Tensor:
        """Gradient dL/dtheta as a flat vector [P].

        Cost: one forward and one backward per batch; streamed, a second forward, and memory of one segment's graph.
        """
        result, total = torch.zeros(self.space.size, dtype=self.dtype, device=self.device), 0
        with evaluation(self.model, self._parameters):
            for number, batch in enumerate(self.batches):
                with _located(self.model, self.loss, batch, number):
                    if self._streamed is None:
                        pieces, _, tokens = batch_gradient(self.model, self.loss, batch, self._parameters)
                    else:
                        pieces, _, tokens = self._streamed.gradient(number, batch)
                _accumulate(self.space.split(result), pieces, tokens)
                total += tokens
        result.div_(_counted(total))
        self._check_finite(result.reshape(1, -1))
        return result

    def loss_value(self) -> float:
        """The loss L: the mean over all counted tokens of all batches.

        Cost: one forward per batch; streamed, what products start with, which is kept for them.
        """
        total, tokens = 0.0, 0
        with evaluation(self.model, self._parameters):
            for number, batch in enumerate(self.batches):
                with _located(self.model, self.loss, batch, number):
                    if self._streamed is None:
                        with torch.no_grad():
                            mean, counted = mean_loss(self.model, self.loss, batch)
                        value = 0.0 if mean is None else float(mean)
                    else:
                        found = self._streamed.derivatives(number, batch)
                        value, counted = found.loss, found.tokens
                total, tokens = total + value * counted, tokens + counted
        return total / _counted(tokens)


def inspect(model: nn.Module, loss: Loss, parameters: Sequence[nn.Parameter], batch: Batch) -> Segments:
    """`curvature.segments.find_segments`, under `evaluation`.

    Beside the gradients in these parameters those in all small ones are compared: gates and biases that are zero hide
    from the others what a segment reads, until they change.
    """
    wanted = set(parameters)
    probed = [p for p in model.parameters() if p in wanted or (p.is_floating_point() and p.numel() <= _SMALL)]
    with evaluation(model, probed):
        return find_segments(model, loss, batch)


@contextmanager
def _located(model: nn.Module, loss: Loss, batch: Batch, number: int) -> Iterator[None]:
    """Where the loss of a batch is not finite, say which module's result is the first that is not."""
    try:
        yield
    except FloatingPointError as error:
        found: list[str] = []

        def look(name: str, output: Any) -> None:
            tensor = output[0] if isinstance(output, tuple | list) and output else output
            if not found and isinstance(tensor, Tensor) and not bool(torch.isfinite(tensor).all()):
                found.append(name)

        with ExitStack() as stack, torch.no_grad():
            for name, module in model.named_modules():
                if name:
                    hook = module.register_forward_hook(lambda _, __, output, name=name: look(name, output))
                    stack.callback(hook.remove)
            loss(model, batch)
        where = f"the first result that is not finite is that of {found[0]!r}" if found else "every module's is finite"
        raise FloatingPointError(f"batches[{number}]: {error}; {where}") from error


def _accumulate(into: Sequence[Tensor], pieces: Sequence[Tensor | None], weight: int) -> None:
    pairs = [(target, piece) for target, piece in zip(into, pieces, strict=True) if piece is not None]
    if pairs:
        torch._foreach_add_([target for target, _ in pairs], [piece for _, piece in pairs], alpha=weight)


def _counted(tokens: int) -> int:
    if tokens == 0:
        raise ValueError(
            "batches: no token is counted (every label is ignored or padding, or sequences hold a single token); "
            "the loss is a mean over counted tokens"
        )
    return tokens


@contextmanager
def evaluation(model: nn.Module, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Evaluation mode, with these parameters and no others requiring a gradient; both are restored at the end.

    Autograd then records nothing ahead of the first selected parameter, and no gradient of a parameter that is not
    asked for. An embedding's `padding_idx` is off meanwhile: PyTorch drops the gradient of that row, although the loss
    depends on it wherever the token is used as a token.
    """
    if torch.is_inference_mode_enabled():
        raise RuntimeError("nothing can be differentiated under torch.inference_mode(); torch.no_grad() does no harm")
    # One walk through the modules: every product makes it, and short ones take a GPU only milliseconds.
    modules, wanted = list(model.modules()), set(parameters)
    training = [module for module in modules if module.training]
    paddings = [(m, m.padding_idx) for m in modules if isinstance(m, nn.Embedding) and m.padding_idx is not None]
    present = {p for m in modules for p in m._parameters.values() if p is not None}
    if lost := len(wanted - present):
        raise RuntimeError(
            f"{lost} of the {len(wanted)} parameters to differentiate are no longer the model's; make a new operator"
        )
    others = [p for p in present - wanted if p.requires_grad]
    frozen = [p for p in parameters if not p.requires_grad]
    try:
        if training:
            model.eval()
        for embedding, _ in paddings:
            embedding.padding_idx = None
        for parameter in others:
            parameter.requires_grad_(False)
        for parameter in frozen:
            parameter.requires_grad_(True)
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)
        for parameter in others:
            parameter.requires_grad_(True)
        for embedding, padding_idx in paddings:
            embedding.padding_idx = padding_idx
        for module in training:
            module.training = True


def _has_active_dropout(model: nn.Module) -> bool:
    def rate(module: nn.Module) -> float:
        own = module.p if isinstance(module, nn.modules.dropout._DropoutNd) else 0.0
        return max(float(own), float(getattr(module, "attention_dropout", 0.0) or 0.0))

    return any(module.training and rate(module) > 0 for module in model.modules())


def _check_weights(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            raise ValueError(f"model: parameter {name!r} holds NaN or infinite weights; no derivative is defined there")


def _check_batches(
    batches: Iterable[Batch], model: nn.Module, loss: Loss, device: torch.device
) -> list[dict[str, Any]]:
    if isinstance(batches, Mapping):
        raise TypeError("batches must be a list of batches, got a single one; pass [batch]")
    checked = []
    for number, batch in enumerate(batches):
        if not isinstance(batch, Mapping):
            raise TypeError(f"batches[{number}] must be a dict as collators make it, got {type(batch).__name__}")
        checked.append({key: value.to(device) if isinstance(value, Tensor) else value for key, value in batch.items()})
    if not checked:
        raise ValueError("batches: there is none; the loss is a mean over at least one counted token")
    own = model if isinstance(model, PreTrainedModel) else None
    embedding, head = (None, None) if own is None else (own.get_input_embeddings(), own.get_output_embeddings())
    for number, batch in enumerate(checked):
        ids = batch.get("input_ids")
        if isinstance(ids, Tensor) and not ids.numel():
            raise ValueError(f"batches[{number}]: input_ids of shape {list(ids.shape)} hold no token")
        if isinstance(ids, Tensor) and isinstance(embedding, nn.Embedding):
            _check_token_ids(ids, embedding.num_embeddings, number)
        if isinstance(loss, CausalLMLoss) and isinstance(head, nn.Linear):
            count_targets(loss.targets(batch), loss.ignore_index, head.out_features, f"batches[{number}]")
    return checked


def _check_token_ids(ids: Tensor, vocabulary: int, number: int) -> None:
    """Look at the ids before a GPU does, whose answer to a wrong one is an error that ends the process."""
    if not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
        raise ValueError(
            f"batches[{number}]: token ids reach from {int(ids.min())} to {int(ids.max())}, but the model's "
            f"vocabulary has {vocabulary} entries; is this the model's own tokenizer?"
        )
