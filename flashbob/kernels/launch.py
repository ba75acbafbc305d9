"""Tile shapes by architecture, and the launchers: plain tensors in, plain tensors out.

A table instead of an autotuner: the first call of a shape compiles once and searches nothing, and a new sequence length
compiles nothing at all, since no length is a compile-time constant.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Sequence
from types import ModuleType
from typing import Any, Literal, NamedTuple

import torch
import triton
from torch import Tensor

from flashbob.geometry import Geometry
from flashbob.kernels import tuned
from flashbob.kernels.column_pass import column_pass_kernel
from flashbob.kernels.first_order import dkv_kernel, dq_kernel, forward_kernel
from flashbob.kernels.row_pass import row_pass_kernel, tangent_kernel
from flashbob.kernels.scores import bias_operand, keep_operand
from flashbob.kernels.tiles import Band, ceil_div, operand
from flashbob.plan import Plan, SecondGradients, Wanted

Pass = Literal["forward", "dq", "dkv", "row", "column", "tangent"]
GLUON = "3.6."  # releases of Triton that the Hopper kernels were written for and compile with
HOPPER_FROM = 15  # products, see `_faster_on_hopper`
MAX_TILE = 128  # rows that a masked tile may reach past the end
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


class Tiles(NamedTuple):
    """Queries and keys per tile, software-pipeline stages, warps per program."""

    bm: int
    bn: int
    stages: int
    warps: int


# 16-bit inputs, by padded head size. Measured on an H200 (sm_90); the other architectures take the entry whose shared
# memory they can hold (see `tiles_for`).
HALF: dict[Pass, dict[int, Tiles]] = {
    "forward": {64: Tiles(128, 64, 3, 4), 128: Tiles(128, 64, 3, 8), 256: Tiles(128, 32, 2, 8)},
    "dq": {64: Tiles(128, 64, 3, 8), 128: Tiles(128, 64, 2, 8), 256: Tiles(64, 32, 2, 8)},
    "dkv": {64: Tiles(64, 128, 3, 8), 128: Tiles(64, 128, 2, 8), 256: Tiles(32, 64, 2, 8)},
    "row": {64: Tiles(128, 64, 3, 8), 128: Tiles(64, 32, 2, 4), 256: Tiles(64, 16, 2, 8)},
    "column": {64: Tiles(64, 128, 2, 8), 128: Tiles(32, 128, 2, 8), 256: Tiles(32, 64, 1, 8)},
    "tangent": {64: Tiles(128, 64, 3, 8), 128: Tiles(128, 32, 3, 8), 256: Tiles(64, 32, 2, 8)},
}
# float32 inputs: every product is three TF32 products, so tiles are small.
SINGLE: dict[Pass, dict[int, Tiles]] = {
    "forward": {64: Tiles(64, 32, 2, 4), 128: Tiles(64, 32, 2, 8), 256: Tiles(32, 16, 1, 4)},
    "dq": {64: Tiles(64, 32, 2, 4), 128: Tiles(64, 32, 1, 8), 256: Tiles(32, 16, 1, 4)},
    "dkv": {64: Tiles(32, 64, 2, 4), 128: Tiles(32, 64, 1, 8), 256: Tiles(16, 32, 1, 4)},
    "row": {64: Tiles(64, 32, 1, 4), 128: Tiles(32, 16, 1, 4), 256: Tiles(32, 16, 1, 8)},
    "column": {64: Tiles(32, 64, 1, 4), 128: Tiles(16, 32, 1, 4), 256: Tiles(16, 16, 1, 4)},
    "tangent": {64: Tiles(64, 32, 1, 4), 128: Tiles(32, 32, 1, 4), 256: Tiles(32, 16, 1, 8)},
}


def tiles_for(which: Pass, block_d: int, itemsize: int, capability: tuple[int, int], bent: bool = False) -> Tiles:
    """The table's entry; one pipeline stage less where shared memory is below Hopper's (sm_80: 163 KiB, sm_86: 99).

    A table that `flashbob-curv bench attention --tune` made on this machine wins.

    With a soft-cap, a bias or dropout (`bent`) a score takes more registers, so the passes that have none left stream
    half as many rows at a time: 24 bytes of spills in place of 728 (row, head size 64, soft-cap).
    """
    size = max(64, block_d)
    found = tuned.entry(which, size, itemsize, capability)
    entry = Tiles(*found) if found else (HALF if itemsize == 2 else SINGLE)[which][size]
    if bent and which == "row":
        entry = entry._replace(bn=max(16, entry.bn // 2))
    if bent and which in ("column", "dkv"):
        entry = entry._replace(bm=max(16, entry.bm // 2))
        if itemsize == 4:  # 16 queries by 8 warps: the compiled kernel then reads outside its memory (Triton 3.6)
            entry = entry._replace(warps=min(4, entry.warps))
    if capability[0] < 9 and not found:
        entry = entry._replace(stages=max(1, entry.stages - 1))
    return entry


def _padded(d: int) -> int:
    """The power of two, 16 at least, that holds a head size."""
    return max(16, 1 << (d - 1).bit_length())


def _settings(
    which: Pass,
    q: Tensor,
    v: Tensor,
    plan: Plan,
    bounds: Tensor | None,
    bias: Tensor | None,
    operands: Sequence[Tensor],
) -> dict[str, Any]:
    """Compile-time constants of a launch, but for those that say which operands and results there are."""
    d, dv = q.shape[-1], v.shape[-1]
    block_d, block_dv = _padded(d), _padded(dv)
    if INTERPRETED:
        tiles = Tiles(32, 16, 1, 4) if which in ("forward", "dq", "row", "tangent") else Tiles(16, 32, 1, 4)
    else:
        bent = bias is not None or plan.softcap is not None or plan.dropout is not None
        tiles = tiles_for(which, max(block_d, block_dv), q.element_size(), _capability(q.device), bent)
    return {
        "BM": tiles.bm,
        "BN": tiles.bn,
        "D": d,
        "DV": dv,
        "BLOCK_D": block_d,
        "BLOCK_DV": block_dv,
        "LEFT": plan.geometry.left is not None,
        "RIGHT": plan.geometry.right is not None,
        "PADDED": bounds is not None,
        "STAGES": tiles.stages,
        "PRECISION": "tf32x3" if q.dtype == torch.float32 and not INTERPRETED else "ieee",
        "WIDE": any((x.shape[2] + MAX_TILE) * x.stride(2) >= 2**31 for x in operands),
        "SOFTCAP": plan.softcap is not None,
        "BIAS": bias is not None,
        "DROPOUT": plan.dropout is not None,
        "num_warps": tiles.warps,
    }


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@functools.cache
def hopper_kernels(device: torch.device) -> ModuleType | None:
    """The kernels in Gluon, where this is a Hopper GPU and this the Triton whose (experimental) Gluon they speak."""
    if device.type != "cuda" or _capability(device) != (9, 0):
        return None
    if not triton.__version__.startswith(GLUON):
        warnings.warn(
            f"flashbob: the fast Hopper kernels are written for Triton {GLUON}x and this is {triton.__version__}; the "
            "general kernels take their place (same results, slower)",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    from flashbob.kernels import hopper

    return hopper


def _band(geometry: Geometry, bounds: Tensor | None, placeholder: Tensor) -> Band:
    return Band(
        geometry.queries,
        geometry.keys,
        geometry.shift,
        geometry.left or 0,
        geometry.right or 0,
        placeholder if bounds is None else bounds,
    )


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _rows_of(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if x is None else _rows(x) for x in tensors]


class _Compiled(NamedTuple):
    """What a launch needs once its kernel is compiled: the kernel, the grid, and the compile-time arguments."""

    kernel: Any
    grid: tuple[int, int, int]
    constants: tuple[Any, ...]


KERNELS: dict[Pass, Any] = {
    "forward": forward_kernel,
    "dq": dq_kernel,
    "dkv": dkv_kernel,
    "row": row_pass_kernel,
    "column": column_pass_kernel,
    "tangent": tangent_kernel,
}
# Releases in which a compiled kernel is launched with exactly the arguments that the JIT function would pass on.
DIRECT = ("3.6.", "3.9.")
MAX_COMPILED = 4096
compiled_kernels: dict[tuple[Any, ...], _Compiled] = {}


def _key(tensors: Sequence[Tensor]) -> list[Any]:
    """All that Triton specializes a kernel on in its tensors and their strides."""
    return [y for x in tensors for y in (x.dtype, x.shape, x.stride(), x.data_ptr() % 16)]


def _launch(
    which: Pass,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tensors: Sequence[Tensor],
    scalars: Sequence[Tensor],
    bounds: Tensor | None,
    bias: Tensor | None,
    plan: Plan,
    **parts: bool,
) -> None:
    """Run a kernel on `tensors` (as operands) and row `scalars`; `parts` are its other compile-time constants.

    The first launch of a key goes through Triton, which analyses the arguments, compiles, and keeps what it compiled.
    Later ones call the compiled kernel directly: the key names everything that the analysis would look at.
    """
    geometry, rowwise = plan.geometry, which not in ("dkv", "column")
    heads = (q if rowwise else k).shape[1]
    arguments = (
        *map(operand, tensors),
        *scalars,
        _band(geometry, bounds, scalars[0]),
        heads,
        plan.scale,
        float(plan.softcap or 1.0),  # an integer would be specialized on
        bias_operand(bias, scalars[0]),
        keep_operand(plan.dropout),
    )
    with_bias = tensors if bias is None else (*tensors, bias)
    band = (geometry.shift, geometry.left, geometry.right)  # its lengths are in the tensors' shapes
    modes = (bounds is None, bias is None, plan.softcap is None, plan.dropout is None)
    aligned = [x.data_ptr() % 16 for x in scalars]
    key = (which, q.device, *parts.values(), *modes, *band, *aligned, *_key(with_bias))
    compiled = compiled_kernels.get(key)
    if compiled is not None:
        compiled.kernel[compiled.grid](*arguments, *compiled.constants)
        return
    settings = _settings(which, q, v, plan, bounds, bias, tensors)
    blocks = ceil_div(q.shape[2], settings["BM"]) if rowwise else ceil_div(k.shape[2], settings["BN"])
    grid = (blocks, q.shape[0] * heads, 1)
    options = {"num_warps": settings.pop("num_warps")}
    constants = {"GROUPS": q.shape[1] // k.shape[1], **settings, **parts}
    kernel = KERNELS[which][grid](*arguments, **constants, **options)
    if kernel is not None and triton.__version__.startswith(DIRECT):  # the interpreter compiles nothing
        if len(compiled_kernels) >= MAX_COMPILED:
            compiled_kernels.clear()
        order = KERNELS[which].arg_names[len(arguments) :]
        compiled_kernels[key] = _Compiled(kernel, grid, tuple(constants[name] for name in order))


def forward(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor | None, bias: Tensor | None, plan: Plan
) -> tuple[Tensor, Tensor]:
    q, k, v = map(_rows, (q, k, v))
    o = torch.empty_like(q) if v.shape[-1] == q.shape[-1] else q.new_empty(*q.shape[:3], v.shape[-1])
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    _launch("forward", q, k, v, (q, k, v, o), (lse,), bounds, bias, plan)
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
    q, k, v, o, do = map(_rows, (q, k, v, o, do))
    lse = lse.float().contiguous()
    dq, dk, dv, delta = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), torch.empty_like(lse)
    _launch("dq", q, k, v, (q, k, v, o, do, dq), (lse, delta), bounds, bias, plan)
    _launch("dkv", q, k, v, (q, k, v, do, dk, dv), (lse, delta), bounds, bias, plan)
    return dq, dk, dv


def products(uq: bool, uk: bool, uv: bool, wanted: Wanted) -> int:
    """Tile products of the two general passes for a direction with these parts (18 for a whole one, all wanted)."""
    f = uq or uk
    curved = wanted.q or wanted.k
    row = 1 + uq + uk + (f + uv) * (wanted.do + curved) + (2 + uk) * wanted.q
    column = 1 + uq + uk + f * wanted.v + (f + uv + 1 + uq) * wanted.k
    return row + (column if wanted.k or (wanted.v and f) else 0)


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
    given = (uq is not None, uk is not None, uv is not None)
    hopper = _faster_on_hopper(q, v, bounds, bias, plan, products(*given, wanted))
    if hopper is not None:
        dense = (torch.zeros_like(x) if u is None else u for u, x in ((uq, q), (uk, k), (uv, v)))
        found = hopper.double_backward(q, k, v, o, lse, do, dq, *dense, plan.geometry, plan.scale)
        gq, gk, gv, gdo = (x if asked else None for x, asked in zip(found, wanted, strict=True))
        return gq, gk, gv, gdo
    if not (wanted.q or wanted.k or (wanted.v and any(given[:2]))):  # what is left of gv is zero without F
        moved = tangent(q, k, v, o, lse, uq, uk, uv, bounds, bias, plan) if wanted.do else None
        return None, None, torch.zeros_like(v) if wanted.v else None, moved
    lse = lse.float().contiguous()
    scalars = (lse, *(torch.empty_like(lse) for _ in range(3)))  # and alpha, e0, delta
    operands = (*map(_rows, (q, k, v, do)), *_rows_of(uq, uk, uv))
    gq, gdo = _row_pass(operands, _rows(o), _rows(dq), scalars, bounds, bias, plan, wanted)
    gk, gv = _column_pass(operands, scalars, bounds, bias, plan, wanted)
    return gq, gk, gv, gdo


# q, k, v, do, and the parts of the direction. What is absent has a place among a kernel's operands all the same, taken
# by another tensor that the compiled code never touches.
_Operands = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]


def _given(uq: Tensor | None, uk: Tensor | None, uv: Tensor | None) -> dict[str, bool]:
    return {"HAS_UQ": uq is not None, "HAS_UK": uk is not None, "HAS_UV": uv is not None}


def _row_pass(
    operands: _Operands,
    o: Tensor,
    dq: Tensor,
    scalars: Sequence[Tensor],
    bounds: Tensor | None,
    bias: Tensor | None,
    plan: Plan,
    wanted: Wanted,
) -> tuple[Tensor | None, Tensor | None]:
    """(gq, gdo); fills the row scalars."""
    q, k, v, do, uq, uk, uv = operands
    gq = torch.empty_like(q) if wanted.q else None
    gdo = torch.empty_like(do) if wanted.do else None
    tensors = (q, k, v, o, do, dq, _or(uq, q), _or(uk, k), _or(uv, v), _or(gq, q), _or(gdo, do))
    wants = {"WANT_Q": wanted.q, "WANT_DO": wanted.do, "CURVED": wanted.q or wanted.k}
    _launch("row", q, k, v, tensors, scalars, bounds, bias, plan, **_given(uq, uk, uv), **wants)
    return gq, gdo


def _column_pass(
    operands: _Operands,
    scalars: Sequence[Tensor],
    bounds: Tensor | None,
    bias: Tensor | None,
    plan: Plan,
    wanted: Wanted,
) -> tuple[Tensor | None, Tensor | None]:
    """(gk, gv) from the row scalars."""
    q, k, v, do, uq, uk, uv = operands
    moves = wanted.v and (uq is not None or uk is not None)  # otherwise gv is zero
    gk = torch.empty_like(k) if wanted.k else None
    gv = None if not wanted.v else torch.empty_like(v) if moves else torch.zeros_like(v)
    if wanted.k or moves:
        tensors = (q, k, v, do, _or(uq, q), _or(uk, k), _or(uv, v), _or(gk, k), _or(gv, v))
        wants = {"WANT_K": wanted.k, "WANT_V": moves}
        _launch("column", q, k, v, tensors, scalars, bounds, bias, plan, **_given(uq, uk, uv), **wants)
    return gk, gv


def _or(x: Tensor | None, placeholder: Tensor) -> Tensor:
    return placeholder if x is None else x


def _faster_on_hopper(
    q: Tensor, v: Tensor, bounds: Tensor | None, bias: Tensor | None, plan: Plan, general_products: int
) -> ModuleType | None:
    """The Hopper kernels, where they can compute this call and do so faster than the general ones.

    They always compute all 18 products (from zeros, where a part of the direction is absent), in the time that the
    general kernels take for 15 (head size 64) or 14 (head size 128).
    """
    bent = bias is not None or plan.softcap is not None or plan.dropout is not None
    return hopper_takes(q, v, bounds, plan.geometry, bent) if general_products >= HOPPER_FROM else None


def hopper_takes(
    q: Tensor, v: Tensor, bounds: Tensor | None, geometry: Geometry, bent: bool = False
) -> ModuleType | None:
    """The Hopper kernels, where they can compute a call; `bent` by a soft-cap, a bias or dropout, they cannot."""
    hopper = None if bent else hopper_kernels(q.device)
    return hopper if hopper is not None and hopper.takes(q, v, bounds, geometry) else None


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
    q, k, v, o = map(_rows, (q, k, v, o))
    uq, uk, uv = _rows_of(uq, uk, uv)
    lse = lse.float().contiguous()
    out = torch.empty_like(o)
    tensors = (q, k, v, o, _or(uq, q), _or(uk, k), _or(uv, v), out)
    _launch("tangent", q, k, v, tensors, (lse,), bounds, bias, plan, **_given(uq, uk, uv))
    return out
