"""Descent inside a computation: right by hand, and differentiable through."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from curvature.inner_descent import descend


def quadratic(matrix: Tensor, x: Tensor) -> Tensor:
    """x after descent on x' A x / 2, as its closed form (1 - rate A)^steps x."""
    return descend(lambda v: 0.5 * v["x"] @ matrix @ v["x"], {"x": x}, rates=0.1, steps=3)["x"]


def symmetric() -> Tensor:
    a = torch.randn(4, 4, dtype=torch.float64)
    return (a + a.T).requires_grad_()


def test_descent_on_a_quadratic_form() -> None:
    matrix, x = symmetric(), torch.randn(4, dtype=torch.float64, requires_grad=True)
    step = torch.eye(4, dtype=torch.float64) - 0.1 * matrix
    expected = step @ step @ step @ x
    found = quadratic(matrix, x)
    torch.testing.assert_close(found, expected)
    weights = torch.randn(4, dtype=torch.float64)
    (by_x,) = torch.autograd.grad(found @ weights, x, retain_graph=True)
    torch.testing.assert_close(by_x, torch.autograd.grad(expected @ weights, x)[0])
    half = matrix.detach().clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda a, y: quadratic((a + a.T) / 2, y), (half, x))


def test_rates_are_learned_and_first_order_is_another_gradient() -> None:
    start = {"x": torch.tensor([2.0, -1.0], requires_grad=True), "y": torch.tensor(3.0)}
    rates = {"x": torch.tensor([0.1, 0.2], requires_grad=True), "y": 0.5}

    def outer(second_order: bool) -> tuple[Tensor, ...]:
        end = descend(lambda v: (v["x"] ** 2).sum() * v["y"], start, rates=rates, create_graph=second_order)
        return torch.autograd.grad(end["x"].sum(), (start["x"], rates["x"]))

    by_start, by_rate = outer(True)
    torch.testing.assert_close(by_start, 1 - rates["x"].detach() * 6)
    torch.testing.assert_close(by_rate, -6 * start["x"].detach())
    by_start, by_rate = outer(False)
    torch.testing.assert_close(by_start, torch.ones(2))
    torch.testing.assert_close(by_rate, -6 * start["x"].detach())


def test_values_that_the_loss_does_not_use_stay() -> None:
    start = {"x": torch.ones(2), "y": torch.ones(3)}
    end = descend(lambda v: v["x"].sum(), start, rates=0.5, steps=2)
    assert torch.equal(end["y"], start["y"])
    assert torch.equal(end["x"], torch.zeros(2))
    assert descend(lambda v: v["x"].sum(), start, rates=0.5, steps=0)["x"] is start["x"]


def test_bad_arguments_are_refused() -> None:
    start = {"x": torch.ones(2), "y": torch.ones(3)}
    with pytest.raises(ValueError, match="steps must be at least 0, got -1"):
        descend(lambda v: v["x"].sum(), start, rates=0.5, steps=-1)
    with pytest.raises(ValueError, match=r"rates: none for \['y'\]"):
        descend(lambda v: v["x"].sum(), start, rates={"x": 0.1})
