"""An operator sees whatever changes in its model and its batches, and answers for what is there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from curvature_oracles import relative
from tiny_causal_lms import VOCABULARY, tiny_lm, tokens
from torch import nn

import curvature.model_operator
from curvature import GGNOperator, HessianOperator
from curvature.model_state import Digest


class Adapter(nn.Module):
    """A low-rank adapter around a linear map."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner
        self.down = nn.Parameter(torch.randn(2, inner.in_features, dtype=inner.weight.dtype))
        self.up = nn.Parameter(torch.randn(inner.out_features, 2, dtype=inner.weight.dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner(x) + x @ self.down.T @ self.up.T
        return found


def _scaling(model: Any) -> None:
    model.model.layers[0].self_attn.scaling = 0.05


def _epsilon(model: Any) -> None:
    model.model.norm.variance_epsilon = 0.7


def _hook(model: Any) -> None:
    model.lm_head.register_forward_hook(lambda _, __, logits: 0.5 * logits)


def _adapter(model: Any) -> None:
    attention = model.model.layers[1].self_attn
    attention.o_proj = Adapter(attention.o_proj)


def _activation(model: Any) -> None:
    model.model.layers[1].mlp.act_fn = nn.Tanh()


@pytest.mark.parametrize("kind", [HessianOperator, GGNOperator])
@pytest.mark.parametrize("change", [_scaling, _epsilon, _hook, _adapter, _activation])
def test_a_change_of_structure_is_seen(change: Callable[[Any], None], kind: Any) -> None:
    model = tiny_lm("llama")
    names = [name for name, _ in model.named_parameters() if "mlp" in name]
    op = kind(model, [tokens((1, 9)), tokens((1, 7), seed=1)], params=names, method="streamed")
    v = torch.randn(op.shape[0], dtype=torch.float64)
    before = op @ v
    change(model)
    expected = kind(model, op.batches, params=names, method="whole")
    assert relative(expected @ v, before) > 1e-3
    for _ in range(2):
        assert relative(op @ v, expected @ v) < 1e-12
    assert relative(op.gradient(), expected.gradient()) < 1e-12


def test_a_soft_cap_that_is_switched_on_is_seen() -> None:
    model = tiny_lm("gemma2", final_logit_softcapping=None)
    op = HessianOperator(model, [tokens((1, 9))], method="streamed")
    v = torch.randn(op.shape[0], dtype=torch.float64)
    op @ v
    model.config.final_logit_softcapping = 0.5
    assert relative(op @ v, HessianOperator(model, op.batches, method="whole") @ v) < 1e-12


def test_nothing_is_looked_at_again_while_nothing_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_lm("llama").train()
    model.get_input_embeddings().padding_idx = 0
    op = HessianOperator(model, [tokens((1, 9))], method="streamed")
    v = torch.randn(op.shape[0], dtype=torch.float64)
    monkeypatch.setattr(curvature.model_operator, "find_segments", None)
    block = op.restricted(["model.norm.weight"])
    block @ torch.ones(block.shape[0], dtype=torch.float64)
    for mode in (model.train, model.eval):
        mode()
        model.requires_grad_(mode == model.train)
        op @ v


def test_parameters_that_have_left_the_model_are_told() -> None:
    model = tiny_lm("llama")
    op = HessianOperator(model, [tokens((1, 9))], method="streamed")
    model.lm_head = nn.Linear(*reversed(model.lm_head.weight.shape), bias=False, dtype=torch.float64)
    for method in (op, HessianOperator(tiny_lm("llama"), op.batches, method="whole")):
        if method is not op:
            method.model.lm_head = model.lm_head
        with pytest.raises(
            RuntimeError, match=r"1 of the \d+ parameters .* no longer the model's; make a new operator"
        ):
            method @ torch.randn(op.shape[0], dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_values_that_change_places_are_seen(dtype: torch.dtype) -> None:
    digest, generator = Digest(), torch.Generator().manual_seed(0)
    weight = torch.randn(24, 40, generator=generator).to(dtype)
    ids = torch.randint(0, VOCABULARY, (2, 24), generator=generator)
    for t in (weight, ids, weight[0].clone()):
        before = digest([t])
        for _ in range(20):
            moved = t.flatten()[torch.randperm(t.numel(), generator=generator)].view_as(t)
            assert not torch.equal(digest([moved]), before)
        for dim in range(t.ndim):
            assert not torch.equal(digest([t.flip(dim)]), before)
        assert torch.equal(digest([t.clone()]), before)


def test_tokens_that_change_places_behind_torchs_back_are_seen() -> None:
    model, ids = tiny_lm("gpt2"), tokens((1, 12))["input_ids"]
    op = HessianOperator(model, [{"input_ids": ids}], method="streamed")
    v = torch.randn(op.shape[0], dtype=torch.float64)
    op @ v
    op.batches[0]["input_ids"].numpy()[:] = ids.numpy()[:, ::-1].copy()
    assert relative(op @ v, HessianOperator(model, op.batches, method="whole") @ v) < 1e-12


def test_a_gate_that_is_closed_hides_nothing() -> None:
    """A bias of zero that is handed from part to part is not seen by the gradients of other weights."""
    model = tiny_lm("gpt-neox", model_type="gpt_neox_japanese", attn_implementation="eager")
    biases = [p for name, p in model.named_parameters() if "dense_bias" in name]
    with torch.no_grad():
        for p in biases:
            p.zero_()
    op = HessianOperator(model, [tokens((1, 9))], params="mlp")
    v = torch.randn(op.shape[0], dtype=torch.float64)
    op @ v
    with torch.no_grad():
        for p in biases:
            p.normal_()
    assert biases
    assert relative(op @ v, HessianOperator(model, op.batches, params="mlp", method="whole") @ v) < 1e-12
