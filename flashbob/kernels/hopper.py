"""The double backward on Hopper (sm_90): which calls the fast kernels take, their launch table, and the launcher.

16-bit tensors, head size 64 or 128 for keys and values alike, no padding, and either the square causal mask or none.
Everything else stays with the general kernels of `launch`. The kernels read and write through TMA descriptors, so any
[B, H, N, d] strides that are multiples of 16 bytes do; other tensors are copied first.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flashbob.geometry import Geometry
from flashbob.kernels.hopper_column import column_kernel
from flashbob.kernels.hopper_column_split import column_split_kernel
from flashbob.kernels.hopper_row import row_kernel
from flashbob.kernels.hopper_row_split import row_split_kernel
from flashbob.kernels.tiles import ceil_div

OWNED = 64  # stationary rows of a program, those of one warpgroup
ROW_BLOCK = 128  # the packed row scalars are padded to a multiple of this


class Plan(NamedTuple):
    """A kernel and its launch table entry.

    Attributes:
        kernel: the Gluon kernel.
        tile: streamed rows a stage.
        constants: its other compile-time constants: STAGES of the ring of streamed tiles, SLOTS of the ring of score
            tiles, SECTION heads that run through all their blocks together, BS streamed rows worked off at a time,
            SCORE_REGISTERS a thread of the warpgroup of the scores.
        options: compiler options.
    """

    kernel: Any
    tile: int
    constants: dict[str, int]
    options: dict[str, int]


# Measured on an H200; what lost is in flashbob/README.md.
_SPLIT = {"STAGES": 4, "SECTION": 4, "SCORE_REGISTERS": 240}
ROW = {
    64: Plan(row_kernel, 32, {"STAGES": 4, "SECTION": 8}, {}),
    128: Plan(row_split_kernel, 32, _SPLIT | {"SLOTS": 2}, {"maxnreg": 248}),
}
COLUMN = {
    64: Plan(column_kernel, 64, {"BS": 32, "STAGES": 3, "SECTION": 8}, {}),
    128: Plan(column_split_kernel, 32, _SPLIT | {"SLOTS": 3}, {"maxnreg": 248}),
}


def takes(q: Tensor, v: Tensor, bounds: Tensor | None, geometry: Geometry) -> bool:
    """Whether these kernels compute this call (the operands are known to agree, and to lie on a Hopper GPU)."""
    return (
        q.dtype in (torch.bfloat16, torch.float16)
        and q.shape[-1] == v.shape[-1]
        and q.shape[-1] in ROW
        and bounds is None
        and (geometry.is_full or geometry.is_square_causal)
        and 4 * q.shape[0] * q.shape[1] * (q.shape[2] + ROW_BLOCK) < 2**31
    )


def _describable(x: Tensor) -> Tensor:
    """x, or a copy of it where TMA cannot address it: 16-byte alignment, and no broadcast dimension."""
    fits = x.data_ptr() % 16 == 0
    if fits and not x.is_contiguous():
        fits = x.stride(-1) == 1 and all(
            n == 1 or (stride > 0 and stride * x.element_size() % 16 == 0)
            for n, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True)
        )
    return x if fits else x.clone(memory_format=torch.contiguous_format)


class _Described(TensorDescriptor):  # type: ignore[misc]
    """A descriptor of a tensor that `_describable` has seen to, so that it need not be checked again."""

    def __post_init__(self) -> None:
        pass


_LAYOUT = gl.NVMMASharedLayout(128, 16, rank=4)
_SCALAR_LAYOUT = gl.NVMMASharedLayout(0, 32, rank=1)


def _describe(tensors: tuple[Tensor, ...], rows: int) -> list[TensorDescriptor]:
    """[B, H, N, d] tensors in blocks of [1, 1, rows, d]; the stride of a dimension of one is made a legal one."""
    descriptors = []
    for x in tensors:
        shape, strides = x.shape, x.stride()
        d = shape[3]
        if 1 in shape:
            strides = (*(d if n == 1 else stride for n, stride in zip(shape[:3], strides[:3], strict=True)), 1)
        descriptors.append(_Described(x, shape, strides, [1, 1, rows, d], _LAYOUT))
    return descriptors


_compiled: dict[tuple[Any, ...], Any] = {}


def _launch(plan: Plan, programs: int, key: tuple[Any, ...], arguments: tuple[Any, ...], **constants: Any) -> None:
    """Run the kernel. Once compiled for a key it is called directly, which spares Triton's analysis of the arguments.

    The key names all that the compiled code depends on: descriptors vary in dtype and block only, no integer is
    specialized (see `do_not_specialize`), the row scalars are aligned.
    """
    constants |= plan.constants
    compiled = _compiled.get(key)
    if compiled is None:
        constants["num_warps"] = 4
        _compiled[key] = plan.kernel[(programs,)](*arguments, **constants, **plan.options)
    else:  # constants are baked in: only their number counts
        compiled[programs, 1, 1](*arguments, *constants.values(), 4)


def empty_scalars(q: Tensor, block: int) -> Tensor:
    """[B * H, blocks, 4, block] float32 for lse (base 2), alpha, E0 and delta of every row."""
    padded = ceil_div(q.shape[2], ROW_BLOCK) * ROW_BLOCK
    return torch.empty(q.shape[0] * q.shape[1], padded // block, 4, block, dtype=torch.float32, device=q.device)


def row_pass(
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
    scalars: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Results gq and gdo, strided like q and do; fills `scalars`."""
    batch, heads, queries, d = q.shape
    plan, groups, block = ROW[d], heads // k.shape[1], scalars.shape[3]
    gq, gdo = torch.empty_like(q), torch.empty_like(do)
    stationary, streamed = (q, uq, do, o, dq), (k, v, uk, uv)
    descriptors = _describe(stationary, OWNED) + _describe(streamed, plan.tile) + _describe((gq, gdo), OWNED)
    blocks, all_heads = ceil_div(queries, OWNED), batch * heads
    sizes = (queries, k.shape[2], heads, blocks, all_heads, scalars.shape[1], scale)
    _launch(
        plan, blocks * all_heads, ("row", q.device, q.dtype, d, groups, causal, lse.data_ptr() % 16),
        (*descriptors, lse, scalars, *sizes), GROUPS=groups, D=d, BN=plan.tile, CAUSAL=causal, BLOCK=block,
    )  # fmt: skip
    return gq, gdo


