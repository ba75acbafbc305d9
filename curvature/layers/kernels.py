"""Triton kernels of the fused layers, and their launchers: plain tensors in, plain tensors out.

All arithmetic is float32; every result is rounded once.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from curvature.layers.activation import ACTIVATIONS, Name

_BLOCK = 2048
_ENTRIES = 2048  # of a tile of rows
_PROGRAMS = 4  # per multiprocessor, for kernels whose programs run through many rows


@triton.jit
def _derivatives(x, KIND: tl.constexpr):
    """f, f' and f''; the formulas are those of `curvature.layers.activation`."""
    if KIND == 0:
        a = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        e = tl.exp(-2 * tl.abs(a))
        t = tl.where(a < 0, e - 1, 1 - e) / (1 + e)
        s = 1 - t * t
        w = 0.7978845608028654 * (1 + 0.134145 * x * x)
        return (
            0.5 * x * (1 + t),
            0.5 * (1 + t) + 0.5 * x * s * w,
            s * w + 0.5 * x * s * (0.21406859728399 * x - 2 * t * w * w),
        )
    if KIND == 1:
        cdf = 0.5 * (1 + tl.erf(x * 0.7071067811865476))
        pdf = tl.exp(-0.5 * x * x) * 0.3989422804014327
        return x * cdf, cdf + x * pdf, pdf * (2 - x * x)
    g = 1 / (1 + tl.exp(-x))
    return x * g, g * (1 + x * (1 - g)), g * (1 - g) * (2 + x * (1 - 2 * g))


@triton.jit
def _activation_kernel(x_ptr, dy_ptr, u_ptr, first_ptr, second_ptr, size, KIND: tl.constexpr, ORDER: tl.constexpr,
                       BLOCK: tl.constexpr):  # fmt: skip
    """ORDER 0: first = f(x). 1: first = dy f'(x). 2: first = u dy f''(x), second = u f'(x)."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    f, df, ddf = _derivatives(x, KIND)
    if ORDER == 0:
        out = f
    else:
        dy = tl.load(dy_ptr + at, mask=inside, other=0.0).to(tl.float32)
        if ORDER == 1:
            out = dy * df
        else:
            u = tl.load(u_ptr + at, mask=inside, other=0.0).to(tl.float32)
            out = u * dy * ddf
            tl.store(second_ptr + at, (u * df).to(second_ptr.dtype.element_ty), mask=inside)
    tl.store(first_ptr + at, out.to(first_ptr.dtype.element_ty), mask=inside)


def _run_activation(x: Tensor, dy: Tensor, u: Tensor, name: Name, order: int) -> tuple[Tensor, Tensor]:
    x, dy, u = x.contiguous(), dy.contiguous(), u.contiguous()
    first = torch.empty_like(x)
    second = torch.empty_like(x) if order == 2 else first
    if x.numel():
        _activation_kernel[(triton.cdiv(x.numel(), _BLOCK),)](
            x, dy, u, first, second, x.numel(), KIND=ACTIVATIONS.index(name), ORDER=order, BLOCK=_BLOCK
        )
    return first, second


def activation(x: Tensor, name: Name) -> Tensor:
    """f(x)."""
    return _run_activation(x, x, x, name, 0)[0]


def activation_backward(x: Tensor, dy: Tensor, name: Name) -> Tensor:
    """Dy f'(x)."""
    return _run_activation(x, dy, x, name, 1)[0]


def activation_second(x: Tensor, dy: Tensor, u: Tensor, name: Name) -> tuple[Tensor, Tensor]:
    """(u dy f''(x), u f'(x))."""
    return _run_activation(x, dy, u, name, 2)


