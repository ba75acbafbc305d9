"""The space that parameter vectors live in: which parameters, in which order, and the forms a vector may take."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TypeAlias

import torch
from torch import Tensor, nn

from curvature.precision import vector_dtype

__all__ = ["Block", "ParameterSpace", "Vector", "inner", "norm", "select_parameters"]

Vector: TypeAlias = Tensor | Sequence[Tensor] | Mapping[str, Tensor]
"""Flat [P], several flat columns [P, K], a list with one tensor per parameter, or {parameter name: tensor}."""

_CHUNK = 1 << 24


@dataclass(frozen=True)
class Block:
    """One parameter tensor as a stretch of a flat vector."""

    name: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of entries."""
        return torch.Size(self.shape).numel()


@dataclass(frozen=True)
class ParameterSpace:
    """The vector space of a set of named tensors, each flattened in row-major order and laid end to end.

    Args:
        blocks: The tensors in order.
        dtype: The dtype of vectors (float32 or float64).
        device: Where vectors live.
    """

    blocks: tuple[Block, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, parameters: Mapping[str, nn.Parameter]) -> ParameterSpace:
        """The space of these parameters, in their order.

        Raises:
            NotImplementedError: If the parameters are spread over several devices.
        """
        devices = {p.device for p in parameters.values()}
        if len(devices) > 1:
            raise NotImplementedError(
                f"the parameters lie on several devices ({', '.join(sorted(map(str, devices)))}); put the model on one"
            )
        blocks = tuple(Block(name, tuple(p.shape)) for name, p in parameters.items())
        return cls(blocks, vector_dtype(list(parameters.values())), devices.pop())

    @cached_property
    def size(self) -> int:
        """Dimension P of the space."""
        return sum(self._sizes)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The blocks' names in order."""
        return tuple(b.name for b in self.blocks)

    @cached_property
    def _sizes(self) -> list[int]:
        return [b.numel for b in self.blocks]

    def slices(self) -> dict[str, slice]:
        """Where each block lies in a flat vector."""
        ends = list(accumulate(self._sizes))
        return {b.name: slice(end - b.numel, end) for b, end in zip(self.blocks, ends, strict=True)}

    def split(self, flat: Tensor) -> list[Tensor]:
        """Views of a contiguous flat vector [P], one per block, each of the block's shape."""
        return [piece.view(b.shape) for piece, b in zip(flat.split(self._sizes), self.blocks, strict=True)]

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """A flat vector [P] as {name: tensor}."""
        return dict(zip(self.names, self.split(flat), strict=True))

    def flatten(self, tensors: Iterable[Tensor]) -> Tensor:
        """One tensor per block as a new flat vector [P] of this space's dtype and device."""
        return torch.cat([t.detach().to(self.device, self.dtype).reshape(-1) for t in tensors])

    def rows(self, v: Vector) -> tuple[Tensor, Callable[[Tensor], Vector]]:
        """Read a vector in any form.

        Args:
            v: See `Vector`. Entries of other floating dtypes are converted to this space's.

        Returns:
            The columns of v as contiguous rows [K, P], and the map that turns rows [K, P] back into the form of v.

        Raises:
            TypeError: If v is none of the forms, or not real floating point.
            ValueError: If a shape, a length, a name or the device does not fit.
        """
        if isinstance(v, Tensor):
            return self._rows_of_tensor(v)
        if isinstance(v, Mapping):
            if set(v) != set(self.names):
                missing, unknown = sorted(set(self.names) - set(v)), sorted(set(v) - set(self.names))
                raise ValueError(
                    f"a vector given by name must have exactly the operator's {len(self.names)} names; "
                    f"missing: {missing[:3]}, unknown: {unknown[:3]}"
                )
            return self._row_of_list([v[name] for name in self.names]), lambda rows: self.named(rows[0])
        if isinstance(v, (list, tuple)):
            return self._row_of_list(v), lambda rows: self.split(rows[0])
        raise TypeError(f"a vector must be a tensor, a list of tensors or {{name: tensor}}, got {type(v).__name__}")

    def _rows_of_tensor(self, v: Tensor) -> tuple[Tensor, Callable[[Tensor], Vector]]:
        self._check(v, "a vector")
        if v.ndim not in (1, 2) or v.shape[0] != self.size:
            raise ValueError(f"a vector must have shape [{self.size}] or [{self.size}, K], got {list(v.shape)}")
        v = v.detach()
        if v.ndim == 1:
            return v.to(self.dtype).contiguous().reshape(1, -1), lambda rows: rows[0]
        return v.to(self.dtype).T.contiguous(), lambda rows: rows.T

    def _row_of_list(self, tensors: Sequence[Tensor]) -> Tensor:
        if len(tensors) != len(self.blocks):
            raise ValueError(f"a vector given as a list must have {len(self.blocks)} tensors, got {len(tensors)}")
        for tensor, block in zip(tensors, self.blocks, strict=True):
            self._check(tensor, block.name)
            if tuple(tensor.shape) != block.shape:
                raise ValueError(f"{block.name}: expected a tensor of shape {block.shape}, got {tuple(tensor.shape)}")
        return self.flatten(tensors).reshape(1, -1)

    def _check(self, tensor: object, what: str) -> None:
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            found = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise TypeError(f"{what} must be a real floating-point tensor, got {found}")
        if tensor.device != self.device:
            raise ValueError(f"{what} is on {tensor.device}, the operator on {self.device}; move it with .to()")


