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

from curvature import CausalLMLoss, HessianOperator, LinearOperator, hvp
from curvature.vectors import inner, norm


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


# Parameters


def test_tied_weights_count_once() -> None:
    tied, untied = tiny_gpt2(), tiny_gpt2(tied=False)
    assert (
        operator(untied, [token_batch(7, (1, 5))]).shape[0] - tied.lm_head.weight.numel()
        == (operator(tied, [token_batch(7, (1, 5))]).shape[0])
    )
    assert operator(tied, [token_batch(7, (1, 5))]).shape[0] == sum(p.numel() for p in tied.parameters())


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (r"h\.1\.ln_2", ["transformer.h.1.ln_2.weight", "transformer.h.1.ln_2.bias"]),
        (["transformer.wpe.weight", "transformer.wte.weight"], ["transformer.wte.weight", "transformer.wpe.weight"]),
        (r"lm_head", ["transformer.wte.weight"]),
        (["lm_head.weight"], ["transformer.wte.weight"]),
    ],
    ids=["regex", "names in model order", "regex on a tied name", "tied name"],
)
def test_restriction_is_the_diagonal_block(params: str | list[str], expected: list[str]) -> None:
    model, batches = tiny_gpt2(), [token_batch(7, (2, 6))]
    whole, part = operator(model, batches), operator(model, batches, params=params)
    assert list(part.space.names) == expected
    inside = torch.cat([torch.arange(whole.shape[0])[whole.space.slices()[name]] for name in expected])
    v = torch.zeros(whole.shape[0], dtype=torch.float64)
    v[inside] = torch.randn(len(inside), dtype=torch.float64)
    assert relative(part @ v[inside], (whole @ v)[inside]) < 1e-12
    assert all(p.requires_grad for p in model.parameters())


def test_frozen_parameters_are_left_out() -> None:
    model = tiny_gpt2()
    model.transformer.wpe.requires_grad_(False)
    op = operator(model, [token_batch(7, (1, 5))])
    assert "transformer.wpe.weight" not in op.space.names
    op @ torch.ones(op.shape[0], dtype=torch.float64)
    assert not model.transformer.wpe.weight.requires_grad


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ("no_such", "'no_such' matches no parameter"),
        ("(", "is not a regular expression"),
        ("wpe", "matches only parameters that do not require a gradient"),
        (["lm_head.bias"], "no parameter is named 'lm_head.bias'"),
        (["transformer.wpe.weight"], "'transformer.wpe.weight' does not require a gradient"),
        ([], "an empty list selects nothing"),
    ],
    ids=["no match", "invalid", "frozen", "unknown name", "frozen name", "empty"],
)
def test_a_selection_without_parameters_is_refused(params: str | list[str], message: str) -> None:
    model = tiny_gpt2()
    model.transformer.wpe.requires_grad_(False)
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        operator(model, [token_batch(7, (1, 5))], params=params)


def test_parameters_without_curvature_give_zero() -> None:
    """A gradient that does not depend on anything must not end in an error of autograd."""
    model = nn.Linear(3, 1).double()
    op = operator(model, [{"x": torch.ones(2, 3).double()}], loss=lambda m, b: (m(b["x"]).sum(), 2))
    assert not (op @ torch.ones(4, dtype=torch.float64)).any()
    unused = nn.ModuleDict({"used": nn.Linear(2, 1), "unused": nn.Linear(2, 1)}).double()
    op = operator(unused, [{"x": torch.ones(2, 2).double()}], loss=lambda m, b: ((m["used"](b["x"]) ** 2).sum(), 2))
    product = op.space.named(op @ torch.ones(6, dtype=torch.float64))
    assert not product["unused.weight"].any()
    assert product["used.weight"].any()


