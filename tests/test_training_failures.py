"""Training that cannot work says so in one line."""

from __future__ import annotations

import math
import re
import shutil
from pathlib import Path

import pytest
import torch
from command_line import Run
from safetensors.torch import load_file, save_file
from training_runs import SMALL, STEPS

from curvature.training import Training
from curvature.training_model import load_for_training
from curvature.training_settings import Schedule, TrainingSettings
from curvature.training_text import open_training_text


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--lr", "1e25", "--max-steps", 9), r"step \d: the .* is (nan|inf).*lower --lr"),
        (
            ("--model", "nan"),
            "step 1: loss: it is nan, which has no Hessian; no update was made yet",
        ),
        (("--model", "nan", "--optimizer", "adamw"), "step 1: the loss is nan; no update was made yet"),
        (("--warmup", 6), "warmup must be at least 0 and less than the 6 steps, got 6"),
        (("--min-lr", 1.0), r"min-lr must be between 0 and lr \(0.01\), got 1"),
        (("--lr", 0.0), "lr must be finite and above 0, got 0.0"),
        (("--data", "empty.txt"), "data 'empty.txt': the text is empty"),
        (("--data", "short.txt"), "fewer than two windows in one file, one of them held out, of 64"),
        (("--data", "missing.txt"), "data 'missing.txt': there is no such file"),
        (("--eval-data", "short.txt"), "fewer than a window of 32"),
        (("--gamma", 0.0), "gamma must be finite and above 0"),
        (("--dropout", 1.0), r"dropout must be in \[0, 1\), got 1"),
        (("--clip", -1.0), "clip must be finite and at least 0"),
        (("--clip", "inf"), "clip must be finite and at least 0"),
        (("--weight-decay", -1.0, "--optimizer", "adamw"), "weight-decay must be finite and at least 0, got -1.0"),
        (("--beta1", 1.5, "--optimizer", "adamw"), r"beta1 must be finite and in \[0, 1\), got 1.5"),
        (("--beta2", "nan"), r"beta2 must be finite and in \[0, 1\), got nan"),
        (("--eps", 0.0, "--optimizer", "adamw"), "eps must be finite and above 0, got 0.0"),
        (("--out", "short.txt"), "--out short.txt: cannot be written .* choose another folder"),
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
    if "nan" in arguments[:2]:
        shutil.copytree(model, tmp_path / "nan")
        weights = load_file(tmp_path / "nan" / "model.safetensors")
        weights["transformer.wte.weight"][0] = math.nan
        save_file(weights, tmp_path / "nan" / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "short.txt").write_text("A few words.")
    outcome = run("train", "--model", model, "--out", "out", *SMALL, *STEPS, *arguments)
    assert outcome.code == 1
    assert len(lines := [line for line in outcome.err.splitlines() if "error: " in line]) == 1
    assert re.search(told, lines[0]), lines[0]
    assert "--resume" not in lines[0], "it would come to the same end"
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
