"""Interrupted runs go on to the last bit, and a state is never taken for another run's."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import Child, Run, make_model, result, run_in_process
from curvature_oracles import MatrixOperator, with_spectrum

import curvature.state
from curvature import RunState, diagonal, eigenpairs, lanczos, spectral_density, trace
from curvature.groups import Group
from curvature.groups import Part as Entries
from curvature.state import Part, Saved, StateError, weights_digest

MATRIX, _ = with_spectrum([30.0, 20.0, 10.0, 5.0, *np.linspace(-1, 1, 30), -4.0, -8.0])
KILLS = int(os.environ.get("FLASHBOB_KILLS", "1"))
"""Random moments at which each command is killed; more than the default takes a while."""


class Interrupted(BaseException):
    """Like Ctrl-C: not an Exception."""


class Interruptible(MatrixOperator):
    """A matrix whose product number `last` + 1 does not come back."""

    def __init__(self, last: int | None = None) -> None:
        super().__init__(MATRIX, [6, 30])
        self._end = last

    def _apply(self, rows: torch.Tensor) -> torch.Tensor:
        if self.applied == self._end:
            raise Interrupted
        return super()._apply(rows)


def _lanczos(op: MatrixOperator, **options: Any) -> list[Any]:
    found = lanczos(op, steps=12, top=3, vectors=True, **options)
    return [found.eigenvalues, found.residuals, found.eigenvectors, found.asymmetry, found.products]


def _density(op: MatrixOperator, **options: Any) -> list[Any]:
    found = spectral_density(op, probes=3, steps=4, **options)
    return [found.values, found.grid, found.stderr, found.trace, *found.extremes(2)]


def _eigenpairs(op: MatrixOperator, **options: Any) -> list[Any]:
    found = eigenpairs(op, top=2, basis=7, tol=1e-9, vectors=True, **options)
    assert found.restarts > 2
    return [found.eigenvalues, found.residuals, found.eigenvectors, found.products, found.restarts, found.converged]


def _trace(op: MatrixOperator, **options: Any) -> list[Any]:
    found = trace(op, tol=0.2, **options)
    return [found.samples, found.value, found.stderr, found.per_block, found.products, found.interval()]


def _trace_with_groups(op: MatrixOperator, **options: Any) -> list[Any]:
    halves = [Group(f"half {i}", (Entries("block1", 0, 15 * i, 15 * i + 15),)) for i in range(2)]
    found = trace(op, tol=0.2, groups=halves, **options)
    return [found.samples, found.value, found.per_block, found.per_group, *found.group_samples.values()]


def _diagonal(op: MatrixOperator, **options: Any) -> list[Any]:
    found = diagonal(op, tol=0.2, max_products=14, **options)
    return [found.values, found.stderr, found.relative_error, found.per_block, found.products, found.converged]


ESTIMATES: dict[str, Callable[..., list[Any]]] = {
    "lanczos": _lanczos,
    "lanczos-in-host-memory": lambda op, **options: _lanczos(op, offload=True, **options),
    "density": _density,
    "eigenpairs": _eigenpairs,
    "trace": _trace,
    "trace-with-groups": _trace_with_groups,
    "diagonal": _diagonal,
}


def same(a: list[Any], b: list[Any]) -> bool:
    def one(x: Any, y: Any) -> bool:
        if isinstance(x, torch.Tensor):
            return torch.equal(x, y)
        return bool(np.array_equal(x, y)) if isinstance(x, np.ndarray) else bool(x == y)

    return len(a) == len(b) and all(map(one, a, b))


@pytest.fixture(params=ESTIMATES.values(), ids=ESTIMATES.keys())
def compute(request: pytest.FixtureRequest) -> Callable[..., list[Any]]:
    return request.param


@pytest.fixture
def every_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Save after each product, though these take no longer than the saving."""
    monkeypatch.setattr(curvature.state, "_SHARE", 1.0)
    monkeypatch.setattr(os, "fsync", lambda _: None)  # the power does not fail here, and disks are slow


# The library


def test_a_run_that_keeps_a_state_is_the_run_that_keeps_none(compute: Callable[..., Any], tmp_path: Path) -> None:
    state = RunState.open(tmp_path / "state", {})
    assert same(compute(Interruptible()), compute(Interruptible(), state=state))
    state.remove()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("every_product")
def test_an_interrupted_run_goes_on_to_the_last_bit(compute: Callable[..., Any], tmp_path: Path) -> None:
    whole = Interruptible()
    expected = compute(whole)
    for last in range(whole.applied):
        state = RunState.open(tmp_path / "state", {"run": last})
        with pytest.raises(Interrupted):
            compute(Interruptible(last), state=state)
        state.close()
        state = RunState.open(tmp_path / "state", {"run": last}, resume=True)
        assert state.resumed
        rest = Interruptible()
        assert same(compute(rest, state=state), expected), f"after {last} products"
        assert rest.applied == whole.applied - last, "what was saved is not computed again"
        assert state.elapsed() > state.seconds_before >= 0
        state.remove()


