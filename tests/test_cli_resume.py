"""Interrupted commands: what --resume goes on from, and what is said."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import Child, Run, make_model, result
from safetensors.torch import load_file, save_file

from curvature import trace, training_text

KILLS = int(os.environ.get("FLASHBOB_KILLS", "1"))
"""Random moments at which each command is killed; more than the default takes a while."""


SMALL = ("--seq", 32, "--batches", 2, "--device", "cpu")
COMMANDS = {
    "trace": ("--max-products", 14, "--tol", 1e-4),
    "spectrum": ("--steps", 6, "--top", 1, "--tol", 1e-3, "--max-products", 14),
    "diagonal": ("--max-products", 14, "--tol", 1e-4),
    "diagonal by xdiag": ("--max-products", 14, "--tol", 1e-4, "--estimator", "xdiag"),
}


@pytest.mark.parametrize("case", COMMANDS)
def test_killed_at_random_moments_the_record_is_that_of_a_run_that_was_not(
    case: str, model: Path, tmp_path: Path
) -> None:
    """SIGKILL, again and again, until a run comes through; FLASHBOB_KILLS=20 does it that many times."""
    command = case.split()[0]
    arguments = (command, "--model", model, *SMALL, *COMMANDS[case], "--out")
    started = time.perf_counter()
    outcome = Child(*arguments, "whole", folder=tmp_path).end()
    taken = time.perf_counter() - started
    assert outcome.code == 0, outcome.err
    moments = random.Random(case)
    for number in range(KILLS):
        out, killed = f"out-{number}", 0
        while killed < 2:
            child = Child(*arguments, out, "--resume", folder=tmp_path)
            child.process.join(moments.uniform(0.2 * taken, 0.9 * taken))
            if child.process.exitcode == 0:
                break
            child.kill()
            killed += 1
        outcome = Child(*arguments, out, "--resume", folder=tmp_path).end()
        assert outcome.code == 0, outcome.err
        assert result(tmp_path / out, command) == result(tmp_path / "whole", command)
        assert {path.name for path in (tmp_path / out).iterdir()} == {p.name for p in (tmp_path / "whole").iterdir()}
        for name in {"trace": ("trace.csv", "trace.png"), "spectrum": ("spectrum.png",), "diagonal": ()}[command]:
            assert (tmp_path / out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_state_of_other_settings_is_refused_in_one_line(
    run: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("trace", "--model", model, *SMALL, "--max-products", 4, "--out", "out")
    stopped = interrupted_after(3, monkeypatch, lambda: run(*arguments))
    assert stopped.code == 1
    assert "out/state/trace: the same command with --resume" in stopped.err.splitlines()[-1]
    for changed, told in {
        ("--seed", 1): "settings.seed was 0, is 1",
        ("--seq", 16): "settings.seq was 32, is 16",
        ("--tol", 0.5): "settings.tol was 0.05, is 0.5",
        ("--random-init",): "model.random_init was false, is true",
    }.items():
        outcome = run(*arguments, *changed, "--resume")
        assert outcome.code == 1
        assert told in outcome.err.splitlines()[-1]
        assert "start anew without --resume" in outcome.err.splitlines()[-1]
    outcome = run(*arguments, "--resume")
    assert outcome.code == 0
    assert "going on from out/state/trace" in outcome.err
    assert [path.name for path in (tmp_path / "out").iterdir() if path.is_dir()] == []


def test_a_run_without_resume_starts_anew_and_says_so(
    run: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("trace", "--model", model, *SMALL, "--max-products", 4, "--out", "out")
    interrupted_after(3, monkeypatch, lambda: run(*arguments))
    outcome = run(*arguments, "--seed", 1)
    assert outcome.code == 0
    assert "starts anew without --resume" in outcome.err
    assert json.loads((tmp_path / "out" / "trace.json").read_text())["settings"]["seed"] == 1
    assert [path.name for path in (tmp_path / "out").iterdir() if path.is_dir()] == []


def test_a_run_that_cannot_begin_leaves_nothing_and_advises_nothing(run: Run, model: Path, tmp_path: Path) -> None:
    outcome = run("trace", "--model", model, *SMALL, "--per-head", "--params", r"ln_f\.", "--out", "out")
    assert outcome.code == 1
    assert "leave out --per-head" in outcome.err.splitlines()[-1]
    assert "--resume" not in outcome.err
    assert list((tmp_path / "out").iterdir()) == []
    for command, tol in (("trace", 0), ("diagonal", "nan"), ("spectrum", -1)):
        outcome = run(command, "--model", model, *SMALL, "--tol", tol)
        assert outcome.code == 2
        assert "is not a positive number" in outcome.err


def test_resume_without_a_state_says_so(run: Run, model: Path) -> None:
    outcome = run("trace", "--model", model, *SMALL, "--max-products", 2, "--out", "out", "--resume")
    assert outcome.code == 0
    assert "no state in out/state/trace" in outcome.err
    finished = Path("out/trace.json").read_bytes()
    for products, code, told in ((2, 0, "nothing is left to do"), (4, 1, "max_products was 2, is 4")):
        outcome = run("trace", "--model", model, *SMALL, "--max-products", products, "--out", "out", "--resume")
        assert outcome.code == code, outcome.err
        assert "the run in out has ended (trace.json)" in outcome.err
        assert told in outcome.err
        assert Path("out/trace.json").read_bytes() == finished
        assert not Path("out/state").exists()
    outcome = run("hvp", "--model", model, *SMALL, "--repeat", 1, "--out", "out", "--resume")
    assert outcome.code == 0
    assert "hvp keeps no state" in outcome.err


def test_a_finished_run_of_other_text_or_weights_is_refused(run: Run, tmp_path: Path) -> None:
    folder, text = make_model(tmp_path / "m"), tmp_path / "text.txt"
    weights = folder / "model.safetensors"
    quick = {"trace": ("--max-products", 2), "train": ("--max-steps", 1, "--eval-batches", 1)}
    for command, more in quick.items():
        arguments = (command, "--model", folder, "--data", text, "--seq", 16, "--device", "cpu", *more, "--out", "out")
        text.write_text("A text of some words. " * 200)
        assert run(*arguments).code == 0
        record = Path("out", f"{command}.json")
        finished = record.read_bytes()
        assert run(*arguments, "--resume").code == 0
        text.write_text("Another text, of other words. " * 200)
        outcome = run(*arguments, "--resume")
        assert (outcome.code, record.read_bytes()) == (1, finished)
        assert "data.sha256 was " in outcome.err.splitlines()[-1]
        text.write_text("A text of some words. " * 200)
        stored = weights.read_bytes()
        changed = load_file(weights)
        changed["transformer.ln_f.weight"] += 1
        save_file(changed, weights, metadata={"format": "pt"})
        outcome = run(*arguments, "--resume")
        assert (outcome.code, record.read_bytes()) == (1, finished)
        assert "model.weights was " in outcome.err.splitlines()[-1]
        weights.write_bytes(stored)


def test_a_finished_run_on_a_stream_is_known_by_its_source(
    run: Run, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_text, "hub_documents", lambda _: iter(["A text of some words. " * 9] * 40))
    arguments = ("train", "--model", model, "--data", "hub:some/text", "--seq", 16, "--device", "cpu", "--out", "out",
                 "--max-steps", 1, "--eval-batches", 1)  # fmt: skip
    assert run(*arguments).code == 0
    outcome = run(*arguments, "--resume")
    assert (outcome.code, "nothing is left to do" in outcome.err) == (0, True)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"settings": 3, "model": {}, "data": {}}'])
def test_a_finished_run_whose_record_is_damaged_is_told(content: str, run: Run, model: Path) -> None:
    Path("out").mkdir()
    Path("out/trace.json").write_text(content)
    outcome = run("trace", "--model", model, *SMALL, "--max-products", 2, "--out", "out", "--resume")
    assert outcome.code == 1
    assert "--resume: out/trace.json is damaged" in outcome.err.splitlines()[-1]
    assert "leave out --resume" in outcome.err.splitlines()[-1]
    assert Path("out/trace.json").read_text() == content


def interrupted_after(products: int, monkeypatch: pytest.MonkeyPatch, body: Callable[[], Any]) -> Any:
    """What the body gives when Ctrl-C comes during product number `products` + 1."""
    sample, count = trace.__globals__["_sample"], [0]

    def counted(*arguments: Any) -> Any:
        if count[0] == products:
            raise KeyboardInterrupt
        count[0] += 1
        return sample(*arguments)

    with monkeypatch.context() as patched:
        patched.setitem(trace.__globals__, "_sample", counted)
        return body()
