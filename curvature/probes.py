"""Random probe vectors that depend on the seed alone: not on the device, the number of processes, or the order of work.

Each parameter tensor draws from a stream of its own: the counter-based generator Philox, with the key (seed, probe
index) and a counter whose top word is a hash of the tensor's name. Probe i of a tensor can therefore be drawn anywhere
at any time, and restricting an operator to some parameters leaves their probes as they are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from curvature.vectors import ParameterSpace

__all__ = ["normal", "rademacher"]


def rademacher(space: ParameterSpace, *, seed: int, index: int) -> Tensor:
    """Probe of independent signs: entries +1 or -1 with equal probability.

    E[z z^T] = I, and among all such distributions with independent entries it gives Hutchinson's estimator its least
    variance. Exact in every dtype, bf16 included.

    Args:
        space: Where the probe lives.
        seed: 0 <= seed < 2**64.
        index: Which probe, 0 <= index < 2**64.

    Returns:
        A flat vector [P] of the space's dtype and device.

    Raises:
        ValueError: If the seed or the index is out of range.
    """
    return _draw(space, seed, index, _signs)


def normal(space: ParameterSpace, *, seed: int, index: int) -> Tensor:
    """Probe of independent standard normal entries; drawn in float64, then rounded. See `rademacher`."""
    return _draw(space, seed, index, _normals)


def _draw(
    space: ParameterSpace, seed: int, index: int, draw: Callable[[np.random.Philox, int, torch.device], Tensor]
) -> Tensor:
    for name, value in (("seed", seed), ("index", index)):
        if not 0 <= value < 2**64:
            raise ValueError(f"{name} must be in [0, 2**64), got {value}")
    probe = torch.empty(space.size, dtype=space.dtype, device=space.device)
    for block, target in zip(space.blocks, space.split(probe), strict=True):
        target.copy_(draw(_stream(seed, index, block.name), block.numel, probe.device).view(block.shape))
    return probe


def _stream(seed: int, index: int, name: str) -> np.random.Philox:
    word = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
    return np.random.Philox(
        key=np.array([seed, index], dtype=np.uint64), counter=np.array([0, 0, 0, word], dtype=np.uint64)
    )


def _signs(stream: np.random.Philox, count: int, device: torch.device) -> Tensor:
    """A bit each; unpacked where they are needed, so that an eighth of a byte per sign is drawn and sent."""
    packed = torch.from_numpy(stream.random_raw(-(-count // 64)).astype("<u8").view(np.uint8)).to(device)
    bits = (packed[:, None] >> torch.arange(7, -1, -1, dtype=torch.uint8, device=device)) & 1
    return bits.view(torch.int8).mul_(2).sub_(1).flatten()[:count]


def _normals(stream: np.random.Philox, count: int, device: torch.device) -> Tensor:
    return torch.from_numpy(np.random.Generator(stream).standard_normal(count)).to(device)
