"""The streamed product against the whole-graph product, in float64; what it recomputes, keeps and remembers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from curvature import CausalLMLoss, HessianOperator, hvp
from curvature.chain import Chain, Segment
from curvature.operators import Method
from curvature.segments import find_segments
from curvature.storage import Allowance, LiveBytes, Stretches
from curvature.streamed import Streamed
from curvature.streaming import Streaming
from curvature.whole_graph import WholeGraph
from flashbob import blocked, fused
from tests.tiny_causal_lms import ARCHITECTURES, tiny_lm, tokens

SHORT = Streaming(stretches=Stretches(tokenwise=16, head=11))
"""Stretches that divide nothing: 5 and 3 columns of a batch of three."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Over tensors this small, threads wait for each other for longer than they compute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def difference(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def operators(model: nn.Module, batches: Sequence[Any], **kwargs: Any) -> tuple[HessianOperator, HessianOperator]:
    """(streamed in short stretches, whole)."""
    streamed = HessianOperator(model, batches, method="streamed", streaming=SHORT, **kwargs)
    return streamed, HessianOperator(model, batches, method="whole", **kwargs)


def direction(op: HessianOperator, columns: int | None = None) -> Tensor:
    return torch.randn(op.shape[0], *([] if columns is None else [columns]), dtype=op.dtype)


@pytest.mark.parametrize(
    ("name", "padding"),
    [*((name, True) for name in ARCHITECTURES), *((name, False) for name in ("gpt2", "llama", "mistral-window"))],
    ids=lambda value: value if isinstance(value, str) else "padded" if value else "full",
)
def test_streamed_equals_whole(name: str, padding: bool) -> None:
    model = tiny_lm(name)
    streamed, whole = operators(model, [tokens((3, 13), padding=padding)])
    z = direction(whole)
    assert difference(streamed @ z, whole @ z) < 1e-12


def test_eager_attention_is_streamed_as_well() -> None:
    streamed, whole = operators(tiny_lm("llama", attn_implementation="eager"), [tokens((2, 9))])
    z = direction(whole)
    assert difference(streamed @ z, whole @ z) < 1e-12


@pytest.mark.parametrize("method", ["auto", "streamed", "whole"])
def test_an_attention_without_a_second_derivative_is_named_with_the_remedy(method: Method) -> None:
    op = HessianOperator(tiny_lm("llama", attn_implementation="sdpa"), [tokens((2, 9))], method=method)
    with pytest.raises(NotImplementedError, match=r"no second derivative.*attn_implementation='flashbob'"):
        op @ torch.ones(op.shape[0], dtype=op.dtype)


