"""What operators differentiate and under which modes, and the inputs that they refuse."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from curvature_oracles import MatrixOperator, NormFree, relative, tiny_gpt2, tiny_llama, token_batch
from torch import Tensor, nn

from curvature import CausalLMLoss, GGNOperator, HessianOperator
from curvature.vectors import inner, norm


def operator(model: nn.Module, batches: Any, **options: Any) -> HessianOperator:
    """The whole-graph operator; the streamed method has tests of its own that compare with it."""
    return HessianOperator(model, batches, **({"method": "whole"} | options))


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


@pytest.mark.parametrize("kind", [HessianOperator, GGNOperator])
@pytest.mark.parametrize("method", ["streamed", "whole"])
def test_an_operator_keeps_its_parameters_when_they_are_frozen_later(kind: Any, method: Any) -> None:
    model = tiny_gpt2()
    op = kind(model, [token_batch(7, (1, 5))], method=method)
    v = torch.randn(op.shape[0], dtype=torch.float64)
    product, gradient = op @ v, op.gradient()
    model.requires_grad_(False)
    assert relative(op @ v, product) < 1e-14
    assert relative(op.gradient(), gradient) < 1e-14
    assert not any(p.requires_grad for p in model.parameters())


def test_parameters_that_the_loss_does_not_see_have_zero_curvature() -> None:
    model = tiny_gpt2()
    model.register_parameter("unused", nn.Parameter(torch.ones(3, dtype=torch.float64)))
    op = operator(model, [token_batch(7, (1, 5))]).restricted(["unused"])
    assert torch.equal(op @ torch.ones(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64))
    assert torch.equal(op.gradient(), torch.zeros(3, dtype=torch.float64))


def test_a_restriction_takes_a_list_of_names() -> None:
    op = operator(tiny_gpt2(), [token_batch(7, (1, 5))])
    with pytest.raises(TypeError, match=r"pass \['transformer.wpe.weight'\]"):
        op.restricted("transformer.wpe.weight")
    with pytest.raises(ValueError, match="names: there is none"):
        op.restricted([])


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
    with pytest.raises(FloatingPointError, match="the loss of a batch is"):
        op.loss_value()


@pytest.mark.parametrize(
    ("batches", "error", "message"),
    [
        ([], ValueError, "batches: there is none"),
        ({"input_ids": torch.zeros(1, 4, dtype=torch.int64)}, TypeError, r"pass \[batch\]"),
        ([{"input_ids": torch.tensor([[0, 7]])}], ValueError, r"batches\[0\]: token ids reach from 0 to 7"),
        ([{"input_ids": torch.tensor([[0, -1]])}], ValueError, r"batches\[0\]: token ids reach from -1 to 0"),
        ([torch.zeros(1, 4)], TypeError, r"batches\[0\] must be a dict as collators make it, got Tensor"),
        ([{"input_ids": torch.zeros(0, 4, dtype=torch.int64)}], ValueError, r"of shape \[0, 4\] hold no token"),
        (
            [{"input_ids": torch.zeros(1, 3, dtype=torch.int64), "labels": torch.tensor([[-7, -1, 3]])}],
            ValueError,
            r"batches\[0\]: labels that count reach from -1 to 3",
        ),
    ],
    ids=["none", "a single batch", "id too large", "negative id", "a tensor", "no token", "label"],
)
def test_bad_batches_are_refused(batches: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        operator(tiny_gpt2(), batches)


def test_inference_mode_is_refused() -> None:
    op = operator(tiny_gpt2(), [token_batch(7, (1, 5))])
    with torch.inference_mode(), pytest.raises(RuntimeError, match=r"under torch\.inference_mode"):
        op.gradient()


@pytest.mark.parametrize("method", ["streamed", "whole"])
def test_vectors_may_require_a_gradient(method: Any) -> None:
    model = tiny_gpt2()
    op = operator(model, [token_batch(7, (1, 5))], method=method)
    flat = op.space.flatten(model.parameters())
    product = op @ list(model.parameters())
    assert relative(op.space.flatten(product), op @ flat) < 1e-14
    assert relative(op @ flat.clone().requires_grad_(True), op @ flat) < 1e-14


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
