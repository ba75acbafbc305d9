"""Finding a model's segments: what is found, what is left whole, what is refused and why."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from curvature import CausalLMLoss, HessianOperator
from curvature.layer_parts import SegmentationError
from curvature.segments import find_segments
from tests.tiny_causal_lms import ARCHITECTURES, tiny_lm, tokens


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Over tensors this small, threads wait for each other for longer than they compute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_layer_is_cut_into_attention_and_the_rest(name: str) -> None:
    model, batch = tiny_lm(name), tokens((2, 9))
    chain = find_segments(model, CausalLMLoss(), batch)(batch)
    assert len(chain.segments) == 2
    assert all(segment.attend is not None and segment.tokenwise for segment in chain.segments)
    inner = [p for segment in chain.segments for p in segment.parameters]
    assert {*inner, *chain.outer} == set(model.parameters())
    assert (chain.length, chain.tokens) == (9, 16)


@pytest.mark.parametrize("name", sorted({*ARCHITECTURES} - {"bloom"}))
def test_the_output_projection_belongs_to_the_token_wise_part(name: str) -> None:
    """In `attend`, then, no gradient of a parameter depends on what attention answers."""
    model, batch = tiny_lm(name), tokens((2, 9))
    chain = find_segments(model, CausalLMLoss(), batch)(batch)
    x, segment = chain.embed().detach(), chain.segments[0]
    assert segment.attend is not None
    a = segment.attend(x)
    unused = torch.autograd.grad(a.sum(), list(segment.parameters), allow_unused=True)
    names = {p: n for n, p in model.named_parameters()}
    projection = ("o_proj", "c_proj", "dense.", "out_proj")
    outputs = [
        p
        for p in segment.parameters
        if ("attn" in names[p] or "attention" in names[p])
        and any(part in names[p].replace("dense_", "") for part in projection)
    ]
    assert outputs
    for p, gradient in zip(segment.parameters, unused, strict=True):
        assert (gradient is None) or not any(p is output for output in outputs)


def test_arguments_are_those_of_the_batch() -> None:
    model = tiny_lm("llama")
    segments = find_segments(model, CausalLMLoss(), tokens((2, 9)))
    for batch in (tokens((1, 30)), tokens((3, 12), padding=True)):
        chain = segments(batch)
        x = chain.embed()
        for segment in chain.segments:
            assert segment.attend is not None
            x = segment.combine(x, segment.attend(x))
        expected, _ = CausalLMLoss()(model, batch)
        total = chain.head(x, 0, chain.length).detach()
        assert float(total) == pytest.approx(float(expected.detach()), rel=1e-13)


def test_modules_are_themselves_again() -> None:
    model, batch = tiny_lm("gpt2"), tokens((2, 9))
    before = model(**batch).logits
    chain = find_segments(model, CausalLMLoss(), batch)(batch)
    chain.head(chain.embed(), 0, 9)
    assert torch.equal(model(**batch).logits, before)
    assert not any("forward" in vars(module) for module in model.modules())
    assert not any(module._forward_hooks for module in model.modules())


class Layer(nn.Module):
    """x + mix(x) + f(x), mix a causal mean."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix, self.feed = Mean(width), nn.Sequential(nn.Linear(width, width), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(x)
        fed: Tensor = self.feed(x)
        return x + fed


class Mean(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.value = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        summed: Tensor = self.value(torch.tanh(x)).cumsum(1)
        return summed / torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]


