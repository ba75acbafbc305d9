"""Streamed second derivatives of several batches, kept between calls as far as memory allows."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from curvature.capture import CAPTURED_TOKENS, Kinds, RecordedBatch, Recordings, recordable
from curvature.chain import Chain, Segments
from curvature.loss import Batch
from curvature.model_state import Digest, Modes, State, Structure, modes_of
from curvature.storage import Allowance, Stretches, spare_bytes
from curvature.streamed import Streamed

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
        capture: Whether products with kept batches of at most `curvature.capture.CAPTURED_TOKENS` tokens are replayed
            as CUDA graphs from the second product of a kind of batch on. The graphs hold the memory that one product
            works in.
        recordings: Where these graphs are; None: in the operator. Operators of the same model, parameters and loss that
            share one replay each other's.
    """

    segments: Segments | None = None
    stretches: Stretches | None = None
    keep: bool = True
    reuse_bytes: int | None = None
    offload: bool = False
    capture: bool = True
    recordings: Recordings | None = None

    def __post_init__(self) -> None:
        if self.reuse_bytes is not None and self.reuse_bytes < 0:
            raise ValueError(f"reuse_bytes must be at least 0, got {self.reuse_bytes}; 0 keeps nothing")


class StreamedBatches:
    """Makes the streamed derivatives of batches, and hands them out again while nothing has changed.

    Args:
        model: The model.
        parameters: The parameters to differentiate.
        settings: See `Streaming`.
        find: Finds out how the model is cut, with a batch to look at it with; asked again where its modules, their
            settings or hooks, or its configuration have changed since.
        segments: How it is cut now.

    Attributes:
        segments: How the model was cut when it was last looked at.

    Raises:
        SegmentationError: If the model does not decompose into a chain of segments.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Sequence[nn.Parameter],
        settings: Streaming,
        find: Callable[[Batch], Segments],
        segments: Segments,
    ) -> None:
        self._model, self._parameters, self._settings = model, parameters, settings
        self._find, self.segments = find, segments
        self._see(Structure(model))
        owner = weakref.ref(self)
        self._launch = _Launch(parameters, settings, lambda: 0 if (found := owner()) is None else found._left())
        self._budget = settings.reuse_bytes
        self._recordings = settings.recordings or Recordings()
        self._kept: dict[int, tuple[_Lasting, State]] = {}
        self._digest = Digest()

    def of(self, parameters: Sequence[nn.Parameter]) -> StreamedBatches:
        """The same with other parameters, and recordings of its own."""
        settings = replace(self._settings, recordings=None)
        found = StreamedBatches(self._model, parameters, settings, self._find, self.segments)
        found._see(self._structure)  # that under evaluation, as products see it
        return found

    def current(self, batch: Batch) -> Segments:
        """How the model is cut; found anew, and everything kept dropped, where it has changed.

        Raises:
            SegmentationError: If the model does not decompose any more.
        """
        structure, dtypes = Structure(self._model), [t.dtype for t in self._tensors]
        if structure.holds_the_same_as(self._structure) and dtypes == self._dtypes:
            return self.segments
        if structure != self._structure or dtypes != self._dtypes:
            self.release()
            self.segments = self._find(batch)
            structure = Structure(self._model)
        self._see(structure)
        return self.segments

    def _see(self, structure: Structure) -> None:
        self._structure, self._tensors = structure, structure.tensors(self._parameters[0].device)
        self._dtypes = [t.dtype for t in self._tensors]

    def gradient(self, number: int, batch: Batch) -> tuple[Sequence[Tensor | None], float, int]:
        """Gradient of one batch's mean loss, the mean loss, and the number of counted tokens.

        From derivatives that were kept for products, or a recording of them; otherwise computed alone, and not kept.
        """
        state = self._state(batch)
        found: Streamed | RecordedBatch | _Lasting | None = self._fresh(number, state)
        if found is None:
            chain, kinds = self._chain(batch, state)
            recording = kinds and kinds.matching(chain)
            found = (
                RecordedBatch(recording, chain, lambda _: False) if recording else self._launch(chain, products=False)
            )
        return found.gradient(), found.loss, found.tokens

    def derivatives(self, number: int, batch: Batch) -> Streamed | RecordedBatch | _Lasting:
        """The derivatives of batch number `number`: those that were kept, or new ones.

        Kept derivatives are dropped when a weight, a buffer or the batch has changed since.
        """
        state = self._state(batch)
        if (kept := self._fresh(number, state)) is not None:
            return kept
        chain, kinds = self._chain(batch, state)
        if not self._settings.keep:
            recording = kinds and kinds.matching(chain)
            return RecordedBatch(recording, chain, lambda _: False) if recording else self._launch(chain)
        lasting = _Lasting(chain, self._launch, kinds, self._tensors)
        if isinstance(lasting.found, Streamed) and lasting.found.allowance.left < 0:
            return lasting.found
        self._kept[number] = lasting, state
        return lasting

    def _fresh(self, number: int, state: State) -> _Lasting | None:
        """What was kept of a batch; dropped where anything has changed."""
        kept = self._kept.pop(number, None)
        if kept is None or not kept[1].equals(state):
            return None
        self._kept[number] = kept
        return kept[0]

    def _chain(self, batch: Batch, state: State) -> tuple[Chain, Kinds | None]:
        """The batch's chain, and the recordings among which there may be one for it."""
        if self._budget is None:
            self._budget = spare_bytes(state.values.device) // 3
        settings, chain = self._settings, self.segments(batch)
        short = chain.tokens > 0 and batch["input_ids"].numel() <= CAPTURED_TOKENS
        recorded = short and settings.capture and not settings.offload and self._budget > 0
        recorded = recorded and recordable(state.values.device)
        return chain, self._recordings.under(self._key()) if recorded else None

    def _left(self) -> int:
        """What may still be spent on keeping."""
        kinds = self._recordings.under(self._key())
        return (self._budget or 0) - kinds.spent - sum(lasting.spent for lasting, _ in self._kept.values())

    def release(self) -> None:
        """Drop everything that was kept, but for recordings that are shared."""
        self._kept.clear()
        if self._settings.recordings is None:
            self._recordings.clear()

    def _key(self) -> tuple[object, ...]:
        addresses = [(t.data_ptr(), t.dtype, t.shape) for t in (*self._parameters, *self._tensors)]
        return self.segments, len(self._parameters), addresses, self._structure, self._modes()

    def _modes(self) -> Modes:
        return modes_of(self._model, self._parameters[0].device.type)

    def _state(self, batch: Batch) -> State:
        self.current(batch)
        return State.of(self._tensors, batch, self._modes(), self._digest)


