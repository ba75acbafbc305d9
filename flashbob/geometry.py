"""Which keys each query sees: the one description of masking that every backend reads.

Query `i` and key `j` of one head stand at absolute positions `q_offset + i` and `k_offset + j`. With
`shift = q_offset - k_offset`, query `i` of sequence `b` sees key `j` exactly when

    i + shift - left <= j <= i + shift + right      (a bound that is None does not bind)
    bounds[b, 0] <= j < bounds[b, 1]                (padding; absent when `bounds` is None)

A query that sees no key gives a zero output row and zero gradients; its log-sum-exp is stored as +inf, so that
`exp(S - L)` is exactly zero in every later pass.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Geometry:
    """Band of visible keys, the same for every sequence and head (padding travels beside it, as a tensor)."""

    queries: int
    keys: int
    shift: int = 0
    left: int | None = None
    right: int | None = None

    @classmethod
    def build(
        cls, queries: int, keys: int, *, is_causal: bool, window_size: int, q_offset: int | None, k_offset: int
    ) -> Geometry:
        """Translate the public arguments; bounds that can never bind are dropped, so that equal cases compare equal."""
        shift = max(0, keys - queries) if q_offset is None else q_offset - k_offset
        left = window_size - 1 if window_size else None
        right = 0 if is_causal or window_size else None
        if left is not None and queries - 1 + shift - left <= 0:
            left = None
        if right is not None and shift + right >= keys - 1:
            right = None
        return cls(queries, keys, shift, left, right)

    @property
    def is_full(self) -> bool:
        """Every query sees every key (padding aside)."""
        return self.left is None and self.right is None

    @property
    def is_square_causal(self) -> bool:
        """The ordinary causal mask over equally many queries and keys."""
        return self.left is None and self.right == 0 and self.shift == 0 and self.queries == self.keys

    def key_range(self, m0: int, m1: int) -> tuple[int, int]:
        """Smallest half-open range of keys that holds all keys seen by queries `m0 <= i < m1`."""
        lo = 0 if self.left is None else max(0, m0 + self.shift - self.left)
        hi = self.keys if self.right is None else min(self.keys, m1 + self.shift + self.right)
        return min(lo, self.keys), max(hi, 0)

    def query_range(self, n0: int, n1: int) -> tuple[int, int]:
        """Smallest half-open range of queries that holds all queries which see a key `n0 <= j < n1`."""
        lo = 0 if self.right is None else max(0, n0 - self.shift - self.right)
        hi = self.queries if self.left is None else min(self.queries, n1 - self.shift + self.left)
        return min(lo, self.queries), max(hi, 0)

    def hidden(self, m0: int, m1: int, n0: int, n1: int, bounds: Tensor | None, device: torch.device) -> Tensor | None:
        """True where query `m0 + a` must not see key `n0 + b`.

        Returns:
            None when the whole tile is visible, else a bool tensor [m1 - m0, n1 - n0], or
            [B, 1, 1, m1 - m0, n1 - n0] with `bounds` (int tensor [B, 2]).
        """
        columns = torch.arange(n0, n1, device=device)
        mask: Tensor | None = None
        below = self.left is not None and n0 < m1 - 1 + self.shift - self.left
        above = self.right is not None and n1 - 1 > m0 + self.shift + self.right
        if below or above:
            distance = columns[None, :] - torch.arange(m0 + self.shift, m1 + self.shift, device=device)[:, None]
            mask = torch.zeros_like(distance, dtype=torch.bool)
            if self.left is not None:
                mask |= distance < -self.left
            if self.right is not None:
                mask |= distance > self.right
        if bounds is not None:
            padded = (columns < bounds[:, :1]) | (columns >= bounds[:, 1:])
            padded = padded[:, None, None, None, :]
            mask = padded.expand(-1, 1, 1, m1 - m0, -1) if mask is None else padded | mask
        return mask
