"""Groups of entries, attention heads of any layout, block-diagonal restrictions, and the arithmetic of operators."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from curvature_oracles import MatrixOperator, dense_hessian, relative, tiny_gpt2, tiny_llama, token_batch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from curvature import (
    BlockDiagonalOperator,
    Group,
    GroupOperator,
    HessianOperator,
    groups_by,
    head_groups,
    layer_groups,
    trace,
)
from curvature.blocks import kind_of
from curvature.groups import Part, group_inner
from tests.tiny_causal_lms import ARCHITECTURES, tiny_lm


def symmetric(size: int = 12) -> Tensor:
    matrix = torch.randn(size, size, dtype=torch.float64)
    return matrix + matrix.T


def indices(groups: list[Group], op: Any) -> list[Tensor]:
    """The flat positions of each group's entries, in the group's order."""
    positions = torch.arange(op.space.size, dtype=torch.float64)
    return [torch.cat([v.reshape(-1) for v in g.views(op.space, positions)]).long() for g in groups]


CUT = [
    Group("rows", (Part("block0", 0, 0, 2),)),
    Group("mixed", (Part("block0", 0, 3, 5), Part("block1"))),
]


# Arithmetic


def test_operators_add_up_scale_and_shift() -> None:
    a, b = symmetric(), symmetric()
    p, q = MatrixOperator(a, [5, 7]), MatrixOperator(b, [5, 7])
    v, eye = torch.randn(12, 3, dtype=torch.float64), torch.eye(12, dtype=torch.float64)
    for op, matrix in [
        (p + q, a + b),
        (p - q, a - b),
        (2 * p, 2 * a),
        (p * 0.5 - 3 * q, a / 2 - 3 * b),
        (-p, -a),
        (p.shifted(0.25), a + 0.25 * eye),
        ((p + q).shifted(-1) * 2, 2 * (a + b - eye)),
    ]:
        assert op.space == p.space
        assert relative(op @ v, matrix @ v) < 1e-14
        assert relative(v.T @ op, v.T @ matrix) < 1e-14
        assert relative(v[:, 0] @ op, matrix @ v[:, 0]) < 1e-14
        np.testing.assert_allclose(op.to_scipy() @ v.numpy(), (matrix @ v).numpy(), atol=1e-12)


def test_operators_of_other_spaces_do_not_add_up() -> None:
    with pytest.raises(ValueError, match="same parameters"):
        MatrixOperator(symmetric(), [5, 7]) + MatrixOperator(symmetric(), [7, 5])
    with pytest.raises(ValueError, match="must be finite, got nan"):
        MatrixOperator(symmetric()).shifted(float("nan"))
    with pytest.raises(TypeError):
        MatrixOperator(symmetric()) + 1.0


def test_numpy_does_not_take_an_operator_entry_by_entry() -> None:
    with pytest.raises(TypeError):
        np.ones(12) @ MatrixOperator(symmetric())


# Groups


def test_group_operator_is_the_principal_block() -> None:
    matrix = symmetric()
    op = MatrixOperator(matrix, [5, 7])
    for group, index in zip(CUT, indices(CUT, op), strict=True):
        block = GroupOperator(op, group)
        assert block.space.size == len(index) == group.numel(op.space)
        v = torch.randn(len(index), 2, dtype=torch.float64)
        assert relative(block @ v, matrix[index][:, index] @ v) < 1e-14
    assert GroupOperator(op, CUT[1]).space.names == ("block0[3:5]", "block1")


def test_block_diagonal_operator_drops_what_couples_groups() -> None:
    matrix = symmetric()
    op = MatrixOperator(matrix, [5, 7])
    expected = torch.zeros_like(matrix)
    for index in indices(CUT, op):
        expected[index[:, None], index] = matrix[index[:, None], index]
    block = BlockDiagonalOperator(op, CUT)
    v = torch.randn(12, 3, dtype=torch.float64)
    assert relative(block @ v, expected @ v) < 1e-14
    op.applied = 0
    block @ torch.eye(12, dtype=torch.float64)[:, 0]
    assert op.applied == 1, "a vector in one group costs one product"


def test_block_diagonal_hessian_by_layer_and_kind() -> None:
    model, batches = tiny_gpt2(), [token_batch(7, (2, 5))]
    op, dense = HessianOperator(model, batches, method="whole"), dense_hessian(model, batches)
    v = torch.randn(len(dense), dtype=torch.float64)
    for groups in (layer_groups(op.space), groups_by(op.space, kind_of), groups_by(op.space, str)):
        expected = torch.zeros_like(dense)
        for index in indices(groups, op):
            expected[index[:, None], index] = dense[index[:, None], index]
        assert relative(BlockDiagonalOperator(op, groups) @ v, expected @ v) < 1e-10
    assert [g.name for g in layer_groups(op.space)] == ["embedding", "position", "layer 0", "layer 1", "norm"]
    part = op.restricted(["transformer.h.0.ln_1.weight"])
    assert part.space.names == ("transformer.h.0.ln_1.weight",)
    with pytest.raises(ValueError, match="are not among the operator's"):
        op.restricted(["no.such"])


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([], "there is none"),
        ([Group("a", ())], "'a' is empty"),
        ([Group("a", (Part("other"),))], "names 'other', which is not among the parameters"),
        ([Group("a", (Part("block0", 0, 3, 6),))], "reaches outside 'block0'"),
        ([Group("a", (Part("block0", 1, 0, 1),))], "reaches outside 'block0'"),
        ([Group("a", (Part("block0"),)), Group("b", (Part("block0", 0, 1, 2),))], "'b' holds entries of 'block0'"),
    ],
    ids=["none", "empty", "unknown", "outside", "dimension", "overlap"],
)
def test_bad_groups_are_refused(groups: list[Group], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BlockDiagonalOperator(MatrixOperator(symmetric(), [5, 7]), groups)


# Heads


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_heads_share_out_all_attention_weights(name: str) -> None:
    """Every entry of q, k, v and o (but o's bias) is in exactly one group, and heads of one kind have equal shares."""
    model = tiny_lm(name)
    groups = head_groups(model)
    counted = {n: torch.zeros(p.shape) for n, p in model.named_parameters()}
    for group in groups:
        for part in group.parts:
            part.of(counted[part.parameter]).add_(1)
    for parameter, count in counted.items():
        kind = kind_of(parameter)
        belongs = kind in ("q", "k", "v", "qkv") or (kind == "o" and parameter.endswith("weight"))
        assert bool((count == (1 if belongs else 0)).all()), parameter
    sizes = {
        sum(part.of(counted[part.parameter]).numel() for part in g.parts) for g in groups if "shared" not in g.name
    }
    assert len(sizes) == 1


@pytest.mark.parametrize("name", ["gpt2", "gpt-neox", "bloom", "falcon", "llama", "qwen3"])
def test_a_group_without_its_head_changes_nothing_else(name: str) -> None:
    """Zeroed output columns of one head take its queries, keys and values out of the model's answer."""
    model = tiny_lm(name)
    heads = [g for g in head_groups(model) if g.name.startswith("layer 1 head ")]
    ids = torch.arange(3, 12)[None]
    weights = dict(model.named_parameters())
    with torch.no_grad():
        for part in heads[0].parts:
            if kind_of(part.parameter) == "o":
                part.of(weights[part.parameter]).zero_()
        before = model(input_ids=ids).logits
        for part in heads[0].parts:
            part.of(weights[part.parameter]).add_(torch.randn(()) if kind_of(part.parameter) != "o" else 0)
        assert torch.equal(model(input_ids=ids).logits, before)
        for part in heads[1].parts:
            part.of(weights[part.parameter]).mul_(1.5)
        assert not torch.allclose(model(input_ids=ids).logits, before)


def test_traces_of_heads_are_slices_of_full_products() -> None:
    model, batches = tiny_llama(num_hidden_layers=1), [token_batch(7, (1, 4))]
    op = HessianOperator(model, batches, method="whole")
    dense, groups = dense_hessian(model, batches), head_groups(model)
    expected = torch.stack([dense.diagonal()[index].sum() for index in indices(groups, op)])
    eye = torch.eye(len(dense), dtype=torch.float64)
    product = op @ eye
    found = sum(
        group_inner(op.space, groups, e.contiguous(), c.contiguous()) for e, c in zip(eye, product.T, strict=True)
    )
    assert relative(found, expected) < 1e-10
    assert [g.name for g in groups[:3]] == ["layer 0 head 0", "layer 0 head 1", "layer 0 heads 0-1 shared"]


def test_heads_of_selected_parameters_only() -> None:
    model = tiny_gpt2()
    groups = head_groups(model, ["transformer.h.1.attn.c_proj.weight"])
    assert [g.name for g in groups] == ["layer 1 head 0", "layer 1 head 1"]
    assert groups[1].parts == (Part("transformer.h.1.attn.c_proj.weight", 0, 2, 4),)


def test_models_without_heads_are_refused() -> None:
    with pytest.raises(ValueError, match="no num_attention_heads"):
        head_groups(nn.Linear(2, 2))
    model = tiny_gpt2()
    model.config.n_head = 3
    with pytest.raises(ValueError, match="do not divide"):
        head_groups(model)


def test_tied_weights_are_counted_once() -> None:
    """GPT-2's table and head are one tensor: 29,056 parameters, not 31,104."""
    special = dict.fromkeys(("bos_token_id", "eos_token_id"))
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=48, **special))
    model.eval().set_attn_implementation("eager")
    op = HessianOperator(model, [token_batch(64, (1, 4))], method="whole")
    assert op.shape == (29_056, 29_056)
    assert sum(p.numel() for _, p in model.named_parameters(remove_duplicate=False)) == 31_104
    estimate = trace(op, probes=2)
    assert list(estimate.per_block) == list(op.space.names)
    assert sum(g.numel(op.space) for g in layer_groups(op.space)) == 29_056
