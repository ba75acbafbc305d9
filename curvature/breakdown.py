"""Where a trace lies: by layer, by kind of parameter, and by both, each sum with the standard error of the sum."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from curvature.blocks import kind_of, layer_of
from curvature.estimate import mean_and_stderr
from curvature.groups import Group
from curvature.trace import TraceEstimate
from curvature.vectors import ParameterSpace

__all__ = ["KINDS", "Breakdown", "Piece", "Share"]

KINDS = (
    "embedding", "position", "norm", "q", "k", "v", "qkv", "o", "router", "mlp gate", "mlp in", "mlp out", "head",
    "other",
)  # fmt: skip
"""Kinds of parameters in the order in which a table shows them."""

_Key = TypeVar("_Key", bound=Hashable)


@dataclass(frozen=True, eq=False)
class Piece:
    """Entries of one parameter tensor, or of one share of a fused one.

    Attributes:
        layer: Number of the transformer block, or None outside the blocks.
        kind: See `curvature.blocks.kind_of`.
        numel: Number of entries.
        samples: The probes' contributions to the trace of its diagonal block, float64 [products].
    """

    layer: int | None
    kind: str
    numel: int
    samples: npt.NDArray[np.float64] = field(repr=False)

    @property
    def place(self) -> str:
        """The layer as a label; the kind for what lies outside the transformer blocks."""
        return self.kind if self.layer is None else f"layer {self.layer}"


@dataclass(frozen=True)
class Share:
    """What some of the entries have of the trace.

    Attributes:
        numel: Number of entries.
        trace: Estimate of the trace of their diagonal blocks together.
        stderr: Its standard error, of the sum: errors of the parts are correlated.
    """

    numel: int
    trace: float
    stderr: float

    @property
    def mean_eigenvalue(self) -> float:
        """The trace over the number of entries."""
        return self.trace / self.numel

    @property
    def mean_stderr(self) -> float:
        """Standard error of the mean eigenvalue."""
        return self.stderr / self.numel


@dataclass(frozen=True, eq=False)
class Breakdown:
    """A trace in pieces, which add up to it."""

    pieces: tuple[Piece, ...]

    @classmethod
    def of(cls, estimate: TraceEstimate, space: ParameterSpace, fused: Sequence[Group] = ()) -> Breakdown:
        """The pieces of an estimate.

        Args:
            estimate: From `curvature.trace`, made with `fused` among its groups.
            space: The operator's space.
            fused: From `curvature.attention_heads.fused_groups`: these take the place of the parameters that they share
                out among them.

        Raises:
            KeyError: If the estimate has no samples of such a group.
        """
        covered = {part.parameter for group in fused for part in group.parts}
        left = sum(block.numel for block in space.blocks if block.name in covered)
        if left != sum(group.numel(space) for group in fused):
            raise ValueError(f"fused: the groups do not share out {sorted(covered)[:3]} without a rest")
        pieces = [
            Piece(layer_of(block.name), kind_of(block.name), block.numel, column)
            for block, column in zip(space.blocks, estimate.samples.T, strict=True)
            if block.name not in covered
        ]
        for group in fused:
            layer, kind = layer_of(group.parts[0].parameter), group.name.rsplit(" ", 1)[1]
            pieces.append(Piece(layer, kind, group.numel(space), estimate.group_samples[group.name]))
        # Embeddings first, then the layers, then what comes behind them, which has no number either.
        first = min((i for i, piece in enumerate(pieces) if piece.layer is not None), default=0)
        order = sorted(
            range(len(pieces)), key=lambda i: (*_order(pieces[i].layer, i < first), KINDS.index(pieces[i].kind))
        )
        return cls(tuple(pieces[i] for i in order))

    def by(self, key: Callable[[Piece], _Key]) -> dict[_Key, Share]:
        """Sums of pieces.

        Args:
            key: Maps a piece to its group, such as its kind or its place.

        Returns:
            {group: share}, in the order of the groups' first pieces: by layer, then by kind.
        """
        groups: dict[_Key, list[Piece]] = {}
        for piece in self.pieces:
            groups.setdefault(key(piece), []).append(piece)
        found = {}
        for group, pieces in groups.items():
            value, stderr = mean_and_stderr(np.sum([piece.samples for piece in pieces], axis=0))
            found[group] = Share(sum(piece.numel for piece in pieces), value, stderr)
        return found


def _order(layer: int | None, ahead: bool) -> tuple[int, int]:
    if layer is None:
        return (0 if ahead else 2), 0
    return 1, layer