def column_pass(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    uq: Tensor,
    uk: Tensor,
    uv: Tensor,
    scalars: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Results gk and gv, strided like k and v, from the row scalars of the row pass."""
    batch, heads, keys, d = k.shape
    plan, groups = COLUMN[d], q.shape[1] // heads
    gk, gv = torch.empty_like(k), torch.empty_like(v)
    packed = _Described(scalars, [scalars.numel()], [1], [4 * plan.tile], _SCALAR_LAYOUT)
    stationary, streamed = _describe((k, v, uk, uv), OWNED), _describe((q, uq, do), plan.tile)
    blocks, all_heads = ceil_div(keys, OWNED), batch * heads
    sizes = (q.shape[2], heads, blocks, all_heads, scalars.shape[1], scale)
    _launch(
        plan, blocks * all_heads, ("column", q.device, q.dtype, d, groups, causal),
        (*stationary, *streamed, packed, *_describe((gk, gv), OWNED), *sizes),
        GROUPS=groups, D=d, BM=plan.tile, CAUSAL=causal,
    )  # fmt: skip
    return gk, gv


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
    geometry: Geometry,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(gq, gk, gv, gdo) of a call that `takes` accepts; arguments as in `launch.double_backward`."""
    q, k, v, o, do, dq, uq, uk, uv = map(_describable, (q, k, v, o, do, dq, uq, uk, uv))
    causal = not geometry.is_full
    scalars = empty_scalars(q, COLUMN[q.shape[3]].tile)
    gq, gdo = row_pass(q, k, v, o, lse.float().contiguous(), do, dq, uq, uk, uv, scalars, causal, scale)
    gk, gv = column_pass(q, k, v, do, uq, uk, uv, scalars, causal, scale)
    return gq, gk, gv, gdo