class Shifting(Layer):
    """Mixes tokens in its own forward as well, so that no child can be taken out."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + 0.5 * torch.roll(x, 1, dims=1))


class Model(nn.Module):
    """A language model in the manner of transformers, with room for trouble."""

    def __init__(self, layer: type[nn.Module] = Layer, width: int = 6, vocabulary: int = 11) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(layer(width) for _ in range(3))
        self.head = nn.Linear(width, vocabulary)
        self.between: Any = lambda number, x: x
        self.around: Any = lambda layer, x, embedded: layer(x)
        self.double()

    def forward(self, input_ids: Tensor) -> Any:
        x = embedded = self.embedding(input_ids)
        for number, layer in enumerate(self.layers):
            x = self.around(layer, self.between(number, x), embedded)
        return SimpleNamespace(logits=self.head(x))


BATCH = {"input_ids": torch.arange(18).reshape(2, 9) % 11}


def refusal(model: nn.Module, batch: Any = BATCH, loss: Any = None) -> str:
    """The reason that a model is refused; "auto" gives it, goes through the whole graph, and "streamed" raises."""
    with pytest.raises(SegmentationError, match="method='streamed' does not apply") as caught:
        HessianOperator(model, [batch], method="streamed", loss=loss)
    op = HessianOperator(model, [batch], loss=loss)
    assert op.method == "whole"
    assert op.method_reason is not None
    assert op.method_reason in str(caught.value)
    z = torch.randn(op.shape[0], dtype=op.dtype)
    assert torch.equal(op @ z, HessianOperator(model, [batch], method="whole", loss=loss) @ z)
    return op.method_reason


def products_agree(model: nn.Module, batch: Any = BATCH, between: Any = lambda: None, **kwargs: Any) -> bool:
    """Streamed and whole, with anything done between the inspection of the model and the first product."""
    streamed, whole = (HessianOperator(model, [batch], method=method, **kwargs) for method in ("streamed", "whole"))
    between()
    z = torch.randn(whole.shape[0], dtype=whole.dtype)
    return bool((streamed @ z - whole @ z).norm() < 1e-12 * (whole @ z).norm())


def test_a_model_that_is_not_from_transformers_is_cut_all_the_same() -> None:
    model = Model()
    chain = find_segments(model, CausalLMLoss(), BATCH)(BATCH)
    assert all(segment.attend is not None for segment in chain.segments)
    assert products_agree(model)


def test_a_layer_that_cannot_be_cut_stays_whole() -> None:
    model = Model(Shifting)
    chain = find_segments(model, CausalLMLoss(), BATCH)(BATCH)
    assert all(segment.attend is None and not segment.tokenwise for segment in chain.segments)
    assert products_agree(model)


def test_a_layer_without_mixing_is_token_wise_as_a_whole() -> None:
    model = Model(lambda width: nn.Sequential(nn.Linear(width, width), nn.Tanh()))  # type: ignore[arg-type]
    chain = find_segments(model, CausalLMLoss(), BATCH)(BATCH)
    assert all(segment.attend is None and segment.tokenwise for segment in chain.segments)
    assert products_agree(model)


def test_refused_is_a_change_between_layers() -> None:
    model = Model()
    model.between = lambda number, x: 2 * x if number == 2 else x
    assert refusal(model) == "the hidden state is changed between layers.1 and layers.2"


def test_refused_are_arguments_that_depend_on_parameters() -> None:
    class Skip(Layer):
        def forward(self, x: Tensor, embedded: Tensor | None = None) -> Tensor:
            assert embedded is not None
            return super().forward(x) + embedded

    model = Model(Skip)
    model.around = lambda layer, x, embedded: layer(x, embedded=embedded)
    assert refusal(model) == "layers.0 takes an argument beside its hidden state that depends on parameters"


def test_refused_are_arguments_that_depend_on_earlier_layers() -> None:
    class Scaled(Layer):
        def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
            return super().forward(x) * (1 if scale is None else scale)

    model = Model(Scaled)
    model.around = lambda layer, x, embedded: layer(x, scale=1 + x.detach().square().mean())
    assert refusal(model) == "an argument of layers.1 depends on the hidden state of an earlier layer"


def test_refused_is_a_way_past_the_hidden_state() -> None:
    """A layer that reads what the one before has left behind; what it finds there is of another shape or graph."""
    left: dict[nn.Module, Tensor] = {}

    class Leaving(Layer):
        def forward(self, x: Tensor) -> Tensor:
            left[self] = self.feed(x)
            before = left.get(model.layers[list(model.layers).index(self) - 1]) if self is not model.layers[0] else None
            return super().forward(x) + (0 if before is None else before)

    model = Model(Leaving)
    reason = refusal(model)
    assert "does not run in segments" in reason or "the segments' gradient differs" in reason


def test_refused_is_a_model_that_fails_in_segments() -> None:
    model = Model()
    model.head = nn.Sequential(TooShort(), model.head)  # type: ignore[assignment]
    assert refusal(model) == "the model does not run in segments (ValueError: too short)"


class TooShort(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] < 9:
            raise ValueError("too short")
        return x


def test_refused_is_a_parameter_that_its_segment_does_not_own() -> None:
    """A layer that reads the embedding's weights on its own: the loss is right, the gradient is not."""

    class Reading(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + model.embedding.weight.mean(0)

    model = Model(Reading)
    assert refusal(model) == "the segments' gradient differs from the model's own in embedding.weight"


def test_refused_is_a_layer_that_runs_twice() -> None:
    model = Model()
    model.around = lambda layer, x, embedded: layer(layer(x))
    assert refusal(model) == "layers.0 is called 2 times in a forward pass, not once"


def test_refused_is_a_model_without_a_list_of_layers() -> None:
    model = Model()
    model.layers = nn.Sequential(*model.layers)  # type: ignore[assignment]
    assert "no list of layers" in refusal(model)


def test_refused_is_a_loss_that_is_not_a_sum_over_positions() -> None:
    def squared(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        return model(batch["input_ids"]).logits.square().sum(), 1

    assert "cannot be evaluated on stretches" in refusal(Model(), loss=squared)


def test_refused_is_a_head_that_mixes_tokens() -> None:
    class Mixing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + super().forward(x).mean(1, keepdim=True)

    model = Model()
    model.head = Mixing(6, 11, dtype=torch.float64)
    assert "the segments' loss is" in refusal(model)


def test_refused_is_a_gradient_that_differs_in_a_parameter_of_no_interest() -> None:
    """With the biases at zero the loss of the segments is right, and so is the gradient by every matrix."""
    if "gpt_neox_japanese" not in CONFIG_MAPPING:
        pytest.skip("the installed transformers has no gpt_neox_japanese")
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 43}
    config = CONFIG_MAPPING["gpt_neox_japanese"](**sizes, bos_token_id=None, eos_token_id=None)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").double().eval()
    with pytest.raises(SegmentationError, match=r"the segments' gradient differs .* in .*dense_bias"):
        find_segments(model, CausalLMLoss(), tokens((2, 9)))


def test_a_single_token_tells_nothing() -> None:
    with pytest.raises(SegmentationError, match="single token per row"):
        find_segments(Model(), CausalLMLoss(), {"input_ids": torch.ones(2, 1, dtype=torch.int64)})


def test_the_default_is_streamed_for_a_model_of_transformers() -> None:
    op = HessianOperator(tiny_lm("llama"), [tokens((2, 9))])
    assert op.method == "streamed"
    assert op.method_reason is None


@pytest.mark.parametrize("method", ["streamed", "whole"])
@pytest.mark.parametrize("label", [-1, 11])
def test_labels_outside_the_vocabulary_are_refused_whenever_they_come(method: Any, label: int) -> None:
    batch = {**BATCH, "labels": BATCH["input_ids"].clone()}
    op = HessianOperator(Model(), [batch], method=method)
    z = torch.ones(op.shape[0], dtype=op.dtype)
    op @ z
    batch["labels"][:, :4] = label
    for call in (op.loss_value, op.gradient, lambda: op @ z):
        with pytest.raises(ValueError, match=r"labels that count reach from .* but the model's vocabulary has 11 entr"):
            call()


def bent(value: Any) -> Any:
    return torch.tanh(value) if isinstance(value, Tensor) else (torch.tanh(value[0]), *value[1:])


def hooked_ahead(module: nn.Module) -> None:
    def bend(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (bent(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": bent(kwargs["hidden_states"])}

    module.register_forward_pre_hook(bend, with_kwargs=True)


def hooked_after(module: nn.Module) -> None:
    module.register_forward_hook(lambda _, __, ___, output: bent(output), with_kwargs=True, always_call=True)


@pytest.mark.parametrize("hook", [hooked_ahead, hooked_after])
@pytest.mark.parametrize("later", [False, True], ids=["before", "after the inspection"])
def test_hooks_run_once_where_their_module_runs(later: bool, hook: Any) -> None:
    model, batch = tiny_lm("llama"), tokens((2, 9))
    names = ("layers.0", "layers.0.self_attn.o_proj", "layers.0.mlp", "layers.1", "layers.1.self_attn", "norm")
    hooked = [model.lm_head, *(model.model.get_submodule(name) for name in names)]

    def add_hooks() -> None:
        for module in hooked:
            hook(module)

    if not later:
        add_hooks()
    assert products_agree(model, batch, add_hooks if later else lambda: None)
    assert all(len(m._forward_hooks) + len(m._forward_pre_hooks) == (m in hooked) for m in model.modules())


def test_refused_are_backward_hooks() -> None:
    model = Model()
    model.layers[1].get_submodule("mix.value").register_full_backward_hook(lambda _, __, ___: None)
    assert refusal(model) == "layers.1 has backward hooks, which would run again for each of its parts"


def pruned(module: nn.Module) -> None:
    prune.random_unstructured(module, "weight", 0.3)


def normalized(module: nn.Module) -> None:
    with pytest.warns(FutureWarning, match="weight_norm"):
        nn.utils.weight_norm(module)


@pytest.mark.parametrize("compute", [pruned, normalized])
@pytest.mark.parametrize("params", [None, "layers"], ids=["all", "layers"])
def test_a_weight_that_is_computed_for_each_call_is_read_anew(compute: Any, params: str | None) -> None:
    model = tiny_lm("llama")
    computed = model.lm_head, model.model.layers[0].mlp.up_proj
    for module in computed:
        compute(module)

    def double() -> None:
        for parameter in (p for module in computed for p in module.parameters()):
            parameter.data *= 2

    assert products_agree(model, tokens((2, 9)), double, params=params)


class Weighed(nn.Module):
    """x + table * (overlay f(x))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = Overlay(width)

    def forward(self, x: Tensor, overlay: Tensor, table: Tensor) -> Tensor:
        return x + self.mix(x, overlay) * table


class Overlay(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.value = nn.Linear(width, width)

    def forward(self, x: Tensor, overlay: Tensor) -> Tensor:
        mixed: Tensor = overlay[:, 0] @ torch.tanh(self.value(x))
        return mixed


class Positioned(Model):
    """Takes positions of any shape, weights of pairs of them [rows or 1, 1, N, N], and tables ([1, N, 1],)."""

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor | None = None,
        overlay: Tensor | None = None,
        tables: tuple[Tensor] | None = None,
    ) -> Any:
        x = self.embedding(input_ids)
        if positions is not None:
            x = x + self.embedding(positions % 11)
        for layer in self.layers:
            x = layer(x, overlay, tables and tables[0])
        return SimpleNamespace(logits=self.head(x))


@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("shape", [(30,), (1, 30), (3, 30)], ids=str)
def test_whatever_has_the_batchs_length_is_cut_to_the_probe(rows: int, shape: tuple[int, ...]) -> None:
    if shape[0] == 3 and rows != 3:
        pytest.skip("the shape is that of three rows")
    batch = {
        "input_ids": torch.arange(rows * 30).reshape(rows, 30) % 11,
        "positions": torch.arange(30).expand(shape),
        "overlay": torch.rand(rows, 1, 30, 30, dtype=torch.float64).tril() / 30,
        "tables": (torch.rand(1, 30, 1, dtype=torch.float64),),
    }
    model = Positioned(Weighed)
    assert products_agree(model, batch)


def test_refused_is_a_model_that_runs_on_the_batch_only() -> None:
    class Fixed(Model):
        def forward(self, input_ids: Tensor) -> Any:
            if input_ids.shape[1] != 30:
                raise TypeError("made for 30 tokens\nno more, no less")
            return super().forward(input_ids)

    reason = refusal(Fixed(), {"input_ids": torch.arange(60).reshape(2, 30) % 11})
    assert reason == "the model does not run on a few tokens of the batch (TypeError: made for 30 tokens)"


@pytest.mark.parametrize("kept", [1, 30], ids=["one token", "thirty tokens"])
def test_the_probe_holds_a_counted_token_wherever_padding_is(kept: int) -> None:
    """One row padded on the left up to its last tokens, one on the right from the middle on."""
    batch, mask = tokens((2, 100)), torch.zeros(2, 100, dtype=torch.int64)
    mask[0, -kept:], mask[1, :50] = 1, 1
    assert products_agree(tiny_lm("llama"), {**batch, "attention_mask": mask})
