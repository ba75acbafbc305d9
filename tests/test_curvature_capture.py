"""Products that are recorded once and replayed: the same numbers as launched ones."""

from __future__ import annotations

import warnings

import pytest
import torch

from curvature import HessianOperator
from curvature.streaming import Streaming
from tests.tiny_causal_lms import VOCABULARY, tiny_lm

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3"])
def test_replayed_products_equal_launched_ones(name: str) -> None:
    model = tiny_lm(name, dtype=torch.float32).to("cuda")
    batches = [
        {"input_ids": torch.randint(0, VOCABULARY, (2, 40))},
        {"input_ids": torch.randint(0, VOCABULARY, (1, 64))},
    ]
    recorded = HessianOperator(model, batches, method="streamed")
    launched = HessianOperator(model, batches, method="streamed", streaming=Streaming(capture=False))
    directions = [torch.randn(recorded.space.size, device="cuda") for _ in range(4)]
    directions[3][: recorded.space.size // 2] = 0  # zero in other parameters than the recorded one
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # that a product cannot be recorded is told by a warning
        for v in [*directions, directions[0]]:
            torch.testing.assert_close(recorded @ v, launched @ v, rtol=1e-4, atol=1e-5)


def test_a_changed_weight_makes_a_new_recording() -> None:
    model = tiny_lm("gpt2", dtype=torch.float32).to("cuda")
    op = HessianOperator(model, [{"input_ids": torch.randint(0, VOCABULARY, (2, 40))}], method="streamed")
    v = torch.randn(op.space.size, device="cuda")
    before = [op @ v for _ in range(3)][-1]
    with torch.no_grad():
        next(model.parameters()).mul_(1.5)
    after = [op @ v for _ in range(3)]
    torch.testing.assert_close(after[2], after[0], rtol=1e-4, atol=1e-5)
    assert float((after[0] - before).norm() / before.norm()) > 1e-2
