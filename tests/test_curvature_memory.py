"""Live bytes, allowances, forecasts."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from curvature import CausalLMLoss, HessianOperator
from curvature.costs import Line, measure_costs
from curvature.memory import forecast, suggest
from curvature.segments import find_segments
from curvature.storage import Allowance, LiveBytes, Stretches, default_stretches, spare_bytes
from curvature.streamed import Streamed
from curvature.streaming import Streaming
from curvature.whole_graph import WholeGraph
from flashbob import blocked
from tests.tiny_causal_lms import VOCABULARY, tiny_lm, tokens


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Over tensors this small, threads wait for each other for longer than they compute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_live_bytes_are_counted_once_and_until_the_last_view_is_gone() -> None:
    before = torch.ones(1000)
    with LiveBytes() as live:
        live.ignore([before])
        a = before + 1
        assert live.now == 4000
        view = a[:10]
        del a
        assert live.now == 4000
        b = before.view(10, 100).T
        assert live.now == 4000
        del view
        assert live.now == 0
        c = torch.zeros(500, dtype=torch.float64, requires_grad=True)
        d = (c * c).sum()
        assert live.now == 4000 + 8
        del d
        assert (live.now, live.peak) == (4000, 4000 + 4000 + 8)
        del b, c


def test_an_allowance_is_spent_once() -> None:
    allowance = Allowance(100)
    assert allowance.take(60)
    assert not allowance.take(41)
    allowance.spend(50)
    assert (allowance.spent, allowance.left) == (110, -10)
    assert not allowance.take(0)
    assert Allowance().take(1 << 60)


@pytest.mark.parametrize("name", ["tokenwise", "head"])
def test_stretches_have_at_least_one_token(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least 1 token, got 0"):
        Stretches(**({"tokenwise": 1, "head": 1} | {name: 0}))
    with pytest.raises(ValueError, match="reuse_bytes must be at least 0"):
        Streaming(reuse_bytes=-1)


def test_default_stretches_follow_the_widest_matrix_and_the_vocabulary() -> None:
    model = tiny_lm("gpt2", dtype=torch.float32, n_embd=64, n_head=2)
    chain = find_segments(model, CausalLMLoss(), tokens((1, 9)))(tokens((1, 9)))
    stretches = default_stretches(chain)
    assert stretches.tokenwise == (48 << 20) // (4 * 256) // 128 * 128
    assert stretches.head == (128 << 20) // (4 * VOCABULARY) // 128 * 128


def test_there_is_spare_memory() -> None:
    assert spare_bytes(torch.device("cpu")) > 1 << 20


def test_a_line_goes_through_its_points() -> None:
    line = Line.through({10: 120.0, 20: 220.0})
    assert (line.fixed, line.each, line(100)) == (20.0, 10.0, 1020.0)


def peak(name: str, layers: int, shape: tuple[int, int], streaming: Streaming | None, directions: int = 1) -> int:
    """Measured peak of what a forecast counts: weights, three vectors per direction, all else that lives."""
    model = model_of(name, layers)
    parameters, batch = list(model.parameters()), tokens(shape)
    z = [[torch.randn(p.shape) for p in parameters] for _ in range(directions)]
    segments = find_segments(model, CausalLMLoss(), batch)
    with LiveBytes() as live:
        live.ignore([*parameters, *model.buffers(), *(t for d in z for t in d)])
        if streaming is None:
            WholeGraph(model, CausalLMLoss(), batch, parameters).product(z[0], keep=False)
        else:
            allowance = Allowance(streaming.reuse_bytes)
            derivatives = Streamed(segments(batch), parameters, stretches=streaming.stretches, allowance=allowance)
            list(derivatives.products(z, keep=streaming.keep))
    weights = sum(p.numel() * p.element_size() for p in [*parameters, *model.buffers()])
    return live.peak + weights + 2 * directions * sum(4 * p.numel() for p in parameters)


def model_of(name: str, layers: int) -> torch.nn.Module:
    width = {"n_embd": 64, "n_positions": 512} if name == "gpt2" else {"hidden_size": 64, "head_dim": 16}
    return tiny_lm(
        name, dtype=torch.bfloat16, **width, **{"n_layer" if name == "gpt2" else "num_hidden_layers": layers}
    )


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_the_forecast_from_a_single_layer_holds_for_a_deep_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocked, "TILE_ELEMENTS", 1 << 13)  # else tiles outweigh the activations of models this small
    layers = 3
    costs = measure_costs(model_of(name, 1), layers=layers, tokens=(64, 128))
    for shape, streaming, directions in (
        ((1, 256), Streaming(stretches=Stretches(64, 64)), 1),
        ((1, 256), Streaming(stretches=Stretches(64, 32), keep=False, reuse_bytes=0), 1),
        ((2, 128), Streaming(stretches=Stretches(256, 128), keep=False), 1),
        ((2, 128), Streaming(stretches=Stretches(64, 64)), 3),
    ):
        expected = forecast(
            costs, seq=shape[1], batch=shape[0], stretches=streaming.stretches, keep=streaming.keep,
            reuse_bytes=streaming.reuse_bytes, directions=directions,
        )  # fmt: skip
        assert expected.peak_bytes == pytest.approx(peak(name, layers, shape, streaming, directions), rel=0.12)
        assert sum(expected.items.values()) == expected.peak_bytes
    whole = forecast(costs, seq=256, method="whole")
    assert whole.peak_bytes == pytest.approx(peak(name, layers, (1, 256), None), rel=0.12)


def test_the_forecast_of_a_whole_graph_counts_every_array_of_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits outweigh all else in a model of many words; PyTorch's cross-entropy holds several arrays of their size."""
    monkeypatch.setattr(blocked, "TILE_ELEMENTS", 1 << 13)

    def wordy(layers: int) -> torch.nn.Module:
        model = model_of("gpt2", layers).float()
        model.resize_token_embeddings(4096)
        return model

    batch = tokens((1, 256))
    expected = forecast(measure_costs(wordy(1), layers=2, tokens=(64, 128)), seq=256, method="whole")
    model = wordy(2)
    parameters = list(model.parameters())
    z = [torch.randn(p.shape) for p in parameters]
    with LiveBytes() as live:
        live.ignore([*parameters, *model.buffers(), *z])
        WholeGraph(model, CausalLMLoss(), batch, parameters).product(z, keep=False)
    weights = sum(p.numel() * p.element_size() for p in [*parameters, *model.buffers()])
    found = live.peak + weights + 2 * sum(4 * p.numel() for p in parameters)
    assert expected.peak_bytes == pytest.approx(found, rel=0.12)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_further_layer_takes_three_activations(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocked, "TILE_ELEMENTS", 1 << 13)
    shape, frugal = (1, 256), Streaming(stretches=Stretches(64, 64), keep=False, reuse_bytes=0)
    few, many = 2, 6
    peaks = {layers: peak(name, layers, shape, frugal) for layers in (few, many)}
    parameters = [sum(p.numel() for p in model_of(name, layers).parameters()) for layers in (few, many)]
    # A parameter has two bytes, and four each in the direction, in its share of the product and in the product.
    own = (2 + 3 * 4) * (parameters[1] - parameters[0])
    activation = 2 * 64 * shape[0] * shape[1]
    assert peaks[many] - peaks[few] - own <= 3.2 * activation * (many - few)