@pytest.mark.usefixtures("every_product")
def test_a_run_that_is_interrupted_again_and_again_comes_through(compute: Callable[..., Any], tmp_path: Path) -> None:
    whole = Interruptible()
    expected = compute(whole)
    RunState.open(tmp_path / "state", {}).close()
    interruptions = (whole.applied - 1) // 2
    for _ in range(interruptions):
        state = RunState.open(tmp_path / "state", {}, resume=True)
        with pytest.raises(Interrupted):
            compute(Interruptible(2), state=state)
        state.close()
    rest = Interruptible()
    assert same(compute(rest, state=RunState.open(tmp_path / "state", {}, resume=True)), expected)
    assert rest.applied == whole.applied - 2 * interruptions


@pytest.mark.usefixtures("every_product")
def test_each_lanczos_vector_is_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, written = curvature.state.write_bytes, []

    def counted(path: Path, content: bytes) -> None:
        written.append(len(content))
        write(path, content)

    monkeypatch.setattr(curvature.state, "write_bytes", counted)
    lanczos(Interruptible(), steps=30, vectors=True, state=RunState.open(tmp_path / "state", {}))
    assert len(written) == 30
    assert sum(written) < 2 * (30 * 36 + 30 * 31) * 8, "twice the basis and the matrix; all of it each time would be 15"


def test_a_finished_run_is_not_computed_again(compute: Callable[..., Any], tmp_path: Path) -> None:
    state = RunState.open(tmp_path / "state", {})
    expected = compute(Interruptible(), state=state)
    state.close()
    assert same(compute(Interruptible(0), state=RunState.open(tmp_path / "state", {}, resume=True)), expected)


