"""`flashbob-curv bench attention`: what it measures, refuses, records, and how it ends."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import Outcome, run_in_process
from torch import Tensor

from cli import bench_attention, timing
from cli.bench_attention import Case, Gate, measure
from cli.timing import Memory, Quantiles, matmul_rate, timed
from flashbob.rivals import RIVALS, Problem, Second

CPU = torch.device("cpu")
CASE = Case(32, 8, (2, 1), 1, True, 0, torch.float64, CPU, seed=0)
FIELDS = {
    "op", "backend", "B", "H_Q", "H_KV", "N", "D", "dtype", "causal", "window", "ms_p20", "ms_p50", "ms_p80", "tflops",
    "cublas_tflops", "cublas_fraction", "peak_bytes", "error", "status",
}  # fmt: skip
HEADER = {"command", "version", "model", "data", "settings", "environment", "seconds", "peak_memory_bytes"}


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(bench_attention.SEQS, "cpu", "16")
    monkeypatch.setitem(timing.MATMUL_SIZE, "cpu", 128)
    quick = ("bench", "attention", "--device", "cpu", "--dims", "8", "--reps", "1")
    return lambda *arguments: run_in_process(capsys, *quick, *arguments)


def broken(problem: Problem) -> Second:
    """A way that is off by one percent in gk."""
    second = RIVALS["closed-form"](problem)

    def wrong() -> tuple[Tensor, ...]:
        gq, gk, gv, gdo = second()
        return gq, 1.01 * gk, gv, gdo

    return wrong


def raising(error: Exception) -> Callable[[Problem], Second]:
    def way(_: Problem) -> Second:
        raise error

    return way


def test_a_row_has_every_field_and_the_record_its_header(run: Callable[..., Outcome], tmp_path: Path) -> None:
    outcome = run("--seqs", "16,24", "--heads", "2,4/2", "--dtype", "float64", "--backends", "ours,math,closed-form")
    assert outcome.code == 0, outcome.err
    record = json.loads((tmp_path / "runs/bench/attention.json").read_text())
    assert record.keys() >= HEADER
    assert (record["command"], record["model"], record["settings"]["sweeps"][0]["seqs"]) == (
        "bench attention",
        None,
        [16, 24],
    )
    shapes = [(r["N"], r["H_Q"], r["H_KV"], r["backend"]) for r in record["rows"]]
    ways = ("ours", "math", "closed-form")
    assert shapes == [(n, *h, way) for h in ((2, 2), (4, 2)) for n in (16, 24) for way in ways]
    for row in record["rows"]:
        assert row.keys() >= FIELDS
        assert row["status"] == "ok"
        assert 0 < row["ms_p20"] <= row["ms_p50"] <= row["ms_p80"]
        assert row["error"] < 1e-12
        assert row["peak_bytes"] > 0
        flops = 18 * row["N"] ** 2 * row["D"] * row["H_Q"]
        assert row["tflops"] == pytest.approx(flops / row["ms_p50"] / 1e9)
        assert row["cublas_fraction"] == pytest.approx(row["tflops"] / row["cublas_tflops"])
    assert len([line for line in outcome.out.splitlines() if "float64" in line]) == len(record["rows"])


def test_json_is_alone_on_stdout_and_rows_are_appended(run: Callable[..., Outcome], tmp_path: Path) -> None:
    arguments = ("--backends", "ours", "--out", tmp_path / "a.json", "--append", "--json", "--window")
    first, second = run(*arguments, 0), run(*arguments, 5)
    assert [row["window"] for row in second.json["rows"]] == [0, 5]
    assert [sweep["window"] for sweep in second.json["settings"]["sweeps"]] == [0, 5]
    assert second.json["seconds"] > first.json["seconds"]
    assert "ours" in second.err


def test_appending_to_something_else_is_refused(run: Callable[..., Outcome], tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    run("--backends", "ours", "--out", path)
    record = json.loads(path.read_text())
    record["environment"]["torch"] = "1.0"
    path.write_text(json.dumps(record))
    outcome = run("--out", path, "--append")
    assert (outcome.code, "another environment" in outcome.err) == (1, True)
    for part in ({"settings": {}}, {"rows": None}, {"command": None}):
        path.write_text(json.dumps(record | part))
        outcome = run("--out", path, "--append")
        assert (outcome.code, "is no record" in outcome.err or "not of" in outcome.err) == (1, True)
    path.write_text("{}")
    outcome = run("--out", path, "--append")
    assert (outcome.code, "is no record" in outcome.err) == (1, True)


def test_where_rows_cannot_go_is_found_before_the_first(
    run: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_attention, "measure", lambda *_, **__: pytest.fail("a row was measured first"))
    (tmp_path / "a-file").touch()
    for out, told in ((tmp_path, "is a folder; name a file"), (tmp_path / "a-file" / "rows.json", "cannot be written")):
        outcome = run("--out", out)
        assert outcome.code == 1
        assert told in outcome.err.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--heads", "6/4"), "6/4"),
        (("--heads", "x"), "'x,x'"),
        (("--dims", "0"), "--dims"),
        (("--seqs", "4"), "at least 16"),
        (("--backends", "ours,theirs"), "'theirs'"),
        (("--device", "tpu"), "tpu"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_wrong_usage_ends_with_2(arguments: tuple[str, ...], told: str, run: Callable[..., Outcome]) -> None:
    outcome = run(*arguments)
    assert outcome.code == 2
    assert told in " ".join(outcome.err.split())


def test_a_way_that_is_wrong_is_marked_and_not_timed(run: Callable[..., Outcome], monkeypatch: Any) -> None:
    monkeypatch.setattr(bench_attention, "RIVALS", {**RIVALS, "math": broken})
    outcome = run("--backends", "math,ours", "--dtype", "float64")
    assert outcome.code == 1
    assert "1 of 2 rows are wrong" in outcome.err
    assert "gk has error 1.0e-02" in outcome.out


def test_a_way_that_is_wrong_only_at_the_timed_length_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_attention, "GATE_SEQ", 16)

    def long_wrong(problem: Problem) -> Second:
        return (RIVALS["closed-form"] if problem.q.shape[2] == 16 else broken)(problem)

    row = measure(CASE, "way", Gate({"way": long_wrong}), reps=1, rate=1.0)
    assert row["status"] == "inaccurate"
    assert "sampled rows" in row["reason"]
    assert row["ms_p50"] is row["error"] is None


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "oom"),
        (MemoryError(), "oom"),
        (NotImplementedError("no windows"), "unsupported"),
        (RuntimeError("no kernel image"), "failed"),
    ],
    ids=["oom-gpu", "oom-cpu", "unsupported", "failed"],
)
def test_what_ends_a_way_is_a_row(error: Exception, status: str) -> None:
    row = measure(CASE, "way", Gate({"way": raising(error)}), reps=1, rate=1.0)
    assert row["status"] == status
    assert row.keys() >= FIELDS | {"reason"}
    assert row["ms_p50"] is None
    assert str(error) in row["reason"]
    assert bench_attention.line(row).endswith(f"{status}: {row['reason']}")


def test_the_sweep_goes_on_after_a_row_that_failed(run: Callable[..., Outcome], monkeypatch: Any) -> None:
    monkeypatch.setattr(bench_attention, "RIVALS", {**RIVALS, "math": raising(RuntimeError("no kernel image"))})
    outcome = run("--backends", "math,ours", "--seqs", "16,24", "--json")
    assert [row["status"] for row in outcome.json["rows"]] == ["failed", "ok"] * 2
    assert outcome.code == 1


def test_the_gate_looks_at_a_small_case_of_the_same_shape() -> None:
    long = replace(CASE, seq=4096, heads=(32, 8), batch=4, window=1024)
    small = long.small
    assert (small.seq, small.heads, small.batch, small.window, small.dim) == (193, (4, 1), 1, 64, CASE.dim)


def test_batch_falls_to_one_beyond_the_most_tokens(run: Callable[..., Outcome]) -> None:
    arguments = ("--batch", 3, "--max-tokens", 60, "--seqs", "16,24", "--heads", 1, "--backends", "ours", "--json")
    assert [row["B"] for row in run(*arguments).json["rows"]] == [3, 1]


def test_tuning_needs_a_gpu(run: Callable[..., Outcome]) -> None:
    outcome = run("--tune")
    assert (outcome.code, "needs a CUDA GPU" in outcome.err) == (1, True)


@pytest.mark.parametrize("option", [("--json",), ("--out", "rows.json"), ("--append",), ("--backends", "ours")])
def test_tuning_has_no_rows_to_write(option: tuple[str, ...], run: Callable[..., Outcome]) -> None:
    outcome = run("--tune", *option)
    assert (outcome.code, outcome.out) == (2, "")
    assert f"leave out {option[0]}" in " ".join(outcome.err.split())


def test_quantiles_and_repetitions() -> None:
    spent = Quantiles.of([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    assert (spent.p20, spent.p50, spent.p80, spent.reps) == (2.0, 3.5, 5.0, 6)
    calls: list[int] = []
    assert timed(lambda: calls.append(1), CPU, reps=7, warmup=2).reps == 7
    assert len(calls) == 9
    assert timed(lambda: torch.randn(200, 200) @ torch.randn(200, 200), CPU, reps=50, seconds=0.0).reps == 3


def test_peak_counts_what_is_alive_at_once() -> None:
    held = torch.zeros(1000)
    with Memory(CPU, (held,)) as used:
        a = torch.ones(1000)
        del a
        b = torch.ones(2000, dtype=torch.float64)
        held.view(10, 100)
    assert used.peak == b.numel() * 8


def test_yardstick_is_a_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(timing.MATMUL_SIZE, "cpu", 128)
    assert 0 < matmul_rate(CPU) < 100
