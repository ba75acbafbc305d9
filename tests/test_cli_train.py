"""`flashbob-curv train`: the loop is the algorithm, goes on exactly, and is the same on any number of processes."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from command_line import Child, Outcome, Run, free_port, make_model, run_in_process
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from cli.train import TrainOptions
from curvature import load_model
from curvature.sophia import SophiaH, hutchinson_diagonal
from curvature.training import Training, _mixed
from curvature.training_model import grow_positions, load_for_training, set_dropout
from curvature.training_settings import Schedule, TrainingSettings
from curvature.training_text import open_training_text

SMALL = ("--seq", 32, "--device", "cpu", "--eval-batches", 2)
EXACT = (*SMALL, "--dtype", "float64")
STEPS = ("--max-steps", 6, "--hessian-every", 2, "--lr", 0.01, "--warmup", 2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: run_in_process(capsys, *arguments)


def record(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "train.json").read_text())


def losses(folder: Path) -> list[float]:
    found = record(folder)
    return [entry["loss"] for entry in (*found["history"], *found["evaluation"])]


def trained(run: Run, out: str, *arguments: object) -> list[float]:
    outcome = run("train", *arguments, "--out", out)
    assert outcome.code == 0, outcome.err
    return losses(Path(out))


# The loop


def test_the_loop_is_the_algorithm(run: Run, model: Path, tmp_path: Path) -> None:
    """Every loss of a Sophia-H run with accumulation, clipping and a schedule, from a loop written out in full."""
    found = trained(
        run,
        "out",
        "--model",
        model,
        *EXACT,
        *STEPS,
        "--batch",
        2,
        "--batches",
        3,
        "--hessian-batches",
        2,
        "--clip",
        0.5,
    )
    loaded = load_model(str(model), dtype=torch.float64, attention="eager")
    parts = open_training_text(loaded.tokenizer, "sample", 32, held_out=4)
    plain = loaded.model

    def loss_of(ids: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(plain(input_ids=ids).logits[:, :-1].flatten(0, 1).double(), ids[:, 1:].flatten())

    parameters = list(plain.parameters())
    groups = [[p for p in parameters if p.dim() >= 2], [p for p in parameters if p.dim() < 2]]
    optimizer = SophiaH(
        [{"params": groups[0], "weight_decay": 0.1}, {"params": groups[1], "weight_decay": 0.0}], interval=2
    )
    rates = [0.005, 0.01, 0.01, 0.00775, 0.00325, 0.001]
    expected = []
    for step in range(6):
        micro = parts.training.take(6).split(2)
        estimates = None
        if step % 2 == 0:
            samples = [
                hutchinson_diagonal(loss_of(ids), optimizer.parameters, seed=_mixed(0, 2, step, place))
                for place, ids in enumerate(micro[:2])
            ]
            estimates = [None if a is None or b is None else (a + b) / 2 for a, b in zip(*samples, strict=True)]
        mean = sum(loss_of(ids) for ids in micro) / 3
        mean.backward()
        expected.append(float(mean.detach()))
        norm = torch.sqrt(sum((p.grad**2).sum() for p in parameters))
        for p in parameters:
            p.grad *= min(1.0, 0.5 / (float(norm) + 1e-6))
        for group in optimizer.param_groups:
            group["lr"] = rates[step]
        if estimates is not None:
            optimizer.update_curvature(estimates)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        expected.append(float(loss_of(parts.held_out)))
    # Eager attention computes its softmax in float32.
    np.testing.assert_allclose(found, expected, rtol=2e-6)


def test_what_is_written(run: Run, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    outcome = run("train", "--model", model, *SMALL, *STEPS, "--eval-every", 4, "--checkpoint-every", 3, "--out", out)
    assert outcome.code == 0, outcome.err
    assert {path.name for path in out.iterdir()} == {"model", "train.json", "train.png", "checkpoints"}
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["step-000003", "step-000006"]
    found = record(out)
    assert found["settings"]["optimizer"] == "sophia"
    assert found["settings"]["lr"] == 0.01
    assert found["settings"]["min_lr"] == pytest.approx(0.001)
    assert [entry["step"] for entry in found["history"]] == [1, 2, 3, 4, 5, 6]
    assert [entry["tokens"] for entry in found["history"]] == [32 * n for n in range(1, 7)]
    assert [entry["step"] for entry in found["history"] if "estimate_seconds" in entry] == [1, 3, 5]
    assert all(0 < e["bounded_share"] <= 1 for e in found["history"] if "estimate_seconds" in e)
    assert [entry["step"] for entry in found["evaluation"]] == [4, 6]
    assert np.all(np.diff([entry["seconds"] for entry in found["history"]]) > 0)
    assert found["history"][-1]["lr"] == pytest.approx(0.001)
    assert found["data"]["sha256"]
    assert "tokens/s" in outcome.err
    stored = AutoModelForCausalLM.from_pretrained(out / "model", attn_implementation="eager")
    ids = open_training_text(load_model(str(model)).tokenizer, "sample", 32, held_out=2).held_out
    loss = float(stored(input_ids=ids, labels=ids).loss.detach())
    assert loss == pytest.approx(found["evaluation"][-1]["loss"], rel=1e-5)
    last = load_file(out / "checkpoints" / "step-000006" / "model.safetensors")
    assert all(torch.equal(t, last[name]) for name, t in load_file(out / "model" / "model.safetensors").items())


@pytest.mark.parametrize("optimizer", ["adamw", "sophia"])
def test_the_loss_falls(run: Run, model: Path, optimizer: str) -> None:
    found = trained(
        run, "out", "--model", model, *SMALL, "--batch", 8, "--max-steps", 30, "--lr", 0.01, "--optimizer", optimizer
    )
    assert np.mean(found[25:30]) < found[0] - 1.0


@pytest.mark.parametrize(
    "other",
    [("--attention", "math"), ("--attention", "hybrid"), ("--method", "streamed")],
    ids=["math", "hybrid", "streamed"],
)
def test_ways_to_differentiate_train_the_same(run: Run, model: Path, other: tuple[str, ...]) -> None:
    arguments = ("--model", model, *EXACT, *STEPS, "--eps", 1e-4)
    np.testing.assert_allclose(trained(run, "b", *arguments, *other), trained(run, "a", *arguments), rtol=1e-9)


def test_bfloat16_is_autocast_over_float32_weights(run: Run, model: Path) -> None:
    arguments = ("--model", model, *SMALL, *STEPS, "--batch", 4)
    exact, rounded = (trained(run, name, *arguments, "--dtype", name) for name in ("float32", "bfloat16"))
    assert rounded != exact
    np.testing.assert_allclose(rounded, exact, rtol=2e-2)
    assert {t.dtype for t in load_file("bfloat16/model/model.safetensors").values()} == {torch.float32}
    assert record(Path("bfloat16"))["settings"]["dtype"] == "bfloat16"


@pytest.mark.gpu
def test_attentions_train_alike_on_a_gpu(run: Run, model: Path) -> None:
    arguments = ("--model", model, "--seq", 64, "--eval-batches", 2, "--batch", 8, *STEPS, "--device", "cuda")
    exact = trained(run, "exact", *arguments, "--dtype", "float32", "--attention", "math")
    for attention in ("flashbob", "math", "hybrid"):
        found = trained(run, attention, *arguments, "--attention", attention)
        np.testing.assert_allclose(found, exact, rtol=2e-2)
        assert record(Path(attention))["settings"]["dtype"] == "bfloat16"


def test_only_what_is_asked_for_is_trained(run: Run, model: Path) -> None:
    trained(run, "out", "--model", model, *SMALL, *STEPS, "--params", r"mlp")
    before, after = load_file(model / "model.safetensors"), load_file("out/model/model.safetensors")
    changed = {name for name, t in after.items() if not torch.equal(t, before[name])}
    assert changed == {name for name in before if "mlp" in name}


def test_dropout_is_on_in_steps_alone(run: Run, model: Path) -> None:
    arguments = ("--model", model, *SMALL, "--max-steps", 2, "--lr", 1e-9, "--warmup", 0)
    plain, dropped, again = (
        trained(run, str(n), *arguments, "--dropout", rate) for n, rate in enumerate((0.0, 0.5, 0.5))
    )
    assert dropped == again
    assert abs(dropped[0] - plain[0]) > 1e-3
    assert dropped[-1] == pytest.approx(plain[-1], abs=1e-6), "an evaluation is without"


# Exact continuation


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


# Several processes


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


def test_an_estimate_that_cannot_be_shared_is_refused(model: Path, tmp_path: Path) -> None:
    outcomes = started(2, "--model", model, *SMALL, *STEPS, "--hessian-batches", 3, folder=tmp_path)
    assert [outcome.code for outcome in outcomes] == [1, 1]
    assert "hessian-batches must be a multiple of the 2 processes and at most the 2 micro-batches" in outcomes[0].err


# What does not work


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--lr", "1e25", "--max-steps", 9), r"step \d is (nan|inf).*lower --lr"),
        (("--warmup", 6), "warmup must be at least 0 and less than the 6 steps, got 6"),
        (("--min-lr", 1.0), r"min-lr must be between 0 and lr \(0.01\), got 1"),
        (("--lr", 0.0), "lr must be above 0, got 0.0"),
        (("--data", "empty.txt"), "data 'empty.txt': the text is empty"),
        (("--data", "short.txt"), "fewer than two windows in one file, one of them held out, of 64"),
        (("--data", "missing.txt"), "data 'missing.txt': there is no such file"),
        (("--eval-data", "short.txt"), "fewer than a window of 32"),
        (("--gamma", 0.0), "gamma must be finite and above 0"),
        (("--dropout", 1.0), r"dropout must be in \[0, 1\), got 1"),
        (("--clip", -1.0), "clip must be at least 0"),
        (("--hessian-batches", 2), "hessian-batches must be a multiple of the 1 processes and at most the 1"),
        (("--dtype", "bfloat16", "--method", "streamed"), "streamed Hessian products need --dtype float32 or float64"),
        (("--attention", "math", "--method", "streamed"), "need attention 'flashbob', got 'math'"),
        (("--attention", "hybrid", "--dropout", 0.1), "hybrid: attention dropout is not supported"),
        (("--params", "nothing"), "matches no parameter"),
    ],
    ids=lambda value: "-".join(str(v).strip("-") for v in value) if isinstance(value, tuple) else "",
)
def test_what_cannot_work_is_told_in_one_line(
    run: Run, model: Path, tmp_path: Path, arguments: tuple[object, ...], told: str
) -> None:
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "short.txt").write_text("A few words.")
    outcome = run("train", "--model", model, *SMALL, *STEPS, *arguments, "--out", "out")
    assert outcome.code == 1
    assert len(lines := [line for line in outcome.err.splitlines() if "error: " in line]) == 1
    assert re.search(told, lines[0]), lines[0]
    assert not (tmp_path / "out" / "train.json").exists()


def test_weights_stay_as_they_were_before_a_step_that_is_not_finite(model: Path) -> None:
    loaded, seq = load_for_training(str(model), lambda _: 32)
    parts = open_training_text(loaded.tokenizer, "sample", seq, held_out=1)
    training = Training(
        loaded.model, parts.training, parts.held_out, TrainingSettings(schedule=Schedule(1e25, 0.0, 0, 9))
    )
    with pytest.raises(FloatingPointError, match="lower --lr"):
        training.run()
    assert training.step >= 1
    assert all(bool(torch.isfinite(p).all()) for p in loaded.model.parameters())


# Schedule, model and configurations


def test_the_schedule_rises_falls_and_ends_at_its_floor() -> None:
    rates = [Schedule(1e-3, 1e-4, 150, 1908).rate(step) for step in range(1908)]
    assert rates[0] == pytest.approx(1e-3 / 150)
    assert rates[149] == rates[150] == 1e-3
    assert np.all(np.diff(rates[150:]) < 0)
    assert rates[(150 + 1907) // 2] == pytest.approx(5.5e-4, rel=2e-3)
    assert rates[-1] == pytest.approx(1e-4)
    assert Schedule(1.0, 0.5, 0, 1).rate(0) == 1.0


def test_the_shipped_configuration_trains_the_embedded_model(run: Run, root: Path) -> None:
    small = ("--seq", 32, "--batch", 1, "--batches", 2, "--eval-batches", 1, "--device", "cpu", "--max-steps", 2)
    found = trained(run, "out", "--config", root / "configs" / "train_tiny_sophia.yaml", *small)
    assert found[0] == pytest.approx(np.log(2048), abs=0.5), "from random weights"
    assert record(Path("out"))["model"]["parameters"] == 2369664


@pytest.mark.parametrize("name", ["train_gpt2_adamw", "train_gpt2_sophia", "train_tiny_sophia"])
def test_shipped_configurations_hold_options_and_a_possible_schedule(root: Path, name: str) -> None:
    content = yaml.safe_load((root / "configs" / f"{name}.yaml").read_text())
    options = TrainOptions(**{key.replace("-", "_"): value for key, value in content.items()})
    Schedule(float(options.lr or 0), float(options.min_lr or 0), options.warmup or 0, options.max_steps)
    if name.startswith("train_gpt2"):
        tokens = options.seq * options.batch * options.batches * 8
        assert tokens == 524_288
        assert tokens * options.max_steps == pytest.approx(1e9, rel=1e-3)


def test_random_weights_get_a_table_of_as_many_positions(tmp_path: Path, model: Path) -> None:
    loaded, seq = load_for_training(str(model), lambda _: 96, random_init=True)
    short, _ = load_for_training(str(model), lambda _: 64, random_init=True)
    assert seq == 96
    assert loaded.info.parameters == short.info.parameters + 32 * 16
    assert "its position table has 96 rows" in loaded.notices[-1]
    old, new = (m.model.transformer.wpe.weight.detach() for m in (short, loaded))
    assert torch.equal(new[:64], old)
    assert float(new[64:].std()) == pytest.approx(0.02, rel=0.15)
    loaded.model.save_pretrained(tmp_path / "grown")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "grown", attn_implementation="eager")
    ids = torch.randint(0, 2048, (1, 96))
    torch.testing.assert_close(again(input_ids=ids).logits, loaded.model(input_ids=ids).logits, rtol=1e-4, atol=1e-5)
    with torch.random.fork_rng():
        grow_positions(short.model, 70, seed=0)
    assert short.model.config.n_positions == 70


def test_a_rate_of_dropout_reaches_attention() -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model(
        "llama", hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=32
    )
    llama = AutoModelForCausalLM.from_config(config)
    set_dropout(llama, 0.25)
    assert llama.model.layers[0].self_attn.attention_dropout == 0.25
