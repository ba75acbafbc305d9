"""`flashbob-curv diagonal` on a model small enough to know the answer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from command_line import Run
from curvature_oracles import MatrixOperator
from safetensors.torch import load_file

from curvature import HessianOperator, Processes, diagonal, load_model, token_windows

SMALL = ("--dtype", "float64", "--seq", 16, "--batch", 1, "--batches", 2, "--device", "cpu")
NORM = r"ln_f\."  # 32 parameters: the whole block can be computed


@pytest.mark.parametrize("estimator", ["hutchinson", "xdiag"])
def test_diagonal_entries_are_within_their_errors(run: Run, model: Path, tmp_path: Path, estimator: str) -> None:
    loaded = load_model(str(model), dtype=torch.float64)
    windows = token_windows(loaded.tokenizer, "sample", 16, 1, 2)
    operator = HessianOperator(loaded.model, windows.batches, params=NORM, method="whole")
    exact = operator.space.named((operator @ torch.eye(32, dtype=torch.float64)).diagonal().contiguous())

    out = tmp_path / "out"
    arguments = (
        "--params",
        NORM,
        "--tol",
        0.05,
        "--max-products",
        40,
        "--estimator",
        estimator,
        "--check",
        "--out",
        out,
    )
    outcome = run("diagonal", "--model", model, *SMALL, *arguments)
    assert outcome.code == 0, outcome.err
    assert {path.name for path in out.iterdir()} == {"diagonal.safetensors", "diagonal.json"}
    tensors, record = load_file(out / "diagonal.safetensors"), json.loads((out / "diagonal.json").read_text())
    assert set(tensors) == {*exact, *(f"{name}.stderr" for name in exact)}
    for name, entries in exact.items():
        error = tensors[f"{name}.stderr"]
        assert bool(((tensors[name] - entries).abs() <= 6 * error + 1e-12).all())
    assert record["command"] == "diagonal"
    assert record["estimator"] == estimator
    assert record["symmetry_error"] < 1e-10
    assert record["repeatability_error"] == 0
    assert record["finite_difference_error"] < 1e-6
    assert record["trace"] == pytest.approx(sum(float(t.sum()) for n, t in tensors.items() if n in exact))
    assert [block["name"] for block in record["blocks"]] == list(exact)
    assert "relative error" in outcome.out


def test_a_tolerance_out_of_reach_is_said(run: Run, model: Path, tmp_path: Path) -> None:
    outcome = run(
        "diagonal", "--model", model, *SMALL, "--params", NORM, "--tol", 1e-6, "--max-products", 4, "--out", tmp_path,
        "--json",
    )  # fmt: skip
    assert outcome.code == 0
    assert (outcome.json["converged"], outcome.json["products"]) == (False, 4)
    assert "raise --max-products" in outcome.err
    assert outcome.json["finite_difference_error"] is None


def test_xdiag_shares_no_work() -> None:
    op = MatrixOperator(torch.eye(6, dtype=torch.float64))
    with pytest.raises(NotImplementedError, match="choose 'hutchinson' or one process"):
        diagonal(op, method="xdiag", processes=Processes(0, 2))
