"""The last segment of a chain, from the activation behind the layers to the loss, stretch by stretch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, TypeAlias

import torch
from torch import Tensor, nn

from curvature.chain import Chain, cut, cut_any, paste, spans
from curvature.directions import Directions, pull
from curvature.layers.unread import unread_gradients
from curvature.readout import Along, Readout, TokenLoss
from curvature.storage import Allowance, bytes_of

__all__ = ["Add", "Head", "LossHead", "ReadoutHead", "make_head"]

Add: TypeAlias = Callable[[int, Sequence[int], Sequence[Tensor | None]], None]
"""Receives (number of the direction, numbers of parameters, what is added to its result in them)."""

_Timer: TypeAlias = Callable[[str], AbstractContextManager[object]]


class Head(Protocol):
    """The mean loss as a function of x_n [B, N, width] and of the parameters behind the layers."""

    def loss(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The mean loss, a float64 scalar, and its gradient by x."""
        ...

    def gradient(self, x: Tensor, add: Add) -> None:
        """Hand the gradient by the parameters to `add`, for direction 0."""
        ...

    def second(self, x: Tensor, xdot: Sequence[Tensor | None], z: Directions) -> list[Tensor | None]:
        """For each direction the derivative of the gradient by x; that by the parameters is added to z."""
        ...

    def kept(self) -> list[Tensor]:
        """What `loss` has kept for products."""
        ...

    def release(self) -> None:
        """Forget what was kept for further products."""
        ...


def make_head(
    chain: Chain, parameters: Sequence[nn.Parameter], numbers: Sequence[int], stretch: int, reached: bool,
    allowance: Allowance, timer: _Timer,
) -> Head:  # fmt: skip
    """The head of a chain.

    Args:
        chain: The chain.
        parameters: The parameters that are differentiated.
        numbers: Which of them the chain reads outside its segments.
        stretch: Tokens processed at once, counted over all sequences of the batch.
        reached: Whether x_n depends on any of the parameters.
        allowance: Memory for what spares computation.
        timer: See `curvature.streamed.Streamed`.
    """
    if chain.readout is not None:
        return ReadoutHead(chain, chain.readout, parameters, numbers, stretch, reached, allowance, timer)
    return LossHead(chain, parameters, numbers, stretch, reached, timer)


