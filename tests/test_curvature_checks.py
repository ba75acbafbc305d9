"""Self-checks: what passes, what is refused, and with which reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from curvature_oracles import MatrixOperator, NormFree, tiny_gpt2, tiny_llama, token_batch, with_spectrum
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from curvature import CheckError, GGNOperator, HessianOperator, check_operator
from curvature.checks import finite_difference_error
from curvature.precision import roundoff


@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float64, 1e-10), (torch.float32, 3e-3)], ids=["float64", "float32"]
)
@pytest.mark.parametrize("method", ["whole", "streamed"])
def test_a_right_product_passes(method: Any, dtype: torch.dtype, limit: float) -> None:
    model = tiny_llama().to(dtype)
    before = [p.detach().clone() for p in model.parameters()]
    op = HessianOperator(model, [token_batch(7, (2, 6))], method=method)
    checks = check_operator(op, dtype, finite_difference=True)
    assert checks.finite_difference is not None
    assert checks.finite_difference < limit
    assert checks.repeatability == 0
    assert checks.symmetry < checks.symmetry_limit
    for p, start in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, start)


class WrongSecond(torch.autograd.Function):
    """x^3 / 3, whose second derivative is taken for x in place of 2 x: symmetric, repeatable, and wrong."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3 / 3

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return g * (x * x.detach())


def test_a_wrong_second_derivative_shows_in_finite_differences_only() -> None:
    model = nn.Linear(3, 2).double()
    batch = {"x": torch.randn(4, 3, dtype=torch.float64)}
    op = HessianOperator(model, [batch], loss=lambda m, b: (WrongSecond.apply(m(b["x"])).sum(), 4), method="whole")
    check_operator(op, torch.float64)
    with pytest.raises(CheckError, match="off the differences of gradients"):
        check_operator(op, torch.float64, finite_difference=True)


def test_a_dropout_out_of_reach_is_refused() -> None:
    model = NormFree()
    logits = model.forward
    model.forward = lambda input_ids: F.dropout(logits(input_ids), 0.2)  # training=True by default
    op = HessianOperator(model, [token_batch(7, (2, 6))], method="whole")
    with pytest.raises(CheckError, match="the loss is random"):
        check_operator(op, torch.float64)


def test_an_asymmetric_operator_is_refused() -> None:
    matrix, _ = with_spectrum(range(1, 21))
    matrix[0, 1] += 1.0
    with pytest.raises(CheckError, match="not symmetric"):
        check_operator(MatrixOperator(matrix), torch.float64)


def test_what_differences_cannot_tell_is_refused() -> None:
    batches = [token_batch(7, (1, 5))]
    with pytest.raises(TypeError, match="only a Hessian"):
        check_operator(GGNOperator(tiny_gpt2(), batches, method="whole"), torch.float64, finite_difference=True)
    op = HessianOperator(tiny_gpt2().bfloat16(), batches, method="whole")
    with pytest.raises(NotImplementedError, match="in 16 bits"):
        finite_difference_error(op)
    with pytest.raises(ValueError, match="step must be positive"):
        finite_difference_error(HessianOperator(tiny_gpt2(), batches, method="whole"), step=0)


@pytest.mark.parametrize("operator", [HessianOperator, GGNOperator])
def test_the_module_of_the_first_number_that_is_not_finite_is_named(operator: Any) -> None:
    model = tiny_gpt2()
    op = HessianOperator(model, [token_batch(7, (1, 5)), token_batch(7, (1, 4))], method="whole")
    model.transformer.h[1].mlp.register_forward_hook(lambda m, a, output: output * float("nan"))
    with pytest.raises(FloatingPointError, match=r"batches\[0\].* is that of 'transformer\.h\.1\.mlp'"):
        op @ torch.ones(op.shape[0], dtype=torch.float64)
    with pytest.raises(FloatingPointError, match=r"transformer\.h\.1\.mlp"):
        op.gradient()


def test_float32_on_a_gpu_is_as_coarse_as_its_products() -> None:
    with FakeTensorMode():
        there, here = torch.empty(1, device="cuda"), torch.empty(1)
        double, half = there.double(), there.bfloat16()
    assert roundoff([there, here]) == torch.finfo(torch.float32).eps
    torch.set_float32_matmul_precision("high")
    try:
        assert roundoff([there]) == 2.0**-10
        assert roundoff([here]) == torch.finfo(torch.float32).eps
        assert roundoff([double]) == torch.finfo(torch.float64).eps
        assert roundoff([there, half]) == torch.finfo(torch.bfloat16).eps
    finally:
        torch.set_float32_matmul_precision("highest")
