"""The launches of a batch's derivatives, recorded once and replayed: for further directions, and for further batches.

At a few thousand tokens the host needs longer to launch a product's kernels than the device to run them. A CUDA graph
holds the launches with their memory; a replay costs the host next to nothing. One graph holds sweeps 1 and 2 of
`curvature.streamed`, another one sweeps 3 and 4; what the first leaves for the second lies at fixed addresses. Another
batch of the same kind (`curvature.chain.Reads`) is served by copying its tokens there and a replay, or, where it has
been there before, by a copy of what its own sweeps 1 and 2 had left.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from curvature.chain import Chain
from curvature.directions import nonzero
from curvature.storage import bytes_of
from curvature.streamed import Streamed

__all__ = ["CAPTURED_TOKENS", "Graph", "Kinds", "RecordedBatch", "Recording", "Recordings", "recordable"]

CAPTURED_TOKENS = 1 << 14
"""Longest batches for which the host is the limit, and the memory of a recorded product is small."""

_KINDS = 8
"""Kinds of batches that are recorded at a time, each with the memory that a product works in."""

_LAUNCHED = 64
"""Kinds of batches of which it is known that they have been launched."""

_T = TypeVar("_T")


def recordable(device: torch.device) -> bool:
    """Whether launches on a device can be recorded. Those under autocast read casts that do not last."""
    return device.type == "cuda" and not torch.is_autocast_enabled("cuda")


class Graph(Generic[_T]):
    """Launches on a CUDA device, recorded while they are not run.

    Args:
        run: Launches them.
        device: The device.
        beside: Launches whose work space is used again. What these leave lasts until those are replayed.

    Attributes:
        result: What `run` has returned; its tensors hold values after a replay.

    Raises:
        RuntimeError: If something cannot be recorded, such as a read of a value by the host.
    """

    def __init__(self, run: Callable[[], _T], device: torch.device, beside: Graph[Any] | None = None) -> None:
        self._graph, self._device = torch.cuda.CUDAGraph(), device
        pool = torch.cuda.graph_pool_handle() if beside is None else beside._graph.pool()
        present = torch.cuda.current_stream(device)
        with torch.cuda.device(device), _no_collection():
            try:
                # Other threads (NCCL's watchdog, one that pins memory) go on with what a recording may not do.
                with torch.cuda.graph(
                    self._graph, pool=pool, stream=_stream(device), capture_error_mode="thread_local"
                ):
                    self.result = run()
            except BaseException:
                torch.cuda.set_stream(present)
                _end_what_is_left_open(self._graph, pool)
                raise

    def replay(self) -> None:
        """Run the launches."""
        with torch.cuda.device(self._device):
            self._graph.replay()


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Python's collector of cycles waits: a CUDA graph that it frees spoils one that is being recorded."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _end_what_is_left_open(graph: torch.cuda.CUDAGraph, pool: tuple[int, int]) -> None:
    """Make PyTorch as it was before a recording that it could not end.

    Otherwise its allocator gives no memory back to the device from then on, and its random numbers end with an error
    (PyTorch 2.11, aten/src/ATen/cuda/CUDAGraph.cpp and CUDAGeneratorImpl.cpp).
    """
    device = torch.device("cuda", torch.cuda.current_device())
    try:
        graph.pool()
        return  # it was ended
    except RuntimeError:
        pass
    with contextlib.suppress(RuntimeError):  # it was not begun
        torch._C._cuda_endAllocateToPool(device.index, pool)
        torch._C._cuda_releasePool(device.index, pool)
    # A generator leaves the state of recording at the end of any recording.
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=_stream(device), capture_error_mode="thread_local"):
        torch.zeros((), device=device)


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """The stream on which launches of a device are recorded; graphs that share work space must share it."""
    return torch.cuda.Stream(device)


class RecordedBatch:
    """Derivatives of one batch by way of a recording: a `curvature.whole_graph.BatchDerivatives`.

    Args:
        recording: A recording that serves the chain.
        chain: The batch's chain.
        admit: Asked with a number of bytes before what sweeps 1 and 2 left for this batch is laid aside for another.

    Attributes:
        tokens: Number of counted tokens.
        loss: The batch's mean loss.
        laid_aside: What sweeps 1 and 2 left, where another batch has taken its place; None: it is computed again.
    """

    def __init__(self, recording: Recording, chain: Chain, admit: Callable[[int], bool]) -> None:
        self.tokens, self.loss, self.admit = chain.tokens, 0.0, admit
        self.values = [] if chain.reads is None else [t.clone() for t in chain.reads.tokens]
        self.laid_aside: list[Tensor] | None = None
        self._recording = recording
        recording.users.add(self)
        recording.load(self)

    @property
    def spent(self) -> int:
        """Bytes that are laid aside."""
        return bytes_of(self.laid_aside or [])

    def gradient(self) -> list[Tensor | None]:
        """See `Streamed.gradient`; the tensors are overwritten by the next product or gradient of this kind."""
        self._recording.load(self)
        return self._recording.gradient()

    def product(self, direction: Sequence[Tensor], *, keep: bool = True) -> list[Tensor | None]:
        """See `Streamed.product`; the tensors are overwritten by the next product or gradient of this kind."""
        self._recording.load(self)
        return self._recording.product(direction)

    def products(self, directions: Sequence[Sequence[Tensor]], *, keep: bool = True) -> Iterator[list[Tensor | None]]:
        """See `product`."""
        for direction in directions:
            yield self.product(direction)


class Recording:
    """Products of batches of one kind with one direction after another, by replay.

    Args:
        chain: The chain of a batch on a CUDA device, whose kind has been launched before (so that kernels are
            compiled). It belongs to the recording from here on.
        launch: Launches sweeps 1 and 2 of the chain, without reading the loss or offloading.
        direction: A direction; those that are zero in other parameters are launched.
        alive: What the launches read beside the chain's own tensors; held, so that its memory stays where it is.

    Attributes:
        streamed: The derivatives of the batch that was loaded last.
        spent: Bytes of what sweeps 1 and 2 leave.
        users: The batches that it serves.

    Raises:
        RuntimeError: If something in the model cannot be recorded, such as a read of a value by the host.
    """

    def __init__(
        self,
        chain: Chain,
        launch: Callable[[Chain], Streamed],
        direction: Sequence[Tensor],
        alive: Sequence[Tensor] = (),
    ) -> None:
        self._chain, self._direction, self._alive = chain, [d.clone() for d in direction], alive
        self.users: weakref.WeakSet[RecordedBatch] = weakref.WeakSet()
        self._device = self._direction[0].device
        self._nonzero = nonzero([self._direction])
        self._prepare = Graph(lambda: launch(chain), self._device)
        self.streamed = self._prepare.result
        self._left = self.streamed.left()
        self.spent = bytes_of(self._left)
        self._multiply = Graph(self._sweep, self._device, self._prepare)
        self._gradient: Graph[list[Tensor | None]] | None = None
        self._present: Callable[[], RecordedBatch | None] = lambda: None

    def _sweep(self) -> list[Tensor | None]:
        z = self.streamed.directions([self._direction], self._nonzero)
        self.streamed.sweep(z)
        return z.sums[0]

    @property
    def idle(self) -> bool:
        """Whether no batch uses it."""
        return not self.users

    @property
    def useless(self) -> bool:
        """Whether none ever will: the only batch that it could serve is gone."""
        return self.idle and self._chain.reads is None

    def serves(self, chain: Chain) -> bool:
        """Whether a batch is of this recording's kind."""
        return _same_kind(chain, self._chain)

    def load(self, batch: RecordedBatch) -> None:
        """Make `streamed` the derivatives of a batch.

        Raises:
            FloatingPointError: If its loss is not finite.
        """
        present = self._present()
        if present is batch:
            return
        if present is not None and present.laid_aside is None and present.admit(self.spent):
            present.laid_aside = [t.clone() for t in self._left]
        self._present = lambda: None
        self.streamed.left()
        if batch.values:
            torch._foreach_copy_(list(self._tokens()), batch.values)
        if batch.laid_aside is None:
            self._prepare.replay()
            self.streamed.read_loss()
            batch.loss = self.streamed.loss
        else:
            torch._foreach_copy_(self._left, batch.laid_aside)
        self._present = weakref.ref(batch)

    def _tokens(self) -> Sequence[Tensor]:
        return [] if self._chain.reads is None else self._chain.reads.tokens

    def product(self, direction: Sequence[Tensor]) -> list[Tensor | None]:
        """The product of the batch that is loaded; its tensors are overwritten by the next one."""
        if nonzero([direction]) != self._nonzero:
            return self.streamed.product(direction)
        torch._foreach_copy_(self._direction, list(direction))
        self._multiply.replay()
        return self._multiply.result

    def gradient(self) -> list[Tensor | None]:
        """The gradient of the batch that is loaded; its tensors are overwritten by the next product or gradient."""
        if self._gradient is None:
            self._gradient = Graph(self.streamed.gradient, self._device, self._prepare)
        self._gradient.replay()
        return self._gradient.result