def test_a_restriction_is_cut_as_its_operator_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is not inspected again for each of many blocks."""
    model, batches = tiny_lm("llama"), [tokens((2, 12))]
    operator = HessianOperator(model, batches, method="streamed")
    name = "model.layers.1.mlp.down_proj.weight"
    expected = HessianOperator(model, batches, params=[name], method="whole")

    def refuse(*_: object) -> None:
        raise AssertionError("inspected again")

    monkeypatch.setattr("curvature.model_operator.find_segments", refuse)
    block = operator.restricted([name])
    assert block.segments is operator.segments
    v = torch.randn(block.shape[0], dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(block @ v, expected @ v, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize(
    "params",
    [
        r"wte",
        r"wpe",
        r"h\.0\.ln_1\.bias",
        r"h\.1\.attn",
        r"h\.1\.mlp\.c_proj\.bias",
        r"ln_f",
        r"mlp",
        r"h\.0\.attn\.c_proj",
    ],
)
@pytest.mark.parametrize("name", ["gpt2", "gpt2-untied"])
def test_restricted_to_some_parameters(name: str, params: str) -> None:
    streamed, whole = operators(tiny_lm(name, n_layer=3), [tokens((3, 9), padding=True)], params=params)
    z = direction(whole)
    assert difference(streamed @ z, whole @ z) < 1e-12


@pytest.mark.parametrize("params", ["lm_head", "experts", "router", "k_proj", "post_attention_layernorm"])
def test_restricted_in_a_mixture_of_experts(params: str) -> None:
    streamed, whole = operators(tiny_lm("granite-moe"), [tokens((2, 9))], params=params)
    z = direction(whole)
    assert difference(streamed @ z, whole @ z) < 1e-12


def test_frozen_layers() -> None:
    model = tiny_lm("llama", num_hidden_layers=3)
    model.get_submodule("model.layers.1").requires_grad_(False)
    model.get_submodule("model.embed_tokens").requires_grad_(False)
    streamed, whole = operators(model, [tokens((2, 9))])
    z = direction(whole)
    assert difference(streamed @ z, whole @ z) < 1e-12


def test_directions_that_are_zero_in_most_parameters() -> None:
    """They start sweep 3 at the first segment that they reach; the product is wanted everywhere."""
    streamed, whole = operators(tiny_lm("gpt2-untied", n_layer=3), [tokens((2, 9))])
    for name, where in whole.space.slices().items():
        if any(part in name for part in ("wpe", "h.2.mlp.c_fc.weight", "h.1.attn.c_attn.bias", "lm_head")):
            z = torch.zeros(whole.shape[0], dtype=torch.float64)
            z[where] = torch.randn(z[where].shape, dtype=torch.float64)
            assert difference(streamed @ z, whole @ z) < 1e-12, name
    assert not (streamed @ torch.zeros(whole.shape[0], dtype=torch.float64)).any()


def test_unequal_and_padded_batches_and_one_without_a_counted_token() -> None:
    nothing = tokens((1, 6), seed=3) | {"labels": torch.full((1, 6), -100)}
    labelled = tokens((2, 7), seed=4)
    labelled["labels"] = labelled["input_ids"].clone()
    labelled["labels"][:, :4] = -100
    batches = [tokens((3, 13), padding=True), nothing, tokens((1, 5), seed=2), labelled]
    streamed, whole = operators(tiny_lm("qwen3"), batches)
    z = direction(whole)
    assert difference(streamed @ z, whole @ z) < 1e-12
    assert difference(streamed.gradient(), whole.gradient()) < 1e-12
    assert streamed.loss_value() == pytest.approx(whole.loss_value(), rel=1e-13)


@pytest.mark.parametrize("params", [None, r"layers\.1", "lm_head"], ids=["all", "last layer", "head"])
def test_gradient(params: str | None) -> None:
    streamed, whole = operators(tiny_lm("llama"), [tokens((2, 9))], params=params)
    assert difference(streamed.gradient(), whole.gradient()) < 1e-12


def test_a_gradient_alone_takes_one_pass_back_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    layers, counts = 3, Counter[str]()
    model, batch = tiny_lm("llama", num_hidden_layers=layers), tokens((2, 9))
    whole = HessianOperator(model, [batch], method="whole").gradient()
    op = HessianOperator(model, [batch], method="streamed")
    monkeypatch.setattr(fused, "find", lambda *_: Counting(blocked, counts))
    for _ in range(2):
        counts.clear()
        assert difference(op.gradient(), whole) < 1e-12
        assert counts == {"forward": layers, "backward": layers}
    counts.clear()
    op @ torch.ones(op.shape[0], dtype=op.dtype)
    kept = counts.copy()
    assert difference(op.gradient(), whole) < 1e-12
    assert counts["forward"] == kept["forward"]
    assert counts["backward"] == kept["backward"] + layers


def test_a_gradient_alone_refuses_products() -> None:
    model, batch = tiny_lm("gpt2"), tokens((1, 6))
    derivatives = streamed_batch(model, batch, products=False)
    z = [torch.randn_like(p) for p in model.parameters()]
    expected = streamed_batch(model, batch).gradient()
    for a, b in zip(derivatives.gradient(), expected, strict=True):
        assert a is not None
        assert b is not None
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)
    with pytest.raises(RuntimeError, match="released"):
        derivatives.product(z)


def test_several_directions_at_once() -> None:
    streamed, whole = operators(tiny_lm("gemma2"), [tokens((2, 9))])
    z = direction(whole, 5)
    z[:, 3] = 0
    expected = whole @ z
    assert difference(streamed @ z, expected) < 1e-12
    two_at_once = Streaming(stretches=SHORT.stretches, reuse_bytes=3 * 2 * 2 * (2 * 9 * 16 * 8))
    limited = HessianOperator(tiny_lm("gemma2"), [tokens((2, 9))], method="streamed", streaming=two_at_once)
    assert difference(limited @ z, expected) < 1e-12


def streamed_batch(model: nn.Module, batch: Any, **kwargs: Any) -> Streamed:
    return Streamed(find_segments(model, CausalLMLoss(), batch)(batch), list(model.parameters()), **kwargs)


@pytest.mark.parametrize("size", [0, 3000, 9000, 20000, None])
def test_the_allowance_changes_the_work_and_not_the_result(size: int | None) -> None:
    model, batch = tiny_lm("llama"), tokens((2, 9))
    z = [torch.randn_like(p) for p in model.parameters()]
    expected = streamed_batch(model, batch, allowance=Allowance(0)).product(z, keep=False)
    derivatives = streamed_batch(model, batch, allowance=Allowance(size))
    for _ in range(2):
        for a, b in zip(derivatives.product(z), expected, strict=True):
            assert a is not None
            assert torch.equal(a, b)


class Counting:
    """An attention implementation that counts what it is asked for."""

    def __init__(self, implementation: Any, counts: Counter[str]) -> None:
        self.name, self._implementation, self._counts = "counting", implementation, counts

    def __getattr__(self, attribute: str) -> Callable[..., Any]:
        def counted(*args: Any) -> Any:
            self._counts[attribute] += 1
            return getattr(self._implementation, attribute)(*args)

        return counted


def test_a_further_direction_costs_one_double_and_one_first_backward_per_attention(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layers, counts = 3, Counter[str]()
    model, batch = tiny_lm("llama", num_hidden_layers=layers), tokens((2, 9))
    segments = find_segments(model, CausalLMLoss(), batch)
    monkeypatch.setattr(fused, "find", lambda *_: Counting(blocked, counts))
    original = blocked.double_backward

    def counted(*args: Any) -> Any:
        counts["double_backward"] += 1
        return original(*args)

    monkeypatch.setattr(blocked, "double_backward", counted)
    z = [torch.randn_like(p) for p in model.parameters()]
    derivatives = Streamed(segments(batch), list(model.parameters()))
    assert counts == {"forward": layers, "backward": layers}
    for products in (1, 2):
        derivatives.product(z)
        assert counts == {
            "forward": layers, "backward": (1 + products) * layers, "double_backward": products * layers,
        }  # fmt: skip
    counts.clear()
    frugal = Streamed(segments(batch), list(model.parameters()), allowance=Allowance(0))
    frugal.product(z)
    assert counts == {"forward": 4 * layers, "backward": 3 * layers, "double_backward": layers}


def test_released_derivatives_refuse_a_further_product() -> None:
    model, batch = tiny_lm("gpt2"), tokens((1, 6))
    derivatives = streamed_batch(model, batch)
    z = [torch.randn_like(p) for p in model.parameters()]
    derivatives.product(z, keep=False)
    with pytest.raises(RuntimeError, match="released"):
        derivatives.product(z)


@pytest.mark.parametrize("through_data", [False, True], ids=["in place", "through .data"])
def test_changed_weights_are_noticed(through_data: bool) -> None:
    model, batches = tiny_lm("gpt2"), [tokens((2, 8))]
    streamed, _ = operators(model, batches)
    z = direction(streamed)
    before = streamed @ z
    assert torch.equal(streamed @ z, before)
    weight = model.get_parameter("transformer.h.0.mlp.c_fc.weight")
    if through_data:
        weight.data.mul_(-1)
    else:
        with torch.no_grad():
            weight.mul_(1.5)
    after = streamed @ z
    assert difference(after, before) > 1e-3
    assert difference(after, HessianOperator(model, batches, method="whole") @ z) < 1e-12


def test_kept_derivatives_can_be_released_and_come_back() -> None:
    streamed, whole = operators(tiny_lm("gpt2"), [tokens((2, 8)), tokens((1, 5), seed=1)])
    z = direction(whole)
    first = streamed @ z
    streamed.release()
    assert torch.equal(streamed @ z, first)


def test_hvp_streams_and_keeps_nothing() -> None:
    model, batches = tiny_lm("llama"), [tokens((2, 8))]
    whole = HessianOperator(model, batches, method="whole")
    z = direction(whole)
    assert difference(hvp(model, batches, z), whole @ z) < 1e-12


def test_a_loss_that_is_not_finite_is_an_error() -> None:
    model = tiny_lm("gpt2")
    streamed, _ = operators(model, [tokens((1, 6))])
    with torch.no_grad():
        model.get_parameter("transformer.ln_f.weight").mul_(torch.inf)
    with pytest.raises(FloatingPointError, match="loss of a batch is nan"):
        streamed @ direction(streamed)


@pytest.mark.parametrize("name", ["gpt2", "llama", "granite-moe"])
def test_bfloat16_is_no_less_exact_than_through_the_whole_graph(name: str) -> None:
    batches = [tokens((2, 32))]
    exact = HessianOperator(tiny_lm(name), batches, method="whole")
    low = tiny_lm(name, dtype=torch.bfloat16)
    streamed, whole = operators(low, batches)
    rounded = HessianOperator(low.double(), batches, method="whole")
    z = torch.randn(exact.shape[0])
    expected = rounded @ z.double()
    low.bfloat16()
    errors = [difference((op @ z).double(), expected) for op in (streamed, whole)]
    assert errors[0] < 1.25 * errors[1]
    assert errors[0] < 0.1


def peak_beyond_results(layers: int, tokens_: int = 256, **settings: Any) -> float:
    """Peak of live memory during construction and one product, beyond the product itself, in hidden states."""
    width = 32
    model = tiny_lm("gpt2", dtype=torch.float32, n_layer=layers, n_embd=width, n_positions=tokens_)
    parameters, batch = list(model.parameters()), tokens((1, tokens_))
    z = [torch.randn_like(p) for p in parameters]
    whole = settings.pop("whole", False)
    segments = find_segments(model, CausalLMLoss(), batch)
    with LiveBytes() as live:
        live.ignore([*parameters, *model.buffers(), *z])
        if whole:
            product = WholeGraph(model, CausalLMLoss(), batch, parameters).product(z, keep=False)
        else:
            keep = settings.pop("keep", False)
            product = Streamed(segments(batch), parameters, stretches=Stretches(64, 64), **settings).product(
                z, keep=keep
            )
    return (live.peak - sum(4 * t.numel() for t in product if t is not None)) / (4 * width * tokens_)


def test_a_layer_more_costs_three_hidden_states() -> None:
    """x, and s and s_a (before them lambda and alpha): nothing else waits. With lambda kept for later, a fourth."""
    frugal = {"allowance": Allowance(0)}
    assert peak_beyond_results(6, **frugal) - peak_beyond_results(2, **frugal) == pytest.approx(4 * 3, abs=0.1)
    kept = [peak_beyond_results(n, keep=True, **frugal) for n in (2, 6)]
    assert kept[1] - kept[0] == pytest.approx(4 * 4, abs=0.1)
    whole = [peak_beyond_results(n, whole=True) for n in (2, 6)]
    assert whole[1] - whole[0] > 4 * 40


@pytest.mark.gpu
def test_offloaded_activations_give_the_same_product() -> None:
    model, batches = tiny_lm("llama", attn_implementation="eager", num_hidden_layers=4).cuda(), [tokens((2, 32))]
    products = []
    for offload in (False, True):
        streaming = Streaming(stretches=SHORT.stretches, offload=offload)
        op = HessianOperator(model, batches, method="streamed", streaming=streaming)
        z = torch.randn(op.shape[0], 2, dtype=op.dtype, generator=torch.Generator().manual_seed(0)).to(op.device)
        products += [op @ z, op @ z]
    for product in products[1:]:
        assert difference(product, products[0]) < 1e-12


@pytest.mark.gpu
def test_a_model_decomposes_where_products_are_taken_in_tf32() -> None:
    config = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_hidden_layers": 4}
    model, batch = tiny_lm("llama", **config).float().cuda(), tokens((2, 256))
    exact = HessianOperator(model, [batch], method="whole")
    z = torch.randn(exact.shape[0], generator=torch.Generator().manual_seed(0)).cuda()
    expected = exact @ z
    torch.set_float32_matmul_precision("high")
    try:
        op = HessianOperator(model, [batch])
        assert op.method == "streamed", op.method_reason
        # A random model's product amplifies rounding a thousandfold, by either method.
        rounding = difference(HessianOperator(model, [batch], method="whole") @ z, expected)
        assert 1e-4 < difference(op @ z, expected) < 1.2 * rounding
    finally:
        torch.set_float32_matmul_precision("highest")


class TokenShift(nn.Module):
    """A small recurrent-looking model without attention: each layer adds the previous token's projection."""

    def __init__(self, layers: int = 2, width: int = 8, vocabulary: int = 11) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary)

    def layer(self, number: int, x: Tensor) -> Tensor:
        return x + self.layers[number](torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :-1])

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for number in range(len(self.layers)):
            x = self.layer(number, x)
        logits: Tensor = self.head(x)
        return logits