def test_padding_index_does_not_drop_a_derivative() -> None:
    """PyTorch gives an embedding's padding row no gradient, although the loss depends on it where the token is used."""
    plain, padded = tiny_llama(tie_word_embeddings=False), tiny_llama(tie_word_embeddings=False)
    padded.load_state_dict(plain.state_dict())
    padded.model.embed_tokens.padding_idx = 3
    batch = {"input_ids": torch.tensor([[3, 5, 3, 1]])}
    op = operator(plain, [batch])
    v = torch.randn(op.shape[0], dtype=torch.float64)
    assert torch.equal(operator(padded, [batch]) @ v, op @ v)
    assert padded.model.embed_tokens.padding_idx == 3


# Modes, dtypes, methods


def test_training_mode_is_announced_and_dropout_off() -> None:
    model, batches = tiny_gpt2(attn_pdrop=0.5, resid_pdrop=0.5), [token_batch(7, (1, 5))]
    expected = operator(model, batches)
    v = torch.randn(expected.shape[0], dtype=torch.float64)
    model.train()
    model.transformer.h[0].eval()
    with pytest.warns(UserWarning, match="training mode with active dropout"):
        op = operator(model, batches)
    assert torch.equal(op @ v, expected @ v)
    assert model.training
    assert not model.transformer.h[0].training


def test_the_model_is_restored_after_an_error() -> None:
    model = tiny_gpt2(resid_pdrop=0.0, attn_pdrop=0.0, embd_pdrop=0.0).train()

    def failing(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        raise RuntimeError("on purpose")

    op = operator(model, [token_batch(7, (1, 5))], params="wpe", loss=failing)
    with pytest.raises(RuntimeError, match="on purpose"):
        op @ torch.ones(op.shape[0], dtype=torch.float64)
    assert model.training
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize(("dtype", "vectors", "error"), [
    (torch.float64, torch.float64, 1e-14), (torch.float32, torch.float32, 1e-5), (torch.bfloat16, torch.float32, 0.1),
], ids=["float64", "float32", "bfloat16"])  # fmt: skip
def test_vectors_have_the_operators_dtype(dtype: torch.dtype, vectors: torch.dtype, error: float) -> None:
    exact, batches = tiny_gpt2(), [token_batch(7, (2, 6))]
    op = operator(copy.deepcopy(exact).to(dtype), batches)
    assert op.dtype == vectors
    v = torch.randn(op.shape[0], dtype=vectors)
    assert (op @ v).dtype == vectors
    assert relative((op @ v).double(), operator(exact, batches) @ v.double()) < error


def test_methods() -> None:
    model, batches = NormFree(), [token_batch(7, (1, 5))]
    assert operator(tiny_gpt2(), batches).method == "whole"
    assert operator(model, batches, method="auto").method == "whole", "this model is no chain of segments"
    with pytest.raises(ValueError, match="method must be one of auto, streamed, whole, got 'fast'"):
        operator(model, batches, method="fast")


def test_the_default_method_gives_the_same_product() -> None:
    model, batches = tiny_gpt2(), [token_batch(7, (2, 9)), token_batch(7, (1, 4))]
    op = HessianOperator(model, batches)
    v = torch.randn(op.shape[0], 2, dtype=torch.float64)
    assert relative(op @ v, operator(model, batches) @ v) < 1e-12
    assert relative(op.gradient(), operator(model, batches).gradient()) < 1e-12


def test_attention_without_a_second_derivative_is_named() -> None:
    model = tiny_gpt2()
    model.set_attn_implementation("sdpa")
    op = operator(model, [token_batch(7, (1, 5))])
    with pytest.raises(NotImplementedError, match="attn_implementation='flashbob' or 'eager'"):
        op @ torch.ones(op.shape[0], dtype=torch.float64)


# Bad input


def test_nan_weights_are_named() -> None:
    model = tiny_gpt2()
    model.transformer.h[1].ln_1.weight.data[0] = float("nan")
    with pytest.raises(ValueError, match=r"'transformer\.h\.1\.ln_1\.weight' holds NaN"):
        operator(model, [token_batch(7, (1, 5))])


def test_a_product_that_is_not_finite_names_its_parameter() -> None:
    op = operator(tiny_gpt2(), [token_batch(7, (1, 5))])
    v = op.space.named(torch.zeros(op.shape[0], dtype=torch.float64))
    v["transformer.wte.weight"][0, 0] = float("inf")
    with pytest.raises(FloatingPointError, match=r"first in parameter 'transformer\."):
        op @ v
    matrix = torch.diag(torch.tensor([1.0, float("nan"), 1.0], dtype=torch.float64))
    with pytest.raises(FloatingPointError, match="first in parameter 'block1'"):
        MatrixOperator(matrix, [1, 2]) @ torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64)


