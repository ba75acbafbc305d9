"""The directions of a product, the pull-backs along which they are taken, and the sums that become its result."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

__all__ = ["Directions", "nonzero", "pull"]


def nonzero(directions: Sequence[Sequence[Tensor]]) -> list[list[bool]]:
    """For each direction, in which parameters it is not zero. Cost: a read of all of them, and one transfer."""
    sizes = [torch.stack(torch._foreach_norm(list(d), ord=math.inf)) for d in directions]
    return (torch.stack(sizes) != 0).tolist()


class Directions:
    """Several directions in parameter space, read and added to parameter by parameter.

    Args:
        directions: For each direction one tensor per parameter, of its shape.
        parameters: The parameters.
        present: In which parameters each direction is not zero, where that is known: see `nonzero`.

    Attributes:
        count: Number of directions.
        sums: The products so far: for each direction one tensor per parameter in the direction's dtype, or None.
    """

    def __init__(
        self,
        directions: Sequence[Sequence[Tensor]],
        parameters: Sequence[nn.Parameter],
        present: list[list[bool]] | None = None,
    ) -> None:
        self.count = len(directions)
        self.sums: list[list[Tensor | None]] = [[None] * len(parameters) for _ in directions]
        self._directions, self._parameters = directions, parameters
        # A direction that is zero in a parameter costs nothing there.
        self._nonzero = nonzero(directions) if present is None else present

    def any(self, numbers: Sequence[int]) -> bool:
        """Whether any direction is nonzero in any of these parameters."""
        return any(nonzero[i] for nonzero in self._nonzero for i in numbers)

    def tangents(self, k: int, numbers: Sequence[int]) -> list[Tensor | None]:
        """Direction k in these parameters, in the parameters' dtype; None where it is zero."""
        return [self._directions[k][i].to(self._parameters[i].dtype) if self._nonzero[k][i] else None for i in numbers]

    def add(self, k: int, numbers: Sequence[int], pieces: Sequence[Tensor | None]) -> None:
        """Add to product k in these parameters."""
        for i, piece in zip(numbers, pieces, strict=True):
            if piece is not None:
                present = self.sums[k][i]
                if present is None:
                    self.sums[k][i] = piece.to(self._directions[k][i].dtype, copy=True)
                else:
                    present.add_(piece)


def pull(
    outputs: Sequence[Tensor | None],
    inputs: Sequence[Tensor],
    cotangents: Sequence[Tensor | None],
    *,
    create_graph: bool = False,
    retain: bool = False,
) -> list[Tensor | None]:
    """Vector-Jacobian product, one tensor per input: None where the input requires no gradient or is not reached.

    Outputs without a cotangent drop out, and those without a graph (gradients that depend on nothing further, such as
    that of a last bias).
    """
    pairs = [(o, c) for o, c in zip(outputs, cotangents, strict=True) if o is not None and c is not None]
    pairs = [(o, c) for o, c in pairs if o.requires_grad]
    wanted = [t for t in inputs if t.requires_grad]
    if not pairs or not wanted:
        return [None] * len(inputs)
    found = iter(
        torch.autograd.grad(
            [o for o, _ in pairs],
            wanted,
            [c.to(o.dtype) for o, c in pairs],
            create_graph=create_graph,
            retain_graph=create_graph or retain,
            allow_unused=True,
        )
    )
    return [next(found) if t.requires_grad else None for t in inputs]
