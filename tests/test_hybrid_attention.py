"""The baseline attention is exact, and refuses what it does not compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_causal_lms import VOCABULARY, tiny_lm
from torch import Tensor

from curvature import HessianOperator
from flashbob import sdpa_bob
from flashbob.hybrid import hybrid_attention, register_hybrid_attention

register_hybrid_attention()


def inputs(*shape: int) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for _ in range(3))
    return q, k, v


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_value_and_both_derivatives(causal: bool, scale: float | None) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return hybrid_attention(q, k, v, is_causal=causal, scale=scale)

    tensors = inputs(1, 2, 5, 4)
    expected = sdpa_bob(*tensors, is_causal=causal, scale=scale, backend="reference")
    torch.testing.assert_close(attend(*tensors), expected)
    assert torch.autograd.gradcheck(attend, tensors)
    assert torch.autograd.gradgradcheck(attend, tensors)


def test_a_models_hessian_is_the_same() -> None:
    batch = {"input_ids": torch.randint(0, VOCABULARY, (2, 9))}
    ours, hybrid = (
        HessianOperator(tiny_lm("gpt2", attn_implementation=name), [batch], method="whole")
        for name in ("flashbob", "hybrid")
    )
    z = torch.randn(ours.shape[0], dtype=torch.float64)
    torch.testing.assert_close(hybrid @ z, ours @ z, rtol=1e-9, atol=1e-11)


def test_what_it_does_not_compute_is_refused() -> None:
    q, k, v = inputs(1, 2, 5, 4)
    with pytest.raises(NotImplementedError, match=r"no fused attention for torch.float64 on cpu.*2/1 heads"):
        hybrid_attention(q, k[:, :1], v[:, :1], is_causal=True)
    with pytest.raises(NotImplementedError, match="forward mode"):
        torch.func.jvp(lambda q: hybrid_attention(q, k, v, is_causal=True), (q.detach(),), (q.detach(),))


@pytest.mark.parametrize(
    ("name", "given", "told"),
    [
        ("gpt2", {"attention_mask": torch.tensor([[0, 1, 1, 1, 1, 1, 1, 1]])}, "padding"),
        ("mistral-window", {}, "a sliding window"),
    ],
)
def test_models_that_ask_for_more_are_refused(name: str, given: dict[str, Any], told: str) -> None:
    model = tiny_lm(name, attn_implementation="hybrid")
    with pytest.raises(NotImplementedError, match=f"hybrid: {told} is not supported"):
        model(input_ids=torch.randint(0, VOCABULARY, (1, 8)), **given)
