"""What the two passes move between memory and the processor's own: the closed forms, and the same counted by tiles.

Two levels of memory: a large one, and the tiles and accumulators of a program. Every load of a tile counts, also where
a cache between the two has it already; so the count is what a GPU's L2 serves, and device memory serves between
`compulsory` (each tensor once) and that.

Row pass, per query row of a head: q, do, uq, o, dq in and gq, gdo out, D entries each; lse in and alpha, E0, delta out.
Per block of B_r queries, the k, v, uk, uv of every key that it sees. Column pass, per key row: k, v, uk, uv in and gk,
gv out; per block of B_c keys, the q, do, uq (D each) and lse, alpha, E0, delta of every query that sees it. Without a
mask, in entries per head:

    row     7 N D + 4 N + 4 D N^2 / B_r
    column  6 N D       + (3 D + 4) N^2 / B_c

Givans, Crawshaw and Liu 2026 (theorem 4.3) have 12 N D + 4 N in place of 13 N D + 4 N: our row pass reads dq as well,
which takes the place of one matrix product.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashbob.geometry import Geometry

__all__ = ["Traffic", "column_pass", "published", "row_pass"]

SCALAR_BYTES = 4
"""Row scalars are float32."""


@dataclass(frozen=True)
class Traffic:
    """Bytes that one pass moves over all sequences and heads.

    Attributes:
        stationary: Read once per block and written once: what a block owns.
        streamed: Read once per block that meets it.
        compulsory: Every tensor that the pass touches, once.
    """

    stationary: int
    streamed: int
    compulsory: int

    @property
    def total(self) -> int:
        """All bytes that tiles load and store."""
        return self.stationary + self.streamed

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.stationary + other.stationary, self.streamed + other.streamed, self.compulsory + other.compulsory
        )


def published(n: int, d: int, row_block: int, column_block: int) -> float:
    """Entries that the published two passes move for one head without a mask (theorem 4.3).

        12 N D + 4 N + 4 D N^2 / B_r + (3 D + 4) N^2 / B_c

    Args:
        n: Tokens.
        d: Head size.
        row_block: Queries that a program of the row pass owns, B_r.
        column_block: Keys that a program of the column pass owns, B_c.
    """
    return 12 * n * d + 4 * n + 4 * d * n**2 / row_block + (3 * d + 4) * n**2 / column_block


def row_pass(
    n: int, d: int, *, heads: int, kv_heads: int, batch: int, causal: bool, block: int, tile: int, itemsize: int
) -> Traffic:
    """Bytes of the row pass over [batch, heads, n, d], tile by tile.

    Args:
        n: Queries, and keys.
        d: Head size.
        heads: Query heads; each streams its group's keys.
        kv_heads: Key/value heads.
        batch: Sequences.
        causal: Whether keys after the query are skipped.
        block: Queries that a program owns, B_r.
        tile: Keys that it loads at a time; a tile with one visible key is loaded whole, but for keys past the end.
        itemsize: Bytes of an entry.

    Returns:
        See `Traffic`.
    """
    owned = (7 * n * d * itemsize + 4 * n * SCALAR_BYTES) * batch * heads
    seen = _met(n, causal, block, tile, of_keys=False)
    keys = 4 * n * d * itemsize * batch * kv_heads
    return Traffic(owned, 4 * d * itemsize * seen * batch * heads, owned + keys)


def column_pass(
    n: int, d: int, *, heads: int, kv_heads: int, batch: int, causal: bool, block: int, tile: int, itemsize: int
) -> Traffic:
    """Bytes of the column pass; arguments as in `row_pass`, with keys and queries in each other's place.

    A program streams the queries of all heads of its group.
    """
    owned = 6 * n * d * itemsize * batch * kv_heads
    row = 3 * d * itemsize + 4 * SCALAR_BYTES
    seen = _met(n, causal, block, tile, of_keys=True)
    return Traffic(owned, row * seen * batch * heads, owned + row * n * batch * heads)


def _met(n: int, causal: bool, block: int, tile: int, *, of_keys: bool) -> int:
    """Rows that all blocks of one head stream together: those in tiles that hold a visible pair."""
    geometry = Geometry.build(n, n, is_causal=causal, window_size=0, q_offset=None, k_offset=0)
    met = 0
    for start in range(0, n, block):
        stop = min(n, start + block)
        lo, hi = geometry.query_range(start, stop) if of_keys else geometry.key_range(start, stop)
        met += min(n, -(-hi // tile) * tile) - lo // tile * tile
    return met
