"""Which dtype a run takes by itself, and what its record says about it."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import Any

import pytest
import readme_figures
import torch
import yaml
from command_line import Run
from readme_figures import dtype_errors, dtype_records

import curvature.dtype_policy
from cli.options import Dtype
from cli.session import choose_dtype
from curvature.dtype_policy import OFFERED, MeasuredRounding, PrecisionNote, default_dtype, measured_roundings

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
SMALL = ("--seq", 16, "--device", "cpu")


def measured(dtype: str, seconds: float, trace: float, eigenvalue: float, device: str = "cuda: G") -> MeasuredRounding:
    return MeasuredRounding(dtype, seconds, trace, trace, trace / 2, eigenvalue, "float64", "a model", 1000, 64, device)


@pytest.fixture
def gpu_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {
        "float64": measured("float64", 9.0, 0.0, 0.0),
        "float32": measured("float32", 3.0, 1e-6, 1e-7),
        "bfloat16": measured("bfloat16", 1.0, 0.02, 3e-3),
    }
    monkeypatch.setattr(curvature.dtype_policy, "measured_roundings", {"cuda": rows, "cpu": {}}.__getitem__)


@pytest.mark.parametrize(
    ("probes", "residual", "expected"),
    [
        (1, None, torch.bfloat16),
        (2499, None, torch.bfloat16),
        (2500, None, torch.float32),  # 0.02 sqrt(2500) = 1
        (1, 0.01, torch.bfloat16),
        (1, 1e-3, torch.float32),
        (1, 1e-9, torch.float64),
    ],
)
@pytest.mark.usefixtures("gpu_measured")
def test_the_default_is_the_fastest_that_is_sound(probes: int, residual: float | None, expected: torch.dtype) -> None:
    assert default_dtype(GPU, probes, residual) == expected
    assert choose_dtype(Dtype.auto, GPU, probes, residual) == expected
    assert choose_dtype(Dtype.float64, GPU, probes, residual) == torch.float64


@pytest.mark.parametrize(
    ("tol", "least", "expected"),
    [
        (0.05, 10, torch.bfloat16),  # ends with a larger error than rounding's 0.01 of the trace
        (0.0104, 10, torch.float32),
        (0.05, 2500, torch.float32),  # so many probes alone may have a smaller one
    ],
)
@pytest.mark.usefixtures("gpu_measured")
def test_a_run_that_stops_at_a_tolerance_needs_no_more_than_that(tol: float, least: int, expected: torch.dtype) -> None:
    assert default_dtype(GPU, 10_000) == torch.float32
    assert choose_dtype(Dtype.auto, GPU, 10_000, None, (tol, least)) == expected


@pytest.mark.usefixtures("gpu_measured")
def test_without_a_measurement_there_is_a_default_and_it_is_said() -> None:
    assert default_dtype(CPU, 100, 1e-9) == torch.float32
    note = PrecisionNote("float32", "cpu", "default", 10)
    assert "has not been measured" in note.text
    assert note.as_record()["measured"] is note.as_record()["rounding_of_stderr_at_most"] is None


def test_where_nothing_is_precise_enough_it_is_the_most_precise(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {"bfloat16": measured("bfloat16", 1.0, 2.0, 0.1), "float32": measured("float32", 3.0, 1.0, 0.1)}
    monkeypatch.setattr(curvature.dtype_policy, "measured_roundings", lambda _: rows)
    assert default_dtype(GPU) == torch.float32


@pytest.mark.usefixtures("gpu_measured")
def test_the_note_sets_rounding_against_the_standard_error() -> None:
    note = PrecisionNote("bfloat16", "cuda", "flag", 100)
    assert note.of_stderr == pytest.approx(0.2)
    assert "as asked for by --dtype" in note.text
    assert "with 100 probes at most 2.0e-01 of the standard error, below it" in note.text
    assert "NOT below it" in PrecisionNote("bfloat16", "cuda", "flag", 10_000).text
    assert "standard error" not in PrecisionNote("bfloat16", "cuda", "flag", None).text


def test_the_packaged_table_is_that_of_the_records(root: Path) -> None:
    """`python3 -m tests.readme_figures` writes it."""
    assert (root / "curvature" / "dtype_errors.yaml").read_text(encoding="utf-8") == dtype_errors()


def test_the_defaults_that_are_documented_are_sound_by_the_records() -> None:
    assert default_dtype(CPU, 100) == torch.float32
    found = measured_roundings("cpu")
    assert tuple(found) == OFFERED
    assert 1e-8 < found["float32"].trace < 1e-3 < found["bfloat16"].trace < 0.1
    # On a GPU the mean of a hundred probes can be known better than bfloat16 allows; a trace to 5 % cannot.
    assert 0.1 < measured_roundings("cuda")["bfloat16"].trace < 0.3
    assert default_dtype(GPU, 10) == default_dtype(GPU, 100, stop=(0.05, 10)) == torch.bfloat16
    assert default_dtype(GPU, 100) == default_dtype(GPU, 100, 1e-6) == torch.float32
    assert default_dtype(GPU, 100, stop=(0.01, 10)) == torch.float32


def test_of_several_records_of_a_device_the_largest_model_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (record,) = [r for r in dtype_records() if r["file"] == "dtype_tiny_cpu.json"]
    del record["file"]
    for name, parameters in (("a", 5), ("b", 70), ("c", 6)):
        changed: dict[str, Any] = record | {"model": name, "parameters": parameters}
        (tmp_path / f"dtype_{name}.json").write_text(json.dumps(changed))
    monkeypatch.setattr(readme_figures, "RECORDS", tmp_path)
    assert {row["model"] for row in yaml.safe_load(dtype_errors())["cpu"]} == {"b"}


@pytest.mark.parametrize(
    ("command", "probes"),
    [
        (("trace", "--max-products", 4), 4),
        (("spectrum", "--steps", 2, "--probes", 2), 2),
        (("spectrum", "--steps", 2, "--probes", 1), None),
        (("diagonal", "--max-products", 4), 4),
        (("hvp", "--repeat", 1), None),
    ],
    ids=["trace", "spectrum", "spectrum-of-one-probe", "diagonal", "hvp"],
)
def test_every_record_and_report_states_it(
    command: tuple[object, ...], probes: int | None, run: Run, model: Path, tmp_path: Path
) -> None:
    outcome = run(*command, "--model", model, *SMALL, "--params", r"ln_f\.", "--out", "out", "--json")
    assert outcome.code == 0, outcome.err
    found = outcome.json["precision"]
    assert (found["dtype"], found["chosen_by"], found["probes"]) == ("float32", "default", probes)
    expected = measured_roundings("cpu")["float32"]
    assert found["measured"]["trace"] == expected.trace
    assert found["rounding_of_stderr_at_most"] == (None if probes is None else expected.of_stderr(probes))
    page = tmp_path / "out" / "report.html"
    assert command[0] in ("diagonal", "hvp") or escape(found["text"]) in page.read_text()


def test_a_dtype_that_is_too_coarse_is_noticed(run: Run, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    coarse = {"bfloat16": measured("bfloat16", 1.0, 0.8, 0.1, "cpu: C")}
    monkeypatch.setattr(curvature.dtype_policy, "measured_roundings", lambda _: coarse)
    arguments = ("--model", model, *SMALL, "--params", r"ln_f\.", "--max-products", 4, "--dtype", "bfloat16", "--json")
    outcome = run("trace", *arguments)
    assert outcome.json["precision"]["chosen_by"] == "flag"
    assert any("times the standard error" in notice for notice in outcome.json["notices"])


def test_eigenvalues_to_a_tolerance_take_a_dtype_that_reaches_it(run: Run, model: Path) -> None:
    arguments = ("--model", model, *SMALL, "--params", r"ln_f\.", "--steps", 2, "--top", 1, "--json")
    assert run("spectrum", *arguments, "--tol", 1e-3).json["settings"]["dtype"] == "float32"
    assert run("spectrum", *arguments, "--tol", 1e-9).json["settings"]["dtype"] == "float64"