@dataclass(frozen=True, eq=False)
class _Launch:
    """Launches derivatives of a chain of the model.

    Attributes:
        parameters: See `StreamedBatches`.
        settings: See `StreamedBatches`.
        left: What may still be spent on keeping. It refers weakly to the batches that keep: these own what it is for,
            and their memory must not wait until Python looks for cycles.
    """

    parameters: Sequence[nn.Parameter]
    settings: Streaming
    left: Callable[[], int]

    def __call__(self, chain: Chain, *, read: bool = True, products: bool = True) -> Streamed:
        return Streamed(
            chain,
            self.parameters,
            stretches=self.settings.stretches,
            allowance=Allowance(max(0, self.left())),
            offload=self.settings.offload,
            read=read,
            products=products,
        )

    def admits(self, size: int) -> bool:
        """Whether so many bytes more may be kept."""
        return size <= self.left()


class _Lasting:
    """Derivatives that outlive the promise that a product is the last one, and learn to make products quickly.

    Args:
        chain: The batch's chain.
        launch: Makes launched derivatives of a chain, and says what may be kept beside them.
        kinds: Where recordings are looked for, and made where a product of this kind of batch has been launched before.
            None: products are launched.
        tensors: Tensors of the model, that recordings read.

    Attributes:
        found: The derivatives: launched ones, recorded ones, or None until the first call where they are to be
            recorded.
        tokens: Number of counted tokens.
    """

    def __init__(
        self,
        chain: Chain,
        launch: _Launch,
        kinds: Kinds | None,
        tensors: Sequence[Tensor],
    ) -> None:
        self._chain, self._launch, self._kinds, self._tensors = chain, launch, kinds, tensors
        self.tokens = chain.tokens
        self.found: Streamed | RecordedBatch | None = None
        if not self._adopt() and (kinds is None or not kinds.warm(chain)):
            self.found = launch(chain)

    def _adopt(self) -> bool:
        """Go on with a recording that serves this batch, if there is one."""
        recording = self._kinds and self._kinds.matching(self._chain)
        if not recording:
            return False
        self.found = None
        self.found = RecordedBatch(recording, self._chain, self._launch.admits)
        return True

    @property
    def spent(self) -> int:
        """Bytes that are kept for this batch alone."""
        if self.found is None:
            return 0
        return self.found.spent if isinstance(self.found, RecordedBatch) else self.found.allowance.spent

    @property
    def loss(self) -> float:
        """The batch's mean loss."""
        return self._launched().loss

    def gradient(self) -> list[Tensor | None]:
        """See `Streamed.gradient`."""
        return self._launched().gradient()

    def _launched(self) -> Streamed | RecordedBatch:
        if self.found is None:
            self.found = self._launch(self._chain)
        return self.found

    def product(self, direction: Sequence[Tensor], *, keep: bool = True) -> Sequence[Tensor | None]:
        """See `BatchDerivatives.product`; the tensors are overwritten by the next product."""
        kinds, fresh = self._kinds, not isinstance(self.found, RecordedBatch)
        if kinds is not None and fresh and not self._adopt():
            if not kinds.warm(self._chain):
                product = self._launched().product(direction)
                kinds.launched(self._chain)
                return product
            self._record(kinds, direction)
        return self._launched().product(direction)

    def _record(self, kinds: Kinds, direction: Sequence[Tensor]) -> None:
        self.found = None  # its memory is needed
        left, admit = self._launch.left(), self._launch.admits
        launch = replace(self._launch, left=lambda: left)  # a recording always leaves the same
        try:
            self.found = kinds.record(
                self._chain, lambda chain: launch(chain, read=False), direction, self._tensors, admit
            )
        except RuntimeError as error:
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            warnings.warn(f"products cannot be recorded ({reason}); they are launched one by one", stacklevel=5)

    def products(
        self, directions: Sequence[Sequence[Tensor]], *, keep: bool = True
    ) -> Iterator[Sequence[Tensor | None]]:
        """See `BatchDerivatives.products`."""
        if self._kinds is None:
            yield from self._launched().products(directions)
        else:
            for direction in directions:
                yield self.product(direction)
