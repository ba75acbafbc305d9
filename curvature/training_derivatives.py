"""Gradients of a training step and products of its Hessian: launched, or on a GPU recorded once and replayed.

At usual sizes the host needs longer to launch a step's kernels than the device to run them, and a Hessian product has
five times as many. Every step launches the same kernels on the same memory, apart from the windows and, for a product,
the direction: both are copied to where a CUDA graph reads them.

The two graphs use the same work space, so that what one has left lasts until the other is replayed: a step takes its
products first, each of them used up before the next one, and then its gradients.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from curvature.capture import Graph
from curvature.sophia import check_loss, hessian_product, hutchinson_diagonal, signs
from curvature.storage import bytes_of

__all__ = ["Derivatives"]

_FREE = 0.25
"""Share of a device's memory that must have stayed free for launches to be recorded: their work space is not given back
for evaluations and the like."""

_Found: TypeAlias = tuple[Tensor, list[Tensor | None]]
"""A loss, and one tensor per parameter, None where it is zero."""


class Derivatives:
    """First and second derivatives of the mean loss of windows. One shape of windows is recorded, once it repeats.

    Args:
        loss: The mean loss of windows, int64 [batch, seq]. Where launches are recorded it must do the same each time,
            and read nothing on the host.
        parameters: What is trained; updated in place.

    Attributes:
        recorded: Which of "gradient" and "product" are replayed by now.
    """

    def __init__(self, loss: Callable[[Tensor], Tensor], parameters: Sequence[nn.Parameter]) -> None:
        self._loss, self._parameters = loss, parameters
        self._device = parameters[0].device
        self._graphs: dict[str, Graph[_Found]] = {}
        self._launched: set[tuple[str, torch.Size]] = set()
        self._refused = False
        self._ids = torch.empty(0)
        self._z: list[Tensor] = []

    @property
    def recorded(self) -> frozenset[str]:
        """See the class."""
        return frozenset(self._graphs)

    def add_gradient(self, ids: Tensor, parts: int, *, record: bool = True) -> Tensor:
        """Add the gradient of the mean loss, divided by `parts`, to `parameter.grad`.

        Args:
            ids: int64 [batch, seq], on the parameters' device.
            parts: What the gradient is divided by; the same in every call.
            record: Whether these launches may be recorded; with dropout, whose masks the host draws, they may not.

        Returns:
            The mean loss, a scalar that is overwritten by the next call.
        """

        def run() -> _Found:
            loss = self._loss(self._ids)
            found = torch.autograd.grad(loss / parts, self._parameters, allow_unused=True)
            return loss.detach(), _apart(found, self._parameters)

        graph = self._graph("gradient", run, ids, record)
        if graph is None:
            loss = self._loss(ids)
            (loss / parts).backward()
            return loss.detach()
        graph.replay()
        loss, gradients = graph.result
        for p, g in zip(self._parameters, gradients, strict=True):
            if g is None:
                continue
            if p.grad is None:
                p.grad = g if parts == 1 else g.clone()  # with one part nothing is added before the next replay
            else:
                p.grad.add_(g)
        return loss

    def hutchinson_diagonal(self, ids: Tensor, seed: int, *, record: bool = True) -> list[Tensor | None]:
        """See `curvature.sophia.hutchinson_diagonal`, of the mean loss of `ids`, int64 [batch, seq].

        Args:
            ids: See `add_gradient`.
            seed: Of the signs.
            record: Whether these launches may be recorded.
        """

        def run() -> _Found:
            loss = self._loss(self._ids)
            return loss.detach(), hessian_product(loss, self._parameters, self._z)

        graph = self._graph("product", run, ids, record)
        if graph is None:
            return hutchinson_diagonal(self._loss(ids), self._parameters, seed=seed)
        with torch.no_grad():
            torch._foreach_copy_(self._z, signs(self._parameters, seed))
        graph.replay()
        loss, products = graph.result
        check_loss(loss)
        return [None if hz is None else hz * z for hz, z in zip(products, self._z, strict=True)]

    def _graph(self, name: str, run: Callable[[], _Found], ids: Tensor, record: bool) -> Graph[_Found] | None:
        """The recording of these launches, its windows in place; None where they are to be launched."""
        if self._ids.numel() and ids.shape != self._ids.shape:
            return None
        if not record or (name not in self._graphs and not self._record(name, run, ids)):
            self._launched.add((name, ids.shape))
            return None
        self._ids.copy_(ids)
        return self._graphs[name]

    def _record(self, name: str, run: Callable[[], _Found], ids: Tensor) -> bool:
        """Record what has been launched before, so that kernels are compiled; whether that was done."""
        if (name, ids.shape) not in self._launched or self._refused or not _roomy(self._device, self._parameters):
            return False
        if not self._ids.numel():
            self._ids = ids.clone()
        if name == "product":
            self._z = [torch.zeros_like(p, requires_grad=False) for p in self._parameters]
        beside: Graph[Any] | None = next(iter(self._graphs.values()), None)
        try:
            self._graphs[name] = Graph(run, self._device, beside)
        except (RuntimeError, ValueError) as error:
            self._refused = True
            if name == "product":
                self._z = []
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            warnings.warn(f"what is not recorded yet is launched in every step: {reason}", stacklevel=2)
            return False
        return True


def _apart(gradients: Sequence[Tensor | None], parameters: Sequence[Tensor]) -> list[Tensor | None]:
    """The gradients in the parameters' own layouts, which optimizers are fastest with, each in memory of its own.

    Autograd returns one tensor for two parameters that are only added to each other.
    """
    seen: set[int] = set()
    found: list[Tensor | None] = []
    for g, p in zip(gradients, parameters, strict=True):
        if g is not None and (g.stride() != p.stride() or g.data_ptr() in seen):
            g = torch.empty_like(p, requires_grad=False).copy_(g)
        if g is not None:
            seen.add(g.data_ptr())
        found.append(g)
    return found


def _roomy(device: torch.device, parameters: Sequence[Tensor]) -> bool:
    """Whether launches on this device can be recorded, and its memory has room for what they hold on to.

    Besides the work space, which launches share with all else and recordings keep: the direction, and, where parts are
    added, the sum of their gradients; an update has as much again for the time that it takes.
    """
    if device.type != "cuda":
        return False
    whole, peak = torch.cuda.get_device_properties(device).total_memory, torch.cuda.max_memory_allocated(device)
    return peak <= (1 - _FREE) * whole and peak + 3 * bytes_of(parameters) <= whole
