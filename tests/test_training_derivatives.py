"""Training steps whose launches are recorded and replayed: the same weights as from launched steps.

On a CPU a recording is a closure that is run again at each replay. As graphs that share work space do, it spoils what
other recordings have left.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config

import curvature.training
import curvature.training_derivatives as derivatives
from curvature.training import Training
from curvature.training_settings import Schedule, TrainingSettings
from flashbob import register_attention

VOCABULARY, SEQ = 61, 16


class SpoilingGraph:
    """Stands in for `curvature.capture.Graph` where there is no GPU."""

    made: list[SpoilingGraph]

    def __init__(self, run: Callable[[], Any], device: torch.device, beside: SpoilingGraph | None = None) -> None:
        assert beside is None or beside is self.made[0]
        self._run, self.result = run, run()
        self._spoil()
        self.made.append(self)

    def tensors(self) -> list[Tensor]:
        loss, found = self.result
        return [loss, *(t for t in found if t is not None)]

    def _spoil(self) -> None:
        for t in self.tensors():
            t.detach().fill_(torch.nan)

    def replay(self) -> None:
        loss, found = self._run()
        with torch.no_grad():
            for old, new in zip(self.tensors(), [loss, *(t for t in found if t is not None)], strict=True):
                old.copy_(new)
        for other in self.made:
            if other is not self:
                other._spoil()


class Windows:
    """Random windows by number."""

    def __init__(self) -> None:
        self.taken = 0

    def take(self, count: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.taken)
        self.taken += count
        return torch.randint(0, VOCABULARY, (count, SEQ), generator=generator)

    def position(self) -> tuple[dict[str, int], dict[str, Tensor]]:
        return {"window": self.taken}, {}


def training(device: str = "cpu", **chosen: Any) -> Training:
    register_attention()
    torch.manual_seed(0)
    off: dict[str, Any] = {"attn_pdrop": 0.1, "resid_pdrop": 0.1, "embd_pdrop": 0.0, "use_cache": False}
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=SEQ, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0, **off
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="flashbob").to(device)
    usual: dict[str, Any] = {
        "batch": 2,
        "accumulate": 3,
        "estimates": 2,
        "interval": 2,
        "gamma": 0.01,
        "betas": (0.9, 0.9),
    }
    settings = TrainingSettings(schedule=Schedule(1e-2, 1e-3, 1, 8), curvature="row-norm", **usual | chosen)
    model.eval()
    held_out = torch.randint(0, VOCABULARY, (2, SEQ), generator=torch.Generator().manual_seed(99))
    return Training(model, Windows(), held_out, settings)  # type: ignore[arg-type]


def outcome(run: Training) -> tuple[list[float], list[Tensor]]:
    found = run.run()
    return [e["loss"] for e in (*found.history, *found.evaluation)], [
        p.detach().clone() for p in run.model.parameters()
    ]


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    SpoilingGraph.made = []
    monkeypatch.setattr(derivatives, "Graph", SpoilingGraph)
    monkeypatch.setattr(derivatives, "_roomy", lambda *_: True)


@pytest.mark.parametrize(
    "chosen",
    [
        {},
        {"accumulate": 1, "estimates": 1},
        {"optimizer": "adamw"},
        {"autocast": True},
        {"interval": 3, "accumulate": 2},
    ],
    ids=["accumulated", "one part", "adamw", "autocast", "another interval"],
)
def test_recorded_steps_are_launched_ones(chosen: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    launched = outcome(training(**chosen))
    SpoilingGraph.made = []
    monkeypatch.setattr(derivatives, "Graph", SpoilingGraph)
    monkeypatch.setattr(derivatives, "_roomy", lambda *_: True)
    run = training(**chosen)
    losses, weights = outcome(run)
    expected = {"gradient"} if chosen.get("optimizer") == "adamw" else {"gradient", "product"}
    assert run._derivatives.recorded == expected
    assert losses == launched[0]
    assert all(map(torch.equal, weights, launched[1]))


@pytest.mark.usefixtures("recorded")
def test_dropout_is_launched() -> None:
    run = training(dropout=True)
    run.run()
    assert run._derivatives.recorded == {"product"}  # estimates are without dropout


@pytest.mark.usefixtures("recorded")
def test_windows_of_another_shape_are_launched() -> None:
    run = training()
    ids = torch.randint(0, VOCABULARY, (2, SEQ))
    for _ in range(3):
        run._derivatives.hutchinson_diagonal(ids, 5)
    few = run._derivatives.hutchinson_diagonal(ids[:1], 5)
    expected = training()._derivatives.hutchinson_diagonal(ids[:1], 5)
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(few, expected, strict=True))  # type: ignore[arg-type]


@pytest.mark.usefixtures("recorded")
def test_a_loss_that_is_not_finite_is_found_in_a_replay() -> None:
    run = training(accumulate=1, estimates=1)
    ids = torch.randint(0, VOCABULARY, (2, SEQ))
    for _ in range(3):
        run._derivatives.hutchinson_diagonal(ids, 5)
    with torch.no_grad():
        next(iter(run.model.parameters())).fill_(torch.nan)
    with pytest.raises(FloatingPointError, match="no Hessian"):
        run._derivatives.hutchinson_diagonal(ids, 5)


def test_what_cannot_be_recorded_is_launched_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    launched = outcome(training())
    monkeypatch.setattr(derivatives, "Graph", refuse)
    monkeypatch.setattr(derivatives, "_roomy", lambda *_: True)
    with pytest.warns(UserWarning, match="launched in every step: operation not permitted") as told:
        losses, _ = outcome(training())
    assert losses == launched[0]
    assert len(told) == 1


@pytest.mark.usefixtures("recorded")
def test_nothing_is_recorded_before_it_was_launched_once() -> None:
    """Kernels are compiled by then; and nothing in the first step, when the optimizer has no state yet."""
    run = training(accumulate=1, estimates=1)
    found, first, other = (
        run._derivatives,
        torch.zeros(2, SEQ, dtype=torch.int64),
        torch.ones(1, SEQ, dtype=torch.int64),
    )
    found.hutchinson_diagonal(first, 1, record=False)
    found.hutchinson_diagonal(other, 1)
    assert not found.recorded
    found.add_gradient(first, 1)
    assert not found.recorded
    found.hutchinson_diagonal(first, 2)
    assert found.recorded == {"product"}
    found.add_gradient(first, 1)
    assert found.recorded == {"gradient", "product"}


@pytest.mark.parametrize(("refused", "interval"), [("gradient", 1), ("product", 2)])
def test_one_recording_goes_on_where_the_other_is_refused(
    refused: str, interval: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = outcome(training(interval=interval))

    class Refusing(SpoilingGraph):
        def __init__(self, run: Callable[[], Any], device: torch.device, beside: SpoilingGraph | None = None) -> None:
            if f"add_{refused}" in run.__qualname__ or (refused == "product" and "hutchinson" in run.__qualname__):
                raise RuntimeError
            super().__init__(run, device, beside)

    Refusing.made = SpoilingGraph.made = []
    monkeypatch.setattr(derivatives, "Graph", Refusing)
    monkeypatch.setattr(derivatives, "_roomy", lambda *_: True)
    run = training(interval=interval)
    with pytest.warns(UserWarning, match="launched in every step: RuntimeError"):
        losses, weights = outcome(run)
    assert run._derivatives.recorded == {"gradient", "product"} - {refused}
    assert losses == launched[0]
    assert all(map(torch.equal, weights, launched[1]))


@pytest.mark.usefixtures("recorded")
def test_a_step_that_ended_before_its_update_leaves_no_gradient_behind() -> None:
    """`parameter.grad` is then the recording's own tensor, to which the next step would add itself."""
    run = training(accumulate=1, optimizer="adamw", clip=0.0)
    for _ in range(3):
        run._one_step(0.0)
    windows = run._text.take(2)
    run._gradients([windows])
    once = [p.grad.clone() for p in run._parameters if p.grad is not None]
    run._gradients([windows])
    assert all(map(torch.equal, [p.grad for p in run._parameters if p.grad is not None], once))  # type: ignore[arg-type]


