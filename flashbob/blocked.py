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
from typing import overload

import torch
from torch import Tensor

from flashbob.plan import Plan, SecondGradients, Wanted

TILE_ELEMENTS = 1 << 21  # scores per tile over all sequences and heads: 8 MiB in float32; about eight tiles live
MIN_TILE, MAX_TILE = 32, 1024

name = "blocked"


@dataclass(frozen=True)
class _Tile:
    """Scores of one tile, the two derivatives of the soft-cap there, and the dropout factors (None: 1, 0 and 1)."""

    scores: Tensor
    slope: Tensor | None
    curvature: Tensor | None
    factors: Tensor | None

    def bent(self, x: Tensor) -> Tensor:
        """The product of x and the slope of the soft-cap."""
        return x if self.slope is None else x * self.slope

    def weights(self, lse: Tensor) -> Tensor:
        """P = exp(S - lse), for lse [..., 1] or in two parts [..., 2]; written over the scores."""
        p = self.scores
        for part in lse.split(1, dim=-1):
            p = p.sub_(part)
        return p.exp_()

    def kept(self, x: Tensor) -> Tensor:
        """The product of x and the dropout factors."""
        return x if self.factors is None else x * self.factors


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

    @overload
    def rows(self, x: Tensor, m0: int, m1: int) -> Tensor: ...
    @overload
    def rows(self, x: None, m0: int, m1: int) -> None: ...
    def rows(self, x: Tensor | None, m0: int, m1: int) -> Tensor | None:
        """[B, H_Q, N_Q, d] -> [B, H_KV, G * m, d]."""
        if x is None:
            return None
        return x[:, :, m0:m1].to(self.dtype).reshape(self.batch, self.kv_heads, self.groups * (m1 - m0), x.shape[-1])

    def row_scalars(self, x: Tensor, m0: int, m1: int) -> Tensor:
        """[B, H_Q, N_Q] -> [B, H_KV, G * m, 1]."""
        return self.rows(x[..., None], m0, m1)

    @overload
    def columns(self, x: Tensor, n0: int, n1: int) -> Tensor: ...
    @overload
    def columns(self, x: None, n0: int, n1: int) -> None: ...
    def columns(self, x: Tensor | None, n0: int, n1: int) -> Tensor | None:
        return None if x is None else x[:, :, n0:n1].to(self.dtype)

    def log_sums(self, lse: Tensor, m0: int, m1: int) -> Tensor:
        """[B, H_Q, N_Q] or, in two parts, [B, H_Q, N_Q, 2] -> [B, H_KV, G * m, 1 or 2]."""
        return self.row_scalars(lse, m0, m1) if lse.ndim == 3 else self.rows(lse, m0, m1)

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
        factors = None
        if self.plan.dropout is not None:
            shape = (self.batch, self.heads)
            factors = self.plan.dropout.factors(shape, m0, m1, n0, n1, self.device, self.dtype).reshape(scores.shape)
        return _Tile(scores, slope, curvature, factors)

    def raw(self, q: Tensor, k: Tensor, uq: Tensor | None, uk: Tensor | None) -> Tensor | None:
        """The product tau (uq.k + q.uk) of a row and a column tile; None where both directions are absent."""
        if uk is None:
            return None if uq is None else (uq @ k.mT).mul_(self.plan.scale)
        raw = q @ uk.mT
        return (raw if uq is None else raw + uq @ k.mT).mul_(self.plan.scale)


def _blocks(lo: int, hi: int, size: int) -> Iterator[tuple[int, int]]:
    return ((start, min(start + size, hi)) for start in range(lo, hi, size))


