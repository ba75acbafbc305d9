"""Interrupted runs go on to the last bit, and a state is never taken for another run's."""

from __future__ import annotations

import errno
import os
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import CHILDREN, free_port
from curvature_oracles import MatrixOperator
from saved_estimates import ESTIMATES, MATRIX, SHARED, Interrupted, Interruptible, equal_times, estimate, found, same

import curvature.state
from curvature import RunState, block_traces, groups, lanczos, trace
from curvature.state import Part, Saved, StateError, weights_digest

KILLS = int(os.environ.get("FLASHBOB_KILLS", "1"))
"""Random moments at which each estimate is killed; more than the default takes a while."""


@pytest.fixture(params=ESTIMATES.values(), ids=ESTIMATES.keys())
def compute(request: pytest.FixtureRequest) -> Callable[..., list[Any]]:
    return request.param


@pytest.fixture(autouse=True)
def times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(block_traces.__globals__, "_timed", equal_times)


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


@pytest.mark.parametrize("name", ESTIMATES)
def test_killed_at_random_moments_it_goes_on_to_the_last_bit(name: str, tmp_path: Path) -> None:
    """SIGKILL in the middle of the work, thrice; FLASHBOB_KILLS=20 does it that many times."""
    expected, moments = ESTIMATES[name](Interruptible()), random.Random(name)
    for number in range(KILLS):
        folder = tmp_path / str(number)
        folder.mkdir()
        for _ in range(3):
            child = CHILDREN.Process(target=estimate, args=(name, folder))
            child.start()
            while not list(folder.glob("state/*/part.json")) and child.is_alive():
                time.sleep(0.005)
            child.join(moments.uniform(0, 0.12))
            child.kill()
            child.join()
        child = CHILDREN.Process(target=estimate, args=(name, folder))
        child.start()
        child.join(60)
        assert child.exitcode == 0
        assert same(found(folder), expected)


@pytest.mark.parametrize("name", SHARED)
def test_shared_among_processes_one_of_which_is_killed_it_is_the_same(name: str, tmp_path: Path) -> None:
    expected = ESTIMATES[name](Interruptible())

    def started(count: int) -> list[Any]:
        port = free_port()
        children = [
            CHILDREN.Process(target=estimate, args=(name, tmp_path, (rank, count, port))) for rank in range(count)
        ]
        for child in children:
            child.start()
        return children

    children = started(2)
    while not list(tmp_path.glob("state/*/part.json")):
        assert all(child.is_alive() for child in children)
        time.sleep(0.005)
    children[1].kill()
    for child in children:
        child.join(60)
    assert children[1].exitcode == -9
    children = started(3)
    for child in children:
        child.join(60)
    assert [child.exitcode for child in children] == [0, 0, 0]
    assert all(same(found(tmp_path, rank), expected) for rank in range(3))


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
    state.close()
    state = RunState.open(tmp_path / "state", {}, resume=True)
    with pytest.raises(StateError, match=told):
        again(state)


class Other(MatrixOperator):
    """An operator of another kind over the same space."""


def test_an_estimate_never_goes_on_with_that_of_another_operator(compute: Callable[..., Any], tmp_path: Path) -> None:
    first, second = Interruptible(), Other(2 * MATRIX, [6, 30])
    state = RunState.open(tmp_path / "state", {})
    expected = compute(first, state=state)
    with pytest.raises(StateError, match=r"estimated with it already; .*state\.named"):
        compute(second, state=state)
    assert same(compute(second, state=state.named("second")), compute(Other(2 * MATRIX, [6, 30])))
    state.close()
    state = RunState.open(tmp_path / "state", {}, resume=True)
    with pytest.raises(StateError, match=r"operator\.class was .Interruptible., is .Other."):
        compute(second, state=state)
    state.close()
    state = RunState.open(tmp_path / "state", {}, resume=True)
    assert same(compute(first, state=state), expected)
    before = second.applied
    compute(second, state=state.named("second"))
    assert second.applied == before


def test_groups_are_told_apart_by_their_entries(tmp_path: Path) -> None:
    def group(stop: int) -> list[groups.Group]:
        return [groups.Group("g", (groups.Part("block0", 0, 0, stop),))]

    state = RunState.open(tmp_path / "state", {})
    trace(Interruptible(), probes=4, groups=group(3), state=state)
    block_traces(Interruptible(), group(3), max_products=20, probing="slices", state=state)
    state.close()
    state = RunState.open(tmp_path / "state", {}, resume=True)
    with pytest.raises(StateError, match="groups was"):
        trace(Interruptible(), probes=4, groups=group(5), state=state)
    with pytest.raises(StateError, match="groups was"):
        block_traces(Interruptible(), group(5), max_products=20, probing="slices", state=state)


def test_a_damaged_state_is_refused(tmp_path: Path) -> None:
    state = RunState.open(tmp_path / "state", {})
    trace(Interruptible(), probes=4, state=state)
    (piece,) = (tmp_path / "state" / "trace").glob("*.safetensors")
    piece.write_bytes(piece.read_bytes()[:50])
    state.close()
    state = RunState.open(tmp_path / "state", {}, resume=True)
    with pytest.raises(StateError, match="damaged"):
        trace(Interruptible(), probes=4, state=state)
    state.close()
    (tmp_path / "state" / "state.json").write_text("{")
    with pytest.raises(StateError, match="cannot be read"):
        RunState.open(tmp_path / "state", {}, resume=True)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"arguments": {}}'], ids=["empty", "cut", "list", "lacking"])
def test_a_part_that_is_not_whole_is_refused(content: str, tmp_path: Path) -> None:
    state = RunState.open(tmp_path / "state", {})
    trace(Interruptible(), probes=4, state=state)
    state.close()
    (tmp_path / "state" / "trace" / "part.json").write_text(content)
    with pytest.raises(StateError, match=r"part\.json: .*start anew without --resume"):
        RunState.open(tmp_path / "state", {}, resume=True)


@pytest.mark.parametrize("content", ["", "[]", '{"identity": 3}'], ids=["empty", "list", "lacking"])
def test_what_is_said_of_a_damaged_state_helps(content: str, tmp_path: Path) -> None:
    RunState.open(tmp_path / "state", {}).close()
    (tmp_path / "state" / "state.json").write_text(content)
    with pytest.raises(StateError, match="start anew without --resume"):
        RunState.open(tmp_path / "state", {}, resume=True)
    anew = RunState.open(tmp_path / "state", {})
    assert (anew.resumed, anew.replaced) == (False, tmp_path / "state.previous")


def test_a_run_that_ends_before_it_has_saved_anything_leaves_the_earlier_state(tmp_path: Path) -> None:
    first = RunState.open(tmp_path / "state", {"run": 1})
    trace(Interruptible(), probes=4, state=first)
    first.withdraw()
    second = RunState.open(tmp_path / "state", {"run": 2})
    assert second.empty
    second.withdraw()
    assert [path.name for path in tmp_path.iterdir()] == ["state"]
    third = RunState.open(tmp_path / "state", {"run": 1}, resume=True)
    assert (third.resumed, third.empty) == (True, False)
    third.remove()
    third.withdraw()
    RunState.open(tmp_path / "state", {}).withdraw()
    assert list(tmp_path.iterdir()) == []


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
