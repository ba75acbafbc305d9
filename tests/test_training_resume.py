"""Training that is killed or interrupted goes on exactly."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import Child
from training_runs import SMALL, losses

from curvature.training import Training
from curvature.training_model import load_for_training
from curvature.training_settings import Schedule, TrainingSettings
from curvature.training_text import open_training_text

KILLS = int(os.environ.get("FLASHBOB_KILLS", "1"))
"""Runs that are killed; more than the default takes a while."""


def fresh(arguments: tuple[object, ...], folder: Path) -> tuple[list[float], bytes]:
    outcome = Child("train", *arguments, "--out", "out", folder=folder).end()
    assert outcome.code == 0, outcome.err
    return losses(folder / "out"), (folder / "out" / "model" / "model.safetensors").read_bytes()


@pytest.mark.parametrize("optimizer", ["adamw", "sophia"])
def test_a_killed_run_goes_on_to_the_last_bit(model: Path, optimizer: str, tmp_path: Path) -> None:
    arguments = (
        *("--model", model, *SMALL, "--max-steps", 24, "--hessian-every", 3, "--optimizer", optimizer, "--lr", 0.003),
        *("--dropout", 0.1, "--eval-every", 5, "--save-every", 2, "--batches", 2),
    )
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    expected = fresh(arguments, whole)
    child = Child("train", *arguments, "--out", "out", folder=killed)
    progress = killed / "out" / "state" / "train" / "training" / "part.json"
    until = time.monotonic() + 120
    while not progress.exists() and time.monotonic() < until:
        time.sleep(0.005)
    child.kill()
    assert not (killed / "out" / "train.json").exists(), "it was killed before its end"
    refused = Child("train", *arguments, "--out", "out", "--resume", "--lr", 0.1, folder=killed).end()
    assert refused.code == 1
    assert "lr was 0.003, is 0.1" in refused.err
    outcome = Child("train", *arguments, "--out", "out", "--resume", folder=killed).end()
    assert outcome.code == 0, outcome.err
    assert "going on from" in outcome.err
    assert (losses(killed / "out"), (killed / "out/model/model.safetensors").read_bytes()) == expected
    assert not (killed / "out" / "state").exists()
    ended = Child("train", *arguments, "--out", "out", "--resume", folder=killed).end()
    assert (ended.code, "nothing is left to do" in ended.err) == (0, True)
    longer = Child("train", *arguments, "--out", "out", "--resume", "--max-steps", 30, folder=killed).end()
    assert (longer.code, "max_steps was 24, is 30" in longer.err) == (1, True)
    assert (losses(killed / "out"), (killed / "out/model/model.safetensors").read_bytes()) == expected
    assert not (killed / "out" / "state").exists()


def test_killed_at_random_moments_the_run_is_that_of_one_that_was_not(model: Path, tmp_path: Path) -> None:
    """SIGKILL twice per run, from its start to its last written file; FLASHBOB_KILLS=5 does it to five runs."""
    arguments = (
        *("--model", model, *SMALL, "--max-steps", 12, "--hessian-every", 3, "--lr", 0.003, "--dropout", 0.1),
        *("--curvature", "row-norm"),
        *("--eval-every", 5, "--save-every", 1, "--checkpoint-every", 4),
    )
    started = time.perf_counter()
    (tmp_path / "whole").mkdir()
    expected = fresh(arguments, tmp_path / "whole")
    taken = time.perf_counter() - started
    written = {path.relative_to(tmp_path / "whole") for path in (tmp_path / "whole" / "out").rglob("*")}
    moments = random.Random(0)
    for number in range(KILLS):
        folder = tmp_path / str(number)
        folder.mkdir()
        for _ in range(2):
            child = Child("train", *arguments, "--out", "out", "--resume", folder=folder)
            child.process.join(moments.uniform(0.1 * taken, taken))
            child.kill()
        outcome = Child("train", *arguments, "--out", "out", "--resume", folder=folder).end()
        assert outcome.code == 0, outcome.err
        assert (losses(folder / "out"), (folder / "out/model/model.safetensors").read_bytes()) == expected
        assert {path.relative_to(folder) for path in (folder / "out").rglob("*")} == written, "and no more"


@pytest.mark.parametrize("others", [("h.0", "h.1"), ("h.0", "wpe")], ids=["of-equal-shapes", "of-other-shapes"])
def test_a_state_of_other_parameters_is_refused_before_anything_is_copied(
    model: Path, others: tuple[str, str], tmp_path: Path
) -> None:
    from curvature import RunState
    from curvature.state import StateError

    def training(only: str) -> Training:
        loaded, seq = load_for_training(str(model), lambda _: 32)
        parts = open_training_text(loaded.tokenizer, "sample", seq, held_out=1)
        chosen = [p for name, p in loaded.model.named_parameters() if only in name]
        settings = TrainingSettings(schedule=Schedule(0.01, 0.001, 0, 2), optimizer="adamw", save_every=1)
        return Training(loaded.model, parts.training, parts.held_out, settings, parameters=chosen)

    state = RunState.open(tmp_path / "state", {})
    training(others[0]).run(state)
    state.close()
    second = training(others[1])
    before = [p.detach().clone() for p in second.model.parameters()]
    state = RunState.open(tmp_path / "state", {}, resume=True)
    with pytest.raises(StateError, match=r"it is another run's: space\.blocks was .*, is ") as caught:
        second.run(state)
    assert "\n" not in str(caught.value)
    assert all(torch.equal(p, q) for p, q in zip(second.model.parameters(), before, strict=True))


class Interrupted(BaseException):
    """Like Ctrl-C."""


@pytest.mark.parametrize("place", ["estimate", "loss", "evaluate", "step"])
def test_an_interruption_anywhere_loses_nothing_and_saves_nothing_half_done(
    model: Path, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from curvature import RunState

    settings = TrainingSettings(schedule=Schedule(0.01, 0.001, 1, 6), interval=2, evaluate_every=2, save_every=3)

    def training() -> Training:
        loaded, seq = load_for_training(str(model), lambda _: 32)
        parts = open_training_text(loaded.tokenizer, "sample", seq, held_out=2)
        return Training(loaded.model, parts.training, parts.held_out, settings)

    def facts(of: Training) -> tuple[Any, ...]:
        history = [(e["step"], e["loss"], e["lr"], e["tokens"]) for e in of.result.history]
        return history, of.result.evaluation, [p.tolist() for p in of.model.parameters()]

    whole = training()
    whole.run()
    first = training()
    target, name = (
        (first.optimizer, "step") if place == "step" else (first, f"_{place}" if place != "evaluate" else place)
    )
    original, calls = getattr(target, name), [0]

    def interrupting(*given: Any) -> Any:
        calls[0] += 1
        if calls[0] == (2 if place == "evaluate" else 5):
            if place == "step":  # half of an update is done
                first._parameters[0].data.add_(1.0)
            raise Interrupted
        return original(*given)

    monkeypatch.setattr(target, name, interrupting)
    state = RunState.open(tmp_path / "state", {})
    with pytest.raises(Interrupted):
        first.run(state)
    state.close()
    second = training()
    state = RunState.open(tmp_path / "state", {}, resume=True)
    second.run(state)
    assert facts(second) == facts(whole)
    if place == "step":
        assert second.step == 6
