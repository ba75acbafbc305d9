"""The double backward on Hopper (sm_90): which calls the fast kernels take, their launch table, and the launcher.

16-bit tensors, head size 64 or 128 for keys and values alike, no padding, and either the square causal mask or none.
Everything else stays with the general kernels of `launch`. The kernels read and write through TMA descriptors, so any
[B, H, N, d] strides that are multiples of 16 bytes do; other tensors are copied first.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.runtime import driver
from triton.runtime.jit import MockTensor

from flashbob.geometry import Geometry
from flashbob.kernels.hopper_column import column_kernel
from flashbob.kernels.hopper_column_split import column_split_kernel
from flashbob.kernels.hopper_launch import OWNED, Block, Launcher, Layout
from flashbob.kernels.hopper_row import row_kernel
from flashbob.kernels.hopper_row_split import row_split_kernel
from flashbob.kernels.tiles import ceil_div

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
ROW = {
    64: Plan(row_kernel, 32, {"STAGES": 4, "SECTION": 8}, {}),
    128: Plan(row_split_kernel, 32, {"STAGES": 4, "SLOTS": 2, "SECTION": 4, "SCORE_REGISTERS": 240}, {"maxnreg": 248}),
}
COLUMN = {
    64: Plan(column_kernel, 64, {"BS": 32, "STAGES": 3, "SECTION": 8}, {}),
    128: Plan(
        column_split_kernel, 32, {"STAGES": 4, "SLOTS": 2, "SECTION": 4, "SCORE_REGISTERS": 248}, {"maxnreg": 255}
    ),
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


def compile_row(plan: Plan, dtype: torch.dtype, d: int, groups: int, causal: bool) -> Any:
    """The row pass, compiled for the active device."""
    owned, streamed, flat = Block(dtype, 1, 1, OWNED, d), Block(dtype, 1, 1, plan.tile, d), MockTensor(torch.float32)
    return plan.kernel.warmup(
        *[owned] * 5, *[streamed] * 4, *[owned] * 2, flat, flat, *[64] * 6, 0.125,
        GROUPS=groups, D=d, BN=plan.tile, CAUSAL=causal, BLOCK=COLUMN[d].tile, num_warps=4, grid=(1,),
        **plan.constants, **plan.options,
    )  # fmt: skip


def compile_column(plan: Plan, dtype: torch.dtype, d: int, groups: int, causal: bool) -> Any:
    """The column pass, compiled for the active device."""
    owned, streamed = Block(dtype, 1, 1, OWNED, d), Block(dtype, 1, 1, plan.tile, d)
    return plan.kernel.warmup(
        *[owned] * 4, *[streamed] * 3, Block(torch.float32, 4 * plan.tile), *[owned] * 2, *[64] * 5, 0.125,
        GROUPS=groups, D=d, BM=plan.tile, CAUSAL=causal, num_warps=4, grid=(1,), **plan.constants, **plan.options,
    )  # fmt: skip


@functools.cache
def _launchers(
    dtype: torch.dtype, d: int, groups: int, causal: bool, device: torch.device
) -> tuple[Launcher, Launcher]:
    """Both passes, compiled for and loaded into the device, which is the current one."""
    row, column = ROW[d], COLUMN[d]
    return (
        Launcher(row.kernel, compile_row(row, dtype, d, groups, causal)),
        Launcher(column.kernel, compile_column(column, dtype, d, groups, causal)),
    )


class Passes:
    """The two passes for tensors of given shapes: all that does not depend on the tensors themselves.

    Args:
        q, k: shapes of the queries and keys.
        dtype, device: of all tensors.
        causal: square causal mask, or none.
        scale: factor on q . k.
    """

    def __init__(
        self, q: torch.Size, k: torch.Size, dtype: torch.dtype, device: torch.device, causal: bool, scale: float
    ) -> None:
        (batch, heads, queries, d), (_, heads_k, keys, _) = q, k
        self.row, self.column = _launchers(dtype, d, heads // heads_k, causal, device)
        self.device = device
        self.queries, self.keys = Layout(*q), Layout(*k)
        padded, tile = ceil_div(queries, ROW_BLOCK) * ROW_BLOCK, COLUMN[d].tile
        self.scalars = Layout(4 * batch * heads * padded)
        blocks, all_heads = ceil_div(queries, OWNED), batch * heads
        self.row_programs = blocks * all_heads
        self.row_sizes = (queries, keys, heads, blocks, all_heads, padded // tile, scale)
        blocks, all_heads = ceil_div(keys, OWNED), batch * heads_k
        self.column_programs = blocks * all_heads
        self.column_sizes = (queries, heads_k, blocks, all_heads, padded // tile, scale)

    def empty_scalars(self) -> Tensor:
        """For lse (base 2), alpha, E0 and delta of every row: a [4, tile] block for every tile of every head, flat."""
        return torch.empty(self.scalars.shape, dtype=torch.float32, device=self.device)


passes_of = functools.lru_cache(maxsize=256)(Passes)


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
    passes = passes_of(q.shape, k.shape, q.dtype, q.device, not geometry.is_full, scale)
    stream = driver.active.get_current_stream(q.device.index)
    at_query, at_key = passes.queries.locate, passes.keys.locate
    by_query = [at_query(x) for x in (q, uq, do, o, dq)]
    by_key = [at_key(x) for x in (k, v, uk, uv)]
    # Results take the strides of what was read, which TMA is known to address.
    gq, gdo = torch.empty_like(by_query[0].tensor), torch.empty_like(by_query[2].tensor)
    gk, gv = torch.empty_like(by_key[0].tensor), torch.empty_like(by_key[1].tensor)
    scalars, lse = passes.empty_scalars(), _flat(lse)
    passes.row(
        passes.row_programs, stream, (*by_query, *by_key, at_query(gq), at_query(gdo)),
        (lse, scalars, *passes.row_sizes),
    )  # fmt: skip
    passes.column(
        passes.column_programs, stream,
        (*by_key, *by_query[:3], passes.scalars.locate(scalars), at_key(gk), at_key(gv)), passes.column_sizes,
    )  # fmt: skip
    return gq, gk, gv, gdo


def _flat(lse: Tensor) -> Tensor:
    """Log-sum-exps as the row pass reads it: float32, contiguous, aligned."""
    if lse.dtype != torch.float32 or not lse.is_contiguous():
        lse = lse.float().contiguous()
    return lse if lse.data_ptr() % 16 == 0 else lse.clone()
