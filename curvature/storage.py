"""Memory of second derivatives: what is processed at once, what waits where, and what may be kept."""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from curvature.chain import Chain

__all__ = ["Allowance", "LiveBytes", "Shelf", "Stretches", "bytes_of", "default_stretches", "spare_bytes"]

_WIDEST, _LOGITS = 48 << 20, 128 << 20


@dataclass(frozen=True)
class Stretches:
    """Numbers of tokens that are processed at once, counted over all sequences of the batch.

    Attributes:
        tokenwise: In the token-wise part of a segment.
        head: In the head, where each token costs a row of logits.
    """

    tokenwise: int
    head: int

    def __post_init__(self) -> None:
        for name in ("tokenwise", "head"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1 token, got {getattr(self, name)}")


def default_stretches(chain: Chain) -> Stretches:
    """Stretches whose widest array takes 48 MiB in the token-wise parts, and whose logits take 128 MiB.

    Where the head is known as a function only, its logits count in float32.
    The width is that of the segments' widest matrix. Multiples of 128 tokens.
    """
    inner = [p for segment in chain.segments for p in segment.parameters if p.ndim > 1]
    width = max((max(p.shape[-2:]) * p.element_size() for p in inner), default=1)
    vocabulary = chain.vocabulary or max((p.shape[0] for p in chain.outer if p.ndim > 1), default=1)
    element = max((p.element_size() for p in chain.outer), default=4)
    logits = vocabulary * (max(4, element) if chain.readout is None else element)
    return Stretches(max(128, _WIDEST // width >> 7 << 7), max(128, _LOGITS // logits >> 7 << 7))


class Allowance:
    """Memory that may be spent on keeping what could be computed again.

    Args:
        size: Bytes; None for no limit.

    Attributes:
        spent: Bytes spent so far.
    """

    def __init__(self, size: int | None = None) -> None:
        self._size = size
        self.spent = 0

    @property
    def left(self) -> float:
        """Bytes that may still be spent; negative where more was needed than allowed."""
        return math.inf if self._size is None else self._size - self.spent

    def spend(self, size: int) -> None:
        """Count bytes that are needed anyway."""
        self.spent += size

    def take(self, size: int) -> bool:
        """Whether `size` further bytes may be kept; if so they count as spent."""
        if size > self.left:
            return False
        self.spent += size
        return True


class Shelf:
    """Where activations wait between their uses: where they are, or in pinned host memory.

    Copies run on a stream of their own. `fetch_ahead` starts them early, so that they overlap with computation.

    Args:
        device: Where activations are used.
        offload: Whether they wait in host memory; without effect unless the device is a CUDA one.
    """

    def __init__(self, device: torch.device, offload: bool) -> None:
        self._device = device
        self._copies = torch.cuda.Stream(device) if offload and device.type == "cuda" else None
        self._coming: dict[int, tuple[Tensor, torch.cuda.Event]] = {}

    @property
    def offloads(self) -> bool:
        """Whether activations wait in host memory."""
        return self._copies is not None

    @overload
    def put(self, t: Tensor) -> Tensor: ...

    @overload
    def put(self, t: Tensor | None) -> Tensor | None: ...

    def put(self, t: Tensor | None) -> Tensor | None:
        """Lay an activation aside; the caller's reference to `t` should end here."""
        if t is None or self._copies is None:
            return t
        self._copies.wait_stream(torch.cuda.current_stream(self._device))
        host = torch.empty(t.shape, dtype=t.dtype, pin_memory=True)
        with torch.cuda.stream(self._copies):
            host.copy_(t, non_blocking=True)
        t.record_stream(self._copies)
        return host

    def fetch_ahead(self, tensors: Sequence[Tensor | None]) -> None:
        """Start to bring activations that `get` will soon be asked for."""
        if self._copies is not None:
            for t in tensors:
                if t is not None and t.device != self._device and id(t) not in self._coming:
                    with torch.cuda.stream(self._copies):
                        copy = t.to(self._device, non_blocking=True)
                    self._coming[id(t)] = copy, self._copies.record_event()

    @overload
    def get(self, t: Tensor) -> Tensor: ...

    @overload
    def get(self, t: Tensor | None) -> Tensor | None: ...

    def get(self, t: Tensor | None) -> Tensor | None:
        """An activation that was laid aside, on the device."""
        if t is None or self._copies is None or t.device == self._device:
            return t
        self.fetch_ahead([t])
        copy, arrived = self._coming.pop(id(t))
        current = torch.cuda.current_stream(self._device)
        current.wait_event(arrived)
        copy.record_stream(current)
        return copy


class LiveBytes(TorchDispatchMode):
    """Inside this mode, counts the bytes of tensor memory that operations have made and that are still alive.

    Memory is counted once, however many tensors share it. Memory that was there before counts when an operation first
    returns a view of it; `ignore` takes it out. Work space that an operation frees before it returns is not seen.

    Attributes:
        now: Bytes alive.
        peak: The largest value of `now`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: dict[int, weakref.ref[object]] = {}

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Never count the memory of these tensors, which must outlive the mode."""
        for t in tensors:
            storage = t.untyped_storage()
            self._known[storage._cdata] = weakref.ref(storage)

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for t in tree_leaves(result):
            if isinstance(t, Tensor):
                self._count(t.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return

        def forget(_: object) -> None:
            del self._known[key]
            self.now -= size

        self._known[key] = weakref.ref(storage, forget)
        self.now += size
        self.peak = max(self.peak, self.now)


def bytes_of(tensors: Sequence[Tensor | None]) -> int:
    """Bytes of the elements of tensors that are there."""
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def spare_bytes(device: torch.device) -> int:
    """Memory of a device that nothing uses; of the host, what the system calls available or free."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    try:
        with open("/proc/meminfo") as file:
            fields: Mapping[str, str] = dict(line.split(":", 1) for line in file)
        return int(fields["MemAvailable"].split()[0]) << 10
    except (OSError, KeyError, ValueError):
        names = getattr(os, "sysconf_names", {})
        if "SC_AVPHYS_PAGES" not in names:
            return 1 << 30
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
