"""Attention and its first two derivatives in plain PyTorch, tile by tile: any device, any dtype, never N x N.

The schedule is the one of the Triton kernels (derivation and symbols in flashbob/README.md): a row pass owns a block of
queries and streams keys, a column pass owns a block of keys and streams queries. Tiles are computed in float64 for
float64 inputs and in float32 otherwise. Query heads that share a key/value head are stacked along the rows of a tile,
so K and V are never repeated.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from flashbob.plan import Plan

TILE_ELEMENTS = 1 << 21  # scores per tile over all sequences and heads: 8 MiB in float32; about eight tiles live
MIN_TILE, MAX_TILE = 32, 1024

name = "blocked"


@dataclass(frozen=True)
class _Tile:
    """Scores of one tile and the two derivatives of the soft-cap there (None without one: they are 1 and 0)."""

    scores: Tensor
    slope: Tensor | None
    curvature: Tensor | None


class _Problem:
    """One call's tensors, cut into tiles on demand.

    Row tiles have shape [B, H_KV, G * m, d] (G query heads per key/value head), column tiles [B, H_KV, n, d].
    """

    def __init__(self, q: Tensor, k: Tensor, bounds: Tensor | None, bias: Tensor | None, plan: Plan) -> None:
        self.plan, self.geometry = plan, plan.geometry
        self.batch, self.heads, self.kv_heads = q.shape[0], q.shape[1], k.shape[1]
        self.groups = self.heads // self.kv_heads
        self.dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        self.device = q.device
        self.bounds = bounds
        self.bias = None if bias is None else bias.expand(self.batch, self.heads, -1, -1)
        side = math.isqrt(TILE_ELEMENTS // max(1, self.batch * self.heads))
        self.block = max(MIN_TILE, min(MAX_TILE, 1 << max(0, side.bit_length() - 1)))

    def row_blocks(self, lo: int = 0, hi: int | None = None) -> Iterator[tuple[int, int]]:
        return _blocks(lo, self.geometry.queries if hi is None else hi, self.block)

    def column_blocks(self, lo: int = 0, hi: int | None = None) -> Iterator[tuple[int, int]]:
        return _blocks(lo, self.geometry.keys if hi is None else hi, self.block)

    def rows(self, x: Tensor, m0: int, m1: int) -> Tensor:
        """[B, H_Q, N_Q, d] -> [B, H_KV, G * m, d]."""
        return x[:, :, m0:m1].to(self.dtype).reshape(self.batch, self.kv_heads, self.groups * (m1 - m0), x.shape[-1])

    def row_scalars(self, x: Tensor, m0: int, m1: int) -> Tensor:
        """[B, H_Q, N_Q] -> [B, H_KV, G * m, 1]."""
        return self.rows(x[..., None], m0, m1)

    def columns(self, x: Tensor, n0: int, n1: int) -> Tensor:
        return x[:, :, n0:n1].to(self.dtype)

    def put_rows(self, out: Tensor, m0: int, m1: int, x: Tensor) -> None:
        out[:, :, m0:m1] = x.reshape(self.batch, self.heads, m1 - m0, x.shape[-1])

    def tile(self, q: Tensor, k: Tensor, m0: int, m1: int, n0: int, n1: int) -> _Tile:
        """Scores of a tile, -inf where hidden. `q` and `k` are a row and a column tile."""
        scores = (q @ k.mT).mul_(self.plan.scale)
        slope = curvature = None
        if self.plan.softcap is not None:
            t = torch.tanh_(scores.div_(self.plan.softcap))
            slope = 1.0 - t * t
            curvature = t * slope * (-2.0 / self.plan.softcap)
            scores = t * self.plan.softcap
        grouped = scores.view(self.batch, self.kv_heads, self.groups, m1 - m0, n1 - n0)
        if self.bias is not None:
            grouped += self.bias[:, :, m0:m1, n0:n1].reshape(grouped.shape).to(self.dtype)
        hidden = self.geometry.hidden(m0, m1, n0, n1, self.bounds, self.device)
        if hidden is not None:
            grouped.masked_fill_(hidden, float("-inf"))
        return _Tile(scores, slope, curvature)


def _blocks(lo: int, hi: int, size: int) -> Iterator[tuple[int, int]]:
    return ((start, min(start + size, hi)) for start in range(lo, hi, size))


def forward(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor | None, bias: Tensor | None, plan: Plan
) -> tuple[Tensor, Tensor]:
    """Online-softmax forward. Returns o [B, H_Q, N_Q, D_v] in q's dtype and lse [B, H_Q, N_Q] in the tile dtype."""
    problem = _Problem(q, k, bounds, bias, plan)
    o = q.new_empty(*q.shape[:3], v.shape[-1])
    lse = torch.empty(q.shape[:3], dtype=problem.dtype, device=q.device)
    for m0, m1 in problem.row_blocks():
        q_rows = problem.rows(q, m0, m1)
        acc = q_rows.new_zeros(*q_rows.shape[:3], v.shape[-1])
        total = q_rows.new_zeros(*q_rows.shape[:3], 1)
        top = torch.full_like(total, float("-inf"))
        for n0, n1 in problem.column_blocks(*plan.geometry.key_range(m0, m1)):
            s = problem.tile(q_rows, problem.columns(k, n0, n1), m0, m1, n0, n1).scores
            new_top = torch.maximum(top, s.amax(-1, keepdim=True))
            safe_top = new_top.masked_fill(new_top == float("-inf"), 0.0)
            p = s.sub_(safe_top).exp_()
            decay = (top - safe_top).exp_()
            total = total.mul_(decay).add_(p.sum(-1, keepdim=True))
            acc = acc.mul_(decay).add_(p @ problem.columns(v, n0, n1))
            top = new_top
        empty = total == 0
        problem.put_rows(o, m0, m1, acc / total.masked_fill(empty, 1.0))
        problem.put_rows(lse[..., None], m0, m1, (top + total.log()).masked_fill(empty, float("inf")))
    return o, lse


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    bounds: Tensor | None,
    bias: Tensor | None,
    plan: Plan,
) -> tuple[Tensor, Tensor, Tensor]:
    """First backward in one sweep: dq accumulates by row block, dk and dv in full-length buffers. No atomics."""
    problem = _Problem(q, k, bounds, bias, plan)
    dq = torch.empty_like(q)
    dk = torch.zeros(k.shape, dtype=problem.dtype, device=k.device)
    dv = torch.zeros(v.shape, dtype=problem.dtype, device=v.device)
    for m0, m1 in problem.row_blocks():
        q_rows, do_rows = problem.rows(q, m0, m1), problem.rows(do, m0, m1)
        lse_rows = problem.row_scalars(lse, m0, m1)
        delta = (problem.rows(o, m0, m1) * do_rows).sum(-1, keepdim=True)
        acc = torch.zeros_like(q_rows)
        for n0, n1 in problem.column_blocks(*plan.geometry.key_range(m0, m1)):
            k_tile = problem.columns(k, n0, n1)
            tile = problem.tile(q_rows, k_tile, m0, m1, n0, n1)
            p = (tile.scores - lse_rows).exp_()
            dv[:, :, n0:n1] += p.mT @ do_rows
            da = (do_rows @ problem.columns(v, n0, n1).mT).sub_(delta).mul_(p)
            if tile.slope is not None:
                da *= tile.slope
            acc += da @ k_tile
            dk[:, :, n0:n1] += da.mT @ q_rows
        problem.put_rows(dq, m0, m1, acc * plan.scale)
    return dq, (dk * plan.scale).to(k.dtype), dv.to(v.dtype)


