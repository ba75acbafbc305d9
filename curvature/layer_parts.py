"""One layer of a model, cut into the part that mixes tokens and the rest, both run by the layer's own code.

The cut is found by stand-ins and derivatives, not by names. With one child module replaced by a stand-in that answers
what it was told to, the rest of the layer is run; if its output at one position then depends on the input at that
position only, the child is what mixes. Derivatives tell: they are exact zeros where there is no dependence, in every
dtype.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from curvature.chain import cut, spans
from curvature.precision import roundoff

__all__ = ["Call", "LayerParts", "SegmentationError", "cut_layer"]


def probe_span(length: int) -> int:
    """Length of the stretches that a token-wise part of this many positions is tried on: two, unequal from three on."""
    return max(1, min((length + 2) // 2, length - 1))


class SegmentationError(ValueError):
    """The model cannot be cut into a chain of segments; the message is the reason."""


class Reached(BaseException):
    """Carries an activation out of the code around it. Not an `Exception`, so that no handler there takes it."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value = value


_AHEAD = ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks")
_AFTER = ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")


@contextmanager
def standing_in(module: nn.Module, forward: Callable[..., Any], *, hooked: bool = False) -> Iterator[None]:
    """Inside, calls of the module go to `forward`, and past its hooks: these run where the module itself does.

    Args:
        module: The module.
        forward: What is called with the arguments of the call.
        hooked: Whether the module's forward hooks still run on what `forward` answers.
    """
    own = vars(module)
    replaced = {name: own[name] for name in (_AHEAD if hooked else _AHEAD + _AFTER) if own.get(name)}
    replaced |= {"forward": own["forward"]} if "forward" in own else {}
    own.update({name: OrderedDict() for name in replaced}, forward=forward)
    try:
        yield
    finally:
        del own["forward"]
        own.update(replaced)


def is_hooked(module: nn.Module) -> bool:
    """Whether calls of the module run hooks of its own."""
    return any(vars(module).get(name) for name in _AHEAD + _AFTER)


@dataclass(frozen=True)
class Call:
    """The arguments of one call of a layer, without the hidden state."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @classmethod
    def split(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensor, Call]:
        """The hidden state (first argument, or `hidden_states`) and the rest."""
        if args and isinstance(args[0], Tensor):
            return args[0], cls(args[1:], kwargs)
        hidden = kwargs.get("hidden_states")
        if args or not isinstance(hidden, Tensor):
            raise SegmentationError("a layer is not called with its hidden state as first argument or `hidden_states`")
        return hidden, cls(args, {k: v for k, v in kwargs.items() if k != "hidden_states"})

    def run(self, module: nn.Module, hidden: Tensor) -> Any:
        """The module's answer to this call with another hidden state."""
        return module(hidden, *self.args, **self.kwargs)


def first_tensor(output: Any) -> Tensor:
    """The hidden state in a module's answer: the answer itself, or the first item of a tuple."""
    first = output[0] if isinstance(output, tuple | list) and output else output
    if not isinstance(first, Tensor):
        raise SegmentationError(f"a layer answers with {type(first).__name__}, not with a hidden state")
    return first


def shell(output: Any) -> Callable[[Tensor], Any]:
    """What wraps a hidden state the way that `output` wraps its own; other tensors in it become None."""
    if isinstance(output, Tensor):
        return lambda x: x
    rest = tuple(None if isinstance(item, Tensor) else item for item in output[1:])
    return lambda x: (x, *rest)


@dataclass(frozen=True)
class LayerParts:
    """A layer as combine(x, attend(x)).

    Attributes:
        name: The layer's name in its model.
        layer: The layer.
        wrap: Wraps a hidden state as the layer's answer.
        mixer: The child that mixes tokens; None: there is none, or the layer stays whole.
        mixer_wrap: Wraps a tensor as the mixer's answer.
        projection: The mixer's child that makes the mixer's answer from what mixing has left, token by token (the
            output projection of attention). It is then counted to `combine`, and `attend` ends before it.
        tokenwise: Whether `combine` may be run on stretches of tokens.
    """

    name: str
    layer: nn.Module
    wrap: Callable[[Tensor], Any]
    mixer: nn.Module | None = None
    mixer_wrap: Callable[[Tensor], Any] | None = None
    projection: nn.Module | None = None
    tokenwise: bool = False

    def attend(self, call: Call, x: Tensor) -> Tensor:
        """Run the layer until its mixer has answered, or calls its projection."""
        if self.mixer is None:
            raise SegmentationError(f"{self.name} has no part that mixes tokens")

        def answered(_: nn.Module, __: Any, output: Any) -> None:
            raise Reached(first_tensor(output))

        def project(x: Tensor) -> None:
            raise Reached(x)

        with ExitStack() as stack:
            if self.projection is None:
                stack.callback(self.mixer.register_forward_hook(answered).remove)
            else:
                stack.enter_context(standing_in(self.projection, project))
            try:
                call.run(self.layer, x)
            except Reached as reached:
                return reached.value
        raise SegmentationError(f"{self.name} answered without calling the module that mixes its tokens")

    def combine(self, call: Call, x: Tensor, a: Tensor | None) -> Tensor:
        """Run the layer with the answer of `attend` given."""
        wrap, project = self.mixer_wrap, self.projection
        if a is None or self.mixer is None or wrap is None:
            return first_tensor(call.run(self.layer, x))

        def forward(*_: Any, **__: Any) -> Any:
            return wrap(a if project is None else project(a))

        with standing_in(self.mixer, forward, hooked=project is not None):  # else a has been through the hooks
            return first_tensor(call.run(self.layer, x))


