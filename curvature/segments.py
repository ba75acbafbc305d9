"""Finding the chain of segments of a causal language model by watching it run.

Every part of the chain *is* the model's own code, run with the modules that do not belong to it replaced by stand-ins:

- the layers are the entries of the `nn.ModuleList` that hand one hidden state from each to the next;
- what the model passes to its layers (positions, rotary tables, masks) is recorded per batch from its own forward pass;
- `attend` runs a layer until its mixing module calls its output projection, `combine` runs it with what the projection
  was given. Which module mixes is read off derivatives of one token's output by the other tokens: exact zeros where
  there is no dependence, in every dtype;
- `embed` runs the model until its last layer is reached, `head` runs it with the last layer's answer given; where the
  logits are what one linear map answers, `features` runs it until that map is reached.

The exception are linear maps, norms and activations that a fused layer is found to equal (`curvature.layers`).
No architecture is known by name. A layer that cannot be cut stays whole; a model that is no such chain is refused with
the reason: the chain's loss and gradient are compared with the model's own before it is used.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from curvature.chain import Chain, Reads, Segment, Segments
from curvature.layer_parts import (
    Call,
    LayerParts,
    Reached,
    SegmentationError,
    cut_layer,
    first_tensor,
    is_hooked,
    probe_span,
    standing_in,
)
from curvature.layers.substitutes import Forwards, find_substitutes, owns_weights, substituted
from curvature.loss import Batch, CausalLMLoss, Loss, count_targets
from curvature.precision import keep_double, precision_of, roundoff
from curvature.readout import Readout
from curvature.storage import Stretches
from curvature.streamed import Streamed

__all__ = ["ChainedLoss", "find_segments"]

_PROBE_TOKENS = 24

_Asked: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of a module's call, before any hook."""