class _Stretched:
    """What the two heads share: the stretches of x_n, and the selection of parameters."""

    def __init__(
        self, chain: Chain, parameters: Sequence[nn.Parameter], numbers: Sequence[int], stretch: int, reached: bool,
        timer: _Timer,
    ) -> None:  # fmt: skip
        self._chain, self._numbers, self._reached, self._timer = chain, list(numbers), reached, timer
        self._selected = [parameters[i] for i in numbers]
        self._stretch = stretch

    def _pieces(self, x: Tensor) -> Iterator[tuple[tuple[int, int], Tensor]]:
        """The stretches, and for each a leaf of x there."""
        for span in spans(self._chain.length, max(1, self._stretch // x.shape[0])):
            with self._timer("head"):
                yield span, cut(x, *span).detach().requires_grad_(self._reached)


class LossHead(_Stretched):
    """A head that is known as a function only: reverse over reverse."""

    def loss(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """See `Head`."""
        adjoint, total = torch.zeros_like(x), torch.zeros((), dtype=torch.float64, device=x.device)
        for span, leaf in self._pieces(x):
            leaf.requires_grad_()
            mean = self._mean(leaf, span)
            total += mean.detach()
            paste(adjoint, pull([mean], [leaf], [torch.ones_like(mean)])[0], span, x.shape)
            del mean
        return total, adjoint

    def gradient(self, x: Tensor, add: Add) -> None:
        """See `Head`."""
        for span, leaf in self._pieces(x):
            mean = self._mean(leaf, span)
            add(0, self._numbers, pull([mean], self._selected, [torch.ones_like(mean)]))
            del mean

    def second(self, x: Tensor, xdot: Sequence[Tensor | None], z: Directions) -> list[Tensor | None]:
        """See `Head`."""
        adjoints: list[Tensor | None] = [None] * z.count
        tangents = [z.tangents(k, self._numbers) for k in range(z.count)]
        for span, leaf in self._pieces(x):
            mean = self._mean(leaf, span)
            first = pull([mean], [leaf, *self._selected], [torch.ones_like(mean)], create_graph=True)
            for k, tangent in enumerate(tangents):
                along = [cut_any(xdot[k], span), *tangent]
                found, *pieces = pull(first, [leaf, *self._selected], along, retain=k + 1 < z.count)
                adjoints[k] = paste(adjoints[k], found, span, x.shape)
                z.add(k, self._numbers, pieces)
            del mean, first, found, pieces
        return adjoints

    def kept(self) -> list[Tensor]:
        """See `Head`."""
        return []

    def release(self) -> None:
        """See `Head`."""

    def _mean(self, leaf: Tensor, span: tuple[int, int]) -> Tensor:
        return self._chain.head(leaf, *span) / self._chain.tokens


class ReadoutHead(_Stretched):
    """A head that ends in a linear map and the cross-entropy (`curvature.readout`).

    The features are one more segment h = features(x), whose adjoint dh is kept where the allowance has room.
    """

    def __init__(
        self, chain: Chain, readout: Readout, parameters: Sequence[nn.Parameter], numbers: Sequence[int], stretch: int,
        reached: bool, allowance: Allowance, timer: _Timer,
    ) -> None:  # fmt: skip
        super().__init__(chain, parameters, numbers, stretch, reached, timer)
        self._readout, self._allowance = readout, allowance
        places: dict[Tensor, int] = {p: i for i, p in enumerate(self._selected)}
        self._weight = places.get(readout.weight)
        self._bias = None if readout.bias is None else places.get(readout.bias)
        self._outputs = [numbers[i] for i in (self._weight, self._bias) if i is not None]
        self._kept: dict[tuple[int, int], Tensor] = {}

    def loss(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """See `Head`."""
        loss = TokenLoss(self._readout, self._chain.tokens)
        adjoint, total = torch.zeros_like(x), torch.zeros((), dtype=torch.float64, device=x.device)
        for span, leaf in self._pieces(x):
            h = self._readout.features(leaf.requires_grad_())
            mean, dh, _ = loss.first(h.detach(), span)
            total += mean
            paste(adjoint, pull([h], [leaf], [dh])[0], span, x.shape)
            if self._allowance.take(bytes_of([dh])):
                self._kept[span] = dh
            del h, dh
        return total, adjoint

    def gradient(self, x: Tensor, add: Add) -> None:
        """See `Head`."""
        loss = TokenLoss(self._readout, self._chain.tokens)
        for span, leaf in self._pieces(x):
            h = self._readout.features(leaf)
            _, dh, found = loss.first(h.detach(), span, parameters=bool(self._outputs))
            add(0, self._numbers, pull([h], self._selected, [dh]))
            add(0, self._outputs, self._chosen(found))
            del h, dh, found

    def second(self, x: Tensor, xdot: Sequence[Tensor | None], z: Directions) -> list[Tensor | None]:
        """See `Head`."""
        adjoints: list[Tensor | None] = [None] * z.count
        tangents = [z.tangents(k, self._numbers) for k in range(z.count)]
        loss = TokenLoss(self._readout, self._chain.tokens, [self._along(t) for t in tangents])
        for span, leaf in self._pieces(x):
            with unread_gradients():
                h = self._readout.features(leaf)
            dh = self._kept.get(span)
            dh = (loss.first(h.detach(), span)[1] if dh is None else dh).detach().requires_grad_()
            first = pull([h], [leaf, *self._selected], [dh], create_graph=True)
            hdots: list[Tensor | None] = []
            for k, tangent in enumerate(tangents):
                along = [cut_any(xdot[k], span), *tangent]
                found = pull(first, [leaf, dh, *self._selected], along, retain=True)
                adjoints[k] = paste(adjoints[k], found[0], span, x.shape)
                hdots.append(found[1])
                z.add(k, self._numbers, found[2:])
            del first, found, dh
            h_again = self._readout.features(leaf)
            for k, (by_h, by_parameters) in enumerate(
                loss.second(h.detach(), span, hdots, parameters=bool(self._outputs))
            ):
                for pair in by_parameters:
                    z.add(k, self._outputs, self._chosen(pair))
                found = pull([h_again], [leaf, *self._selected], [by_h], retain=k + 1 < z.count)
                adjoints[k] = paste(adjoints[k], found[0], span, x.shape)
                z.add(k, self._numbers, found[1:])
            del h, h_again, hdots, found
        return adjoints

    def kept(self) -> list[Tensor]:
        """See `Head`."""
        return list(self._kept.values())

    def release(self) -> None:
        """See `Head`."""
        self._kept.clear()

    def _along(self, tangent: Sequence[Tensor | None]) -> Along:
        return (
            None if self._weight is None else tangent[self._weight],
            None if self._bias is None else tangent[self._bias],
        )

    def _chosen(self, pair: Along) -> list[Tensor | None]:
        return [t for t, place in zip(pair, (self._weight, self._bias), strict=True) if place is not None]
