"""Several processes that share a run: the same results to the last bit, one voice, and an end for all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from command_line import ROOT, Child, Outcome, free_port, result

import cli.session
from curvature import trace
from curvature.distributed import ALONE, PeerError, join, launched, symmetry_error

SMALL = ("--seq", 32, "--device", "cpu")
COMMANDS = {
    "trace": ("--tol", 0.3, "--max-products", 17),
    "spectrum": ("--steps", 3, "--probes", 4, "--top", 1, "--tol", 1e-2, "--max-products", 6),
}


def started(
    count: int, *arguments: object, folder: Path, before: dict[int, Callable[[], None]] | None = None
) -> list[Child]:
    port = free_port()
    sabotage = before or {}
    return [
        Child(*arguments, folder=folder, processes=(rank, count, port), before=sabotage.get(rank))
        for rank in range(count)
    ]


def ended(children: list[Child]) -> list[Outcome]:
    return [child.end() for child in children]


@pytest.mark.parametrize("command", COMMANDS)
def test_any_number_of_processes_gives_the_same_record(command: str, model: Path, tmp_path: Path) -> None:
    arguments = (command, "--model", model, *SMALL, *COMMANDS[command], "--out")
    alone = Child(*arguments, "alone", folder=tmp_path).end()
    assert alone.code == 0, alone.err
    for count in (2, 3):
        outcomes = ended(started(count, *arguments, f"of-{count}", folder=tmp_path))
        assert [outcome.code for outcome in outcomes] == [0] * count, outcomes
        assert result(tmp_path / f"of-{count}", command) == result(tmp_path / "alone", command)
        record = json.loads((tmp_path / f"of-{count}" / f"{command}.json").read_text())
        assert record["environment"]["processes"] == count
        assert "wrote" in outcomes[0].out
        assert all(outcome.out == outcome.err == "" for outcome in outcomes[1:]), "only the first one speaks"
        assert {p.name for p in (tmp_path / f"of-{count}").iterdir()} == {
            p.name for p in (tmp_path / "alone").iterdir()
        }


def fail_at_the_third_product() -> None:
    sample, count = trace.__globals__["_sample"], [0]

    def failing(*arguments: object) -> object:
        count[0] += 1
        if count[0] == 3:
            raise FloatingPointError("this product is not finite")
        return sample(*arguments)

    trace.__globals__["_sample"] = failing


def die_at_the_third_product() -> None:
    sample, count = trace.__globals__["_sample"], [0]

    def dying(*arguments: object) -> object:
        count[0] += 1
        if count[0] == 3:
            os.kill(os.getpid(), 9)
        return sample(*arguments)

    trace.__globals__["_sample"] = dying


def fail_at_the_second_step() -> None:
    from curvature.krylov import Krylov

    step, count = Krylov.step, [0]

    def failing(self: Krylov) -> None:
        count[0] += 1
        if count[0] == 2:
            raise FloatingPointError("this product is not finite")
        step(self)

    Krylov.step = failing  # type: ignore[method-assign]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("command", "failure"),
    [("trace", fail_at_the_third_product), ("spectrum", fail_at_the_second_step)],
    ids=["trace", "spectrum"],
)
def test_a_failing_process_ends_all_with_one_line(
    command: str, failure: Callable[[], None], rank: int, model: Path, tmp_path: Path
) -> None:
    # Steps without end: the other process must not have to finish its own work first.
    long = {"trace": ("--max-products", 10_000, "--tol", 1e-9), "spectrum": ("--steps", 10_000)}[command]
    children = started(
        2, command, "--model", model, *SMALL, *long, "--out", "out", folder=tmp_path, before={rank: failure}
    )
    first, second = ended(children)
    assert (first.code, second.code) == (1, 1)
    told = [line for line in first.err.splitlines() if "not finite" in line]
    assert len(told) == 1
    assert ("process 1 of 2: this product" in told[0]) == (rank == 1)
    assert "--resume" in told[0]
    assert "Traceback" not in first.err
    assert second.err == ""


def test_a_killed_process_ends_the_other_and_the_run_goes_on_with_any_number(model: Path, tmp_path: Path) -> None:
    arguments = ("trace", "--model", model, *SMALL, *COMMANDS["trace"], "--out")
    assert Child(*arguments, "whole", folder=tmp_path).end().code == 0
    first, second = ended(started(2, *arguments, "out", folder=tmp_path, before={1: die_at_the_third_product}))
    assert (first.code, second.code) == (1, -9)
    assert "another process of this run has ended" in first.err.splitlines()[-1]
    assert "--resume" in first.err.splitlines()[-1]
    state = json.loads((tmp_path / "out" / "state" / "trace" / "trace" / "part.json").read_text())
    assert state["progress"]["samples"] == 4
    outcomes = ended(started(3, *arguments, "out", "--resume", folder=tmp_path))
    assert [outcome.code for outcome in outcomes] == [0] * 3, outcomes
    assert result(tmp_path / "out", "trace") == result(tmp_path / "whole", "trace")


def test_killed_together_and_resumed(model: Path, tmp_path: Path) -> None:
    arguments = ("spectrum", "--model", model, *SMALL, "--steps", 30, "--top", 1, "--out")
    assert Child(*arguments, "whole", folder=tmp_path).end().code == 0
    children = started(2, *arguments, "out", folder=tmp_path)
    saved = [tmp_path / "out" / "state" / "spectrum" / f"probe-{i}" / "part.json" for i in range(2)]
    while not all(path.exists() for path in saved):
        assert all(child.process.is_alive() for child in children), [child.err for child in children]
        time.sleep(0.01)
    for child in children:
        child.kill()
    outcomes = ended(started(2, *arguments, "out", "--resume", folder=tmp_path))
    assert [outcome.code for outcome in outcomes] == [0, 0], outcomes
    assert "going on from" in outcomes[0].err
    assert result(tmp_path / "out", "spectrum") == result(tmp_path / "whole", "spectrum")


def test_bad_input_is_told_once(model: Path, tmp_path: Path) -> None:
    first, second = ended(started(2, "trace", "--model", "./missing", folder=tmp_path))
    assert (first.code, second.code) == (1, 1)
    assert [line for line in first.err.splitlines() if "error" in line] == [first.err.splitlines()[-1]]
    assert "./missing" in first.err
    assert second.err == ""
    first, second = ended(started(2, "hvp", "--model", model, *SMALL, folder=tmp_path))
    assert (first.code, second.code) == (1, 1)
    assert "hvp runs in one process, not in 2" in first.err


@pytest.mark.slow
def test_under_torchrun(model: Path, tmp_path: Path) -> None:
    """As a user starts it: two processes and their launcher."""
    arguments = ("trace", "--model", model, *SMALL, *COMMANDS["trace"], "--json", "--out")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}", "-m", "cli")
    command = [sys.executable, *launcher, *map(str, (*arguments, "two"))]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == json.loads((tmp_path / "two" / "trace.json").read_text())
    assert Child(*arguments, "one", folder=tmp_path).end().code == 0
    assert result(tmp_path / "two", "trace") == result(tmp_path / "one", "trace")


# In one process


def test_a_single_process_is_on_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert launched() == (0, 1, 0)
    assert join() is ALONE
    assert ALONE.share([lambda: 1, lambda: 2, lambda: 3]) == [1, 2, 3]
    with pytest.raises(KeyError):
        ALONE.gather(lambda: {}["absent"])


@pytest.mark.parametrize(("rank", "count"), [("2", "2"), ("one", "2"), ("-1", "2")])
def test_a_launchers_nonsense_is_refused(rank: str, count: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", count)
    with pytest.raises(ValueError, match="does not fit together"):
        launched()


def test_a_launcher_that_names_no_meeting_place_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="MASTER_ADDR, MASTER_PORT is not set"):
        join()


@pytest.mark.parametrize(
    ("name", "local", "gpus", "expected"),
    [
        ("auto", 1, 2, "cuda:1"),
        ("cuda", 1, 2, "cuda:1"),
        ("auto", 1, 0, "cpu"),
        ("cpu", 1, 2, "cpu"),
        ("cuda:0", 1, 2, "2 processes would share one GPU; choose --device cuda"),
        ("auto", 1, 1, "PyTorch sees 1 CUDA GPU, and process 1 of this machine wants one of its own"),
    ],
)
def test_each_process_takes_the_gpu_of_its_number(
    name: str, local: int, gpus: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, value in {"RANK": local, "WORLD_SIZE": 2, "LOCAL_RANK": local}.items():
        monkeypatch.setenv(key, str(value))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    if len(expected) < 10:
        assert str(cli.session.choose_device(name)) == expected
    else:
        with pytest.raises(ValueError, match=expected):
            cli.session.choose_device(name)


def test_the_symmetry_error_is_the_operators_own() -> None:
    from curvature_oracles import MatrixOperator, with_spectrum

    matrix, _ = with_spectrum(torch.linspace(-2, 5, 40))
    wrong = matrix + 1e-3 * torch.randn(40, 40, dtype=torch.float64)
    for op in (MatrixOperator(matrix), MatrixOperator(wrong)):
        assert symmetry_error(op, 3) == pytest.approx(op.symmetry_error(3), rel=1e-6, abs=1e-15)
    assert issubclass(PeerError, RuntimeError)
