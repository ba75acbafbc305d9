"""`flashbob-curv bench model`: processes that measure, what ends them, and the sweep over models and lengths."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import Outcome, run_in_process
from dying_processes import die, leave, linger

from cli import bench_model
from cli.bench_model import METHODS, Subject, Task, perform
from curvature.models import architectures

TASK = Task("tiny", 16, 1, "flashbob", "whole", torch.float32, torch.device("cpu"), seed=0, reps=1)
FIELDS = {
    "op", "backend", "B", "H_Q", "H_KV", "N", "D", "dtype", "causal", "window", "ms_p20", "ms_p50", "ms_p80", "tflops",
    "cublas_tflops", "cublas_fraction", "peak_bytes", "error", "status",
}  # fmt: skip


@pytest.fixture(autouse=True)
def short_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison with float64 takes a few tokens only."""
    monkeypatch.setattr(bench_model, "GATE_SEQ", 16)


class Channel:
    """The child's end of the pipe, in this process."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.send = self.rows.append


def work(task: Task) -> list[dict[str, Any]]:
    channel = Channel()
    bench_model._work(task, channel)  # type: ignore[arg-type]
    return channel.rows


@pytest.mark.parametrize("method", METHODS)
def test_a_task_measures_all_of_its_method(method: str) -> None:
    rows = work(replace(TASK, method=method))
    assert [row["op"] for row in rows] == list(METHODS[method])
    for row in rows:
        assert row.keys() >= FIELDS | {"model", "parameters"}
        assert row["status"] == "ok", row["reason"]
        assert row["error"] < 1e-5
        assert row["ms_p50"] > 0
        assert row["peak_bytes"] > 0
        assert (row["parameters"], row["H_Q"], row["D"]) == (2_369_664, 6, 32)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_rivals_are_as_exact(attention: str) -> None:
    rows = work(replace(TASK, attention=attention))
    assert [row["status"] for row in rows] == ["ok"] * 3
    assert max(row["error"] for row in rows) < 1e-5


def test_a_product_that_is_wrong_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bench_model.LIMITS, torch.float32, 1e-9)
    rows = work(replace(TASK, method="streamed"))
    assert [row["status"] for row in rows] == ["inaccurate"] * 3
    assert all("error" in row["reason"] for row in rows)


def test_memory_that_runs_out_is_a_row_and_the_others_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    measure = Subject.measure

    def short(self: Subject, op: str) -> dict[str, Any]:
        if op == "hvp_whole":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return measure(self, op)

    monkeypatch.setattr(Subject, "measure", short)
    rows = work(TASK)
    assert [row["status"] for row in rows] == ["ok", "ok", "oom"]
    assert rows[-1]["ms_p50"] is None


def test_a_model_that_cannot_be_made_is_a_row_per_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise NotImplementedError("no positions")

    monkeypatch.setattr(bench_model, "load_model", lambda *_, **__: refuse())
    assert [row["status"] for row in work(TASK)] == ["unsupported"] * 3


@pytest.mark.parametrize(
    ("body", "statuses"),
    [(die, ["ok", "oom", "oom"]), (leave, ["failed"] * 3)],
    ids=["killed", "left"],
)
def test_a_process_that_dies_costs_only_the_rows_to_come(
    body: Callable[..., None], statuses: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_model, "_work", body)
    rows = perform(TASK, None, lambda _: None)
    assert [row["status"] for row in rows] == statuses
    assert rows[-1]["op"] == "hvp_whole"
    assert "exit code" in rows[-1]["reason"]


def test_a_process_is_stopped_when_the_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_model, "_work", linger)
    skipped: list[str] = []
    started = time.monotonic()
    rows = perform(TASK, started + 5.0, skipped.append)
    assert time.monotonic() - started < 300
    assert [row["op"] for row in rows] in (["forward"], [])  # a busy machine may not get to start it in time
    assert skipped == ["tiny, 16 tokens, flashbob, whole"]
    assert perform(TASK, started, skipped.append) == []
    assert len(skipped) == 2


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: run_in_process(capsys, "bench", "model", "--device", "cpu", *arguments)


@pytest.fixture
def tasks(monkeypatch: pytest.MonkeyPatch) -> list[Task]:
    """What the sweep asks for, answered at once: a product fits up to 256 tokens."""
    asked: list[Task] = []

    def answer(task: Task, ends: float | None, skip: Callable[[str], None]) -> list[dict[str, Any]]:
        asked.append(task)
        status = "ok" if task.seq <= 256 else "oom"
        figures = {"ms_p50": 1.0, "peak_bytes": 1, "error": 0.0, "reason": "full", "status": status}
        return [task.as_row(op) | figures for op in METHODS[task.method]]

    monkeypatch.setattr(bench_model, "perform", answer)
    return asked


def test_the_sweep_streams_ours_alone_and_takes_short_lengths_first(
    run: Callable[..., Outcome], tasks: list[Task]
) -> None:
    outcome = run("--models", "gpt2,tiny", "--seqs", "128,64", "--json")
    assert outcome.code == 0, outcome.err
    kinds = [("flashbob", "whole"), ("flashbob", "streamed"), ("sdpa", "whole"), ("eager", "whole")]
    expected = [(n, m, *kind) for n in (64, 128) for m in ("gpt2", "tiny") for kind in kinds]
    assert [(t.seq, t.model, t.attention, t.method) for t in tasks] == expected
    assert len(outcome.json["rows"]) == 4 * (3 + 3 + 3 + 3)
    assert outcome.json["not_run"] == []


def test_longest_doubles_each_way_until_it_does_not_fit(run: Callable[..., Outcome], tasks: list[Task]) -> None:
    outcome = run("--models", "tiny", "--seqs", "64", "--attentions", "flashbob", "--longest")
    assert outcome.code == 0  # running out of memory is an answer
    assert [(t.method, t.seq) for t in tasks[2:]] == [(m, n) for m in ("whole", "streamed") for n in (128, 256, 512)]


def test_all_of_the_papers_models_are_built_in(run: Callable[..., Outcome], tasks: list[Task]) -> None:
    run("--models", bench_model.PAPER_MODELS, "--seqs", "64", "--attentions", "eager")
    assert len({task.model for task in tasks}) == 10
    assert {task.model for task in tasks} <= architectures().keys()


@pytest.mark.parametrize("arguments", [("--models", "gpt5"), ("--seqs", "8"), ("--attentions", "flash")], ids=" ".join)
def test_wrong_usage_ends_with_2(arguments: tuple[str, ...], run: Callable[..., Outcome]) -> None:
    assert run(*arguments).code == 2


@pytest.mark.slow
def test_as_a_user_runs_it(run: Callable[..., Outcome]) -> None:
    outcome = run("--models", "tiny", "--seqs", 64, "--attentions", "flashbob", "--reps", 1, "--json")
    assert outcome.code == 0, outcome.err
    assert [row["op"] for row in outcome.json["rows"]] == [op for ops in METHODS.values() for op in ops]
    assert {row["status"] for row in outcome.json["rows"]} == {"ok"}
