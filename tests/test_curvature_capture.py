"""Derivatives that are recorded once and replayed, for further directions and batches: the numbers of launched ones.

On a CPU a recording is a closure that is run again at each replay, with its results copied to where the first run left
them: what is recorded, for whom it serves and what is laid aside are then as on a GPU.
"""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import curvature.capture
import curvature.model_state
import curvature.streaming
from curvature import CausalLMLoss, HessianOperator
from curvature.capture import Recordings
from curvature.streamed import Streamed
from curvature.streaming import Streaming
from tests.tiny_causal_lms import VOCABULARY, tiny_lm

pytestmark = pytest.mark.filterwarnings("error")  # that a product cannot be recorded is told by a warning


class RerunGraph:
    """Stands in for `curvature.capture.Graph` where there is no GPU."""

    def __init__(self, run: Callable[[], Any], device: torch.device, beside: Any = None) -> None:
        self._run = run
        self.result = run()
        for t in _tensors(self.result):
            t.detach().fill_(7)  # a recording runs nothing

    def replay(self) -> None:
        with torch.no_grad():
            for old, new in zip(_tensors(self.result), _tensors(self._run()), strict=True):
                old.copy_(new)


def _tensors(result: Any) -> list[Tensor]:
    if isinstance(result, Streamed):
        return [*result.left(), result._total]
    return [result] if isinstance(result, Tensor) else [t for t in result if t is not None]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "cpu":
        monkeypatch.setattr(curvature.capture, "Graph", RerunGraph)
        monkeypatch.setattr(curvature.model_state, "Graph", RerunGraph)
        monkeypatch.setattr(curvature.model_state, "recordable", lambda device: True)
        monkeypatch.setattr(curvature.streaming, "recordable", lambda device: True)
    return str(request.param)


def ids(*shape: int) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(0, VOCABULARY, shape)}


