"""Training on several processes is the same as on one."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from command_line import CHILDREN, Child, Outcome, free_port
from safetensors.torch import load_file
from training_runs import EXACT, SMALL, STEPS, losses, record

from curvature.distributed import join, leave
from curvature.training import Training, average


def started(
    count: int, *arguments: object, folder: Path, before: dict[int, Callable[[], None]] | None = None
) -> list[Outcome]:
    port, sabotage = free_port(), before or {}
    children = [
        Child("train", *arguments, folder=folder, processes=(rank, count, port), before=sabotage.get(rank))
        for rank in range(count)
    ]
    return [child.end() for child in children]


def fail_at_the_fifth_loss() -> None:
    loss, count = Training._loss, [0]

    def failing(self: Training, ids: torch.Tensor) -> torch.Tensor:
        count[0] += 1
        if count[0] == 5:
            raise FloatingPointError("this one fails")
        return loss(self, ids)

    Training._loss = failing  # type: ignore[method-assign]


def test_two_processes_train_as_one_does(model: Path, tmp_path: Path) -> None:
    """The same global batch: gradients, Hessian products and evaluations are averaged over the processes."""
    arguments = ("--model", model, *EXACT, *STEPS, "--hessian-batches", 2, "--eps", 1e-4, "--eval-every", 3)
    alone = Child("train", *arguments, "--batches", 4, "--out", "one", folder=tmp_path).end()
    assert alone.code == 0, alone.err
    outcomes = started(2, *arguments, "--batches", 2, "--out", "two", folder=tmp_path)
    assert [outcome.code for outcome in outcomes] == [0, 0], outcomes
    np.testing.assert_allclose(losses(tmp_path / "two"), losses(tmp_path / "one"), rtol=1e-11)
    one, two = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("one", "two"))
    for name, t in one.items():
        torch.testing.assert_close(two[name], t, rtol=1e-9, atol=1e-11)
    assert record(tmp_path / "two")["environment"]["processes"] == 2
    assert outcomes[1].out == outcomes[1].err == "", "only the first one speaks"


def test_a_process_that_fails_ends_all_and_the_state_stays(model: Path, tmp_path: Path) -> None:
    arguments = ("--model", model, *SMALL, *STEPS, "--save-every", 1, "--out", "out")
    outcomes = started(2, *arguments, folder=tmp_path, before={1: fail_at_the_fifth_loss})
    assert [outcome.code for outcome in outcomes] == [1, 1]
    assert "process 1 of 2: this one fails" in outcomes[0].err
    assert "with --resume goes on from there" in outcomes[0].err
    resumed = started(2, *arguments, "--resume", folder=tmp_path)
    assert [outcome.code for outcome in resumed] == [0, 0], resumed
    assert len(record(tmp_path / "out")["history"]) == 6


def one_of_two(rank: int, port: int, folder: Path) -> None:
    """A process that has the first of three tensors where it is process 0, and the second where it is process 1."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = join()
    like = [torch.empty(2, 3, dtype=torch.float64), torch.empty(4, dtype=torch.float64), torch.empty(2).double()]
    mine = [torch.full_like(t, number + 2) if number == rank else None for number, t in enumerate(like)]
    found = average(mine, like, processes)
    assert found[rank] is mine[rank], "in its own memory"
    torch.save(found, folder / f"{rank}.pt")
    leave()


def test_means_do_not_depend_on_what_a_process_lacks(tmp_path: Path) -> None:
    port = free_port()
    children = [CHILDREN.Process(target=one_of_two, args=(rank, port, tmp_path)) for rank in range(2)]
    for child in children:
        child.start()
    for child in children:
        child.join(120)
        child.kill()
    for rank in range(2):
        first, second, third = torch.load(tmp_path / f"{rank}.pt")
        assert torch.equal(first, torch.full((2, 3), 1.0, dtype=torch.float64))
        assert torch.equal(second, torch.full((4,), 1.5, dtype=torch.float64))
        assert third is None, "no process has it"


def test_an_estimate_that_cannot_be_shared_is_refused(model: Path, tmp_path: Path) -> None:
    outcomes = started(2, "--model", model, *SMALL, *STEPS, "--hessian-batches", 3, folder=tmp_path)
    assert [outcome.code for outcome in outcomes] == [1, 1]
    assert "hessian-batches must be a multiple of the 2 processes and at most the 2 micro-batches" in outcomes[0].err
