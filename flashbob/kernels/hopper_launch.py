"""Host side of the Hopper kernels: TMA descriptors of tensors, and launches without Triton's analysis of the arguments.

At short sequences a double backward takes the GPU less than 0.2 ms, so what the host does for it is counted in
microseconds. A descriptor is encoded straight from a tensor's address and strides, and the compiled kernel is entered
through the function in C that Triton built for it, whose other arguments were put together beforehand.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import knobs
from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime import driver

OWNED = 64  # stationary rows of a program, those of one warpgroup


class Block(TensorDescriptor):  # type: ignore[misc]
    """The block of a descriptor, all that a kernel is compiled for: of a tensor that need not exist."""

    def __init__(self, dtype: torch.dtype, *block: int) -> None:
        layout = gl.NVMMASharedLayout(128, 16, rank=len(block)) if len(block) > 1 else gl.NVMMASharedLayout(0, 32, 1)
        super().__init__(_Typed(dtype), [1] * len(block), [1] * len(block), list(block), layout)

    def __post_init__(self) -> None:
        pass


class _Typed(NamedTuple):
    dtype: torch.dtype


class Located(NamedTuple):
    """A tensor as a descriptor sees it, apart from the block."""

    tensor: Tensor
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Layout:
    """Tensors of one shape as TMA sees them. Remembers the strides that it has met.

    Args:
        shape: of the tensors.
    """

    def __init__(self, *shape: int) -> None:
        self.shape = shape
        self._legal: dict[tuple[int, ...], tuple[int, ...] | None] = {}

    def locate(self, x: Tensor) -> Located:
        """x, or a copy of it where TMA cannot address it: 16-byte alignment, and no broadcast dimension."""
        strides, address = x.stride(), x.data_ptr()
        try:
            legal = self._legal[strides]
        except KeyError:
            legal = self._legal[strides] = self._checked(strides, x.element_size())
        if legal is None or address % 16:
            return self.locate(x.clone(memory_format=torch.contiguous_format))
        return Located(x, address, self.shape, legal)

    def _checked(self, strides: tuple[int, ...], size: int) -> tuple[int, ...] | None:
        """The strides, a legal one at a dimension of one (where any will do), or None where they are not legal."""
        *outer, last = (self.shape[-1] if n == 1 else step for n, step in zip(self.shape, strides, strict=True))
        if last != 1 or any(step <= 0 or step * size % 16 for step in outer):
            return None
        return (*outer, last)


class Launcher:
    """A compiled kernel. A launch costs the host little more than the driver's part in it.

    Args:
        kernel: in Gluon; its arguments are descriptors first and compile-time constants last.
        compiled: what the kernel's `warmup` returned; it is loaded into the current device.
    """

    def __init__(self, kernel: Any, compiled: Any) -> None:
        run = compiled.run
        if run.global_scratch_size or run.profile_scratch_size:
            raise NotImplementedError(f"{compiled.name} wants scratch memory, which this launcher does not provide")
        self._compiled = compiled
        self._encode = driver.active.utils.fill_tma_descriptor
        self._blocks = [
            (meta["swizzle"], meta["elem_size"], TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]], meta["block_size"])
            for meta in compiled.metadata.tensordesc_meta
        ]
        self._enter = inspect.getclosurevars(run.launch).nonlocals["launcher"]
        self._head = (compiled.function, run.launch_cooperative_grid, run.launch_pdl, None, None)
        self._packed = compiled.packed_metadata
        self._constants = (None,) * sum(p.is_constexpr for p in kernel.params)  # baked in: only their number counts

    def __call__(self, programs: int, stream: int, described: Sequence[Located], arguments: tuple[Any, ...]) -> None:
        """Launch on a stream of the current device. Sizes and strides follow each descriptor; no kernel reads them."""
        maps: list[Any] = []
        for (swizzle, size, kind, block), (_, address, shape, strides) in zip(self._blocks, described, strict=True):
            maps.append(self._encode(address, swizzle, size, kind, block, shape, strides, 0))
            maps += shape
            maps += strides
        enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
        hooks: tuple[Any, ...] = (None, None, None)
        if enter.calls or leave.calls:  # a profiler listens
            hooks = (self._compiled.launch_metadata((programs, 1, 1), stream), enter, leave)
        self._enter(
            programs, 1, 1, stream, *self._head, self._packed, *hooks, *maps, *arguments, *self._constants
        )  # fmt: skip
