"""The kernels compile for GPUs that are not at hand: Ampere, Hopper, Blackwell. What compiled was not run there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton")
import torch  # noqa: E402

from flashbob.kernels import launch  # noqa: E402 (needs triton)
from flashbob.kernels.launch import GLUON  # noqa: E402

SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}


def compiled(root: Path, specs: list[str]) -> list[dict[str, Any]]:
    """Resources of the kernels, compiled in a process of their own (it replaces Triton's driver)."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.offline_compile", *specs],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    rows = [json.loads(line) for line in run.stdout.splitlines()]
    assert [":".join([r["kernel"], str(r["head_size"]), str(r["sm"]), *r.get("features", [])]) for r in rows] == specs
    return rows


@pytest.mark.parametrize("sm", sorted(SHARED_MEMORY), ids=lambda sm: f"sm{sm}")
def test_the_two_passes_compile_and_fit(sm, root):
    specs = [f"{which}:64:{sm}" for which in ("row", "column")]
    if sm == 90:
        specs += ["row:128:90", "column:128:90", "forward:64:90"]
    for row in compiled(root, specs):
        assert row["shared_bytes"] <= SHARED_MEMORY[sm], row
        assert row["registers"] <= 255
        assert row["wgmma"] == (sm == 90), row


@pytest.mark.parametrize("sm", [80, 90, pytest.param(100, marks=pytest.mark.slow)], ids=lambda sm: f"sm{sm}")
def test_soft_cap_bias_and_dropout_compile_and_fit(sm, root):
    specs = [f"{which}:64:{sm}:softcap+bias+dropout" for which in ("row", "column")]
    for row in compiled(root, specs):
        assert row["shared_bytes"] <= SHARED_MEMORY[sm], row
        assert row["wgmma"] == (sm == 90), row


def test_absent_parts_leave_registers_free(root):
    whole, part = compiled(root, ["row:64:90", "row:64:90:uq+uk"])
    assert part["registers"] < whole["registers"]
    assert part["shared_bytes"] < whole["shared_bytes"]


@pytest.mark.skipif(not triton.__version__.startswith(GLUON), reason=f"the Hopper kernels are for Triton {GLUON}x")
def test_the_hopper_kernels_compile_without_spills_and_without_serialized_products(root):
    specs = [f"hopper_{which}:{size}:90" for which in ("row", "column") for size in (64, 128)]
    for row in compiled(root, specs):
        assert row["shared_bytes"] <= SHARED_MEMORY[90], row
        if row["head_size"] == 64:  # two programs share a multiprocessor
            assert 2 * (row["shared_bytes"] + 1024) <= 228 * 1024, row
        assert row["stack_bytes"] == 0, row
        assert row["wgmma"], row
        assert row["notes"] == [], row


@pytest.mark.parametrize(
    ("device", "capability", "release", "taken"),
    [
        ("cuda:0", (9, 0), GLUON + "0", True),
        ("cuda:0", (8, 0), GLUON + "0", False),
        ("cuda:0", (10, 0), GLUON + "0", False),
        ("cuda:0", (9, 0), "3.5.1", False),
        ("cpu", (9, 0), GLUON + "0", False),
    ],
    ids=["hopper", "ampere", "blackwell", "another-triton", "cpu"],
)
def test_the_hopper_kernels_are_loaded_on_hopper_only(monkeypatch, device, capability, release, taken):
    monkeypatch.setattr(launch, "_capability", lambda device: capability)
    monkeypatch.setattr(launch.triton, "__version__", release)
    another_triton = device != "cpu" and capability == (9, 0) and not taken
    with pytest.warns(RuntimeWarning, match="written for Triton") if another_triton else nullcontext():
        assert (launch.hopper_kernels.__wrapped__(torch.device(device)) is not None) == taken


@pytest.mark.skipif(not triton.__version__.startswith(GLUON), reason=f"the Hopper kernels are for Triton {GLUON}x")
def test_only_tensors_that_tma_cannot_address_are_copied():
    from flashbob.kernels.hopper_launch import Layout

    layout = Layout(2, 3, 8, 64)
    plain = torch.zeros(2, 3, 8, 64, dtype=torch.bfloat16)
    heads_inside = torch.zeros(2, 8, 3, 64, dtype=torch.bfloat16).transpose(1, 2)
    for x in (plain, heads_inside):
        located = layout.locate(x)
        assert located.address == x.data_ptr()
        assert located.strides == x.stride()
    padded_rows = torch.zeros(2, 3, 8, 68, dtype=torch.bfloat16)[..., :64]  # 136 bytes from row to row
    broadcast = torch.zeros(1, 3, 8, 64, dtype=torch.bfloat16).expand(2, 3, 8, 64)
    transposed = torch.zeros(2, 3, 64, 8, dtype=torch.bfloat16).transpose(2, 3)
    unaligned = torch.zeros(2 * 3 * 8 * 64 + 1, dtype=torch.bfloat16)[1:].view(2, 3, 8, 64)
    for x in (padded_rows, broadcast, transposed, unaligned):
        located = layout.locate(x.copy_(torch.ones(())) if x is not broadcast else x)
        assert located.address != x.data_ptr()
        assert located.address % 16 == 0
        assert located.strides == (3 * 8 * 64, 8 * 64, 64, 1)
        assert torch.equal(located.tensor, x)


@pytest.mark.skipif(not triton.__version__.startswith(GLUON), reason=f"the Hopper kernels are for Triton {GLUON}x")
def test_the_stride_of_a_dimension_of_one_means_nothing_to_tma():
    from flashbob.kernels.hopper_launch import Layout

    x = torch.zeros(7, 8, 64, dtype=torch.bfloat16).as_strided((1, 1, 7, 64), (3, 5, 64, 1))
    located = Layout(1, 1, 7, 64).locate(x)
    assert located.address == x.data_ptr()
    assert located.strides == (64, 64, 64, 1)