def forward(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor | None, bias: Tensor | None, plan: Plan
) -> tuple[Tensor, Tensor]:
    """Online-softmax forward.

    Returns:
        o [B, H_Q, N_Q, D_v] in q's dtype, and lse [B, H_Q, N_Q, 2] in the tile dtype in two parts: the row's largest
        score, and the logarithm of the sum of exp(score - largest). Added up, a large first part would swallow the
        second, and with it the normalization of P in every later pass.
    """
    problem = _Problem(q, k, bounds, bias, plan)
    o = q.new_empty(*q.shape[:3], v.shape[-1])
    lse = torch.empty(*q.shape[:3], 2, dtype=problem.dtype, device=q.device)
    for m0, m1 in problem.row_blocks():
        q_rows = problem.rows(q, m0, m1)
        acc = q_rows.new_zeros(*q_rows.shape[:3], v.shape[-1])
        total = q_rows.new_zeros(*q_rows.shape[:3], 1)
        top = torch.full_like(total, float("-inf"))
        for n0, n1 in problem.column_blocks(*plan.geometry.key_range(m0, m1)):
            tile = problem.tile(q_rows, problem.columns(k, n0, n1), m0, m1, n0, n1)
            s = tile.scores
            new_top = torch.maximum(top, s.amax(-1, keepdim=True))
            safe_top = new_top.masked_fill(new_top == float("-inf"), 0.0)
            p = s.sub_(safe_top).exp_()
            decay = (top - safe_top).exp_()
            total = total.mul_(decay).add_(p.sum(-1, keepdim=True))
            acc = acc.mul_(decay).add_(tile.kept(p) @ problem.columns(v, n0, n1))
            top = new_top
        empty = total == 0
        problem.put_rows(o, m0, m1, acc / total.masked_fill(empty, 1.0))
        problem.put_rows(lse, m0, m1, torch.cat((top, total.log()), dim=-1).masked_fill(empty, float("inf")))
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
        lse_rows = problem.log_sums(lse, m0, m1)
        delta = (problem.rows(o, m0, m1) * do_rows).sum(-1, keepdim=True)
        acc = torch.zeros_like(q_rows)
        for n0, n1 in problem.column_blocks(*plan.geometry.key_range(m0, m1)):
            k_tile = problem.columns(k, n0, n1)
            tile = problem.tile(q_rows, k_tile, m0, m1, n0, n1)
            p = tile.weights(lse_rows)
            dv[:, :, n0:n1] += tile.kept(p).mT @ do_rows
            da = tile.bent(tile.kept(do_rows @ problem.columns(v, n0, n1).mT).sub_(delta).mul_(p))
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
    uq: Tensor | None,
    uk: Tensor | None,
    uv: Tensor | None,
    bounds: Tensor | None,
    bias: Tensor | None,
    plan: Plan,
    wanted: Wanted,
) -> SecondGradients:
    """Backward-over-backward in a row pass and a column pass; 18 products of a tile each way in all.

    Products with an absent part of the direction and those of unwanted gradients are left out.
    """
    if not (wanted.q or wanted.k or (wanted.v and (uq is not None or uk is not None))):  # gv is zero without F
        moved = tangent(q, k, v, o, lse, uq, uk, uv, bounds, bias, plan) if wanted.do else None
        return None, None, torch.zeros_like(v) if wanted.v else None, moved
    problem = _Problem(q, k, bounds, bias, plan)
    scalars = _Scalars(lse, *(torch.empty(q.shape[:3], dtype=problem.dtype, device=q.device) for _ in range(3)))
    gq, gdo = _row_pass(problem, (q, k, v, do, uq, uk, uv), o, dq, scalars, wanted)
    gk, gv = _column_pass(problem, (q, k, v, do, uq, uk, uv), scalars, wanted)
    return gq, gk, gv, gdo


_Operands = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]


@dataclass(frozen=True)
class _Scalars:
    """Row scalars [B, H_Q, N_Q] (lse perhaps in two parts); the row pass fills all but lse."""

    lse: Tensor
    alpha: Tensor
    e0: Tensor
    delta: Tensor


