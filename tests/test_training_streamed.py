"""Training with streamed Hessian products: the model is inspected once, and again where it is another one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tiny_causal_lms import VOCABULARY, tiny_lm
from torch import nn

import curvature.training
from curvature import HessianOperator, Streaming
from curvature.training import Training
from curvature.training_settings import Schedule, TrainingSettings
from curvature.training_text import TokenTable


@pytest.fixture
def inspected(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each estimate's operator, whether it has to inspect the model."""
    noted: list[bool] = []

    def noting(*given: Any, streaming: Streaming, **settings: Any) -> HessianOperator:
        noted.append(streaming.segments is None)
        return HessianOperator(*given, streaming=streaming, **settings)

    monkeypatch.setattr(curvature.training, "HessianOperator", noting)
    return noted


def training(streamed: bool) -> Training:
    ids = np.random.default_rng(0).integers(3, VOCABULARY, 600).astype(np.int32)
    settings = TrainingSettings(
        schedule=Schedule(1e-2, 1e-3, 1, 4), interval=2, accumulate=2, estimates=2, streamed=streamed
    )
    held_out = torch.from_numpy(ids[:24].astype(np.int64)).view(3, 8)
    return Training(tiny_lm("gpt2"), TokenTable(ids, 8, "random", 0), held_out, settings)


def losses(of: Training) -> list[float]:
    return [entry["loss"] for entry in of.result.history]


def test_the_model_is_inspected_for_the_first_of_all_estimates(inspected: list[bool]) -> None:
    streamed, whole = training(True), training(False)
    streamed.run()
    whole.run()
    assert inspected == [True, False, False, False]
    np.testing.assert_allclose(losses(streamed), losses(whole), rtol=1e-10)


@pytest.mark.parametrize("what", ["attention", "module"])
def test_a_model_that_changes_is_inspected_anew(what: str, inspected: list[bool]) -> None:
    def change(of: Training) -> None:
        if what == "attention":
            of.model.set_attn_implementation("eager")
        else:
            of.model.transformer.h[1].mlp.act = nn.ReLU()

    def run(of: Training) -> list[float]:
        of.run(report=lambda step, *_: change(of) if step == 2 else None)
        return losses(of)

    found = run(training(True))
    assert inspected == [True, False, True, False]
    np.testing.assert_allclose(found, run(training(False)), rtol=1e-10)
