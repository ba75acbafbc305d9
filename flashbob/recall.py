"""Keeping what attention has computed, for callers that evaluate the same calls again.

Recomputation (checkpointed or layer-streamed differentiation) runs the same attention calls on the same inputs several
times. A `Recall` records their outputs by call order and hands them out again instead of computing them:

    recall = Recall()
    with recall.calls(gradients=True):
        out = block(x)        # first time: computes and records (o, lse)
    torch.autograd.grad(out, x, do)         # records (dq, dk, dv)
    with recall.calls(gradients=True):
        out = block(x)        # later: the recorded (o, lse); the first backward run through it is recalled as well

The caller vouches for equal inputs: the same q, k, v in every pass, and with `gradients=True` the same output gradient
in the first backward of each pass. Further backwards through the same graph (a double backward reaches the forward
graph again, with other output gradients) are computed. Derivatives of a recalled call are those of a computed one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from flashbob.plan import FirstOrder, Plan

Admit = Callable[[int], bool]
"""Asked with a number of bytes before results of that size are recorded; False leaves them to be computed again."""


class Store(Protocol):
    """Another memory for tensors that wait."""

    def put(self, t: Tensor, /) -> Tensor:
        """A copy of a tensor, in that memory."""

    def get(self, t: Tensor, /) -> Tensor:
        """The tensor of such a copy, where it was computed."""


class Recall:
    """The recorded results of a sequence of attention calls.

    Args:
        admit: Asked for outputs and first backwards. None: everything is recorded.
        spill: A store for first backwards that were not admitted, and who is asked for them then.
    """

    def __init__(self, admit: Admit | None = None, spill: tuple[Store, Admit] | None = None) -> None:
        self._outputs, self._gradients = _Record(admit), _Record(admit, spill)

    @contextmanager
    def calls(self, *, gradients: bool) -> Iterator[None]:
        """Attention calls inside are, in order, the calls number 0, 1, ... of this record.

        Args:
            gradients: Whether the first backward that is run through each of these calls is recorded, or recalled.
        """
        token = _active.set(_Pass(self, gradients))
        try:
            yield
        finally:
            _active.reset(token)

    def bytes(self) -> tuple[int, int]:
        """Memory of the recorded outputs and of the recorded first backwards."""
        return self._outputs.bytes(), self._gradients.bytes()

    def gradients(self) -> list[Tensor]:
        """The recorded first backwards, those in a store as it has them."""
        return self._gradients.tensors()

    def tensors(self) -> list[Tensor]:
        """All that is recorded."""
        return [*self._outputs.tensors(), *self._gradients.tensors()]

    def forget_gradients(self) -> None:
        """Drop the recorded first backwards; the outputs stay."""
        self._gradients.clear()


class _Record:
    """Results by number of the call."""

    def __init__(self, admit: Admit | None, spill: tuple[Store, Admit] | None = None) -> None:
        self._admit, self._spill = admit, spill
        self._results: dict[int, tuple[Tensor, ...]] = {}
        self._spilled: dict[int, Store] = {}

    def tensors(self) -> list[Tensor]:
        return [t for tensors in self._results.values() for t in tensors]

    def bytes(self) -> int:
        return sum(map(_bytes, self.tensors()))

    def clear(self) -> None:
        self._results.clear()
        self._spilled.clear()

    def get(self, number: int, compute: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """The results of a call: the recorded ones, or computed and, where they are admitted, recorded."""
        tensors = self._results.get(number)
        if tensors is None:
            tensors = compute()
            self._record(number, tensors)
        elif number in self._spilled:
            tensors = tuple(map(self._spilled[number].get, tensors))
        # New tensor objects on the same memory: autograd writes its history on the objects that a Function returns.
        return tuple(t.detach() for t in tensors)

    def _record(self, number: int, tensors: tuple[Tensor, ...]) -> None:
        size = sum(map(_bytes, tensors))
        if self._admit is None or self._admit(size):
            self._results[number] = tensors
        elif self._spill is not None and self._spill[1](size):
            self._spilled[number] = self._spill[0]
            self._results[number] = tuple(map(self._spill[0].put, tensors))


def _bytes(t: Tensor) -> int:
    return t.numel() * t.element_size()


class _Pass:
    """One pass through the calls of a record."""

    def __init__(self, recall: Recall, gradients: bool) -> None:
        self.recall, self.gradients, self.count = recall, gradients, 0


_active: ContextVar[_Pass | None] = ContextVar("flashbob_recall", default=None)


def through_recall(first: FirstOrder) -> FirstOrder:
    """`first`, by way of the record that is active here, if one is."""
    current = _active.get()
    if current is None:
        return first
    current.count += 1
    return _Recalled(first.name, first, current.recall, current.count - 1, current.gradients)


@dataclass
class _Recalled:
    """Forward and first backward of one numbered call. It travels in the call's plan, so backward threads have it."""

    name: str
    first: FirstOrder
    recall: Recall
    number: int
    gradients: bool

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, bounds: Tensor | None, bias: Tensor | None, plan: Plan
    ) -> tuple[Tensor, Tensor]:
        o, lse = self.recall._outputs.get(self.number, lambda: self.first.forward(q, k, v, bounds, bias, plan))
        return o, lse

    def backward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        do: Tensor,
        bounds: Tensor | None,
        bias: Tensor | None,
        plan: Plan,
    ) -> tuple[Tensor, Tensor, Tensor]:
        if not self.gradients:
            return self.first.backward(q, k, v, o, lse, do, bounds, bias, plan)
        self.gradients = False
        dq, dk, dv = self.recall._gradients.get(
            self.number, lambda: self.first.backward(q, k, v, o, lse, do, bounds, bias, plan)
        )
        return dq, dk, dv
