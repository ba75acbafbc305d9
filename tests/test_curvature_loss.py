"""CausalLMLoss: what is counted, how it is shifted, and in which precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from curvature_oracles import NormFree, tiny_gpt2, tiny_llama, token_batch
from torch import Tensor, nn

from curvature import CausalLMLoss
from curvature.precision import keep_double
from tests.tiny_causal_lms import tiny_lm


class Logits(nn.Module):
    """A model whose logits are its parameter."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = nn.Parameter(logits)
        self.received: dict[str, Any] = {}

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None
    ) -> Tensor:
        others = {"attention_mask": attention_mask, "token_type_ids": token_type_ids}
        self.received = {name: value for name, value in others.items() if value is not None}
        return self.logits


def by_hand(logits: Tensor, pairs: list[tuple[int, int, int]]) -> Tensor:
    """Sum of -log softmax over (row, predicting position, predicted token)."""
    log_p = logits.double().log_softmax(-1)
    return -sum(log_p[b, t, token] for b, t, token in pairs)


def test_labels_are_the_next_input_ids() -> None:
    logits = torch.randn(2, 3, 5, dtype=torch.float64)
    total, tokens = CausalLMLoss()(Logits(logits), {"input_ids": torch.tensor([[0, 1, 2], [3, 4, 0]])})
    assert tokens == 4
    assert total.dtype == torch.float64
    assert float(total.detach()) == pytest.approx(
        float(by_hand(logits, [(0, 0, 1), (0, 1, 2), (1, 0, 4), (1, 1, 0)])), rel=1e-14
    )


def test_given_labels_are_shifted_and_ignored_ones_left_out() -> None:
    logits = torch.randn(1, 4, 5, dtype=torch.float64)
    batch = {"input_ids": torch.tensor([[0, 1, 2, 3]]), "labels": torch.tensor([[4, -100, 3, 1]])}
    total, tokens = CausalLMLoss()(Logits(logits), batch)
    assert tokens == 2
    assert float(total.detach()) == pytest.approx(float(by_hand(logits, [(0, 1, 3), (0, 2, 1)])), rel=1e-14)
    _, other = CausalLMLoss(ignore_index=3)(Logits(logits), batch | {"labels": torch.tensor([[4, 0, 3, 1]])})
    assert other == 2


@pytest.mark.parametrize(
    ("mask", "pairs"),
    [([1, 1, 1, 0], [(0, 0, 1), (0, 1, 2)]), ([0, 1, 1, 1], [(0, 1, 2), (0, 2, 3)]), ([0, 0, 1, 1], [(0, 2, 3)])],
    ids=["right", "left", "left twice"],
)
def test_padding_neither_predicts_nor_is_predicted(mask: list[int], pairs: list[tuple[int, int, int]]) -> None:
    logits = torch.randn(1, 4, 5, dtype=torch.float64)
    ids = torch.tensor([[0, 1, 2, 3]])
    for labels in ({}, {"labels": ids}):
        total, tokens = CausalLMLoss()(
            Logits(logits), {"input_ids": ids, "attention_mask": torch.tensor([mask]), **labels}
        )
        assert tokens == len(pairs)
        assert float(total.detach()) == pytest.approx(float(by_hand(logits, pairs)), rel=1e-14)


def test_a_mask_of_ones_is_dropped_and_other_entries_passed_on() -> None:
    model, ids = Logits(torch.randn(1, 3, 5)), torch.tensor([[0, 1, 2]])
    CausalLMLoss()(model, {"input_ids": ids, "attention_mask": torch.ones(1, 3), "token_type_ids": ids})
    assert set(model.received) == {"token_type_ids"}
    CausalLMLoss()(model, {"input_ids": ids, "attention_mask": torch.tensor([[1, 1, 0]]), "labels": ids})
    assert set(model.received) == {"attention_mask"}


class Wrapper(nn.Module):
    """Hands everything on to a model that it holds under any name."""

    def __init__(self, **held: nn.Module) -> None:
        super().__init__()
        ((self.name, model),) = held.items()
        self.add_module(self.name, model)

    def forward(self, input_ids: Tensor, **others: Any) -> Any:
        return self.get_submodule(self.name)(input_ids, **others)


class Adapted(Wrapper):
    def get_base_model(self) -> nn.Module:
        return self.get_submodule(self.name)


LEFT_PADDED = {
    "input_ids": torch.arange(10).reshape(2, 5) % 7,
    "attention_mask": torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]),
}


