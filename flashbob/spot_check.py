"""A few rows and columns of a double backward in float64, at lengths whose N x N arrays fit nowhere.

Rows of gq and gdo need their own row of scores only. Rows of gk and gv need the row scalars of every query that sees
the key, and these need those queries' whole rows; under a causal mask keys near the end are seen by few.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flashbob.rivals import OUTPUTS, Problem

__all__ = ["relative_error", "spot_errors"]

SAMPLES = 32
"""Query rows, and key rows, that are compared."""

REACH = 4096
"""Under a causal mask the key rows are taken among this many last ones."""

CHUNK_ENTRIES = 1 << 25
"""Entries of the float64 arrays that are made at a time."""


@dataclass(frozen=True)
class _Group:
    """One key/value head with its query heads, in float64; shapes [G, N, D] and [N, D]."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    uq: Tensor
    uk: Tensor
    uv: Tensor
    scale: float
    causal: bool
    window: int

    @classmethod
    def of(cls, problem: Problem, batch: int, kv_head: int) -> _Group:
        groups = problem.q.shape[1] // problem.k.shape[1]
        heads = slice(kv_head * groups, (kv_head + 1) * groups)
        q, do, uq = (t[batch, heads].double() for t in (problem.q, problem.do, problem.uq))
        k, v, uk, uv = (t[batch, kv_head].double() for t in (problem.k, problem.v, problem.uk, problem.uv))
        return cls(q, k, v, do, uq, uk, uv, problem.scale, problem.causal, problem.window)

    def hidden(self, rows: Tensor) -> Tensor | None:
        """Bool tensor [R, N], True where query rows[r] does not see the key."""
        if not (self.causal or self.window):
            return None
        distance = rows[:, None] - torch.arange(self.k.shape[0], device=rows.device)
        hidden = distance < 0
        return hidden | (distance >= self.window) if self.window else hidden

    def rows(self, rows: Tensor) -> _Rows:
        """What the definition of the double backward gives for these query rows, over all keys."""
        q, do, uq = (t[:, rows] for t in (self.q, self.do, self.uq))
        scores = (q @ self.k.mT).mul_(self.scale)
        if (hidden := self.hidden(rows)) is not None:
            scores.masked_fill_(hidden, float("-inf"))
        p = torch.softmax(scores, dim=-1)
        f = (uq @ self.k.mT).add_(q @ self.uk.mT).mul_(self.scale)
        h = f.sub_((p * f).sum(-1, keepdim=True))
        ds = do @ self.v.mT
        ds = ds.sub_((p * ds).sum(-1, keepdim=True))
        g = (h * ds).add_(do @ self.uv.mT).mul_(p)
        gs = g.sub_(p * g.sum(-1, keepdim=True))
        ph, dsp = h.mul_(p), ds.mul_(p)
        return _Rows(
            gq=(gs @ self.k + dsp @ self.uk) * self.scale, gdo=p @ self.uv + ph @ self.v, ph=ph, gs=gs, dsp=dsp
        )

    def columns(self, columns: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of gk and gv for these keys, [C, D] each, summed over the query heads and over all queries."""
        first = int(columns.min()) if self.causal or self.window else 0
        last = self.q.shape[1]
        if self.window:
            last = min(last, int(columns.max()) + self.window)
        gk, gv = self.k.new_zeros(len(columns), self.k.shape[1]), self.v.new_zeros(len(columns), self.v.shape[1])
        size = max(1, CHUNK_ENTRIES // (self.q.shape[0] * self.k.shape[0]))
        for rows in torch.arange(first, last, device=columns.device).split(size):
            found = self.rows(rows)
            gs, dsp, ph = (t[..., columns] for t in (found.gs, found.dsp, found.ph))
            gk += (gs.mT @ self.q[:, rows] + dsp.mT @ self.uq[:, rows]).sum(0) * self.scale
            gv += (ph.mT @ self.do[:, rows]).sum(0)
        return gk, gv


@dataclass(frozen=True)
class _Rows:
    gq: Tensor
    gdo: Tensor
    ph: Tensor
    gs: Tensor
    dsp: Tensor


def relative_error(found: Tensor, exact: Tensor) -> float:
    """|found - exact| / |exact| in float64; |found| where the exact value is zero. NaN stays NaN."""
    exact = exact.double()
    return float((found.double() - exact).norm()) / (float(exact.norm()) or 1.0)


def spot_errors(problem: Problem, answer: tuple[Tensor, ...], *, seed: int = 0) -> dict[str, float]:
    """Relative error of sampled rows of each of the four gradients, against float64.

    One sequence and one key/value head with its query heads are looked at: `SAMPLES` query rows from anywhere, and as
    many key rows, under a causal mask among the last `REACH`. Exact up to float64 rounding; nothing is estimated but
    which rows are looked at.

    Cost: O(SAMPLES N D), and for the key rows the same for every query that sees one of them; memory about ten arrays
    of `CHUNK_ENTRIES` float64 numbers.

    Args:
        problem: What was asked.
        answer: (gq, gk, gv, gdo).
        seed: Which sequence, head and rows.

    Returns:
        {"gq", "gk", "gv", "gdo"} -> |found - exact| / |exact| over the sampled rows.
    """
    (batch, _, n, _), kv_heads, device = problem.q.shape, problem.k.shape[1], problem.q.device
    generator = torch.Generator().manual_seed(seed)
    b, kv = (int(torch.randint(size, (), generator=generator)) for size in (batch, kv_heads))
    rows = torch.randperm(n, generator=generator)[:SAMPLES].to(device)
    reach = min(n, REACH) if problem.causal or problem.window else n
    columns = (n - reach + torch.randperm(reach, generator=generator)[:SAMPLES]).to(device)
    with torch.no_grad():
        group = _Group.of(problem, b, kv)
        exact = group.rows(rows)
        gk, gv = group.columns(columns)
        groups = group.q.shape[0]
        heads = slice(kv * groups, (kv + 1) * groups)
        found = (
            answer[0][b, heads][:, rows],
            answer[1][b, kv, columns],
            answer[2][b, kv, columns],
            answer[3][b, heads][:, rows],
        )
        return {
            name: relative_error(f, e) for name, f, e in zip(OUTPUTS, found, (exact.gq, gk, gv, exact.gdo), strict=True)
        }
