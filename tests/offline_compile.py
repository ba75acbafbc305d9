"""Compile a kernel for a GPU that is not there: `python -m tests.offline_compile row:64:90` prints its resources.

A fourth part names features: `row:64:90:softcap+bias+dropout`, or absent parts of the direction: `column:64:90:uq+uv`.
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

from flashbob.dropout import Dropout
from flashbob.geometry import Geometry
from flashbob.kernels import launch
from flashbob.kernels.scores import Bias, keep_operand
from flashbob.kernels.tiles import Band, Operand
from flashbob.plan import Plan

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


# The compile-time constants that say which parts of the direction are given and which results are wanted.
GIVEN = ("HAS_UQ", "HAS_UK", "HAS_UV")
PARTS = {"row": (*GIVEN, "WANT_Q", "WANT_DO", "CURVED"), "column": (*GIVEN, "WANT_K", "WANT_V"), "tangent": GIVEN}


def compile_for(
    which: str,
    head_size: int,
    capability: int,
    dtype: torch.dtype = torch.bfloat16,
    features: frozenset[str] = frozenset(),
) -> Any:
    """The compiled kernel of a causal call, from the launch table's entry."""
    driver.set_active(_Driver(capability))
    kernel, operands, scalars = SIGNATURES[which]
    q = torch.empty(1, HEADS, TOKENS, head_size, dtype=dtype, device="meta")
    geometry = Geometry.build(TOKENS, TOKENS, is_causal=True, window_size=0, q_offset=None, k_offset=0)
    launch._capability = lambda device: divmod(capability, 10)
    dropout = Dropout(0.1, 1, 1) if "dropout" in features else None
    backends: Any = (None, None)
    plan = Plan(geometry, 0.125, 2.0 if "softcap" in features else None, *backends, dropout)
    bias = torch.empty(1, 1, 1, 1, dtype=dtype, device="meta") if "bias" in features else None
    settings = launch._settings(which, q, q, plan, None, bias, (q,))
    settings |= {name: name[-2:].lower() not in features for name in PARTS.get(which, ())}
    operand = Operand(MockTensor(dtype), q.stride(0), q.stride(1), q.stride(2))
    scalar = MockTensor(torch.float32)
    band = Band(TOKENS, TOKENS, 0, 0, 0, scalar)
    return kernel.warmup(
        *[operand] * len(operands), *[scalar] * scalars, band, HEADS, 0.125, plan.softcap or 1.0,
        Bias(scalar if bias is None else MockTensor(dtype), HEADS * TOKENS**2, TOKENS**2, TOKENS, 1),
        keep_operand(dropout), GROUPS=1, grid=(1,), **settings,
    )  # fmt: skip


def compile_hopper(which: str, head_size: int, dtype: torch.dtype = torch.bfloat16) -> Any:
    """The compiled Gluon kernel of a causal call, from the launch table's entry."""
    from flashbob.kernels import hopper

    driver.set_active(_Driver(90))
    compile_pass, table = {
        "hopper_row": (hopper.compile_row, hopper.ROW),
        "hopper_column": (hopper.compile_column, hopper.COLUMN),
    }[which]
    return compile_pass(table[head_size], dtype, head_size, 1, True)


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
    if len({spec.split(":")[2] for spec in sys.argv[1:]}) > 1:
        sys.exit("one target a process: Triton keeps the first one")
    for spec in sys.argv[1:]:
        name, size, target, *features = spec.split(":")
        row = {"kernel": name, "head_size": int(size), "sm": int(target)} | ({"features": features} if features else {})
        if name.startswith("hopper"):
            compiled = compile_hopper(name, int(size))
            row["notes"] = notes(compiled)
        else:
            compiled = compile_for(name, int(size), int(target), features=frozenset("+".join(features).split("+")))
        print(json.dumps(row | resources(compiled)), flush=True)