def select_parameters(model: nn.Module, params: str | Iterable[str] | None = None) -> dict[str, nn.Parameter]:
    """The parameters that an operator differentiates, in the order of `model.named_parameters()`.

    Parameters that share one tensor (tied weights) appear once, under the first of their names; they can be selected by
    any of their names.

    Args:
        model: The model.
        params: None: all that require a gradient. A string: a regular expression, searched for (`re.search`) in the
            names of parameters that require a gradient. A list: exact names.

    Raises:
        ValueError: If nothing is selected, the expression is invalid, a name is unknown, or a named parameter does not
            require a gradient.
    """
    aliases: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(parameter, []).append(name)
    trainable = {names[0]: p for p, names in aliases.items() if p.requires_grad}
    if not trainable:
        raise ValueError("params: no parameter of the model requires a gradient; call model.requires_grad_(True)")
    if params is None:
        return trainable
    if isinstance(params, str):
        try:
            pattern = re.compile(params)
        except re.error as error:
            raise ValueError(f"params: {params!r} is not a regular expression ({error})") from error
        matching = {p for p, names in aliases.items() if any(map(pattern.search, names))}
        selected = {name: p for name, p in trainable.items() if p in matching}
        if not selected:
            reason = "matches only parameters that do not require a gradient" if matching else "matches no parameter"
            raise ValueError(f"params: {params!r} {reason}; the names are like {list(trainable)[:3]}")
        return selected
    return _named_parameters(aliases, trainable, list(params))


def _named_parameters(
    aliases: Mapping[nn.Parameter, list[str]], trainable: Mapping[str, nn.Parameter], names: Sequence[str]
) -> dict[str, nn.Parameter]:
    by_name = {name: p for p, all_names in aliases.items() for name in all_names}
    if not names:
        raise ValueError("params: an empty list selects nothing; pass None for all parameters")
    for name in names:
        if name not in by_name:
            raise ValueError(f"params: no parameter is named {name!r}; the names are like {list(trainable)[:3]}")
        if not by_name[name].requires_grad:
            raise ValueError(f"params: {name!r} does not require a gradient; call requires_grad_(True) on it")
    chosen = {by_name[name] for name in names}
    return {name: p for name, p in trainable.items() if p in chosen}


def inner(a: Tensor, b: Tensor) -> Tensor:
    """Inner product <a, b> of two tensors of equal shape, accumulated in float64.

    Works in pieces, so that the float64 copies stay small beside vectors of a billion entries.

    Returns:
        A float64 scalar on the tensors' device.
    """
    a, b = a.reshape(-1), b.reshape(-1)
    if a.numel() <= _CHUNK:
        return torch.dot(a.double(), b.double())
    total = torch.zeros((), dtype=torch.float64, device=a.device)
    for x, y in zip(a.split(_CHUNK), b.split(_CHUNK), strict=True):
        total += torch.dot(x.double(), y.double())
    return total


def norm(a: Tensor) -> float:
    """Euclidean norm, accumulated in float64."""
    return float(inner(a, a).sqrt())