@triton.jit
def _load_rows(ptr, rows, columns, mask, D):
    return tl.load(ptr + rows.to(tl.int64)[:, None] * D + columns[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store_rows(ptr, rows, columns, mask, D, value):
    at = ptr + rows.to(tl.int64)[:, None] * D + columns[None, :]
    tl.store(at, value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _normalized(x, mask, eps, D, CENTERED: tl.constexpr):
    """Xhat and r of rows whose entries past D are zero."""
    if CENTERED:
        x = tl.where(mask, x - (tl.sum(x, 1) / D)[:, None], 0.0)
    r = tl.rsqrt(tl.sum(x * x, 1) / D + eps)
    return x * r[:, None], r


@triton.jit
def _project(v, xhat, mask, D, CENTERED: tl.constexpr):
    """J(v) of `curvature.layers.norm`, and mean(v xhat)."""
    p = tl.sum(v * xhat, 1) / D
    w = v - xhat * p[:, None]
    if CENTERED:
        w = w - (tl.sum(v, 1) / D)[:, None]
    return tl.where(mask, w, 0.0), p


@triton.jit
def _norm_kernel(x_ptr, w_ptr, b_ptr, y_ptr, rows, eps, D: tl.constexpr, BLOCK_D: tl.constexpr, R: tl.constexpr,
                 CENTERED: tl.constexpr, BIASED: tl.constexpr, ROUNDED: tl.constexpr):  # fmt: skip
    columns = tl.arange(0, BLOCK_D)
    row = tl.program_id(0) * R + tl.arange(0, R)
    inside = columns < D
    mask = (row < rows)[:, None] & inside[None, :]
    xhat, _ = _normalized(_load_rows(x_ptr, row, columns, mask, D), mask, eps, D, CENTERED)
    if ROUNDED:
        xhat = xhat.to(x_ptr.dtype.element_ty).to(tl.float32)
    y = xhat * tl.load(w_ptr + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    if BIASED:
        y += tl.load(b_ptr + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    _store_rows(y_ptr, row, columns, mask, D, y)


@triton.jit
def _norm_backward_kernel(x_ptr, w_ptr, dy_ptr, dx_ptr, dw_ptr, db_ptr, rows, eps, D: tl.constexpr,
                          BLOCK_D: tl.constexpr, R: tl.constexpr, CENTERED: tl.constexpr,
                          SUMS: tl.constexpr):  # fmt: skip
    """dx; with SUMS, per program the sums over its rows for dw and db (float32 [programs, D])."""
    columns = tl.arange(0, BLOCK_D)
    inside = columns < D
    w = tl.load(w_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    dw = tl.zeros([BLOCK_D], tl.float32)
    db = tl.zeros([BLOCK_D], tl.float32)
    for start in range(tl.program_id(0) * R, rows, tl.num_programs(0) * R):
        row = start + tl.arange(0, R)
        mask = (row < rows)[:, None] & inside[None, :]
        xhat, r = _normalized(_load_rows(x_ptr, row, columns, mask, D), mask, eps, D, CENTERED)
        dy = _load_rows(dy_ptr, row, columns, mask, D)
        projected, _ = _project(dy * w[None, :], xhat, mask, D, CENTERED)
        _store_rows(dx_ptr, row, columns, mask, D, projected * r[:, None])
        if SUMS:
            dw += tl.sum(dy * xhat, 0)
            db += tl.sum(dy, 0)
    if SUMS:
        at = tl.program_id(0) * D + columns
        tl.store(dw_ptr + at, dw, mask=inside)
        tl.store(db_ptr + at, db, mask=inside)


@triton.jit
def _norm_second_kernel(x_ptr, w_ptr, dy_ptr, ux_ptr, uw_ptr, ub_ptr, gx_ptr, gdy_ptr, gw_ptr, rows, eps,
                        D: tl.constexpr, BLOCK_D: tl.constexpr, R: tl.constexpr, CENTERED: tl.constexpr,
                        UX: tl.constexpr, UW: tl.constexpr, UB: tl.constexpr):  # fmt: skip
    columns = tl.arange(0, BLOCK_D)
    inside = columns < D
    w = tl.load(w_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    gw = tl.zeros([BLOCK_D], tl.float32)
    if UW:
        uw = tl.load(uw_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    if UB:
        ub = tl.load(ub_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    for start in range(tl.program_id(0) * R, rows, tl.num_programs(0) * R):
        row = start + tl.arange(0, R)
        mask = (row < rows)[:, None] & inside[None, :]
        xhat, r = _normalized(_load_rows(x_ptr, row, columns, mask, D), mask, eps, D, CENTERED)
        dy = _load_rows(dy_ptr, row, columns, mask, D)
        gx = tl.zeros([R, BLOCK_D], tl.float32)
        gdy = tl.zeros([R, BLOCK_D], tl.float32)
        if UX:
            u = _load_rows(ux_ptr, row, columns, mask, D)
            v = dy * w[None, :]
            jv, p = _project(v, xhat, mask, D, CENTERED)
            ju, q = _project(u, xhat, mask, D, CENTERED)
            both = tl.sum(v * u, 1) / D - p * q
            if CENTERED:
                both -= tl.sum(v, 1) / D * (tl.sum(u, 1) / D)
            moved = ju * r[:, None]
            gx -= (r * r)[:, None] * (both[:, None] * xhat + q[:, None] * jv + p[:, None] * ju)
            gdy += w[None, :] * moved
            gw += tl.sum(dy * moved, 0)
        if UW:
            projected, _ = _project(dy * uw[None, :], xhat, mask, D, CENTERED)
            gx += projected * r[:, None]
            gdy += xhat * uw[None, :]
        if UB:
            gdy += ub[None, :]
        _store_rows(gx_ptr, row, columns, mask, D, gx)
        _store_rows(gdy_ptr, row, columns, mask, D, gdy)
    if UX:
        tl.store(gw_ptr + tl.program_id(0) * D + columns, gw, mask=inside)


def _tile(d: int) -> dict[str, int]:
    block = triton.next_power_of_2(d)
    return {"D": d, "BLOCK_D": block, "R": max(1, _ENTRIES // block), "num_warps": min(16, max(4, block // 512))}


@functools.cache
def _programs(device: torch.device) -> int:
    if device.type != "cuda":
        return 2
    return _PROGRAMS * int(torch.cuda.get_device_properties(device).multi_processor_count)


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centered: bool, rounded: bool) -> Tensor:
    """Y of rows x [n, D]."""
    x, y, tile = x.contiguous(), torch.empty(x.shape, dtype=x.dtype, device=x.device), _tile(x.shape[1])
    if len(x):
        _norm_kernel[(triton.cdiv(len(x), tile["R"]),)](
            x, weight, weight if bias is None else bias, y, len(x), eps,
            CENTERED=centered, BIASED=bias is not None, ROUNDED=rounded, **tile,
        )  # fmt: skip
    return y


def norm_backward(
    x: Tensor, weight: Tensor, dy: Tensor, eps: float, centered: bool, sums: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Dx [n, D] and, if `sums`, dw and db [D] in float32."""
    x, dy, tile = x.contiguous(), dy.contiguous(), _tile(x.shape[1])
    dx, programs = torch.empty_like(x), min(_programs(x.device), triton.cdiv(len(x), tile["R"]))
    parts = torch.zeros(2, programs if sums else 0, x.shape[1], dtype=torch.float32, device=x.device)
    if programs:
        _norm_backward_kernel[(programs,)](
            x, weight, dy, dx, *((parts[0], parts[1]) if sums else (dx, dx)), len(x), eps,
            CENTERED=centered, SUMS=sums, **tile,
        )  # fmt: skip
    return (dx, *parts.sum(1)) if sums else (dx, None, None)


def norm_second(
    x: Tensor,
    weight: Tensor,
    dy: Tensor,
    ux: Tensor | None,
    uweight: Tensor | None,
    ubias: Tensor | None,
    eps: float,
    centered: bool,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Gx [n, D], gw [D] (None without ux) and gdy [n, D]."""
    x, dy, tile = x.contiguous(), dy.contiguous(), _tile(x.shape[1])
    ux = None if ux is None else ux.contiguous()
    gx, gdy = torch.empty_like(x), torch.empty_like(dy)
    programs = min(_programs(x.device), triton.cdiv(len(x), tile["R"]))
    parts = torch.zeros(programs if ux is not None else 0, x.shape[1], dtype=torch.float32, device=x.device)
    if programs:
        _norm_second_kernel[(programs,)](
            x, weight, dy, x if ux is None else ux, weight if uweight is None else uweight,
            weight if ubias is None else ubias, gx, gdy, parts if ux is not None else gx, len(x), eps,
            CENTERED=centered, UX=ux is not None, UW=uweight is not None, UB=ubias is not None, **tile,
        )  # fmt: skip
    return gx, None if ux is None else parts.sum(0).to(weight.dtype), gdy


@triton.jit
def _online(top, total, z):
    """A step of the running softmax sum: (highest so far, sum of exponentials below it, the factor on older sums)."""
    higher = tl.maximum(top, z)
    factor = tl.exp(top - higher)
    return higher, total * factor + tl.exp(z - higher), factor


@triton.jit
def _token_loss_kernel(z_ptr, target_ptr, loss_ptr, scale, V: tl.constexpr, WIDTH: tl.constexpr,
                       BLOCK: tl.constexpr):  # fmt: skip
    """One row of logits z a program; z <- scale (softmax(z) - onehot), or 0 where the target is negative."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(target_ptr + row)
    z_ptr += row * WIDTH
    top = tl.full([BLOCK], -1e30, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, V, BLOCK):
        at = start + tl.arange(0, BLOCK)
        z = tl.load(z_ptr + at, mask=at < V, other=-1e30).to(tl.float32)
        top, total, _ = _online(top, total, z)
    highest = tl.max(top, 0)
    lse = highest + tl.log(tl.sum(total * tl.exp(top - highest), 0))
    own = tl.load(z_ptr + tl.maximum(target, 0)).to(tl.float32)
    tl.store(loss_ptr + row, tl.where(target >= 0, lse - own, 0.0))
    tl.debug_barrier()  # the target's logit is read before it is overwritten
    counted = tl.where(target >= 0, scale, 0.0)
    for start in range(0, WIDTH, BLOCK):
        at = start + tl.arange(0, BLOCK)
        z = tl.load(z_ptr + at, mask=at < V, other=-1e30).to(tl.float32)
        dz = (tl.exp(z - lse) - tl.where(at == target, 1.0, 0.0)) * counted
        tl.store(z_ptr + at, dz.to(z_ptr.dtype.element_ty), mask=at < WIDTH)


@triton.jit
def _token_second_kernel(z_ptr, target_ptr, u_ptr, scale, V: tl.constexpr, WIDTH: tl.constexpr,
                         BLOCK: tl.constexpr):  # fmt: skip
    """One row a program: of logits z and their derivative u; u <- scale (p u - p <p, u>) with p = softmax(z)."""
    row = tl.program_id(0).to(tl.int64)
    counted = tl.where(tl.load(target_ptr + row) >= 0, scale, 0.0)
    z_ptr += row * WIDTH
    u_ptr += row * WIDTH
    top = tl.full([BLOCK], -1e30, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    pulled = tl.zeros([BLOCK], tl.float32)
    for start in range(0, V, BLOCK):
        at = start + tl.arange(0, BLOCK)
        z = tl.load(z_ptr + at, mask=at < V, other=-1e30).to(tl.float32)
        u = tl.load(u_ptr + at, mask=at < V, other=0.0).to(tl.float32)
        top, total, factor = _online(top, total, z)
        pulled = pulled * factor + tl.where(at < V, tl.exp(z - top) * u, 0.0)
    highest = tl.max(top, 0)
    rest = tl.exp(top - highest)
    sum_all = tl.sum(total * rest, 0)
    mean = tl.sum(pulled * rest, 0) / sum_all
    lse = highest + tl.log(sum_all)
    for start in range(0, WIDTH, BLOCK):
        at = start + tl.arange(0, BLOCK)
        z = tl.load(z_ptr + at, mask=at < V, other=-1e30).to(tl.float32)
        u = tl.load(u_ptr + at, mask=at < V, other=0.0).to(tl.float32)
        value = tl.exp(z - lse) * (u - mean) * counted
        tl.store(u_ptr + at, value.to(u_ptr.dtype.element_ty), mask=at < WIDTH)


_VOCABULARY_BLOCK = 4096


def token_loss(z: Tensor, targets: Tensor, vocabulary: int, scale: float) -> Tensor:
    """Losses [n] in float32 of logits z [n, width >= vocabulary]; z becomes scale times their gradient, in place.

    Rows with a negative target count nothing; columns past the vocabulary become zero.
    """
    losses = torch.empty(len(z), dtype=torch.float32, device=z.device)
    block = min(_VOCABULARY_BLOCK, triton.next_power_of_2(z.shape[1]))
    _token_loss_kernel[(len(z),)](
        z, targets, losses, scale, V=vocabulary, WIDTH=z.shape[1], BLOCK=block, num_warps=8
    )  # fmt: skip
    return losses


def token_second(z: Tensor, targets: Tensor, u: Tensor, vocabulary: int, scale: float) -> None:
    """The derivative of scale times the loss' gradient by z [n, width] along u [n, width], written over u."""
    block = min(_VOCABULARY_BLOCK, triton.next_power_of_2(z.shape[1]))
    _token_second_kernel[(len(z),)](z, targets, u, scale, V=vocabulary, WIDTH=z.shape[1], BLOCK=block, num_warps=8)