def test_suggestions_fit_and_give_up_as_little_as_they_can() -> None:
    small = measure_costs(model_of("llama", 1), layers=48, tokens=(64, 128))
    costs = replace(small, stretches=Stretches(4096, 4096))
    asked = forecast(costs, seq=8192)
    changes = []
    for share in range(100, 0, -2):
        available = asked.peak_bytes * share // 100
        found = suggest(costs, available, seq=8192)
        if found is None:
            break
        assert found.forecast.peak_bytes <= available
        if found.change not in changes:
            changes.append(found.change)
    nothing = "keep nothing between products"
    order = [
        "",
        "keep less between products",
        nothing,
        f"{nothing}, in shorter stretches",
        f"{nothing}, in shorter stretches, activations in host memory",
        *(f"a sequence of {n} tokens" for n in (4096, 2048, 1024, 512, 256, 128)),
    ]
    assert changes == [change for change in order if change in changes]
    assert {"", "keep less between products", nothing, "a sequence of 4096 tokens"} <= set(changes)
    assert suggest(costs, costs.weights, seq=8192) is None


def test_no_forecast_where_memory_is_quadratic() -> None:
    with pytest.raises(NotImplementedError, match="attn_implementation='eager'"):
        measure_costs(tiny_lm("llama", attn_implementation="eager"))


@pytest.mark.gpu
@pytest.mark.parametrize("keep", [False, True], ids=["once", "kept"])
def test_the_forecast_holds_on_the_device(keep: bool) -> None:
    """Against the allocator's own count, in a model large enough for the library's work space not to matter."""
    width, length, layers = 512, 8192, 6

    def model(layers: int) -> torch.nn.Module:
        wide = {"n_embd": width, "n_head": 8, "n_positions": length, "n_layer": layers}
        model = tiny_lm("gpt2", **wide)
        with torch.no_grad():
            for p in model.parameters():  # in bfloat16, weights as large as those of narrow models drown a wide one
                p.mul_(0.1)
        return model.to("cuda", torch.bfloat16)

    costs = measure_costs(model(1), layers=layers)
    deep = model(layers)
    op = HessianOperator(
        deep, [tokens((1, length))], streaming=Streaming(keep=keep, reuse_bytes=None if keep else 0)
    )  # fmt: skip
    assert op.method_reason is None
    z = torch.randn(op.shape[0], device=op.device)
    op @ z  # loads what the libraries load once
    op.release()
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    ours = sum(t.numel() * t.element_size() for t in (z, *deep.parameters(), *deep.buffers()))
    others = torch.cuda.memory_allocated() - ours  # the libraries' lasting work space, and what other tests have left
    op @ z
    expected = forecast(costs, seq=length, keep=keep, reuse_bytes=None if keep else 0)
    assert expected.peak_bytes == pytest.approx(torch.cuda.max_memory_allocated() - others, rel=0.15)
