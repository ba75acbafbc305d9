"""The summed cross-entropy against PyTorch's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from curvature.cross_entropy import cross_entropy_sum
from curvature.storage import LiveBytes


def problem(dtype: torch.dtype = torch.float64, rows: int = 6, vocabulary: int = 9) -> tuple[Tensor, Tensor]:
    logits = (3 * torch.randn(2, rows // 2, vocabulary, dtype=torch.float64)).to(dtype)
    targets = torch.randint(0, vocabulary, (2, rows // 2))
    targets[1, -1] = -100
    return logits.requires_grad_(), targets


def test_derivatives_pass_gradcheck() -> None:
    logits, targets = problem()
    assert torch.autograd.gradcheck(lambda x: cross_entropy_sum(x, targets, -100), logits)
    assert torch.autograd.gradgradcheck(lambda x: cross_entropy_sum(x, targets, -100), logits)


def derivatives(total: Tensor, logits: Tensor, u: Tensor) -> list[Tensor]:
    """Value, gradient, and second derivative; the upstream gradient of `total` varies with the logits."""
    (first,) = torch.autograd.grad(total * total, logits, create_graph=True)
    return [total, first, *torch.autograd.grad(first, logits, u)]


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)]
)
def test_derivatives_are_those_of_pytorch(dtype: torch.dtype, tolerance: float) -> None:
    logits, targets = problem(dtype)
    u = torch.randn_like(logits)
    raised = logits.float() if dtype == torch.bfloat16 else logits
    own = F.cross_entropy(raised.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
    total = cross_entropy_sum(logits, targets, -100)
    assert total.dtype == own.dtype
    for a, b in zip(derivatives(total, logits, u), derivatives(own, logits, u), strict=True):
        assert (a - b).norm() <= tolerance * b.norm()


def test_nothing_counted_is_zero_with_zero_gradients() -> None:
    logits, targets = problem()
    total = cross_entropy_sum(logits, torch.full_like(targets, -100), -100)
    (gradient,) = torch.autograd.grad(total, logits)
    assert float(total.detach()) == 0
    assert not gradient.any()


def test_a_third_derivative_raises() -> None:
    logits, targets = problem()
    (first,) = torch.autograd.grad(cross_entropy_sum(logits, targets, -100), logits, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), logits, create_graph=True)
    with pytest.raises(NotImplementedError, match="third derivative"):
        torch.autograd.grad(second.sum(), logits)


def test_few_arrays_of_the_size_of_the_logits() -> None:
    logits, targets = problem(torch.bfloat16, rows=64, vocabulary=2048)
    u = torch.randn_like(logits)
    with LiveBytes() as live:
        live.ignore([logits, u])
        (first,) = torch.autograd.grad(cross_entropy_sum(logits, targets, -100), logits, create_graph=True)
        torch.autograd.grad(first, logits, u)
    assert live.peak < 3.2 * 4 * logits.numel()
