"""Other ways to the double backward of attention, which ours is measured against.

`ours`, `math`, `closed-form` and `three-pass` answer the same `Problem` with the same four gradients, each through
`torch.autograd.grad` on first gradients that are already recorded: what an optimizer or a Hessian product calls.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashbob.api import sdpa_bob
from flashbob.geometry import Geometry

__all__ = ["OUTPUTS", "RIVALS", "Problem", "Second", "draw", "reference"]

OUTPUTS = ("gq", "gk", "gv", "gdo")
"""What a double backward returns: gradients of <dq, uq> + <dk, uk> + <dv, uv> at q, k, v and do."""

Second = Callable[[], tuple[Tensor, ...]]
"""Computes the double backward once more; forward and first backward lie behind it."""


@dataclass(frozen=True)
class Problem:
    """One double backward: attention's tensors, the gradient `do` of its output, and a direction (uq, uk, uv).

    Attributes:
        q: [B, H_Q, N, D]; `do` and `uq` likewise.
        k: [B, H_KV, N, D]; `v`, `uk` and `uv` likewise.
        causal: Whether keys after the query are hidden.
        window: 0, or the number of keys up to its own that a query sees.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    uq: Tensor
    uk: Tensor
    uv: Tensor
    causal: bool
    window: int = 0

    @property
    def scale(self) -> float:
        """Factor on the scores, 1 / sqrt(D)."""
        return float(self.q.shape[-1] ** -0.5)

    @property
    def leaves(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v and do as leaves of a graph, sharing memory."""
        q, k, v, do = (t.detach().requires_grad_() for t in (self.q, self.k, self.v, self.do))
        return q, k, v, do

    @property
    def directions(self) -> tuple[Tensor, Tensor, Tensor]:
        """(uq, uk, uv)."""
        return self.uq, self.uk, self.uv

    @property
    def pairs(self) -> float:
        """Visible pairs of one head as FLOP are counted: N^2, halved under a causal mask, exact under a window."""
        n, w = self.q.shape[2], min(self.window, self.q.shape[2])
        if w:
            return n * w - w * (w - 1) / 2
        return n * n / 2 if self.causal else float(n * n)

    @property
    def flops(self) -> float:
        """FLOP of the two-pass schedule, whoever computes it: 18 products of 2 D per visible pair and query head."""
        batch, heads, _, d = self.q.shape
        return 18 * 2 * self.pairs * d * batch * heads

    def to(self, dtype: torch.dtype) -> Problem:
        """The same problem in another dtype."""
        tensors = {name: t.to(dtype) for name, t in vars(self).items() if isinstance(t, Tensor)}
        return Problem(**tensors, causal=self.causal, window=self.window)

    def hidden(self) -> Tensor | None:
        """Bool tensor [N, N], True where query i must not see key j; None where it sees all."""
        n = self.q.shape[2]
        geometry = Geometry.build(n, n, is_causal=self.causal, window_size=self.window, q_offset=None, k_offset=0)
        return geometry.hidden(0, n, 0, n, None, self.q.device)


def draw(
    *,
    batch: int,
    heads: tuple[int, int],
    seq: int,
    dim: int,
    causal: bool,
    window: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> Problem:
    """A problem of normal tensors, drawn on the device.

    Args:
        batch: Sequences.
        heads: Query heads and key/value heads; the first a multiple of the second.
        seq: Queries, and keys.
        dim: Head size.
        causal: Whether keys after the query are hidden.
        window: 0, or keys that a query sees.
        dtype: float64, float32, bfloat16 or float16.
        device: Where.
        seed: Of the generator.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def normal(head_count: int) -> Tensor:
        return torch.randn(batch, head_count, seq, dim, generator=generator, dtype=dtype, device=device)

    query_heads, key_heads = heads
    q, do, uq = (normal(query_heads) for _ in range(3))
    k, v, uk, uv = (normal(key_heads) for _ in range(4))
    return Problem(q, k, v, do, uq, uk, uv, causal, window)


def reference(problem: Problem) -> tuple[Tensor, ...]:
    """The answer in float64 by the materializing oracle, `sdpa_bob(backend="reference")`. Memory O(B H N^2)."""
    return _through_autograd(problem.to(torch.float64), lambda q, k, v: _ours(problem, q, k, v, "reference"))()


def ours(problem: Problem) -> Second:
    """`sdpa_bob` as a user calls it."""
    return _through_autograd(problem, lambda q, k, v: _ours(problem, q, k, v, "auto"))


def math(problem: Problem) -> Second:
    """PyTorch's own: `scaled_dot_product_attention` held to its math path, which materializes the scores."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        hidden = problem.hidden() if problem.window else None
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=None if hidden is None else ~hidden,
                is_causal=problem.causal and hidden is None,
                enable_gqa=q.shape[1] != k.shape[1],
            )

    return _through_autograd(problem, attend)


def closed_form(problem: Problem) -> Second:
    """The equations of flashbob/README.md in plain torch operations over whole N x N arrays.

    16-bit products accumulate and stay in float32 on a GPU; arrays that no later line needs are freed or overwritten,
    which leaves four float32 arrays of N x N per head at the peak. A causal mask saves nothing.
    """
    hidden = problem.hidden()
    return _recorded(problem, lambda *tensors: _materialized(*tensors, hidden=hidden, scale=problem.scale))


def three_pass(problem: Problem) -> Second:
    """The three-pass schedule in Triton kernels of the same making as our general ones; see `kernels.three_pass`.

    Raises:
        NotImplementedError: For float64, a window, a head size that is no power of two from 16 to 256, or a CPU without
            Triton's interpreter.
    """
    from flashbob.kernels import three_pass as kernels

    q, interpreted = problem.q, os.environ.get("TRITON_INTERPRET") == "1"
    dim = q.shape[-1]
    if problem.window:
        raise NotImplementedError("three-pass: sliding windows are not supported")
    if q.dtype == torch.float64 or (interpreted and q.dtype != torch.float32):
        raise NotImplementedError(f"three-pass: {q.dtype} is not supported {'when interpreted' if interpreted else ''}")
    if dim not in (16, 32, 64, 128, 256):
        raise NotImplementedError(f"three-pass: the head size must be 16, 32, 64, 128 or 256, got {dim}")
    if not q.is_cuda and not interpreted:
        raise NotImplementedError("three-pass: needs a CUDA device, or TRITON_INTERPRET=1 set before Python starts")
    with torch.no_grad():
        o, lse = _forward(problem)

    def second(q: Tensor, k: Tensor, v: Tensor, do: Tensor, uq: Tensor, uk: Tensor, uv: Tensor) -> tuple[Tensor, ...]:
        q, k, v, do, uq, uk, uv = (t.contiguous() for t in (q, k, v, do, uq, uk, uv))
        return kernels.double_backward(q, k, v, o, lse, do, uq, uk, uv, problem.scale, problem.causal)

    return _recorded(problem, second)


RIVALS: Mapping[str, Callable[[Problem], Second]] = {
    "ours": ours,
    "math": math,
    "closed-form": closed_form,
    "three-pass": three_pass,
}
"""Ways by name; each records forward and first backward and returns the double backward."""


def _ours(problem: Problem, q: Tensor, k: Tensor, v: Tensor, backend: Any) -> Tensor:
    return sdpa_bob(q, k, v, is_causal=problem.causal, window_size=problem.window, backend=backend)


def _through_autograd(problem: Problem, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Second:
    q, k, v, do = problem.leaves
    first = torch.autograd.grad(attend(q, k, v), (q, k, v), do, create_graph=True)
    directions = tuple(u.to(q.dtype) for u in problem.directions)
    return lambda: torch.autograd.grad(first, (q, k, v, do), directions, retain_graph=True)


class _FirstGradients(Function):
    """(q, k, v, do) -> (dq, dk, dv) as given, whose own backward is the function given."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, do: Tensor, first: Any, second: Any) -> tuple[Tensor, ...]:
        ctx.save_for_backward(q, k, v, do)
        ctx.second = second
        return tuple(first)

    @staticmethod
    def backward(ctx: Any, *directions: Tensor) -> tuple[Tensor | None, ...]:
        return (*ctx.second(*ctx.saved_tensors, *directions), None, None)


def _recorded(problem: Problem, second: Callable[..., tuple[Tensor, ...]]) -> Second:
    q, k, v, do = problem.leaves
    o = _ours(problem, q, k, v, "auto")
    first = torch.autograd.grad(o, (q, k, v), problem.do)
    recorded = _FirstGradients.apply(q, k, v, do, first, second)
    return lambda: torch.autograd.grad(recorded, (q, k, v, do), problem.directions, retain_graph=True)


def _forward(problem: Problem) -> tuple[Tensor, Tensor]:
    """Output and row log-sum-exp (float32) of a problem without a window."""
    q, (k, v) = problem.q, (problem.k, problem.v)
    groups = q.shape[1] // k.shape[1]
    if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16):
        repeated = (t.repeat_interleave(groups, dim=1) for t in (k, v))
        o, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            q, *repeated, 0.0, problem.causal, False, scale=problem.scale
        )
        return o.contiguous(), lse.contiguous()
    o, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
    hidden = problem.hidden()
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            scores = problem.scale * (q[b, h] @ k[b, h // groups].mT)
            if hidden is not None:
                scores.masked_fill_(hidden, float("-inf"))
            lse[b, h] = scores.logsumexp(-1)
            o[b, h] = torch.softmax(scores, -1) @ v[b, h // groups]
    return o, lse


def _product(a: Tensor, b: Tensor) -> Tensor:
    """A product over [heads, ., .] in float32 (float64 for float64) from operands in the dtype of `b`."""
    a = a.to(b.dtype)
    if b.dtype in (torch.bfloat16, torch.float16):
        return torch.bmm(a, b, out_dtype=torch.float32) if b.is_cuda else torch.bmm(a.float(), b.float())
    return torch.bmm(a, b)


def _materialized(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    uq: Tensor,
    uk: Tensor,
    uv: Tensor,
    *,
    hidden: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(gq, gk, gv, gdo); the query heads of a group are stacked, so that no key is repeated."""
    groups, n = q.shape[1] // k.shape[1], k.shape[2]
    rows = [t.unflatten(1, (-1, groups)).flatten(2, 3).flatten(0, 1) for t in (q, do, uq)]
    columns = [t.flatten(0, 1) for t in (k, v, uk, uv)]
    (q_, do_, uq_), (k_, v_, uk_, uv_) = rows, columns
    p = _product(q_, k_.mT).mul_(scale)
    if hidden is not None:
        p.unflatten(1, (groups, -1)).masked_fill_(hidden, float("-inf"))
    p = torch.softmax(p, dim=-1)
    h = _product(uq_, k_.mT).add_(_product(q_, uk_.mT)).mul_(scale)
    h -= (p * h).sum(-1, keepdim=True)
    ph = p * h
    gdo = _product(p, uv_).add_(_product(ph, v_))
    gv = _product(ph.mT, do_)
    del ph
    ds = _product(do_, v_.mT)
    ds -= (p * ds).sum(-1, keepdim=True)
    gs = h.mul_(ds).add_(_product(do_, uv_.mT)).mul_(p)
    gs.addcmul_(p, gs.sum(-1, keepdim=True), value=-1)
    ds.mul_(p)
    gq = _product(gs, k_).add_(_product(ds, uk_)).mul_(scale)
    gk = _product(gs.mT, q_).add_(_product(ds.mT, uq_)).mul_(scale)
    return (
        gq.to(q.dtype).unflatten(1, (groups, n)).reshape(q.shape),
        gk.to(k.dtype).view(k.shape),
        gv.to(v.dtype).view(v.shape),
        gdo.to(do.dtype).unflatten(1, (groups, n)).reshape(do.shape),
    )