def test_a_loss_that_is_not_finite_is_named() -> None:
    op = operator(NormFree(), [token_batch(7, (1, 5))], loss=lambda m, b: (m(b["input_ids"]).sum() / 0, 4))
    with pytest.raises(FloatingPointError, match="the loss of a batch is"):
        op @ torch.ones(op.shape[0], dtype=torch.float64)


@pytest.mark.parametrize(
    ("batches", "error", "message"),
    [
        ([], ValueError, "batches: there is none"),
        ({"input_ids": torch.zeros(1, 4, dtype=torch.int64)}, TypeError, r"pass \[batch\]"),
        ([{"input_ids": torch.tensor([[0, 7]])}], ValueError, r"batches\[0\]: token ids reach from 0 to 7"),
        ([{"input_ids": torch.tensor([[0, -1]])}], ValueError, r"batches\[0\]: token ids reach from -1 to 0"),
    ],
    ids=["none", "a single batch", "id too large", "negative id"],
)
def test_bad_batches_are_refused(batches: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        operator(tiny_gpt2(), batches)


@pytest.mark.parametrize(
    ("vector", "error", "message"),
    [
        (torch.ones(3, dtype=torch.float64), ValueError, r"must have shape \[28\] or \[28, K\], got \[3\]"),
        (torch.ones(28, 1, 1, dtype=torch.float64), ValueError, "must have shape"),
        (torch.ones(28, dtype=torch.int64), TypeError, "real floating-point tensor, got torch.int64"),
        (torch.ones(28, dtype=torch.complex64), TypeError, "real floating-point tensor"),
        (np.ones(28), TypeError, "got ndarray"),
        ("vector", TypeError, "got str"),
        ([torch.ones(7, 4)], ValueError, "must have 3 tensors, got 1"),
        (
            [torch.ones(7, 4), torch.ones(4, 4), torch.ones(4, 7)],
            ValueError,
            r"head: expected a tensor of shape \(7, 4\)",
        ),
        ({"embed": torch.ones(7, 4)}, ValueError, r"missing: \['head', 'mix'\]"),
        (torch.ones(28, dtype=torch.float64, device="meta"), ValueError, "is on meta, the operator on cpu"),
    ],
    ids=[
        "length",
        "dimensions",
        "integers",
        "complex",
        "numpy",
        "text",
        "list length",
        "list shape",
        "names",
        "device",
    ],
)
def test_bad_vectors_are_refused(vector: Any, error: type[Exception], message: str) -> None:
    model = NormFree()
    model.mix.requires_grad_(True)
    op = operator(model, [token_batch(7, (1, 4))])
    assert op.shape == (72, 72)
    with pytest.raises(error, match=message.replace("28", "72")):
        op @ vector


def test_inner_product_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = torch.randn(2, 7, 11)
    expected = float((a.double() * b.double()).sum())
    monkeypatch.setattr("curvature.vectors._CHUNK", 10)
    assert float(inner(a, b)) == pytest.approx(expected, rel=1e-14)
    assert norm(a) == pytest.approx(float(a.double().norm()), rel=1e-14)


def test_the_loss_is_the_operators_default() -> None:
    assert operator(tiny_gpt2(), [token_batch(7, (1, 4))]).loss == CausalLMLoss()