def _row_pass(
    problem: _Problem, operands: _Operands, o: Tensor, dq: Tensor, scalars: _Scalars, wanted: Wanted
) -> tuple[Tensor | None, Tensor | None]:
    """(gq, gdo), and the row scalars."""
    q, k, v, do, uq, uk, uv = operands
    gq = torch.empty_like(q) if wanted.q else None
    gdo = torch.empty_like(do) if wanted.do else None
    scale, curved = problem.plan.scale, wanted.q or wanted.k
    for m0, m1 in problem.row_blocks():
        q_rows, do_rows, uq_rows = problem.rows(q, m0, m1), problem.rows(do, m0, m1), problem.rows(uq, m0, m1)
        o_rows, lse_rows = problem.rows(o, m0, m1), problem.log_sums(scalars.lse, m0, m1)
        delta_rows = (o_rows * do_rows).sum(-1, keepdim=True)
        acc_o, acc_b, acc_w = torch.zeros_like(do_rows), torch.zeros_like(q_rows), torch.zeros_like(q_rows)
        alpha_rows, e0_rows = torch.zeros_like(delta_rows), torch.zeros_like(delta_rows)
        for n0, n1 in problem.column_blocks(*problem.geometry.key_range(m0, m1)):
            k_tile, v_tile = problem.columns(k, n0, n1), problem.columns(v, n0, n1)
            uk_tile, uv_tile = problem.columns(uk, n0, n1), problem.columns(uv, n0, n1)
            tile = problem.tile(q_rows, k_tile, m0, m1, n0, n1)
            p = tile.weights(lse_rows)
            raw = problem.raw(q_rows, k_tile, uq_rows, uk_tile)
            if raw is not None:
                alpha_rows += (p * tile.bent(raw)).sum(-1, keepdim=True)
            if wanted.do:
                acc_o += _moved(tile, p, raw, v_tile, uv_tile)
            if not curved:
                continue
            g = torch.zeros_like(p) if uv_tile is None else tile.kept(do_rows @ uv_tile.mT).mul_(p)
            ds = None
            if raw is not None:
                ds = tile.kept(do_rows @ v_tile.mT).sub_(delta_rows).mul_(p)
                g += tile.bent(raw) * ds
            e0_rows += g.sum(-1, keepdim=True)
            if wanted.q:
                acc_b += tile.bent(p) @ k_tile
                acc_w += _bent_twice(tile, g, raw, ds) @ k_tile
                if uk_tile is not None and ds is not None:
                    acc_w += tile.bent(ds) @ uk_tile
        if gdo is not None:
            problem.put_rows(gdo, m0, m1, acc_o - alpha_rows * o_rows)
        if gq is not None:
            problem.put_rows(gq, m0, m1, (acc_w - e0_rows * acc_b) * scale - alpha_rows * problem.rows(dq, m0, m1))
        for saved, rows in ((scalars.alpha, alpha_rows), (scalars.e0, e0_rows), (scalars.delta, delta_rows)):
            problem.put_rows(saved[..., None], m0, m1, rows)
    return gq, gdo


def _moved(tile: _Tile, p: Tensor, raw: Tensor | None, v: Tensor, uv: Tensor | None) -> Tensor:
    """P uv + P F v of a tile, with its dropout."""
    if raw is None:
        assert uv is not None  # a direction has a part
        return tile.kept(p) @ uv
    moved = tile.kept(p * tile.bent(raw)) @ v
    return moved if uv is None else moved + tile.kept(p) @ uv


def _bent_twice(tile: _Tile, g: Tensor, raw: Tensor | None, ds: Tensor | None) -> Tensor:
    """The gradient at q.k from the one at the scores: s' g + s'' F_raw dS."""
    if tile.curvature is None or raw is None or ds is None:
        return tile.bent(g)
    return tile.bent(g) + tile.curvature * raw * ds


