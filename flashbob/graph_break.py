"""Functions that torch.compile calls, and does not record."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch._compile import _disable_dynamo

_P = ParamSpec("_P")
_R = TypeVar("_R")


def graph_break(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """`function`, before which torch.compile ends its graph and after which it begins another.

    torch.compiler.disable does the same, but imports torch's compiler when it decorates.
    """
    uncompiled = _disable_dynamo(function)

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        return (uncompiled if torch.compiler.is_dynamo_compiling() else function)(*args, **kwargs)

    return call