class Kinds:
    """The recordings of batches under one key, one for each kind of batch, and a few kinds at a time."""

    def __init__(self) -> None:
        self._found: list[Recording] = []
        self._launched: list[Chain] = []
        self._refused = False

    @property
    def spent(self) -> int:
        """Bytes of what sweeps 1 and 2 leave in all of them."""
        return sum(recording.spent for recording in self._found)

    def matching(self, chain: Chain) -> Recording | None:
        """The recording of this kind of batch, if there is one."""
        return next((recording for recording in self._found if recording.serves(chain)), None)

    def warm(self, chain: Chain) -> bool:
        """Whether a batch of this kind may be recorded: a product of one has been launched, and there is room."""
        if self._refused or (len(self._found) >= _KINDS and not any(found.idle for found in self._found)):
            return False
        return any(_same_kind(chain, other) for other in self._launched)

    def launched(self, chain: Chain) -> None:
        """Note that a product of a batch of this kind has been launched."""
        if not self._refused and not any(_same_kind(chain, other) for other in self._launched):
            self._launched = [*self._launched[1 - _LAUNCHED :], chain]

    def record(
        self,
        chain: Chain,
        launch: Callable[[Chain], Streamed],
        direction: Sequence[Tensor],
        alive: Sequence[Tensor],
        admit: Callable[[int], bool],
    ) -> RecordedBatch:
        """Make a recording, and serve the batch that it was made with; see `Recording` and `RecordedBatch`.

        Recordings that no batch uses make room for it. After a RuntimeError no further recording is tried.
        """
        self._found = [found for found in self._found if not found.useless]
        while len(self._found) >= _KINDS:
            self._found.remove(next(found for found in self._found if found.idle))
        try:
            recording = Recording(chain, launch, direction, alive)
        except RuntimeError:
            self._refused = True
            raise
        # Other batches may use the recording only once this one has its own copy of its tokens.
        batch = RecordedBatch(recording, chain, admit)
        self._found.append(recording)
        return batch


class Recordings:
    """Where recordings are kept: for one model, selection of parameters, loss and setting of the library at a time.

    Operators may share one. What was recorded under another key is dropped.
    """

    def __init__(self) -> None:
        self._key: object = None
        self._kinds = Kinds()

    def under(self, key: object) -> Kinds:
        """The recordings under a key: all that launches depend on, beside the batch and the values of the weights."""
        if key != self._key:
            self._key, self._kinds = key, Kinds()
        return self._kinds

    def clear(self) -> None:
        """Drop all recordings."""
        self._key, self._kinds = None, Kinds()


def _same_kind(a: Chain, b: Chain) -> bool:
    if a is b:
        return True
    return a.tokens == b.tokens and a.reads is not None and b.reads is not None and a.reads.same_kind(b.reads)
