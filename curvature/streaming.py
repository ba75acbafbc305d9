"""Streamed second derivatives of several batches, kept between calls as far as memory allows."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from curvature.capture import CAPTURED_TOKENS, CapturedProduct
from curvature.chain import Segments
from curvature.loss import Batch, Loss
from curvature.segments import find_segments
from curvature.storage import Allowance, Stretches, spare_bytes
from curvature.streamed import Streamed
from curvature.whole_graph import BatchDerivatives

__all__ = ["StreamedBatches", "Streaming"]


@dataclass(frozen=True)
class Streaming:
    """Settings of streamed products.

    Attributes:
        segments: The model's decomposition. None: found by inspection (`curvature.segments.find_segments`).
        stretches: Tokens processed at once. None: chosen per batch (`curvature.storage.default_stretches`).
        keep: Whether what does not depend on the direction is kept for further products.
        reuse_bytes: Memory for what is kept, and for attention results that are used again within a product. 0: a
            product takes the least memory and the most time. None: a third of the memory that is free when the first
            batch is differentiated.
        offload: Whether activations wait in pinned host memory (CUDA only).
        capture: Whether further products with a kept batch of at most `curvature.capture.CAPTURED_TOKENS` tokens are
            replayed as a CUDA graph, which holds the memory that one product works in.
    """

    segments: Segments | None = None
    stretches: Stretches | None = None
    keep: bool = True
    reuse_bytes: int | None = None
    offload: bool = False
    capture: bool = True

    def __post_init__(self) -> None:
        if self.reuse_bytes is not None and self.reuse_bytes < 0:
            raise ValueError(f"reuse_bytes must be at least 0, got {self.reuse_bytes}; 0 keeps nothing")


class StreamedBatches:
    """Makes the streamed derivatives of batches, and hands them out again while nothing has changed.

    Args:
        model: The model.
        loss: The loss.
        parameters: The parameters to differentiate.
        batch: A batch to inspect the model with, unless `settings.segments` is given.
        settings: See `Streaming`.

    Raises:
        SegmentationError: If the model does not decompose into a chain of segments.
    """

    def __init__(
        self, model: nn.Module, loss: Loss, parameters: Sequence[nn.Parameter], batch: Batch, settings: Streaming
    ) -> None:
        self._model, self._parameters, self._settings = model, parameters, settings
        self._segments = settings.segments or find_segments(model, loss, batch)
        self._budget = settings.reuse_bytes
        self._kept: dict[int, tuple[_Lasting, int, _State]] = {}

    def gradient(self, number: int, batch: Batch) -> tuple[Sequence[Tensor | None], float, int]:
        """Gradient of one batch's mean loss, the mean loss, and the number of counted tokens."""
        found = self._derivatives(number, batch)
        streamed = found.streamed if isinstance(found, _Lasting) else found
        return streamed.gradient(), streamed.loss, streamed.tokens

    def derivatives(self, number: int, batch: Batch) -> BatchDerivatives:
        """The derivatives of batch number `number`: those that were kept, or new ones.

        Kept derivatives are dropped when a weight, a buffer or the batch has changed since.
        """
        return self._derivatives(number, batch)

    def _derivatives(self, number: int, batch: Batch) -> Streamed | _Lasting:
        state = self._state(batch)
        kept = self._kept.pop(number, None)
        if kept is not None and kept[2].equals(state):
            self._kept[number] = kept
            return kept[0]
        del kept
        if self._budget is None:
            self._budget = spare_bytes(state.values.device) // 3
        allowance = Allowance(max(0, self._budget - sum(spent for _, spent, _ in self._kept.values())))
        streamed = Streamed(
            self._segments(batch),
            self._parameters,
            stretches=self._settings.stretches,
            allowance=allowance,
            offload=self._settings.offload,
        )
        if not self._settings.keep or allowance.left < 0:
            return streamed
        short = batch["input_ids"].numel() <= CAPTURED_TOKENS and state.values.is_cuda
        lasting = _Lasting(streamed, capture=short and self._settings.capture and not self._settings.offload)
        self._kept[number] = lasting, allowance.spent, state
        return lasting

    def release(self) -> None:
        """Drop everything that was kept."""
        self._kept.clear()

    def _state(self, batch: Batch) -> _State:
        tensors = [*self._model.parameters(), *self._model.buffers()]
        return _State.of([*tensors, *(value for value in batch.values() if isinstance(value, Tensor))])


@dataclass(frozen=True, eq=False)
class _State:
    """What tells whether tensors have changed.

    Their memory and version counters, and, since writes through `.data` leave those as they are, sums and norms of the
    values. Cost: two reads of all of them.
    """

    versions: list[tuple[int, int]]
    values: Tensor

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> _State:
        sums = [t.detach().sum(dtype=torch.float64) for t in tensors]
        norms = [torch.linalg.vector_norm(t.detach(), dtype=torch.float64) for t in tensors if t.is_floating_point()]
        return cls([(t.data_ptr(), t._version) for t in tensors], torch.stack([*sums, *norms]))

    def equals(self, other: _State) -> bool:
        return self.versions == other.versions and torch.equal(self.values, other.values)


class _Lasting:
    """Derivatives that outlive the promise that a product is the last one, and learn to make products quickly.

    Args:
        streamed: The derivatives.
        capture: Whether products after the first are to be recorded and replayed.
    """

    def __init__(self, streamed: Streamed, *, capture: bool) -> None:
        self.streamed, self.tokens = streamed, streamed.tokens
        self._capture, self._warm = capture and streamed.tokens > 0, False
        self._captured: CapturedProduct | None = None

    def product(self, direction: Sequence[Tensor], *, keep: bool = True) -> Sequence[Tensor | None]:
        """See `BatchDerivatives.product`; the tensors are overwritten by the next product."""
        if self._capture and self._warm and self._captured is None:
            self._record(direction)
        self._warm = True
        if self._captured is not None and self._captured.takes(direction):
            return self._captured.product(direction)
        return self.streamed.product(direction)

    def _record(self, direction: Sequence[Tensor]) -> None:
        try:
            self._captured = CapturedProduct(self.streamed, direction)
        except RuntimeError as error:
            self._capture = False
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            warnings.warn(f"products cannot be recorded ({reason}); they are launched one by one", stacklevel=4)

    def products(
        self, directions: Sequence[Sequence[Tensor]], *, keep: bool = True
    ) -> Iterator[Sequence[Tensor | None]]:
        """See `BatchDerivatives.products`."""
        if self._capture:
            for direction in directions:
                yield self.product(direction)
        else:
            yield from self.streamed.products(directions)