def double_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    dq: Tensor,
    uq: Tensor,
    uk: Tensor,
    uv: Tensor,
    bounds: Tensor | None,
    bias: Tensor | None,
    plan: Plan,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Backward-over-backward in a row pass and a column pass; 18 products of a tile each way in all."""
    problem = _Problem(q, k, bounds, bias, plan)
    gq, gdo = torch.empty_like(q), torch.empty_like(do)
    gk, gv = torch.empty_like(k), torch.empty_like(v)
    alpha = torch.empty_like(lse)
    e0 = torch.empty_like(lse)
    delta = torch.empty_like(lse)
    scale = plan.scale
    for m0, m1 in problem.row_blocks():
        q_rows, do_rows, uq_rows = (problem.rows(x, m0, m1) for x in (q, do, uq))
        o_rows, lse_rows = problem.rows(o, m0, m1), problem.row_scalars(lse, m0, m1)
        delta_rows = (o_rows * do_rows).sum(-1, keepdim=True)
        acc_o, acc_b, acc_w = torch.zeros_like(do_rows), torch.zeros_like(q_rows), torch.zeros_like(q_rows)
        alpha_rows, e0_rows = torch.zeros_like(delta_rows), torch.zeros_like(delta_rows)
        for n0, n1 in problem.column_blocks(*plan.geometry.key_range(m0, m1)):
            k_tile, v_tile, uk_tile, uv_tile = (problem.columns(x, n0, n1) for x in (k, v, uk, uv))
            tile = problem.tile(q_rows, k_tile, m0, m1, n0, n1)
            p = (tile.scores - lse_rows).exp_()
            raw = (uq_rows @ k_tile.mT + q_rows @ uk_tile.mT).mul_(scale)
            f = raw if tile.slope is None else raw * tile.slope
            ds = (do_rows @ v_tile.mT).sub_(delta_rows)
            g = (do_rows @ uv_tile.mT + f * ds).mul_(p)
            pf = p * f
            alpha_rows += pf.sum(-1, keepdim=True)
            e0_rows += g.sum(-1, keepdim=True)
            acc_o += p @ uv_tile + pf @ v_tile
            ds *= p
            if tile.slope is None or tile.curvature is None:
                acc_b += p @ k_tile
                acc_w += g @ k_tile + ds @ uk_tile
            else:
                acc_b += (p * tile.slope) @ k_tile
                acc_w += (g * tile.slope + tile.curvature * raw * ds) @ k_tile + (ds * tile.slope) @ uk_tile
        problem.put_rows(gdo, m0, m1, acc_o - alpha_rows * o_rows)
        problem.put_rows(gq, m0, m1, (acc_w - e0_rows * acc_b) * scale - alpha_rows * problem.rows(dq, m0, m1))
        for saved, rows in ((alpha, alpha_rows), (e0, e0_rows), (delta, delta_rows)):
            problem.put_rows(saved[..., None], m0, m1, rows)

    for n0, n1 in problem.column_blocks():
        k_tile, v_tile, uk_tile, uv_tile = (problem.columns(x, n0, n1) for x in (k, v, uk, uv))
        acc_k, acc_v = torch.zeros_like(k_tile), torch.zeros_like(v_tile)
        for m0, m1 in problem.row_blocks(*plan.geometry.query_range(n0, n1)):
            q_rows, do_rows, uq_rows = (problem.rows(x, m0, m1) for x in (q, do, uq))
            lse_rows, alpha_rows, e0_rows, delta_rows = (
                problem.row_scalars(x, m0, m1) for x in (lse, alpha, e0, delta)
            )
            tile = problem.tile(q_rows, k_tile, m0, m1, n0, n1)
            p = (tile.scores - lse_rows).exp_()
            raw = (uq_rows @ k_tile.mT + q_rows @ uk_tile.mT).mul_(scale)
            h = (raw if tile.slope is None else raw * tile.slope) - alpha_rows
            acc_v += (p * h).mT @ do_rows
            ds = (do_rows @ v_tile.mT).sub_(delta_rows)
            gs = (do_rows @ uv_tile.mT + h * ds).sub_(e0_rows).mul_(p)
            ds *= p
            if tile.slope is not None and tile.curvature is not None:
                gs = gs * tile.slope + tile.curvature * raw * ds
                ds *= tile.slope
            acc_k += gs.mT @ q_rows + ds.mT @ uq_rows
        gk[:, :, n0:n1] = acc_k * scale
        gv[:, :, n0:n1] = acc_v
    return gq, gk, gv, gdo


def tangent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    uq: Tensor,
    uk: Tensor,
    uv: Tensor,
    bounds: Tensor | None,
    bias: Tensor | None,
    plan: Plan,
) -> Tensor:
    """Forward mode: sum_j P uv_j + P F v_j - alpha o, the part of the row pass that needs no output gradient."""
    problem = _Problem(q, k, bounds, bias, plan)
    out = torch.empty_like(o)
    for m0, m1 in problem.row_blocks():
        q_rows, uq_rows = problem.rows(q, m0, m1), problem.rows(uq, m0, m1)
        o_rows, lse_rows = problem.rows(o, m0, m1), problem.row_scalars(lse, m0, m1)
        acc, alpha = torch.zeros_like(o_rows), torch.zeros_like(lse_rows)
        for n0, n1 in problem.column_blocks(*plan.geometry.key_range(m0, m1)):
            k_tile, v_tile, uk_tile, uv_tile = (problem.columns(x, n0, n1) for x in (k, v, uk, uv))
            tile = problem.tile(q_rows, k_tile, m0, m1, n0, n1)
            p = (tile.scores - lse_rows).exp_()
            pf = (uq_rows @ k_tile.mT + q_rows @ uk_tile.mT).mul_(plan.scale).mul_(p)
            if tile.slope is not None:
                pf *= tile.slope
            alpha += pf.sum(-1, keepdim=True)
            acc += p @ uv_tile + pf @ v_tile
        problem.put_rows(out, m0, m1, acc - alpha * o_rows)
    return out
