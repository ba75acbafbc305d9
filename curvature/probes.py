"""Random probe vectors that depend on the seed alone: not on the device, the number of processes, or the order of work.

Each parameter tensor draws from a stream of its own: the counter-based generator Philox, with the key (seed, probe
index) and a counter whose top word is a hash of the tensor's name. Probe i of a tensor can therefore be drawn anywhere
at any time, and restricting an operator to some parameters leaves their probes as they are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

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
    _check(seed, index)
    groups = [-(-block.numel // _GROUP) for block in space.blocks]
    draw = device_words if space.device.type == "cuda" else host_words
    packed = draw([block.name for block in space.blocks], groups, seed, index, space.device).view(torch.uint8)
    bits = packed[:, None] >> torch.arange(7, -1, -1, dtype=torch.uint8, device=space.device)
    signs = bits.bitwise_and_(1).view(torch.int8).mul_(2).sub_(1).flatten().split([g * _GROUP for g in groups])
    probe = torch.empty(space.size, dtype=space.dtype, device=space.device)
    drawn = [part[: b.numel].view(b.shape) for part, b in zip(signs, space.blocks, strict=True)]
    torch._foreach_copy_(list(space.split(probe)), drawn)
    return probe


def normal(space: ParameterSpace, *, seed: int, index: int) -> Tensor:
    """Probe of independent standard normal entries; drawn in float64, then rounded. See `rademacher`."""
    _check(seed, index)
    probe = torch.empty(space.size, dtype=space.dtype, device=space.device)
    for block, target in zip(space.blocks, space.split(probe), strict=True):
        drawn = np.random.Generator(_stream(seed, index, block.name)).standard_normal(block.numel)
        target.copy_(torch.from_numpy(drawn).to(probe.device).view(block.shape))
    return probe


def host_words(names: Sequence[str], groups: Sequence[int], seed: int, index: int, device: torch.device) -> Tensor:
    """The first `groups[i]` groups of four words of the stream of tensor `names[i]`, one stream after another.

    Returns:
        int64 [4 sum(groups)] on the device; its bytes are those of little-endian words.
    """
    words = [_stream(seed, index, name).random_raw(4 * n) for name, n in zip(names, groups, strict=True)]
    return torch.from_numpy(np.concatenate(words).astype("<u8").view(np.int64)).to(device)


def device_words(names: Sequence[str], groups: Sequence[int], seed: int, index: int, device: torch.device) -> Tensor:
    """What `host_words` returns, drawn where it is needed; a host takes longer for it than a GPU for a short product.

    Source: Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (2011), Philox4x64-10, whose unsigned words are
    int64 here, bit by bit.
    """
    count = sum(groups)
    starts = np.concatenate([[0], np.cumsum(groups)[:-1]])
    of_stream = [torch.tensor(x, device=device) for x in (groups, [_signed(_word(name)) for name in names], starts)]
    lengths, words, begins = of_stream
    stream = torch.repeat_interleave(lengths, output_size=count)
    # NumPy counts up before it draws, so a stream's first group has number 1.
    x0 = torch.arange(1, count + 1, device=device) - begins[stream]
    x1, x2, x3 = torch.zeros_like(x0), torch.zeros_like(x0), words[stream]
    key0, key1 = seed, index
    for _ in range(10):
        (high0, low0), (high1, low1) = _product(x0, _MULTIPLIERS[0]), _product(x2, _MULTIPLIERS[1])
        x0, x1, x2, x3 = high1 ^ x1 ^ _signed(key0), low1, high0 ^ x3 ^ _signed(key1), low0
        key0, key1 = (key0 + _BUMPS[0]) % 2**64, (key1 + _BUMPS[1]) % 2**64
    return torch.stack([x0, x1, x2, x3], dim=1).flatten()


_GROUP = 256  # signs in four words
_MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
_BUMPS = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
_LOW = 0xFFFFFFFF


def _product(x: Tensor, by: int) -> tuple[Tensor, Tensor]:
    """High and low word of the 128-bit product of unsigned words, whose bits int64 holds."""
    low, high, by_low, by_high = x & _LOW, (x >> 32) & _LOW, by & _LOW, by >> 32
    middle = high * by_low + ((low * by_low >> 32) & _LOW)
    other = low * by_high + (middle & _LOW)
    return high * by_high + ((middle >> 32) & _LOW) + ((other >> 32) & _LOW), x * _signed(by)


def _signed(word: int) -> int:
    """The int64 with the bits of an unsigned word."""
    return word - 2**64 if word >= 2**63 else word


def _check(seed: int, index: int) -> None:
    for name, value in (("seed", seed), ("index", index)):
        if not 0 <= value < 2**64:
            raise ValueError(f"{name} must be in [0, 2**64), got {value}")


def _word(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def _stream(seed: int, index: int, name: str) -> np.random.Philox:
    return np.random.Philox(
        key=np.array([seed, index], dtype=np.uint64), counter=np.array([0, 0, 0, _word(name)], dtype=np.uint64)
    )