@pytest.mark.parametrize(
    "wrap",
    [
        nn.DataParallel,
        lambda model: torch.compile(model, backend="eager"),
        lambda model: Wrapper(base_model=model),
        lambda model: Wrapper(module=Wrapper(_orig_mod=model)),
        lambda model: Adapted(anything=model),
    ],
    ids=["DataParallel", "compiled", "base_model", "twice", "get_base_model"],
)
def test_a_wrapped_model_is_given_the_positions_of_unpadded_rows(wrap: Callable[[nn.Module], nn.Module]) -> None:
    for model in (tiny_gpt2(), tiny_llama()):
        positions = CausalLMLoss().model_inputs(wrap(model), LEFT_PADDED)["position_ids"]
        assert positions.tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 3, 4]]


def test_positions_that_nobody_may_take_are_refused_or_left_out() -> None:
    loss, unknown = CausalLMLoss(), Wrapper(anything=tiny_gpt2())
    with pytest.raises(ValueError, match=r"whether Wrapper takes position_ids cannot be told .* pad on the right"):
        loss(unknown, LEFT_PADDED)
    given = LEFT_PADDED | {"position_ids": loss.model_inputs(tiny_gpt2(), LEFT_PADDED)["position_ids"]}
    assert torch.equal(loss(unknown, given)[0], loss(tiny_gpt2(), LEFT_PADDED)[0])
    right = LEFT_PADDED | {"attention_mask": LEFT_PADDED["attention_mask"].flip(1)}
    assert torch.equal(loss(unknown, right)[0], loss(tiny_gpt2(), right)[0])
    assert "position_ids" not in loss.model_inputs(tiny_lm("bloom"), LEFT_PADDED)


@pytest.mark.parametrize(("label", "reach"), [(-1, "-1 to 4"), (5, "0 to 5")])
def test_labels_outside_the_vocabulary_are_refused(label: int, reach: str) -> None:
    labels = torch.tensor([[0, label, 4, -100]])
    batch = {"input_ids": torch.zeros(1, 4, dtype=torch.int64), "labels": labels}
    with pytest.raises(ValueError, match=f"labels that count reach from {reach}, but the model's vocabulary has 5"):
        CausalLMLoss()(Logits(torch.randn(1, 4, 5)), batch)


def test_agrees_with_the_models_own_loss_in_float32() -> None:
    for model in (tiny_gpt2().float(), tiny_llama().float()):
        batch = token_batch(7, (2, 9))
        total, tokens = CausalLMLoss()(model, batch)
        own = model(**batch, labels=batch["input_ids"], use_cache=False).loss
        assert float(total.detach() / tokens) == pytest.approx(float(own.detach()), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_logits_are_raised_to_float32(dtype: torch.dtype) -> None:
    logits = torch.randn(1, 3, 5).to(dtype)
    total, _ = CausalLMLoss()(Logits(logits), {"input_ids": torch.tensor([[0, 1, 2]])})
    assert total.dtype == torch.float32
    assert float(total.detach()) == pytest.approx(float(by_hand(logits, [(0, 0, 1), (0, 1, 2)])), rel=1e-6)


def test_a_sequence_of_one_token_counts_nothing() -> None:
    assert CausalLMLoss()(NormFree(), {"input_ids": torch.tensor([[1]])})[1] == 0


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"ids": torch.zeros(1, 3)}, "must hold 'input_ids'"),
        ({"input_ids": torch.zeros(3, dtype=torch.int64)}, r"of shape \[batch, sequence\], got \(3,\)"),
        (
            {"input_ids": torch.zeros(1, 3, dtype=torch.int64), "labels": torch.zeros(1, 2, dtype=torch.int64)},
            "unshifted",
        ),
        (
            {"input_ids": torch.zeros(1, 3, dtype=torch.int64), "attention_mask": torch.ones(1, 1, 3, 3)},
            "not supported",
        ),
    ],
    ids=["no ids", "flat ids", "labels", "mask of pairs"],
)
def test_bad_batches_are_refused(batch: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CausalLMLoss()(NormFree(), batch)


def test_double_precision_is_kept_inside_a_model() -> None:
    class Lowering(nn.Module):
        def __init__(self, dtype: torch.dtype) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3, dtype=dtype))

        def forward(self, x: Tensor) -> list[torch.dtype]:
            lowered = [x.float(), x.to(torch.float32), x.to(dtype=torch.float32), x.type(torch.float32)]
            lowered += [
                torch.softmax(x, -1, dtype=torch.float32),
                nn.functional.softmax(x, dim=-1, dtype=torch.float32),
            ]
            return [t.dtype for t in lowered]

    double, single = Lowering(torch.float64), Lowering(torch.float32)
    with keep_double(double):
        assert set(double(torch.ones(3, dtype=torch.float64))) == {torch.float64}
        assert torch.ones(3, dtype=torch.bfloat16).float().dtype == torch.float32
        assert torch.ones(3, dtype=torch.int64).float().dtype == torch.float32
    with keep_double(single):
        assert set(single(torch.ones(3, dtype=torch.float64))) == {torch.float32}
    assert set(double(torch.ones(3, dtype=torch.float64))) == {torch.float32}