def test_segments_written_by_hand() -> None:
    model, loss = TokenShift().double(), CausalLMLoss()
    batches = [{"input_ids": torch.randint(0, 11, (2, 7))}]

    def segments(batch: Any) -> Chain:
        ids, targets = batch["input_ids"], loss.targets(batch)
        return Chain(
            embed=lambda: model.embedding(ids),
            segments=[
                Segment(f"layers.{i}", list(m.parameters()), lambda x, _, i=i: model.layer(i, x))
                for i, m in enumerate(model.layers)
            ],
            head=lambda x, a, b: loss.token_sum(model.head(x), targets[:, a:b]),
            outer=[*model.embedding.parameters(), *model.head.parameters()],
            length=ids.shape[1],
            tokens=int((targets != loss.ignore_index).sum()),
        )

    streaming = Streaming(segments=segments, stretches=SHORT.stretches)
    streamed = HessianOperator(model, batches, method="streamed", streaming=streaming)
    whole = HessianOperator(model, batches, method="whole")
    z = direction(whole)
    assert difference(streamed @ z, whole @ z) < 1e-12


def test_a_trained_model(shared: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(shared / "models/stories260k", attn_implementation="flashbob").double()
    ids = torch.randint(3, 512, (2, 64))
    auto, whole = (
        HessianOperator(model.eval(), [{"input_ids": ids}]),
        HessianOperator(model, [{"input_ids": ids}], method="whole"),
    )
    assert auto.method == "streamed"
    z = direction(whole)
    assert difference(auto @ z, whole @ z) < 1e-11
