"""The kernels compile for GPUs that are not at hand: Ampere, Hopper, Blackwell. What compiled was not run there."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")
SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}


@pytest.mark.parametrize("sm", sorted(SHARED_MEMORY), ids=lambda sm: f"sm{sm}")
def test_the_two_passes_compile_and_fit(sm, root):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    specs = [f"{which}:64:{sm}" for which in ("row", "column")]
    if sm == 90:
        specs += ["row:128:90", "column:128:90", "forward:64:90"]
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
    assert [f"{r['kernel']}:{r['head_size']}:{r['sm']}" for r in rows] == specs
    for row in rows:
        assert row["shared_bytes"] <= SHARED_MEMORY[sm], row
        assert row["registers"] <= 255
        assert row["wgmma"] == (sm == 90), row
