"""What tells whether a model, a batch, or a setting of the library has changed since something was made of them."""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from curvature.capture import Graph, recordable
from curvature.loss import Batch

__all__ = ["Digest", "Modes", "State", "Structure", "modes_of"]

Modes = tuple[object, ...]

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)

_CONTAINERS = frozenset({dict, OrderedDict, list, tuple, set})


class Structure:
    """What a model's code does beside the values of its tensors: its modules, settings and hooks, its configuration.

    Made by one walk through the model, as every product makes it. Two are equal if they hold the same objects, but for
    plain values, which are compared, and tensors that are no parameters: code may make those anew each time.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._things: list[object] = []
        config = getattr(model, "config", None)
        inside = [config, *(v for v in vars(config).values() if hasattr(v, "to_dict"))] if config is not None else []
        for each in inside:
            self._add(vars(each))
        for module in model.modules():
            self._things.append(module)
            self._add(module.__dict__)

    def _add(self, attributes: Mapping[str, object]) -> None:
        """All attributes, and the entries of those that are containers, among them parameters, modules and hooks."""
        self._things.extend(attributes.values())
        for value in attributes.values():
            if type(value) in _CONTAINERS and value:
                self._things.extend(value.values() if isinstance(value, dict) else cast(Iterable[object], value))

    def holds_the_same_as(self, other: Structure) -> bool:
        """Whether they hold the same objects, tensors and plain values too: a quick way to see that they are equal."""
        return len(self._things) == len(other._things) and all(map(operator.is_, self._things, other._things))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Structure) or len(self._things) != len(other._things):
            return False
        return self.holds_the_same_as(other) or all(
            a is b or _alike(a, b) for a, b in zip(self._things, other._things, strict=True)
        )

    __hash__ = None  # type: ignore[assignment]

    def tensors(self, device: torch.device) -> list[Tensor]:
        """Parameters, buffers, and tensors on the device that modules have as attributes, each once."""
        found = (
            t for t in self._things if isinstance(t, Tensor) and (isinstance(t, nn.Parameter) or t.device == device)
        )
        return list(dict.fromkeys(found))


def _alike(a: object, b: object) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return not isinstance(a, nn.Parameter)
    return type(a) in _CONTAINERS or (isinstance(a, _PLAIN) and a == b)


def modes_of(model: nn.Module, kind: str) -> Modes:
    """Settings of the library, and of the model's attention, that change what is launched on a kind of device."""
    return (
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_autocast_enabled(kind),
        getattr(getattr(model, "config", None), "_attn_implementation", None),
    )


@dataclass(frozen=True, eq=False)
class State:
    """A model's tensors, a batch, and settings of the library at one moment.

    Of tensors their memory and version counters, and, since writes through `.data` leave those as they are, numbers
    that tell their values.

    Attributes:
        versions: Memory and version counter of each tensor.
        settings: The batch's entries that are no tensors, and `modes_of`.
        values: Of each tensor what `Digest` makes.
    """

    versions: list[tuple[int, int]]
    settings: tuple[object, ...]
    values: Tensor

    @classmethod
    def of(cls, model: Sequence[Tensor], batch: Batch, modes: Modes, digest: Digest) -> State:
        """The state of a model with these tensors. Cost: three reads of all of them."""
        own = [value for value in batch.values() if isinstance(value, Tensor)]
        plain = [(key, value if isinstance(value, _PLAIN) else id(value)) for key, value in batch.items()]
        versions = [(t.data_ptr(), t._version) for t in (*model, *own)]
        others = tuple((key, None) if isinstance(batch[key], Tensor) else (key, value) for key, value in plain)
        return cls(versions, (*others, *modes), torch.cat([digest(model), digest.of(own)]))

    def equals(self, other: State) -> bool:
        """Whether nothing has changed."""
        same = self.versions == other.versions and self.settings == other.settings
        return same and torch.equal(self.values, other.values)


class Digest:
    """Numbers that tell a tensor's values: weighted sums of its rows and of its columns and, unless integers, its norm.

    Of the same tensors again and again they come by one launch, where it can be recorded.
    """

    def __init__(self) -> None:
        self._weights: dict[tuple[int, torch.device], Tensor] = {}
        self._addresses: list[int] = []
        self._graph: Graph[Tensor] | None = None

    def __call__(self, tensors: Sequence[Tensor]) -> Tensor:
        """Of the tensors of a model: float64 [up to 3 per tensor], on their device."""
        addresses, device = [t.data_ptr() for t in tensors], tensors[0].device
        if addresses != self._addresses or not recordable(device):
            self._addresses, self._graph = addresses, None
            return self.of(tensors)
        if self._graph is None:
            try:
                self._graph = Graph(lambda: self.of(tensors), device)
            except RuntimeError:
                return self.of(tensors)
        self._graph.replay()
        return self._graph.result.clone()

    def of(self, tensors: Iterable[Tensor]) -> Tensor:
        """Of any tensors: float64 [up to 3 per tensor]."""
        found: list[Tensor] = []
        for t in tensors:
            t = torch.view_as_real(t.detach()) if t.is_complex() else t.detach()
            table = t.reshape(len(t) if t.ndim > 1 else 1, -1)
            # PyTorch would copy what it is to sum to float64; the sums are the same each time.
            precise = t.dtype == torch.float64 or not t.is_floating_point()
            for dim in (0, 1):
                sums = table.sum(dim, dtype=torch.float64 if precise else torch.float32)
                # No product of vectors: cuBLAS takes 32 MiB to work in for each stream.
                found.append((sums * self._weighting(len(sums), t.device)).sum())
            if t.is_floating_point():
                found.append(torch.linalg.vector_norm(table, dtype=torch.float64))
        return torch.stack(found)

    def _weighting(self, length: int, device: torch.device) -> Tensor:
        """Weights between 1 and 2 that no two neighbours share; made before anything is recorded that reads them."""
        if (length, device) not in self._weights:
            places = torch.arange(length, dtype=torch.float64, device=device)
            self._weights[length, device] = 1 + (places * 0.6180339887498949) % 1
        return self._weights[length, device]
