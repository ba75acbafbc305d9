"""Groups of parameter entries: whole tensors, layers, kinds, or the rows and columns that belong to one head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from curvature.blocks import kind_of, layer_of
from curvature.linear_operator import LinearOperator
from curvature.model_operator import ModelOperator
from curvature.vectors import Block, ParameterSpace, inner

__all__ = [
    "BlockDiagonalOperator",
    "Group",
    "GroupOperator",
    "Part",
    "block_operator",
    "group_inner",
    "groups_by",
    "layer_groups",
]


@dataclass(frozen=True)
class Part:
    """Entries of one parameter tensor.

    Attributes:
        parameter: Its name.
        dim: The dimension that is cut, or None: the whole tensor.
        start: First index along it.
        stop: First index behind the part.
    """

    parameter: str
    dim: int | None = None
    start: int = 0
    stop: int = 0

    def of(self, tensor: Tensor) -> Tensor:
        """The entries, as a view of the parameter or of any tensor of its shape."""
        return tensor if self.dim is None else tensor.narrow(self.dim, self.start, self.stop - self.start)


@dataclass(frozen=True)
class Group:
    """A named set of parameter entries, no entry twice."""

    name: str
    parts: tuple[Part, ...]

    @property
    def whole(self) -> bool:
        """Whether it consists of whole parameters."""
        return all(part.dim is None for part in self.parts)

    def views(self, space: ParameterSpace, flat: Tensor) -> list[Tensor]:
        """The group's entries of a contiguous flat vector [P], as views of it, one per part."""
        named = space.named(flat)
        return [part.of(named[part.parameter]) for part in self.parts]

    def numel(self, space: ParameterSpace) -> int:
        """Number of entries."""
        return sum(view.numel() for view in self.views(space, torch.empty(space.size, device="meta")))


def groups_by(space: ParameterSpace, key: Callable[[str], str | None]) -> list[Group]:
    """Whole parameters, grouped.

    Args:
        space: The parameters.
        key: Maps a parameter's name to its group's name; None leaves it out. `curvature.blocks.kind_of` groups by kind,
            `str` puts each parameter into a group of its own.

    Returns:
        The groups in the order of their first parameter.
    """
    found: dict[str, list[Part]] = {}
    for name in space.names:
        group = key(name)
        if group is not None:
            found.setdefault(group, []).append(Part(name))
    return [Group(name, tuple(parts)) for name, parts in found.items()]


def layer_groups(space: ParameterSpace) -> list[Group]:
    """One group per transformer block ("layer 3"), and one per kind of the parameters outside the blocks."""

    def place(name: str) -> str:
        layer = layer_of(name)
        return kind_of(name) if layer is None else f"layer {layer}"

    return groups_by(space, place)


def group_inner(space: ParameterSpace, groups: Sequence[Group], u: Tensor, v: Tensor) -> Tensor:
    """Inner products over each group: for a sign vector u and v = H u, one sample of the trace of each group's block.

    Returns:
        float64 [groups] on the vectors' device.
    """
    pairs = [(g.views(space, u), g.views(space, v)) for g in groups]
    return torch.stack([torch.stack([inner(a, b) for a, b in zip(x, y, strict=True)]).sum() for x, y in pairs])


class GroupOperator(LinearOperator):
    """The diagonal block of an operator that belongs to one group; a product costs one of the whole operator.

    Where the group consists of whole parameters of a model, `ModelOperator.restricted` is cheaper.

    Args:
        op: The operator.
        group: The group; its parts become the blocks of this operator's space.
    """

    def __init__(self, op: LinearOperator, group: Group) -> None:
        check_disjoint(op.space, [group])
        shapes = [tuple(view.shape) for view in group.views(op.space, torch.empty(op.space.size, device="meta"))]
        blocks = tuple(Block(_name(part), shape) for part, shape in zip(group.parts, shapes, strict=True))
        super().__init__(ParameterSpace(blocks, op.dtype, op.device))
        self.group = group
        self._op = op

    def _apply(self, rows: Tensor) -> Tensor:
        lifted = torch.zeros(len(rows), self._op.space.size, dtype=self.dtype, device=self.device)
        for row, target in zip(rows, lifted, strict=True):
            for piece, view in zip(self.space.split(row), self.group.views(self._op.space, target), strict=True):
                view.copy_(piece)
        products = self._op._apply(lifted)
        return torch.stack([self.space.flatten(self.group.views(self._op.space, product)) for product in products])


def block_operator(op: LinearOperator, group: Group) -> LinearOperator:
    """The diagonal block of a group: the cheapest operator for it."""
    if isinstance(op, ModelOperator) and group.whole:
        return op.restricted(part.parameter for part in group.parts)
    return GroupOperator(op, group)


class BlockDiagonalOperator(LinearOperator):
    """An operator without the blocks that couple different groups: sum_g E_g H E_g, with E_g the projection on group g.

    Entries in no group belong to the null space. A product costs one product of the operator for each group in which
    the vector is not zero.

    Args:
        op: The operator.
        groups: Disjoint groups of its parameters' entries.

    Raises:
        ValueError: If there is no group, a parameter is unknown, a part lies outside it, or groups overlap.
    """

    def __init__(self, op: LinearOperator, groups: Sequence[Group]) -> None:
        if not groups:
            raise ValueError("groups: there is none; pass at least one, such as those of layer_groups(op.space)")
        check_disjoint(op.space, groups)
        super().__init__(op.space)
        self.groups = tuple(groups)
        self._op = op

    def _apply(self, rows: Tensor) -> Tensor:
        result = torch.zeros_like(rows)
        for group in self.groups:
            masked = torch.zeros_like(rows)
            for row, target in zip(rows, masked, strict=True):
                for a, b in zip(group.views(self.space, row), group.views(self.space, target), strict=True):
                    b.copy_(a)
            if bool(masked.any()):
                products = self._op._apply(masked)
                for product, target in zip(products, result, strict=True):
                    for a, b in zip(group.views(self.space, product), group.views(self.space, target), strict=True):
                        b.copy_(a)
        return result


def check_disjoint(space: ParameterSpace, groups: Sequence[Group]) -> None:
    """Refuse groups that reach outside the space or hold an entry twice.

    Raises:
        ValueError: With the first such part.
    """
    shapes = {block.name: block.shape for block in space.blocks}
    taken: dict[str, Tensor] = {}
    for group in groups:
        if not group.parts:
            raise ValueError(f"groups: {group.name!r} is empty")
        for part in group.parts:
            shape = shapes.get(part.parameter)
            if shape is None:
                raise ValueError(f"groups: {group.name!r} names {part.parameter!r}, which is not among the parameters")
            if part.dim is not None and not (
                -len(shape) <= part.dim < len(shape) and 0 <= part.start < part.stop <= shape[part.dim]
            ):
                raise ValueError(f"groups: {group.name!r} reaches outside {part.parameter!r} of shape {shape}: {part}")
            if part.parameter not in taken:
                taken[part.parameter] = torch.zeros(shape, dtype=torch.bool)
            view = part.of(taken[part.parameter])
            if bool(view.any()):
                raise ValueError(
                    f"groups: {group.name!r} holds entries of {part.parameter!r} that have a group already"
                )
            view.fill_(True)


def _name(part: Part) -> str:
    if part.dim is None:
        return part.parameter
    return f"{part.parameter}[{':, ' * part.dim}{part.start}:{part.stop}]"