def recordings_of(op: HessianOperator) -> list[Any]:
    assert op._streamed is not None
    return op._streamed._recordings._kinds._found


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3"])
def test_replayed_products_equal_launched_ones(name: str, device: str) -> None:
    model = tiny_lm(name, dtype=torch.float32).to(device)
    batches = [ids(2, 40), ids(1, 64), ids(2, 40), ids(2, 40)]
    recorded = HessianOperator(model, batches, method="streamed")
    launched = HessianOperator(model, batches, method="streamed", streaming=Streaming(capture=False))
    directions = [torch.randn(recorded.space.size, device=device) for _ in range(4)]
    directions[3][: recorded.space.size // 2] = 0  # zero in other parameters than the recorded one
    for v in [*directions, directions[0]]:
        torch.testing.assert_close(recorded @ v, launched @ v, rtol=1e-4, atol=1e-5)
    assert len(recordings_of(recorded)) == 2  # one for each shape
    for _ in range(2):
        torch.testing.assert_close(recorded.gradient(), launched.gradient(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(recorded @ v, launched @ v, rtol=1e-4, atol=1e-5)
    assert recorded.loss_value() == pytest.approx(launched.loss_value(), rel=1e-5)


def test_a_direction_that_ends_elsewhere_is_launched_on_the_batch_that_is_loaded(device: str) -> None:
    model = tiny_lm("gpt2", dtype=torch.float32).to(device)
    batches = [ids(2, 40), ids(2, 40)]
    op = HessianOperator(model, batches, method="streamed")
    launched = HessianOperator(model, batches, method="streamed", streaming=Streaming(capture=False))
    full, part = (torch.randn(op.space.size, device=device) for _ in range(2))
    part[op.space.size // 3 :] = 0
    for v in (full, full, part, part, full, part):
        torch.testing.assert_close(op @ v, launched @ v, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("room", [False, True])
def test_batches_take_turns(room: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_lm("llama", dtype=torch.float32).to(device)
    batches = [ids(1, 24) for _ in range(3)]
    op = HessianOperator(model, batches, method="streamed")
    if not room:
        monkeypatch.setattr(curvature.streaming._Launch, "admits", lambda self, size: False)
    whole = HessianOperator(model, batches, method="whole")
    for _ in range(3):
        v = torch.randn(op.space.size, device=device)
        torch.testing.assert_close(op @ v, whole @ v, rtol=1e-3, atol=1e-5)
    assert op._streamed is not None
    kept = [lasting.found for lasting, _ in op._streamed._kept.values()]
    assert [found is not None and found.laid_aside is not None for found in kept] == [room] * 3  # type: ignore[union-attr]


def test_padding_positions_and_counts_of_another_kind_are_not_served(device: str) -> None:
    model = tiny_lm("gpt2", dtype=torch.float32).to(device)
    left, right = torch.ones(2, 24, dtype=torch.int64), torch.ones(2, 24, dtype=torch.int64)
    left[0, :7], right[1, 15:] = 0, 0
    labels = torch.randint(0, VOCABULARY, (2, 24))
    ignored = labels.clone()
    ignored[:, :9] = -100
    batches = [
        {**ids(2, 24), "attention_mask": left},
        {**ids(2, 24), "attention_mask": right},
        ids(2, 24),
        {**ids(2, 24), "labels": labels},
        {**ids(2, 24), "labels": ignored},
        {**ids(2, 24), "position_ids": torch.arange(3, 27).expand(2, -1)},
        {**ids(2, 24), "attention_mask": left},
        ids(2, 24),
    ]
    op = HessianOperator(model, batches, method="streamed")
    whole = HessianOperator(model, batches, method="whole")
    for _ in range(2):
        v = torch.randn(op.space.size, device=device)
        torch.testing.assert_close(op @ v, whole @ v, rtol=1e-3, atol=1e-5)
    # Left-padded, right-padded, not padded (with labels or without), fewer labels, other positions.
    assert len(recordings_of(op)) == 5


def test_a_changed_weight_is_seen(device: str) -> None:
    model = tiny_lm("gpt2", dtype=torch.float32).to(device)
    op = HessianOperator(model, [ids(2, 40), ids(2, 40)], method="streamed")
    v = torch.randn(op.space.size, device=device)
    before = [op @ v for _ in range(3)][-1]
    with torch.no_grad():
        next(model.parameters()).mul_(1.5)
    after = [op @ v for _ in range(3)]
    torch.testing.assert_close(after[2], HessianOperator(model, op.batches, method="whole") @ v, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(after[0], after[2], rtol=1e-4, atol=1e-5)
    assert float((after[0] - before).norm() / before.norm()) > 1e-2
    layer = model.transformer.h[0]
    layer.table, layer.constant = torch.polar(torch.ones(3), torch.ones(3)).to(device), torch.ones(2)
    for _ in range(2):
        op @ v
    found = recordings_of(op)[0]
    layer.table = layer.table * 2  # such as a module of rotary positions makes anew for a longer text
    op @ v
    assert found not in recordings_of(op)
    op @ v
    found = recordings_of(op)[0]
    parameter = next(model.parameters())
    parameter.data = parameter.data * 0.5  # elsewhere in memory: what was recorded is of no use
    torch.testing.assert_close(op @ v, HessianOperator(model, op.batches, method="whole") @ v, rtol=1e-3, atol=1e-5)
    assert found not in recordings_of(op)


def test_operators_share_recordings(device: str) -> None:
    model = tiny_lm("llama", dtype=torch.float32).to(device)
    recordings = Recordings()
    names = [n for n, _ in model.named_parameters() if "mlp" in n]
    for number in range(4):
        batch = ids(1, 32)
        op = HessianOperator(
            model, [batch], params=names, method="streamed", streaming=Streaming(recordings=recordings)
        )
        whole = HessianOperator(model, [batch], params=names, method="whole")
        v = torch.randn(op.space.size, device=device)
        for _ in range(2):
            torch.testing.assert_close(op @ v, whole @ v, rtol=1e-3, atol=1e-5)
        op.release()
        assert len(recordings._kinds._found) == 1, number
    lean = Streaming(keep=False, recordings=recordings)  # launches nothing of its own where others have recorded it
    op = HessianOperator(model, [batch, ids(1, 32)], params=names, method="streamed", streaming=lean)
    whole = HessianOperator(model, op.batches, params=names, method="whole")
    torch.testing.assert_close(op @ v, whole @ v, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(op.gradient(), whole.gradient(), rtol=1e-3, atol=1e-5)
    del op
    gc.collect()
    present = recordings._kinds._found[0]._present()
    assert present is None  # nothing is laid aside for a batch that is gone


def test_a_loss_that_is_not_finite_is_located(device: str) -> None:
    model = tiny_lm("gpt2", dtype=torch.float32).to(device)
    op = HessianOperator(model, [ids(2, 40), ids(2, 40)], method="streamed")
    v = torch.randn(op.space.size, device=device)
    for _ in range(2):
        op @ v
    with torch.no_grad():
        dict(model.named_parameters())["transformer.h.1.mlp.c_fc.weight"].mul_(float("inf"))
    with pytest.raises(FloatingPointError, match=r"batches\[0\].*h\.1\.mlp"):
        op @ v


def test_a_batch_whose_loss_is_not_finite_spoils_no_other(device: str) -> None:
    """The first replay of a new recording fails: what is left behind must not answer for another batch."""
    model = tiny_lm("gpt2", tie_word_embeddings=False, dtype=torch.float32).to(device)
    a, b = ids(1, 24), ids(1, 24)
    a["input_ids"].clamp_(max=VOCABULARY - 2)
    b["input_ids"][0, 5] = VOCABULARY - 1
    op = HessianOperator(model, [a, b], method="streamed")
    v = torch.randn(op.space.size, device=device)
    with torch.no_grad():
        model.get_input_embeddings().weight[VOCABULARY - 1] = float("inf")
    for _ in range(3):
        with pytest.raises(FloatingPointError, match=r"batches\[1\]"):
            op @ v


def test_a_batch_that_is_changed_in_place_changes_no_other(device: str) -> None:
    model = tiny_lm("gpt2", dtype=torch.float32).to(device)
    batches = [{**ids(2, 24), "position_ids": torch.arange(24).expand(2, -1).clone()} for _ in range(2)]
    op = HessianOperator(model, batches, method="streamed")
    v = torch.randn(op.space.size, device=device)
    for _ in range(3):
        op @ v
    op.batches[1]["position_ids"].add_(5)
    torch.testing.assert_close(op @ v, HessianOperator(model, op.batches, method="whole") @ v, rtol=1e-3, atol=1e-5)


class ThreefoldLoss(CausalLMLoss):
    """A loss of its own type, three times as large."""

    def token_sum(self, logits: Tensor, targets: Tensor) -> Tensor:
        return 3 * super().token_sum(logits, targets)

    def __call__(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        total, tokens = super().__call__(model, batch)
        return 3 * total, tokens


def test_other_parameters_losses_and_settings_are_other_recordings(device: str) -> None:
    model, batch = tiny_lm("gpt2", dtype=torch.float32).to(device), ids(1, 24)
    shared = Streaming(recordings=Recordings())
    full = HessianOperator(model, [batch], streaming=shared)
    losses = [
        HessianOperator(model, [batch], streaming=shared, loss=loss) for loss in (CausalLMLoss(), ThreefoldLoss())
    ]
    blocks = [full.restricted([n]) for n in ("transformer.h.0.mlp.c_fc.weight", "transformer.h.1.mlp.c_fc.weight")]
    named = [
        HessianOperator(model, [batch], streaming=shared, params=[n])
        for n in ("transformer.h.0.mlp.c_fc.weight", "transformer.h.1.mlp.c_fc.weight")
    ]
    operators = [full, *losses, *blocks, *named]
    wholes = [HessianOperator(model, [batch], method="whole", params=op.space.names, loss=op.loss) for op in operators]
    with warnings.catch_warnings():
        # On a GPU, a head that is known as a function only runs code of the model that cannot be recorded.
        warnings.filterwarnings("ignore", "products cannot be recorded")
        for _ in range(4):
            for op, whole in zip(operators, wholes, strict=True):
                v = torch.randn(op.space.size, device=device)
                for _ in range(2):
                    torch.testing.assert_close(op @ v, whole @ v, rtol=1e-3, atol=1e-5)
    torch.set_float32_matmul_precision("high")
    try:
        assert full._streamed is not None
        present = full._streamed._recordings._kinds
        full @ torch.randn(full.space.size, device=device)
        assert full._streamed._recordings._kinds is not present
    finally:
        torch.set_float32_matmul_precision("highest")


def test_few_kinds_of_batches_are_recorded_at_a_time(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curvature.capture, "_KINDS", 2)
    model = tiny_lm("gpt2", dtype=torch.float32).to(device)
    shared = Streaming(recordings=Recordings())
    op = HessianOperator(model, [ids(1, n) for n in (20, 21, 22)], method="streamed", streaming=shared)
    whole = HessianOperator(model, op.batches, method="whole")
    v = torch.randn(op.space.size, device=device)
    for _ in range(3):
        torch.testing.assert_close(op @ v, whole @ v, rtol=1e-3, atol=1e-5)
    assert len(recordings_of(op)) == 2  # the third kind is launched: each of these two serves a batch
    del op
    gc.collect()
    later = HessianOperator(model, [ids(1, 23)], method="streamed", streaming=shared)
    for _ in range(3):
        later @ v
    assert len(recordings_of(later)) == 2  # an idle one has made room
    assert any(found.users for found in recordings_of(later))


def test_nothing_is_recorded_where_nothing_may_be_kept(device: str) -> None:
    model = tiny_lm("gpt2", dtype=torch.float32).to(device)
    op = HessianOperator(model, [ids(1, 24)], method="streamed", streaming=Streaming(reuse_bytes=0))
    for _ in range(3):
        op @ torch.randn(op.space.size, device=device)
    assert not recordings_of(op)


def test_an_operator_that_goes_takes_what_it_kept_with_it(device: str) -> None:
    """At once, not when Python next looks for cycles: a third of the free memory may hang on it."""
    model = tiny_lm("gpt2", dtype=torch.float32).to(device)
    settings = Streaming(capture=device == "cuda")  # the stand-in for recordings refers to what it reruns
    op = HessianOperator(model, [ids(2, 24), ids(2, 24)], method="streamed", streaming=settings)
    gc.collect()
    gc.disable()
    try:
        for _ in range(4):
            op @ torch.randn(op.space.size, device=device)
        assert op._streamed is not None
        kept = [weakref.ref(op._streamed), *(weakref.ref(lasting) for lasting, _ in op._streamed._kept.values())]
        kept += [weakref.ref(recording) for recording in recordings_of(op)]
        assert len(kept) == (4 if device == "cuda" else 3)
        del op
        assert [reference() for reference in kept] == [None] * len(kept)
    finally:
        gc.enable()


class WhileRecorded(nn.Module):
    """A function, and something done besides while it is recorded."""

    def __init__(self, function: Callable[[Tensor], Tensor], besides: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function, self.besides = function, besides

    def forward(self, x: Tensor) -> Tensor:
        if torch.cuda.is_current_stream_capturing():
            self.besides(x)
        return self.function(x)


@pytest.mark.gpu
@pytest.mark.filterwarnings("default:products cannot be recorded")
def test_a_recording_that_fails_leaves_the_device_as_it_was() -> None:
    model = tiny_lm("gpt2", dtype=torch.float32).cuda()
    batch = ids(2, 40)
    v = torch.randn(sum(p.numel() for p in model.parameters()), device="cuda")
    earlier = HessianOperator(model, [batch], method="streamed", params=list(dict(model.named_parameters())))
    expected = [earlier @ v for _ in range(3)][-1]
    assert len(recordings_of(earlier)) == 1
    peeking = tiny_lm("gpt2", dtype=torch.float32).cuda()
    mlp = peeking.transformer.h[1].mlp
    mlp.act = WhileRecorded(mlp.act, lambda x: float(x.sum()))
    op = HessianOperator(peeking, [batch], method="streamed")
    with pytest.warns(UserWarning, match="products cannot be recorded"):
        products = [op @ v for _ in range(3)]
    for product in products:
        torch.testing.assert_close(product, expected, rtol=1e-4, atol=1e-5)
    assert not recordings_of(op)

    assert torch.randn(4, device="cuda").isfinite().all()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    shared = torch.empty(1 << 24, device="cuda")
    shared.record_stream(torch.cuda.Stream())
    del shared
    torch.cuda.synchronize()
    torch.empty(1, device="cuda")  # what other streams are through with is given back at the next request
    assert torch.cuda.memory_allocated() == before

    torch.testing.assert_close(earlier @ v, expected, rtol=1e-4, atol=1e-5)
    later = HessianOperator(model, [ids(1, 24)], method="streamed")
    for _ in range(3):
        later @ v
    assert len(recordings_of(later)) == 1


@pytest.mark.gpu
def test_python_frees_no_recording_while_another_one_is_made() -> None:
    """A recording that is reachable from nowhere but itself becomes garbage in the midst of another one."""
    model = tiny_lm("gpt2", dtype=torch.float32).cuda()
    v = torch.randn(sum(p.numel() for p in model.parameters()), device="cuda")
    old = HessianOperator(model, [ids(2, 40)], method="streamed")
    for _ in range(3):
        old @ v
    held = [recordings_of(old)]
    assert len(held[0]) == 1
    del old

    def lose(_: Tensor) -> None:
        if held:
            cycle: list[Any] = [held.pop()]
            cycle.append(cycle)

    mlp = model.transformer.h[1].mlp
    mlp.act = WhileRecorded(mlp.act, lose)
    op = HessianOperator(model, [ids(2, 40)], method="streamed")
    op @ v
    thresholds = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        recorded = [op @ v for _ in range(2)]
    finally:
        gc.set_threshold(*thresholds)
    assert not held
    assert len(recordings_of(op)) == 1
    whole = HessianOperator(model, op.batches, method="whole")
    torch.testing.assert_close(recorded[1], whole @ v, rtol=1e-3, atol=1e-5)