@pytest.mark.usefixtures("every_product")
def test_whatever_write_a_run_is_killed_at_the_state_is_whole(
    compute: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGKILL leaves files as they are at that moment; here they are copied ahead of every write to be looked at."""
    copies: list[Path] = []
    write = curvature.state.write_bytes

    def copy_and_write(path: Path, content: bytes) -> None:
        copies.append(tmp_path / f"copy-{len(copies)}")
        shutil.copytree(tmp_path / "state", copies[-1])
        (copies[-1] / ".half.part").write_bytes(content[: len(content) // 2])
        write(path, content)

    monkeypatch.setattr(curvature.state, "write_bytes", copy_and_write)
    expected = compute(Interruptible(), state=RunState.open(tmp_path / "state", {}))
    monkeypatch.undo()
    assert len(copies) > 5
    for copy in copies[:: max(1, len(copies) // 8)]:
        assert same(compute(Interruptible(), state=RunState.open(copy, {}, resume=True)), expected)
        assert not list(copy.rglob("*.part"))


@pytest.mark.usefixtures("every_product")
def test_a_full_disk_is_told_and_loses_nothing(
    compute: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = compute(Interruptible())
    state = RunState.open(tmp_path / "state", {})
    left, sync = [7], os.fsync

    def full(handle: int) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(handle)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StateError, match=r"No space left on device.*saved before is intact.*--resume"):
        compute(Interruptible(), state=state)
    monkeypatch.undo()
    state.close()
    op = Interruptible()
    assert same(compute(op, state=RunState.open(tmp_path / "state", {}, resume=True)), expected)
    assert not list(tmp_path.rglob("*.part"))


def test_another_runs_state_is_refused_by_what_differs(tmp_path: Path) -> None:
    identity = {"settings": {"seq": 512, "dtype": "float32"}, "model": {"weights": "a" * 64}}
    RunState.open(tmp_path / "state", identity).close()
    other = {"settings": {"seq": 256, "dtype": "float32"}, "model": {"weights": "b" * 64}}
    with pytest.raises(StateError, match=r"settings.seq was 512, is 256; give what it had") as caught:
        RunState.open(tmp_path / "state", other, resume=True)
    assert "model.weights was" in str(caught.value)
    assert "dtype" not in str(caught.value)
    assert RunState.open(tmp_path / "state", identity, resume=True).resumed


@pytest.mark.parametrize(
    ("again", "told"),
    [
        (lambda state: lanczos(Interruptible(), steps=9, state=state), "steps was 5, is 9"),
        (lambda state: lanczos(Interruptible(), steps=5, seed=1, state=state), "seed was 0, is 1"),
        (lambda state: lanczos(MatrixOperator(MATRIX), steps=5, state=state), "space.blocks was"),
        (lambda state: lanczos(MatrixOperator(MATRIX.float(), [6, 30]), steps=5, state=state), "space.dtype was"),
    ],
    ids=["steps", "seed", "blocks", "dtype"],
)
def test_other_arguments_are_refused(again: Callable[[RunState], object], told: str, tmp_path: Path) -> None:
    state = RunState.open(tmp_path / "state", {})
    lanczos(Interruptible(), steps=5, state=state)
    with pytest.raises(StateError, match=told):
        again(state)


def test_a_damaged_state_is_refused(tmp_path: Path) -> None:
    state = RunState.open(tmp_path / "state", {})
    trace(Interruptible(), probes=4, state=state)
    (piece,) = (tmp_path / "state" / "trace").glob("*.safetensors")
    piece.write_bytes(piece.read_bytes()[:50])
    with pytest.raises(StateError, match="damaged"):
        trace(Interruptible(), probes=4, state=state)
    state.close()
    (tmp_path / "state" / "state.json").write_text("{")
    with pytest.raises(StateError, match="cannot be read"):
        RunState.open(tmp_path / "state", {}, resume=True)


def test_a_new_run_moves_an_old_state_aside(tmp_path: Path) -> None:
    first = RunState.open(tmp_path / "state", {"run": 1})
    trace(Interruptible(), probes=4, state=first)
    first.close()
    second = RunState.open(tmp_path / "state", {"run": 2})
    assert (second.resumed, second.replaced) == (False, tmp_path / "state.previous")
    op = Interruptible()
    trace(op, probes=4, state=second)
    assert op.applied == 4
    second.close()
    assert RunState.open(tmp_path / "state.previous", {"run": 1}, resume=True).resumed


def test_two_runs_do_not_share_a_state(tmp_path: Path) -> None:
    state = RunState.open(tmp_path / "state", {})
    for resume in (True, False):
        with pytest.raises(StateError, match="a running process is using it"):
            RunState.open(tmp_path / "state", {}, resume=resume)
    state.close()
    assert RunState.open(tmp_path / "state", {}, resume=True).resumed


def test_files_that_are_no_state_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "state" / "mine").mkdir(parents=True)
    (tmp_path / "state" / "mine" / "thesis.txt").write_text("text")
    with pytest.raises(StateError, match="files that are not a run's state"):
        RunState.open(tmp_path / "state", {})
    assert (tmp_path / "state" / "mine" / "thesis.txt").read_text() == "text"


def test_facts_are_computed_once(tmp_path: Path) -> None:
    state = RunState.open(tmp_path / "state", {})
    assert state.fact("loss", lambda: 0.1 + 0.2) == 0.1 + 0.2
    state.close()
    resumed = RunState.open(tmp_path / "state", {}, resume=True)
    assert resumed.fact("loss", lambda: pytest.fail("computed again")) == 0.1 + 0.2


def test_expensive_saves_are_spaced_out_and_the_last_offer_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part, written = Part(tmp_path / "part", {}, time.perf_counter), []
    save = part._save

    def slow(saved: Saved) -> None:
        written.append(saved.progress["n"])
        time.sleep(0.05)
        save(saved)

    def work() -> None:
        with part.saving():
            for n in range(30):
                part.offer(lambda n=n: Saved({"n": n}, {}))
            raise Interrupted

    monkeypatch.setattr(part, "_save", slow)
    with pytest.raises(Interrupted):
        work()
    assert written == [0, 29]
    assert Part(tmp_path / "part", {}, time.perf_counter).progress == {"n": 29}


def test_weights_are_told_apart_by_every_bit() -> None:
    model = torch.nn.Linear(3, 2)
    before = weights_digest(model)
    assert weights_digest(model) == before
    with torch.no_grad():
        model.weight[1, 2] = torch.nextafter(model.weight[1, 2], torch.tensor(9.0))
    assert weights_digest(model) != before


# The command line

SMALL = ("--seq", 32, "--batches", 2, "--device", "cpu")
COMMANDS = {
    "trace": ("--max-products", 14, "--tol", 1e-4),
    "spectrum": ("--steps", 6, "--top", 1, "--tol", 1e-3, "--max-products", 14),
    "diagonal": ("--max-products", 14, "--tol", 1e-4),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: run_in_process(capsys, *arguments)


@pytest.mark.parametrize("command", COMMANDS)
def test_killed_at_random_moments_the_record_is_that_of_a_run_that_was_not(
    command: str, model: Path, tmp_path: Path
) -> None:
    """SIGKILL, again and again, until a run comes through; FLASHBOB_KILLS=20 does it that many times."""
    arguments = (command, "--model", model, *SMALL, *COMMANDS[command], "--out")
    started = time.perf_counter()
    outcome = Child(*arguments, "whole", folder=tmp_path).end()
    taken = time.perf_counter() - started
    assert outcome.code == 0, outcome.err
    moments = random.Random(command)
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


def test_resume_without_a_state_says_so(run: Run, model: Path) -> None:
    outcome = run("trace", "--model", model, *SMALL, "--max-products", 2, "--out", "out", "--resume")
    assert outcome.code == 0
    assert "no state in out/state/trace" in outcome.err
    outcome = run("hvp", "--model", model, *SMALL, "--repeat", 1, "--out", "out", "--resume")
    assert outcome.code == 0
    assert "hvp keeps no state" in outcome.err


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
