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
from flashbob.kernels.column_pass import column_pass_kernel
from flashbob.kernels.first_order import dkv_kernel, dq_kernel, forward_kernel
from flashbob.kernels.row_pass import row_pass_kernel, tangent_kernel
from flashbob.kernels.tiles import Band, ceil_div, operand

Pass = Literal["forward", "dq", "dkv", "row", "column", "tangent"]
GLUON = "3.6."  # releases of Triton that the Hopper kernels were written for and compile with
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


def tiles_for(which: Pass, block_d: int, itemsize: int, capability: tuple[int, int]) -> Tiles:
    """The table's entry; one pipeline stage less where shared memory is below Hopper's (sm_80: 163 KiB, sm_86: 99)."""
    entry = (HALF if itemsize == 2 else SINGLE)[which][max(64, block_d)]
    if capability[0] < 9:
        entry = entry._replace(stages=max(1, entry.stages - 1))
    return entry


def _padded(d: int) -> int:
    """The power of two, 16 at least, that holds a head size."""
    return max(16, 1 << (d - 1).bit_length())


def _settings(
    which: Pass, q: Tensor, v: Tensor, geometry: Geometry, bounds: Tensor | None, operands: Sequence[Tensor]
) -> dict[str, Any]:
    """Compile-time constants of a launch."""
    d, dv = q.shape[-1], v.shape[-1]
    block_d, block_dv = _padded(d), _padded(dv)
    if INTERPRETED:
        tiles = Tiles(32, 16, 1, 4) if which in ("forward", "dq", "row", "tangent") else Tiles(16, 32, 1, 4)
    else:
        tiles = tiles_for(which, max(block_d, block_dv), q.element_size(), _capability(q.device))
    return {
        "BM": tiles.bm,
        "BN": tiles.bn,
        "STAGES": tiles.stages,
        "num_warps": tiles.warps,
        "D": d,
        "DV": dv,
        "BLOCK_D": block_d,
        "BLOCK_DV": block_dv,
        "LEFT": geometry.left is not None,
        "RIGHT": geometry.right is not None,
        "PADDED": bounds is not None,
        "PRECISION": "tf32x3" if q.dtype == torch.float32 and not INTERPRETED else "ieee",
        "WIDE": any((x.shape[2] + MAX_TILE) * x.stride(2) >= 2**31 for x in operands),
    }


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@functools.cache
def _hopper(device: torch.device) -> ModuleType | None:
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


def _band(geometry: Geometry, bounds: Tensor | None, lse: Tensor) -> Band:
    return Band(
        geometry.queries,
        geometry.keys,
        geometry.shift,
        geometry.left or 0,
        geometry.right or 0,
        lse if bounds is None else bounds,
    )


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _row_grid(q: Tensor, settings: dict[str, Any]) -> tuple[int, int]:
    return ceil_div(q.shape[2], settings["BM"]), q.shape[0] * q.shape[1]


def _column_grid(k: Tensor, settings: dict[str, Any]) -> tuple[int, int]:
    return ceil_div(k.shape[2], settings["BN"]), k.shape[0] * k.shape[1]


def forward(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor | None, geometry: Geometry, scale: float
) -> tuple[Tensor, Tensor]:
    q, k, v = map(_rows, (q, k, v))
    o = torch.empty_like(q) if v.shape[-1] == q.shape[-1] else q.new_empty(*q.shape[:3], v.shape[-1])
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    tensors = (q, k, v, o)
    settings = _settings("forward", q, v, geometry, bounds, tensors)
    forward_kernel[_row_grid(q, settings)](
        *map(operand, tensors), lse, _band(geometry, bounds, lse), q.shape[1], scale,
        GROUPS=q.shape[1] // k.shape[1], **settings,
    )  # fmt: skip
    return o, lse


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    bounds: Tensor | None,
    geometry: Geometry,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, o, do = map(_rows, (q, k, v, o, do))
    lse = lse.float().contiguous()
    dq, dk, dv, delta = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), torch.empty_like(lse)
    band, groups = _band(geometry, bounds, lse), q.shape[1] // k.shape[1]
    tensors = (q, k, v, o, do, dq)
    settings = _settings("dq", q, v, geometry, bounds, tensors)
    dq_kernel[_row_grid(q, settings)](
        *map(operand, tensors), lse, delta, band, q.shape[1], scale, GROUPS=groups, **settings
    )
    tensors = (q, k, v, do, dk, dv)
    settings = _settings("dkv", q, v, geometry, bounds, tensors)
    dkv_kernel[_column_grid(k, settings)](
        *map(operand, tensors), lse, delta, band, k.shape[1], scale, GROUPS=groups, **settings
    )
    return dq, dk, dv


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
    geometry: Geometry,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    hopper = _hopper(q.device)
    if hopper is not None and hopper.takes(q, v, bounds, geometry):
        return hopper.double_backward(q, k, v, o, lse, do, dq, uq, uk, uv, geometry, scale)
    q, k, v, o, do, dq, uq, uk, uv = map(_rows, (q, k, v, o, do, dq, uq, uk, uv))
    lse = lse.float().contiguous()
    gq, gk, gv, gdo = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), torch.empty_like(do)
    alpha, e0, delta = torch.empty_like(lse), torch.empty_like(lse), torch.empty_like(lse)
    band, groups = _band(geometry, bounds, lse), q.shape[1] // k.shape[1]
    tensors = (q, k, v, o, do, dq, uq, uk, uv, gq, gdo)
    settings = _settings("row", q, v, geometry, bounds, tensors)
    row_pass_kernel[_row_grid(q, settings)](
        *map(operand, tensors), lse, alpha, e0, delta, band, q.shape[1], scale, GROUPS=groups, **settings
    )
    tensors = (q, k, v, do, uq, uk, uv, gk, gv)
    settings = _settings("column", q, v, geometry, bounds, tensors)
    column_pass_kernel[_column_grid(k, settings)](
        *map(operand, tensors), lse, alpha, e0, delta, band, k.shape[1], scale, GROUPS=groups, **settings
    )
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
    geometry: Geometry,
    scale: float,
) -> Tensor:
    q, k, v, o, uq, uk, uv = map(_rows, (q, k, v, o, uq, uk, uv))
    lse = lse.float().contiguous()
    out = torch.empty_like(o)
    tensors = (q, k, v, o, uq, uk, uv, out)
    settings = _settings("tangent", q, v, geometry, bounds, tensors)
    tangent_kernel[_row_grid(q, settings)](
        *map(operand, tensors), lse, _band(geometry, bounds, lse), q.shape[1], scale,
        GROUPS=q.shape[1] // k.shape[1], **settings,
    )  # fmt: skip
    return out
