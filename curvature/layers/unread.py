"""Gradients that are needed as functions only, not as values.

In the second-order sweep, the gradient of a segment's parameters is differentiated, and its value is thrown away. A
layer that is run inside `unread_gradients()` leaves its parameters' gradients out of a backward pass that is itself to
be differentiated (create_graph=True), and returns NaN in their place, attached to the graph: the second derivative is
exact, and a value that is read after all shows.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

__all__ = ["are_unread", "placeholder", "unread_gradients"]

_unread: ContextVar[bool] = ContextVar("unread", default=False)


@contextmanager
def unread_gradients() -> Iterator[None]:
    """Inside, layers are told that the values of their parameters' gradients will not be read."""
    token = _unread.set(True)
    try:
        yield
    finally:
        _unread.reset(token)


def are_unread() -> bool:
    """Whether a layer that runs now may leave out its parameters' gradients."""
    return _unread.get()


@functools.cache
def _nan(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((), math.nan, dtype=dtype, device=device)


def placeholder(like: Tensor) -> Tensor:
    """A NaN of the shape, dtype and device of `like`, without memory of its own."""
    return _nan(like.dtype, like.device).expand(like.shape)
