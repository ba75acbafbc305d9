"""Attention dropout with a mask that is computed anew wherever it is needed, and never stored.

Each attention weight has its own 32 random bits: word `j % 4` of Philox4x32-10 (Salmon, Moraes, Dror and Shaw, 2011)
with the call's seed as its 64-bit key and the counter (j // 4, i, b * H_Q + h, 0), for query i and key j of head h in
sequence b. Nothing but these enters, so all backends, tile shapes and passes see one mask. A weight is kept, and
divided by 1 - p, where its bits are at least p * 2^32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LOW = 0xFFFFFFFF
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
ROUNDS = 10


@dataclass(frozen=True)
class Dropout:
    """The mask of one attention call.

    Attributes:
        p: probability of dropping a weight, 0 < p < 1.
        seed: key of the generator, 0 <= seed < 2^64.
        batch: sequences of the call. torch.func.vmap folds mapped calls into the batch; each of them has the mask of
            the call by itself, that of sequence `b % batch`.
    """

    p: float
    seed: int
    batch: int

    @property
    def threshold(self) -> int:
        """Bits below it drop their weight: p in units of 2^-32."""
        return min(round(self.p * 2**32), LOW)

    @property
    def scale(self) -> float:
        """The factor on kept weights."""
        return 1.0 / (1.0 - self.p)

    def factors(
        self, shape: tuple[int, int], m0: int, m1: int, n0: int, n1: int, device: torch.device, dtype: torch.dtype
    ) -> Tensor:
        """What multiplies the attention weights of queries m0 .. m1 and keys n0 .. n1: 0, or 1 / (1 - p).

        Args:
            shape: number of sequences and of query heads.
            m0: first query.
            m1: one past the last query.
            n0: first key.
            n1: one past the last key.
            device: where the result is made.
            dtype: dtype of the result.

        Returns:
            [B, H_Q, m1 - m0, n1 - n0].
        """
        batch, heads = shape
        quads, rows, every_head = (
            torch.arange(*span, dtype=torch.int64, device=device)
            for span in ((n0 // 4, -(-n1 // 4)), (m0, m1), (0, self.batch * heads))
        )
        counter = (quads, rows[:, None], every_head[:, None, None], torch.zeros_like(quads))
        words = philox(counter, self.seed)
        bits = torch.stack(words, dim=-1).flatten(-2)[..., n0 % 4 : n0 % 4 + n1 - n0]
        kept = (bits >= self.threshold).to(dtype) * self.scale
        of_call: Tensor = kept.view(self.batch, heads, m1 - m0, n1 - n0)
        return of_call.repeat(batch // max(1, self.batch), 1, 1, 1)


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10: four words of 32 random bits for every counter.

    Args:
        counter: four int64 tensors that broadcast against each other, entries in 0 .. 2^32 - 1.
        seed: the key, 0 <= seed < 2^64.

    Returns:
        Four int64 tensors with entries in 0 .. 2^32 - 1.

    Source: Salmon, Moraes, Dror and Shaw, Parallel random numbers: as easy as 1, 2, 3, SC 2011.
    """
    c0, c1, c2, c3 = torch.broadcast_tensors(*counter)
    k0, k1 = seed & LOW, seed >> 32
    for _ in range(ROUNDS):
        # The products of 32-bit words wrap around in int64; their bits are those of the unsigned product.
        first, second = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c2 = (second >> 32) & LOW ^ c1 ^ k0, (first >> 32) & LOW ^ c3 ^ k1
        c1, c3 = second & LOW, first & LOW
        k0, k1 = (k0 + KEY_STEPS[0]) & LOW, (k1 + KEY_STEPS[1]) & LOW
    return c0, c1, c2, c3
