"""`flashbob-curv train`: the loop is the algorithm, and what is written is what happened."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from command_line import Run
from safetensors.torch import load_file
from torch.nn import functional as F
from training_runs import EXACT, SMALL, STEPS, record, trained
from transformers import AutoModelForCausalLM

from curvature import load_model
from curvature.sophia import SophiaH, hutchinson_diagonal
from curvature.training import _mixed
from curvature.training_text import open_training_text


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
    assert re.search(r"loss \d\.\d{4}, \d+% at bound, [\d,]+ tokens/s", outcome.err)
    shares = sorted(e["bounded_share"] for e in found["history"] if "bounded_share" in e)
    assert re.search(rf"updates at their bound +{shares[1]:.0%} of the weights", outcome.out)
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
