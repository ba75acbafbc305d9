"""Compile a kernel for a GPU that is not there: `python -m tests.offline_compile row:64:90` prints its resources.

`hopper_row` and `hopper_column` are the kernels in Gluon (sm_90 only).
Triton asks its driver which target is active; a stand-in answers. For a process of its own, without TRITON_INTERPRET.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import MockTensor

from flashbob.geometry import Geometry
from flashbob.kernels import launch
from flashbob.kernels.tiles import Band, Operand

HEADS, TOKENS = 12, 8192


class _Utilities:
    @staticmethod
    def get_device_properties(device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448, "multiprocessor_count": 132}


class _Driver:
    utils = _Utilities()

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


# Which tensors each kernel takes, in order (q and k stand for any query-side and key-side tensor), and its row scalars.
SIGNATURES: dict[str, tuple[Any, str, int]] = {
    "forward": (launch.forward_kernel, "qkkq", 1),
    "dq": (launch.dq_kernel, "qkkqqq", 2),
    "dkv": (launch.dkv_kernel, "qkkqkk", 2),
    "row": (launch.row_pass_kernel, "qkkqqqqkkqq", 4),
    "column": (launch.column_pass_kernel, "qkkqqkkkk", 4),
    "tangent": (launch.tangent_kernel, "qkkqqkkq", 1),
}


def compile_for(which: str, head_size: int, capability: int, dtype: torch.dtype = torch.bfloat16) -> Any:
    """The compiled kernel of a causal call, from the launch table's entry."""
    driver.set_active(_Driver(capability))
    kernel, operands, scalars = SIGNATURES[which]
    q = torch.empty(1, HEADS, TOKENS, head_size, dtype=dtype, device="meta")
    geometry = Geometry.build(TOKENS, TOKENS, is_causal=True, window_size=0, q_offset=None, k_offset=0)
    launch._capability = lambda device: divmod(capability, 10)
    settings = launch._settings(which, q, q, geometry, None, (q,))
    operand = Operand(MockTensor(dtype), q.stride(0), q.stride(1), q.stride(2))
    scalar = MockTensor(torch.float32)
    band = Band(TOKENS, TOKENS, 0, 0, 0, scalar)
    return kernel.warmup(
        *[operand] * len(operands), *[scalar] * scalars, band, HEADS, 0.125, GROUPS=1, grid=(1,), **settings
    )


class _Tensor:
    """What a tensor descriptor needs of its tensor to be compiled for."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype


def compile_hopper(which: str, head_size: int, dtype: torch.dtype = torch.bfloat16) -> Any:
    """The compiled Gluon kernel of a causal call, from the launch table's entry."""
    from flashbob.kernels import hopper

    driver.set_active(_Driver(90))
    plan = (hopper.ROW if which == "hopper_row" else hopper.COLUMN)[head_size]
    shape, strides = [1, HEADS, TOKENS, head_size], [HEADS * TOKENS * head_size, TOKENS * head_size, head_size, 1]
    owned, streamed = (
        hopper._Described(_Tensor(dtype), shape, strides, [1, 1, rows, head_size], hopper._LAYOUT)
        for rows in (hopper.OWNED, plan.tile)
    )
    flat = _Tensor(torch.float32)
    packed = hopper._Described(flat, [4 * HEADS * TOKENS], [1], [4 * plan.tile], hopper._SCALAR_LAYOUT)
    scalar, blocks = MockTensor(torch.float32), TOKENS // hopper.OWNED
    sizes = (HEADS, blocks, HEADS, TOKENS // plan.tile, 0.125)
    constants = plan.constants | plan.options | {"GROUPS": 1, "D": head_size, "CAUSAL": True, "num_warps": 4}
    if which == "hopper_row":
        operands = (*[owned] * 5, *[streamed] * 4, *[owned] * 2, scalar, scalar, TOKENS)
        constants |= {"BN": plan.tile, "BLOCK": hopper.COLUMN[head_size].tile}
    else:
        operands = (*[owned] * 4, *[streamed] * 3, packed, *[owned] * 2)
        constants |= {"BM": plan.tile}
    return plan.kernel.warmup(*operands, TOKENS, *sizes, grid=(1,), **constants)


def notes(compiled: Any) -> list[str]:
    """What ptxas reports of serialized wgmma products (its notes C7510 to C7519), compiling once more, verbosely."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(compiled.asm["ptx"])
        run = subprocess.run(
            [tool, "-v", "--gpu-name=sm_90a", source, "-o", source.with_suffix(".cubin")],
            capture_output=True,
            text=True,
            check=True,
        )
    text = run.stderr + run.stdout
    if "registers" not in text:
        raise RuntimeError(f"ptxas -v reported no resources: {text!r}")
    return re.findall(r".*C751\d.*", text)


def resources(compiled: Any) -> dict[str, Any]:
    """Registers and stack bytes a thread, shared memory of a program, and which matrix instruction is used."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    if found is None:
        raise RuntimeError(f"cuobjdump printed no resource line: {text!r}")
    return {
        "registers": int(found[1]),
        "stack_bytes": int(found[2]),
        "shared_bytes": compiled.metadata.shared,
        "wgmma": "wgmma.mma_async" in compiled.asm["ptx"],
    }


if __name__ == "__main__":
    if os.environ.get("TRITON_INTERPRET") == "1":
        sys.exit("unset TRITON_INTERPRET to compile")
    for spec in sys.argv[1:]:
        name, size, target = spec.split(":")
        row = {"kernel": name, "head_size": int(size), "sm": int(target)}
        if name.startswith("hopper"):
            compiled = compile_hopper(name, int(size))
            row["notes"] = notes(compiled)
        else:
            compiled = compile_for(name, int(size), int(target))
        print(json.dumps(row | resources(compiled)), flush=True)