def test_parameters_that_are_added_up_have_gradients_of_their_own() -> None:
    a, b = (torch.nn.Parameter(torch.randn(3, 4)) for _ in range(2))
    gradients = torch.autograd.grad((torch.randn(5, 3) @ (a + b)).square().sum(), [a, b])
    assert gradients[0].data_ptr() == gradients[1].data_ptr()
    one, other = derivatives._apart(gradients, [a, b])
    assert one is not None
    assert other is not None
    assert one.data_ptr() != other.data_ptr()
    torch.testing.assert_close(one, other)
    (turned,) = derivatives._apart([torch.randn(4, 3).T], [a])
    assert turned is not None
    assert turned.stride() == a.stride()


def test_recordings_leave_memory_free(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        total_memory = 1000

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    parameters = [torch.zeros(10)]  # 40 bytes
    for peak, expected in ((700, True), (760, False)):
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device, peak=peak: peak)
        assert derivatives._roomy(torch.device("cuda"), parameters) == expected
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 700)
    assert not derivatives._roomy(torch.device("cuda"), [torch.zeros(30)])
    assert not derivatives._roomy(torch.device("cpu"), parameters)


def test_a_head_with_an_aligned_vocabulary_is_the_same_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """61 tokens as 64: what is added is cut off again, ahead of anything that a model does with its logits."""
    ids = torch.randint(0, VOCABULARY, (2, SEQ))

    def found(aligned: bool) -> list[Tensor]:
        monkeypatch.setattr(curvature.training, "one_pass", lambda weight: aligned)
        run = training(accumulate=1, estimates=1)
        run.model.double()
        assert (run.model.get_output_embeddings() in run._fused) == aligned
        loss = run._derivatives.add_gradient(ids, 1)
        gradients = [p.grad for p in run._parameters if p.grad is not None]
        diagonal = [d for d in run._derivatives.hutchinson_diagonal(ids, 3) if d is not None]
        return [loss, *gradients, *diagonal]

    for plain, padded in zip(found(False), found(True), strict=True):
        torch.testing.assert_close(padded, plain, rtol=1e-10, atol=1e-14)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "chosen", [{}, {"accumulate": 1, "estimates": 1, "autocast": True}], ids=["float32", "bfloat16"]
)
def test_recorded_steps_on_a_gpu(chosen: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    run = training("cuda", **chosen)
    losses, _ = outcome(run)
    assert run._derivatives.recorded == {"gradient", "product"}
    monkeypatch.setattr(derivatives, "_roomy", lambda *_: False)
    assert losses == pytest.approx(outcome(training("cuda", **chosen))[0], abs=2e-2 if "autocast" in chosen else 1e-4)