def _column_pass(
    problem: _Problem, operands: _Operands, scalars: _Scalars, wanted: Wanted
) -> tuple[Tensor | None, Tensor | None]:
    """(gk, gv), summed over the query heads of a group."""
    q, k, v, do, uq, uk, uv = operands
    moves = wanted.v and (uq is not None or uk is not None)  # otherwise gv is zero
    gk = torch.empty_like(k) if wanted.k else None
    gv = torch.zeros_like(v) if wanted.v else None
    saved = (scalars.alpha, scalars.e0, scalars.delta)
    for n0, n1 in problem.column_blocks() if wanted.k or moves else ():
        k_tile, v_tile = problem.columns(k, n0, n1), problem.columns(v, n0, n1)
        uk_tile, uv_tile = problem.columns(uk, n0, n1), problem.columns(uv, n0, n1)
        acc_k, acc_v = torch.zeros_like(k_tile), torch.zeros_like(v_tile)
        for m0, m1 in problem.row_blocks(*problem.geometry.query_range(n0, n1)):
            q_rows, do_rows, uq_rows = problem.rows(q, m0, m1), problem.rows(do, m0, m1), problem.rows(uq, m0, m1)
            alpha_rows, e0_rows, delta_rows = (problem.row_scalars(x, m0, m1) for x in saved)
            tile = problem.tile(q_rows, k_tile, m0, m1, n0, n1)
            p = tile.weights(problem.log_sums(scalars.lse, m0, m1))
            raw = problem.raw(q_rows, k_tile, uq_rows, uk_tile)
            h = None if raw is None else tile.bent(raw) - alpha_rows
            if wanted.v and h is not None:
                acc_v += tile.kept(p * h).mT @ do_rows
            if not wanted.k:
                continue
            gs = -e0_rows if uv_tile is None else tile.kept(do_rows @ uv_tile.mT).sub_(e0_rows)
            gs = gs * p
            ds = None
            if h is not None:
                ds = tile.kept(do_rows @ v_tile.mT).sub_(delta_rows).mul_(p)
                gs += h * ds
            acc_k += _bent_twice(tile, gs, raw, ds).mT @ q_rows
            if uq_rows is not None and ds is not None:
                acc_k += tile.bent(ds).mT @ uq_rows
        if gk is not None:
            gk[:, :, n0:n1] = acc_k * problem.plan.scale
        if gv is not None:
            gv[:, :, n0:n1] = acc_v
    return gk, gv


def tangent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    uq: Tensor | None,
    uk: Tensor | None,
    uv: Tensor | None,
    bounds: Tensor | None,
    bias: Tensor | None,
    plan: Plan,
) -> Tensor:
    """Forward mode: sum_j P uv_j + P F v_j - alpha o, the part of the row pass that needs no output gradient."""
    problem = _Problem(q, k, bounds, bias, plan)
    out = torch.empty_like(o)
    for m0, m1 in problem.row_blocks():
        q_rows, uq_rows = problem.rows(q, m0, m1), problem.rows(uq, m0, m1)
        o_rows, lse_rows = problem.rows(o, m0, m1), problem.log_sums(lse, m0, m1)
        acc, alpha = torch.zeros_like(o_rows), torch.zeros_like(lse_rows[..., :1])
        for n0, n1 in problem.column_blocks(*plan.geometry.key_range(m0, m1)):
            k_tile, v_tile = problem.columns(k, n0, n1), problem.columns(v, n0, n1)
            uk_tile, uv_tile = problem.columns(uk, n0, n1), problem.columns(uv, n0, n1)
            tile = problem.tile(q_rows, k_tile, m0, m1, n0, n1)
            p = tile.weights(lse_rows)
            raw = problem.raw(q_rows, k_tile, uq_rows, uk_tile)
            if raw is not None:
                alpha += (p * tile.bent(raw)).sum(-1, keepdim=True)
            acc += _moved(tile, p, raw, v_tile, uv_tile)
        problem.put_rows(out, m0, m1, acc - alpha * o_rows)
    return out
