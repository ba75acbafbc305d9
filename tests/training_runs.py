"""Runs of `flashbob-curv train` that are small enough for a test, and what they record."""

import json
from pathlib import Path
from typing import Any

from command_line import Run

SMALL = ("--seq", 32, "--device", "cpu", "--eval-batches", 2)
EXACT = (*SMALL, "--dtype", "float64")
STEPS = ("--max-steps", 6, "--hessian-every", 2, "--lr", 0.01, "--warmup", 2)


def record(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "train.json").read_text())


def losses(folder: Path) -> list[float]:
    found = record(folder)
    return [entry["loss"] for entry in (*found["history"], *found["evaluation"])]


def trained(run: Run, out: str, *arguments: object) -> list[float]:
    outcome = run("train", *arguments, "--out", out)
    assert outcome.code == 0, outcome.err
    return losses(Path(out))
