"""A product's launches, recorded once and replayed for further directions.

At a few thousand tokens the host needs longer to launch a product's kernels than the device to run them. A CUDA graph
holds the launches with their memory; a replay costs the host next to nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from curvature.directions import nonzero
from curvature.streamed import Streamed

__all__ = ["CAPTURED_TOKENS", "CapturedProduct"]

CAPTURED_TOKENS = 1 << 14
"""Longest batches for which the host is the limit, and the memory of a recorded product is small."""


class CapturedProduct:
    """Products of kept derivatives with one direction after another, by replay.

    Args:
        streamed: Derivatives on a CUDA device that have made a product before (so that kernels are compiled and
            attention results recorded), without offload.
        direction: A direction; further ones must be zero in the same parameters.

    Raises:
        RuntimeError: If something in the model cannot be recorded, such as a read of a value by the host.
    """

    def __init__(self, streamed: Streamed, direction: Sequence[Tensor]) -> None:
        self._direction = [d.clone() for d in direction]
        self._nonzero = nonzero([self._direction])
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            z = streamed.directions([self._direction], self._nonzero)
            streamed.sweep(z)
        self._sums = z.sums[0]

    def takes(self, direction: Sequence[Tensor]) -> bool:
        """Whether the direction is zero where the recorded one is, and nowhere else."""
        return nonzero([direction]) == self._nonzero

    def product(self, direction: Sequence[Tensor]) -> list[Tensor | None]:
        """The product; its tensors are overwritten by the next one."""
        torch._foreach_copy_(self._direction, list(direction))
        self._graph.replay()
        return self._sums