def cut_layer(
    name: str, layer: nn.Module, call: Call, hidden: Tensor, output: Any, like: LayerParts | None = None
) -> LayerParts:
    """Find the parts of a layer, from one call of it.

    Args:
        name: The layer's name.
        layer: The layer, in evaluation mode.
        call: The arguments of the call.
        hidden: Its hidden state [B, N, width], N at least 2.
        output: Its answer.
        like: Parts of another layer. If this layer is of the same class, the same cut is tried first.

    Returns:
        The parts; a layer whose rest is token-wise without any one of its children stays whole.
    """
    whole, hidden = LayerParts(name, layer, shell(output)), hidden.detach()
    if like is not None and like.mixer is not None and type(like.layer) is type(layer):
        counterparts = dict(zip(like.layer.modules(), layer.modules(), strict=False))
        projection = None if like.projection is None else counterparts.get(like.projection)
        same = replace(
            whole,
            mixer=counterparts.get(like.mixer),
            mixer_wrap=like.mixer_wrap,
            projection=projection,
            tokenwise=True,
        )
        if _is_tokenwise(same, call, hidden):
            return same
    if _is_tokenwise(whole, call, hidden):
        return replace(whole, tokenwise=True)
    for child, answer in _answers(layer, lambda: call.run(layer, hidden)):
        mixed = answer[0] if isinstance(answer, tuple | list) and answer else answer
        if isinstance(mixed, Tensor) and mixed.shape[:2] == hidden.shape[:2]:
            parts = replace(whole, mixer=child, mixer_wrap=shell(answer), tokenwise=True)
            if _is_tokenwise(parts, call, hidden):
                return _without_projection(parts, call, hidden, mixed)
    return whole


def _without_projection(parts: LayerParts, call: Call, hidden: Tensor, mixed: Tensor) -> LayerParts:
    """Move the mixer's output projection, if it has one, from `attend` to `combine`.

    No parameter then stands behind the mixing proper, so that its double backward meets no further first backward
    through it, and the projection runs in stretches.
    """
    for child, answer in _answers(parts.mixer, lambda: call.run(parts.layer, hidden)) if parts.mixer else []:
        if isinstance(answer, Tensor) and torch.equal(answer, mixed):
            finer = replace(parts, projection=child)
            if _is_tokenwise(finer, call, hidden):
                return finer
    return parts


def _answers(module: nn.Module, run: Callable[[], Any]) -> list[tuple[nn.Module, Any]]:
    """The children of a module that are called once in a run, in the order of their answers, and what they answer."""
    answers: dict[nn.Module, list[Any]] = {}

    def note(child: nn.Module, _: Any, output: Any) -> None:
        answers.setdefault(child, []).append(output)

    with ExitStack() as stack, torch.no_grad():
        for child in module.children():
            stack.callback(child.register_forward_hook(note).remove)
        run()
    return [(child, found[0]) for child, found in answers.items() if len(found) == 1]


def _is_tokenwise(parts: LayerParts, call: Call, x: Tensor) -> bool:
    """Whether `combine` at one position depends on that position only, and can be run on stretches of positions."""
    rows, length = x.shape[:2]
    try:
        with torch.no_grad():
            a = None if parts.mixer is None else parts.attend(call, x)
        leaves = [t.clone().requires_grad_() for t in (x, a) if t is not None]
        y = parts.combine(call, leaves[0], leaves[1] if a is not None else None)
        cotangent = torch.arange(y.shape[-1], device=y.device).cos().to(y.dtype)
        # One position of each row at a time, the first in one and the last in the next, then the other way round.
        for shift in range(2):
            at = torch.arange(rows), torch.tensor([(length - 1) * ((row + shift) % 2) for row in range(rows)])
            value = (y[at] @ cotangent).sum()
            for gradient in torch.autograd.grad(value, leaves, retain_graph=True, allow_unused=True):
                if gradient is not None:
                    gradient[at] = 0
                    if bool(gradient.any()):
                        return False
        with torch.no_grad():
            stretches = [
                (cut(x, *span), None if a is None else cut(a, *span)) for span in spans(length, probe_span(length))
            ]
            pieces = torch.cat([parts.combine(call, *stretch) for stretch in stretches], 1)
        tolerance = roundoff([y]) ** 0.75  # a different order of summation
        return bool((pieces - y).norm() <= tolerance * y.norm())
    except Exception:
        # Whatever goes wrong in a part taken out of its surroundings, it says that the part cannot be taken out.
        return False
