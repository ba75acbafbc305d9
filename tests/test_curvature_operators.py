"""HessianOperator against dense Hessians, finite differences and the definition of the loss."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from curvature_oracles import (
    MatrixOperator,
    NormFree,
    dense_hessian,
    mean_loss,
    relative,
    tiny_gpt2,
    tiny_llama,
    tiny_opt,
    token_batch,
    with_spectrum,
)
from torch import Tensor, nn
from torch.func import functional_call

from curvature import HessianOperator, LinearOperator, hvp


def operator(model: nn.Module, batches: Any, **options: Any) -> HessianOperator:
    """The whole-graph operator; the streamed method has tests of its own that compare with it."""
    return HessianOperator(model, batches, **({"method": "whole"} | options))


def columns(op: LinearOperator) -> Tensor:
    return op @ torch.eye(op.shape[0], dtype=op.dtype)


MODELS = {
    "gpt2-tied": tiny_gpt2,
    "gpt2-untied": lambda: tiny_gpt2(tied=False, layers=1),
    "llama-gqa": tiny_llama,
    "opt": tiny_opt,
}


@pytest.mark.parametrize("name", MODELS)
def test_identity_gives_the_dense_hessian(name: str) -> None:
    model, batches = MODELS[name](), [token_batch(7, (2, 6))]
    op = operator(model, batches)
    dense = dense_hessian(model, batches)
    assert op.shape == (len(dense), len(dense))
    assert relative(columns(op), dense) < 1e-10


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch.func's own use
def test_identity_gives_the_hessian_of_torch_func() -> None:
    model, batches = NormFree(), [token_batch(7, (2, 5), seed=s) for s in range(2)]
    names = [name for name, _ in model.named_parameters()]
    shapes = [p.shape for p in model.parameters()]

    def loss(flat: Tensor) -> Tensor:
        pieces = flat.split([s.numel() for s in shapes])
        weights = {n: p.view(s) for n, p, s in zip(names, pieces, shapes, strict=True)}

        def call(batch: dict[str, Tensor]) -> Tensor:
            logits = functional_call(model, weights, (batch["input_ids"],))
            return -logits[:, :-1].log_softmax(-1).gather(-1, batch["input_ids"][:, 1:, None]).sum()

        return sum(map(call, batches)) / sum(b["input_ids"][:, 1:].numel() for b in batches)

    expected = torch.func.hessian(loss)(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    assert relative(columns(operator(model, batches)), expected) < 1e-12


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch.func's own use
def test_layer_norm_trap_of_forward_over_reverse_does_not_reach_the_operator() -> None:
    """A second derivative through an affine LayerNorm, which torch.func.hessian is known to get wrong."""
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 1)).double()
    x = torch.randn(5, 3, dtype=torch.float64)
    weights = dict(layer.named_parameters())
    shapes = [p.shape for p in weights.values()]

    def loss(flat: Tensor) -> Tensor:
        pieces = flat.split([s.numel() for s in shapes])
        return (
            functional_call(layer, dict(zip(weights, map(Tensor.view, pieces, shapes), strict=True)), (x,))
            .tanh()
            .mean()
        )

    flat = torch.cat([p.detach().reshape(-1) for p in weights.values()])
    by_double_backward = torch.autograd.functional.hessian(loss, flat)
    op = operator(layer, [{"x": x}], loss=lambda model, batch: (model(batch["x"]).tanh().sum(), len(x)))
    assert relative(columns(op), by_double_backward) < 1e-12
    gradient = torch.func.grad(loss)
    step = 1e-5 * torch.eye(len(flat), dtype=torch.float64)
    differences = torch.stack([(gradient(flat + e) - gradient(flat - e)) / 2e-5 for e in step])
    assert relative(columns(op), differences) < 1e-8
    wrong = relative(torch.func.hessian(loss)(flat), differences)
    assert wrong > 1e-4, "torch.func.hessian is right here now: the design's remark on the trap is out of date"


@pytest.mark.parametrize("name", MODELS)
def test_product_is_the_derivative_of_the_gradient(name: str) -> None:
    """A float64 model must be float64 throughout: an inner float32 norm or softmax caps the agreement near 1e-6."""
    model, batches = MODELS[name](), [token_batch(7, (2, 6))]
    op = operator(model, batches)
    v = torch.randn(op.shape[0], dtype=torch.float64)
    v /= v.norm()

    def gradient(step: float) -> Tensor:
        moved = copy.deepcopy(model)
        with torch.no_grad():
            for p, piece in zip(moved.parameters(), op.space.split(v), strict=True):
                p += step * piece
        return operator(moved, batches).gradient()

    h = 1e-3
    slope = (8 * (gradient(h) - gradient(-h)) - (gradient(2 * h) - gradient(-2 * h))) / (12 * h)
    assert relative(op @ v, slope) < 1e-8


@pytest.mark.parametrize("name", MODELS)
def test_symmetry_error_is_rounding(name: str) -> None:
    assert operator(MODELS[name](), [token_batch(7, (2, 6))]).symmetry_error(seed=3) < 1e-12


def test_symmetry_error_sees_an_asymmetric_operator() -> None:
    matrix, _ = with_spectrum(range(1, 21))
    matrix[0, 1] += 1.0
    assert MatrixOperator(matrix).symmetry_error() > 1e-4
    assert MatrixOperator(torch.zeros(3, 3, dtype=torch.float64)).symmetry_error() == 0.0


def test_every_form_of_vector_gives_the_same_product() -> None:
    op = operator(tiny_gpt2(), [token_batch(7, (1, 5))])
    v = torch.randn(op.shape[0], 3, dtype=torch.float64)
    expected = op @ v
    assert expected.shape == v.shape
    single = op @ v[:, 1]
    assert torch.allclose(single, expected[:, 1], rtol=0, atol=1e-15)
    as_list = op @ op.space.split(v[:, 1].contiguous())
    assert isinstance(as_list, list)
    assert torch.equal(torch.cat([t.reshape(-1) for t in as_list]), single)
    as_dict = op @ op.space.named(v[:, 1].contiguous())
    assert list(as_dict) == list(op.space.names)
    assert all(torch.equal(a, b) for a, b in zip(as_dict.values(), as_list, strict=True))
    assert torch.equal((op @ v[:, 1].float()), op @ v[:, 1].float().double())


def test_product_is_linear() -> None:
    op = operator(tiny_llama(), [token_batch(7, (1, 5))])
    u, v = torch.randn(2, op.shape[0], dtype=torch.float64)
    assert relative(op @ (2 * u - 3 * v), 2 * (op @ u) - 3 * (op @ v)) < 1e-13


def test_scipy_sees_the_same_matrix() -> None:
    op = operator(tiny_gpt2(layers=1), [token_batch(7, (1, 5))])
    linear = op.to_scipy()
    block = np.random.default_rng(0).standard_normal((op.shape[0], 2))
    expected = (op @ torch.from_numpy(block)).numpy()
    np.testing.assert_allclose(linear @ block, expected, rtol=0, atol=1e-15)
    np.testing.assert_allclose(linear.matvec(block[:, :1]), expected[:, :1], rtol=0, atol=1e-14)
    np.testing.assert_allclose(linear.rmatvec(block[:, 0]), expected[:, 0], rtol=0, atol=1e-14)
    assert linear.dtype == np.float64
    both = linear.matvec(block[:, 0] + 2j * block[:, 1])
    np.testing.assert_allclose(both, expected[:, 0] + 2j * expected[:, 1], rtol=0, atol=1e-14)


def test_hvp_is_one_product() -> None:
    model, batches = tiny_gpt2(), [token_batch(7, (1, 5))]
    v = torch.randn(operator(model, batches).shape[0], dtype=torch.float64)
    assert torch.equal(hvp(model, batches, v, method="whole"), operator(model, batches) @ v)


# Weighting


def test_unequal_batches_count_token_by_token() -> None:
    model = tiny_gpt2()
    batches = [token_batch(7, (3, 9), seed=1), token_batch(7, (1, 4), seed=2), token_batch(7, (1, 2), seed=3)]
    op = operator(model, batches)
    v = torch.randn(op.shape[0], dtype=torch.float64)
    assert relative(op @ v, dense_hessian(model, batches) @ v) < 1e-10
    assert op.loss_value() == pytest.approx(float(mean_loss(model, batches).detach()), rel=1e-13)
    unweighted = sum(operator(model, [b]) @ v for b in batches) / len(batches)
    assert relative(unweighted, op @ v) > 0.1, "the test's batches do not tell the weightings apart"


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("make", [tiny_gpt2, tiny_llama], ids=["gpt2", "llama"])
def test_padding_changes_nothing(make: Any, side: str) -> None:
    model = make()
    long, short = token_batch(7, (1, 9), seed=1)["input_ids"], token_batch(7, (1, 4), seed=2)["input_ids"]
    pad, ones = torch.full((1, 5), 6), torch.ones(1, 4, dtype=torch.int64)
    order = slice(None) if side == "right" else slice(None, None, -1)
    padded = {
        "input_ids": torch.cat([long, torch.cat([short, pad][order], 1)]),
        "attention_mask": torch.cat([torch.ones(1, 9, dtype=torch.int64), torch.cat([ones, 0 * pad][order], 1)]),
    }
    alone = operator(model, [{"input_ids": long}, {"input_ids": short}])
    v = torch.randn(alone.shape[0], dtype=torch.float64)
    together = operator(model, [padded])
    labelled = operator(
        model, [padded | {"labels": padded["input_ids"].masked_fill(padded["attention_mask"] == 0, -100)}]
    )
    for op in (together, labelled):
        assert op.loss_value() == pytest.approx(alone.loss_value(), rel=1e-13)
        assert relative(op.gradient(), alone.gradient()) < 1e-12
        assert relative(op @ v, alone @ v) < 1e-10


def test_a_batch_without_counted_tokens_adds_nothing() -> None:
    model, batch = tiny_gpt2(), token_batch(7, (1, 5))
    empty = batch | {"labels": torch.full_like(batch["input_ids"], -100)}
    op = operator(model, [batch])
    v = torch.randn(op.shape[0], dtype=torch.float64)
    assert torch.equal(operator(model, [empty, batch]) @ v, op @ v)
    with pytest.raises(ValueError, match="no token is counted"):
        operator(model, [empty]) @ v
    with pytest.raises(ValueError, match="no token is counted"):
        operator(model, [empty]).gradient()
    with pytest.raises(ValueError, match="no token is counted"):
        operator(model, [empty]).loss_value()


def test_gradient_and_loss_are_those_of_the_definition() -> None:
    model, batches = tiny_llama(), [token_batch(7, (2, 6)), token_batch(7, (1, 4), seed=5)]
    op = operator(model, batches)
    loss = mean_loss(model, batches)
    expected = torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, list(model.parameters()))])
    assert relative(op.gradient(), expected) < 1e-13