@runtime_checkable
class ChainedLoss(Loss, Protocol):
    """A loss that is a sum over positions, so that its head may run on stretches of them (see `CausalLMLoss`)."""

    ignore_index: int

    def targets(self, batch: Batch) -> Tensor:
        """What each position must predict, int64 [B, N]; `ignore_index` where nothing is counted."""
        ...

    def token_sum(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Loss summed over a stretch of positions, from logits [B, n, vocabulary] and targets [B, n]."""
        ...

    def model_inputs(self, model: nn.Module, batch: Batch) -> dict[str, Any]:
        """Keyword arguments for the model's forward pass."""
        ...


def find_segments(model: nn.Module, loss: Loss, batch: Batch) -> Segments:
    """The chain of a causal language model, found by inspection and compared with the model itself.

    The inspection runs on at most two rows and 24 tokens of the batch: a few forward passes, and one gradient of the
    model's own loss beside the chain's. The model must be in evaluation mode, with the parameters to be differentiated
    requiring a gradient; whatever requires one is compared.

    Args:
        model: The model.
        loss: The loss; it must be a `ChainedLoss`.
        batch: A batch as the chain will see it.

    Returns:
        The decomposition, for any batch of this model and loss.

    Raises:
        SegmentationError: If the model does not decompose; the message says where.
    """
    if not isinstance(loss, ChainedLoss):
        raise SegmentationError(
            f"{type(loss).__name__} cannot be evaluated on stretches of positions (it lacks targets, token_sum or "
            "model_inputs; see curvature.segments.ChainedLoss)"
        )
    # A malformed batch is the loss's to refuse.
    loss.targets(batch)
    loss.model_inputs(model, batch)
    if batch["input_ids"].shape[1] < 2:
        raise SegmentationError("the batch has a single token per row, from which nothing can be told about mixing")
    with torch.enable_grad(), keep_double(model):
        with _running("on a few tokens of the batch"):
            probe = _probe(loss, batch)
            inputs = loss.model_inputs(model, probe)
            layers, records = _watch(model, inputs)
            own, _ = loss(model, probe)
        with _running("in segments"):
            parts: list[LayerParts] = []
            for (name, layer), record in zip(layers.items(), records, strict=True):
                like = parts[-1] if parts else None
                parts.append(cut_layer(name, layer, record.call, record.hidden, record.output, like))
            found = _ModelSegments(model, loss, parts)
            found.inspect_head(records[-1].hidden[:, :1], probe["input_ids"][:, :1])
            _compare_arguments(found, inputs, records)
            _compare_loss(found, model, own, probe)
    return found


@contextmanager
def _running(how: str) -> Iterator[None]:
    """Inside, an error is a reason against segments."""
    try:
        yield
    except SegmentationError:
        raise
    except Exception as error:
        lines = str(error).splitlines() or [""]
        raise SegmentationError(f"the model does not run {how} ({type(error).__name__}: {lines[0]})") from error


@dataclass(frozen=True)
class _Record:
    """One layer's call during a forward pass."""

    hidden: Tensor
    call: Call
    output: Any


class _ModelSegments:
    """`Segments` of a model whose layers have been found."""

    def __init__(self, model: nn.Module, loss: ChainedLoss, parts: Sequence[LayerParts]) -> None:
        self.model, self.loss, self.parts, self.vocabulary = model, loss, parts, 0
        inner = {p for part in parts for p in part.layer.parameters()}
        self.outer = [p for p in model.parameters() if p not in inner]
        self.within = {module for part in parts for module in part.layer.modules()}
        self.fused = [find_substitutes(part.layer.modules()) for part in parts]
        self.fused_outside = find_substitutes(module for module in model.modules() if module not in self.within)
        self.linear: nn.Linear | None = None
        self.before: nn.Module | None = None
        self.precision = precision_of(model)
        self.sums_entropies = getattr(type(loss), "token_sum", None) is CausalLMLoss.token_sum

    def __eq__(self, other: object) -> bool:
        """Whether both make the same chains."""
        if not isinstance(other, _ModelSegments) or self.model is not other.model:
            return False
        return _same_loss(self.loss, other.loss) and self._cuts() == other._cuts()

    __hash__ = None  # type: ignore[assignment]

    def _cuts(self) -> list[tuple[object, ...]]:
        cuts = [(part.name, part.mixer, part.projection, part.tokenwise) for part in self.parts]
        return [*cuts, (self.linear, self.before, self.precision)]

    def __call__(self, batch: Batch) -> Chain:
        """The chain of a batch; a label that counts and lies outside the vocabulary is a ValueError."""
        # The chain reads copies: with other tokens in them, it is another batch's.
        batch = tree_map_only(Tensor, torch.clone, dict(batch))
        ids, targets = batch["input_ids"], self.loss.targets(batch).clone()
        inputs = self.loss.model_inputs(self.model, batch)
        others = {key: value for key, value in inputs.items() if value is not ids}
        with torch.no_grad():
            x, calls = self.embed(inputs)
        quick = self._without_mask(inputs, x)

        def head(x: Tensor, a: int, b: int) -> Tensor:
            return self.loss.token_sum(self.logits(x, ids[:, a:b]), targets[:, a:b])

        readout = None
        if self.linear is not None and _stands_alone(self.linear):
            features = functools.partial(self._features, self.linear)
            readout = Readout(features, self.linear.weight, self.linear.bias, targets, self.loss.ignore_index)
        return Chain(
            embed=lambda: self.embed(quick)[0],
            segments=[self._segment(*each) for each in zip(self.parts, calls, self.fused, strict=True)],
            head=head,
            outer=self.outer,
            length=ids.shape[1],
            tokens=count_targets(targets, self.loss.ignore_index, self.vocabulary if self.sums_entropies else None),
            vocabulary=self.vocabulary,
            readout=readout,
            reads=Reads([ids, targets], [others, calls, quick is inputs, readout is None]),
        )

    def inspect_head(self, x: Tensor, ids: Tensor) -> None:
        """Find the width of the logits, and the linear map that they are the answer of, if the loss takes them so.

        Also the module, a norm as a rule, that makes its argument of the last layer's answer, if one does.
        """
        calls: dict[nn.Module, list[tuple[Any, Any]]] = {}

        def note(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            calls.setdefault(module, []).append((args[0] if args else None, output))

        with ExitStack() as stack:
            for module in self.model.modules():
                if module not in self.within:
                    stack.callback(module.register_forward_hook(note).remove)
            logits = self.logits(x, ids)
        self.vocabulary = logits.shape[-1]
        if not self.sums_entropies:
            return
        once = {module: found[0] for module, found in calls.items() if len(found) == 1}
        for module, (argument, output) in once.items():
            if type(module) is nn.Linear and output is logits and _stands_alone(module):
                self.linear = module
                between = (m for m, (a, o) in once.items() if _same(a, x) and _same(o, argument) and _stands_alone(m))
                self.before = next(between, None)

    def _features(self, linear: nn.Linear, x: Tensor) -> Tensor:
        """What the model hands to the linear map that makes its logits."""

        def reached(h: Tensor) -> None:
            raise Reached(h)

        if self.before is not None:
            with self.precision(), substituted(self.fused_outside):
                return self.before(x)  # type: ignore[no-any-return]
        with substituted(self.fused_outside), standing_in(linear, reached):
            try:
                self.logits(x, torch.zeros(x.shape[:2], dtype=torch.int64, device=x.device))
            except Reached as found:
                return found.value
        raise SegmentationError("the linear map behind the last layer was not reached")

    def _segment(self, part: LayerParts, call: Call, fused: Forwards) -> Segment:
        def attend(x: Tensor) -> Tensor:
            with self.precision(), substituted(fused):
                return part.attend(call, x)

        def combine(x: Tensor, a: Tensor | None) -> Tensor:
            with self.precision(), substituted(fused):
                return part.combine(call, x, a)

        parameters = list(part.layer.parameters())
        return Segment(part.name, parameters, combine, None if part.mixer is None else attend, part.tokenwise)

    def _without_mask(self, inputs: Mapping[str, Any], x: Tensor) -> Mapping[str, Any]:
        """Inputs that lead to the same x_0 without the making of masks, which costs time and reads values back.

        Transformers models pass a ready-made mask of four dimensions on as it is. Once the layers' arguments are
        recorded, nobody reads it, unless x_0 depends on it.
        """
        quick = {**inputs, "attention_mask": torch.zeros(1, 1, 1, 1, dtype=x.dtype, device=x.device)}
        try:
            with torch.no_grad():
                same = torch.equal(self.embed(quick)[0], x)
        except Exception:  # the model does not take such a mask
            same = False
        return quick if same else inputs

    def embed(self, inputs: Mapping[str, Any]) -> tuple[Tensor, list[Call]]:
        """x_0, and the arguments that the model passes to each layer."""
        calls: list[Call] = []
        first: list[Tensor] = []

        def note(part: LayerParts) -> Callable[..., Any]:
            def forward(*args: Any, **kwargs: Any) -> Any:
                hidden, call = Call.split(args, kwargs)
                first.append(hidden)
                calls.append(call)
                if part is self.parts[-1]:
                    raise Reached(first[0])
                return part.wrap(hidden)

            return forward

        with ExitStack() as stack, self.precision():
            for part in self.parts:
                stack.enter_context(standing_in(part.layer, note(part)))
            try:
                self.model(**inputs)
            except Reached as reached:
                return reached.value, calls
        raise SegmentationError("the model's last layer was not reached")

    def logits(self, x: Tensor, ids: Tensor) -> Tensor:
        """What the model makes of the last layer's answer x; the ids only give it the right number of tokens."""

        def forward(part: LayerParts) -> Callable[..., Any]:
            if part is self.parts[-1]:
                return lambda *args, **kwargs: part.wrap(x)
            return lambda *args, **kwargs: part.wrap(Call.split(args, kwargs)[0])

        with ExitStack() as stack, self.precision():
            for part in self.parts:
                stack.enter_context(standing_in(part.layer, forward(part)))
            output = self.model(**self.loss.model_inputs(self.model, {"input_ids": ids}))
        logits = output if isinstance(output, Tensor) else output.logits
        if not isinstance(logits, Tensor):
            raise SegmentationError("the model does not answer with logits")
        return logits


def _same_loss(a: object, b: object) -> bool:
    return a is b or (type(a) is CausalLMLoss and a == b)  # a subclass may have more to it than is compared


def _probe(loss: ChainedLoss, batch: Batch) -> Batch:
    """At most two rows and 24 tokens of a batch, labels left out; where there is padding, astride its edge.

    Whatever has the batch's rows or length in its shape is cut with it. If there is a counted token, it holds one.
    """
    batch = {key: value for key, value in batch.items() if key != "labels"}
    ids, mask = batch["input_ids"], batch.get("attention_mask")
    rows, length = ids.shape
    chosen, start, last = list(range(min(2, rows))), 0, max(0, length - _PROBE_TOKENS)
    if isinstance(mask, Tensor) and mask.shape == ids.shape and bool((mask == 0).any()):
        kept = (mask != 0).sum(1)
        short = int(kept.argmin())
        chosen = sorted({short, int(kept.argmax())})
        edge = int(kept[short]) if bool(mask[short, 0]) else length - int(kept[short])
        start = max(0, min(edge - _PROBE_TOKENS // 2, last))
        counted = loss.targets(batch) != loss.ignore_index
        if not bool(counted[chosen, start : start + _PROBE_TOKENS - 1].any()) and bool(counted.any()):
            places = counted.nonzero()
            row, at = places[(places[:, 1] - edge).abs().argmin()].tolist()
            chosen = sorted({short, row})
            start = max(0, min(max(start, at + 2 - _PROBE_TOKENS), at, last))

    def cut_out(value: Tensor) -> Tensor:
        for place, size in enumerate(value.shape):
            if place == 0 and size == rows and value.ndim > 1:
                value = value[chosen]
            elif size == length:
                value = value.narrow(place, start, min(length, _PROBE_TOKENS))
        return value

    return tree_map_only(Tensor, cut_out, batch)  # type: ignore[no-any-return]


def _watch(model: nn.Module, inputs: Mapping[str, Any]) -> tuple[dict[str, nn.Module], list[_Record]]:
    """The decoder layers by name, and one record of each, from a forward pass of the model."""
    lists = {name: m for name, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) > 0}
    asked: dict[nn.Module, list[_Asked]] = {}
    answered: dict[nn.Module, list[Any]] = {}

    def ask(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        asked.setdefault(module, []).append((args, kwargs))

    def answer(module: nn.Module, _: Any, output: Any) -> None:
        answered.setdefault(module, []).append(output)

    with ExitStack() as stack:
        for entry in {entry for entries in lists.values() for entry in entries}:
            # Around the entry's own hooks, which belong to its segment.
            stack.callback(entry.register_forward_pre_hook(ask, prepend=True, with_kwargs=True).remove)
            stack.callback(entry.register_forward_hook(answer).remove)
        model(**inputs)
    records = {entry: list(zip(asked[entry], outputs, strict=True)) for entry, outputs in answered.items()}
    reason = "the model has no list of layers (nn.ModuleList)"
    chains: list[tuple[dict[str, nn.Module], list[_Record]]] = []
    for name, entries in lists.items():
        layers = {f"{name}.{i}": entry for i, entry in enumerate(entries)}
        try:
            chains.append((layers, _chained(name, layers, records)))
        except SegmentationError as error:
            reason = str(error) if not chains else reason
    if not chains:
        raise SegmentationError(reason)
    return max(chains, key=lambda chain: len(chain[0]))


def _chained(
    name: str,
    layers: Mapping[str, nn.Module],
    records: Mapping[nn.Module, list[tuple[_Asked, Any]]],
) -> list[_Record]:
    """One record per entry of a list, if each hands its hidden state to the next and takes nothing else that varies."""
    chain = []
    for entry_name, layer in layers.items():
        calls = records.get(layer, [])
        if len(calls) != 1:
            raise SegmentationError(f"{entry_name} is called {len(calls)} times in a forward pass, not once")
        if any(module._backward_hooks or module._backward_pre_hooks for module in layer.modules()):
            raise SegmentationError(f"{entry_name} has backward hooks, which would run again for each of its parts")
        (args, kwargs), output = calls[0]
        hidden, call = Call.split(args, kwargs)
        if hidden.ndim != 3 or first_tensor(output).shape != hidden.shape:
            raise SegmentationError(f"{entry_name} does not map a hidden state [B, N, width] to one of the same shape")
        if any(t.requires_grad for t in _tensors((call.args, call.kwargs))):
            raise SegmentationError(
                f"{entry_name} takes an argument beside its hidden state that depends on parameters"
            )
        chain.append(_Record(hidden, call, output))
    for number, (before, after) in enumerate(pairwise(chain)):
        if first_tensor(before.output) is not after.hidden:
            raise SegmentationError(f"the hidden state is changed between {name}.{number} and {name}.{number + 1}")
    return chain


def _stands_alone(module: nn.Module) -> bool:
    """Whether a call of the module is its class's forward pass on weights that are its own, with no hook around it."""
    return "forward" not in vars(module) and not is_hooked(module) and owns_weights(module)


def _same(a: Any, b: Any) -> bool:
    """Whether two tensors are one, or views of the same entries in the same order."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return False
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype


def _tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in nested arguments."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from _tensors([getattr(value, field.name) for field in dataclasses.fields(value)])


def _compare_arguments(found: _ModelSegments, inputs: Mapping[str, Any], records: Sequence[_Record]) -> None:
    """What the layers are passed must not depend on what the layers before them computed."""
    x, calls = found.embed(inputs)
    for part, call, record in zip(found.parts, calls, records, strict=True):
        for a, b in zip(
            _tensors((call.args, call.kwargs)), _tensors((record.call.args, record.call.kwargs)), strict=True
        ):
            if a.shape != b.shape or not torch.equal(a, b):
                raise SegmentationError(f"an argument of {part.name} depends on the hidden state of an earlier layer")
    if not torch.equal(x, records[0].hidden):
        raise SegmentationError("the first hidden state is not the same in two forward passes; is dropout active?")


def _compare_loss(found: Segments, model: nn.Module, expected: Tensor, probe: Batch) -> None:
    """Loss and gradient of the chain, by the pull-backs that it is for, against the model's own."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    parameters, (rows, length) = [p for _, p in named], probe["input_ids"].shape
    stretches = Stretches(rows * probe_span(length), rows * probe_span(length))
    derivatives = Streamed(found(probe), parameters, stretches=stretches, products=False)
    eps = roundoff(p for p in model.parameters() if p.is_floating_point())
    own, ours = float(expected.detach()), derivatives.loss * derivatives.tokens
    if not derivatives.tokens or not abs(ours - own) <= eps**0.75 * abs(own):
        raise SegmentationError(f"over {derivatives.tokens} tokens the segments' loss is {ours}, the model's own {own}")
    if not expected.requires_grad:
        return
    theirs = torch.autograd.grad(expected, parameters, allow_unused=True, materialize_grads=True)
    scale = torch.stack([_norm(g) for g in theirs]).norm()
    for (name, _), mean, b in zip(named, derivatives.gradient(), theirs, strict=True):
        a = torch.zeros_like(b) if mean is None else mean * derivatives.tokens
        if not bool(_norm(a - b) <= eps**0.5 * (_norm(b) + 0.01 * scale)):
            raise SegmentationError(f"the segments' gradient differs from the model's own in {name}")


def _norm(t: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(t, dtype=torch.promote_types(t.dtype, torch.float32))
    return norm
