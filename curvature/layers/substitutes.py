"""Which modules of a model compute what a fused layer computes, and the fused layers in their place.

Linear maps are known by their class. Norms and activations go by many names, so that they are recognized by what they
do: a copy of the module, in float64 and with random weights, is compared with each candidate. A module that matches
none keeps its own code.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from curvature.layers.activation import ACTIVATIONS, activation, derivatives
from curvature.layers.linear import linear
from curvature.layers.norm import MAX_WIDTH, norm
from curvature.precision import keep_double

__all__ = ["Forwards", "find_substitutes", "own_code", "owns_weights", "substituted"]

Forwards: TypeAlias = Mapping[nn.Module, Callable[..., Tensor]]
_Normalize: TypeAlias = Callable[..., Tensor]

_EPSILONS = ("eps", "variance_epsilon", "epsilon", "norm_eps")
_own: ContextVar[bool] = ContextVar("own", default=False)
_TOLERANCE = 1e-14
_MODULE_STATE = frozenset(vars(nn.Module()))
"""What every module holds."""


def find_substitutes(modules: Iterable[nn.Module]) -> Forwards:
    """For those of the modules that a fused layer can stand in for, its forward pass.

    It is that of calls with one argument. With further ones (the gate of a norm, say) the module's own code runs.

    Args:
        modules: Any modules, in evaluation mode.
    """
    found, norms = {}, dict[object, _Normalize | None]()
    for module in modules:
        if next(module.children(), None) is None and "forward" not in vars(module) and owns_weights(module):
            forward = _linear(module) or _norm(module, norms) or _activation(module)
            if forward is not None:
                found[module] = _with_one_argument(forward, module.forward)
    return found


def owns_weights(module: nn.Module) -> bool:
    """Whether weight and bias, where there are any, are parameters of the module: nothing computes them for a call."""
    own = {"weight", "bias"} - {name for name, value in module._parameters.items() if value is not None}
    return all(getattr(module, name, None) is None for name in own)


def _with_one_argument(forward: Callable[[Tensor], Tensor], own: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def choose(*args: Any, **kwargs: Any) -> Tensor:
        return forward(*args) if len(args) == 1 and not kwargs else own(*args, **kwargs)

    return choose


@contextmanager
def substituted(forwards: Forwards) -> Iterator[None]:
    """Inside, the modules run their substitutes."""
    if _own.get():
        yield
        return
    for module, forward in forwards.items():
        vars(module)["forward"] = forward
    try:
        yield
    finally:
        for module in forwards:
            vars(module).pop("forward", None)


@contextmanager
def own_code() -> Iterator[None]:
    """Inside, `substituted` has no effect: modules run their own code."""
    token = _own.set(True)
    try:
        yield
    finally:
        _own.reset(token)


def _linear(module: nn.Module) -> Callable[[Tensor], Tensor] | None:
    if type(module) is nn.Linear:
        return lambda x: linear(x, module.weight, module.bias)
    if type(module) is Conv1D:
        return lambda x: linear(x, module.weight, module.bias, transposed=True)
    return None


def _norm(module: nn.Module, known: dict[object, _Normalize | None]) -> Callable[[Tensor], Tensor] | None:
    """The substitute of a norm; `known` are the candidates of modules of the same class and settings."""
    names = [name for name, _ in module.named_parameters()]
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    if names not in (["weight"], ["weight", "bias"]) or not isinstance(weight, Tensor):
        return None
    if weight.ndim != 1 or len(weight) > MAX_WIDTH or (bias is not None and bias.shape != weight.shape):
        return None
    values = [getattr(module, name, None) for name in _EPSILONS]
    eps = next((value for value in values if isinstance(value, float)), None)
    if eps is None:
        return None
    settings = _settings(module)
    if settings not in known:
        known[settings] = _candidate(module, eps)
    candidate = known[settings]
    return None if candidate is None else _in_its_dtype(module, candidate)


def _settings(module: nn.Module) -> object:
    """What a module's result depends on beside its weights; itself, where that is more than plain values."""
    own = {k: v for k, v in vars(module).items() if k not in _MODULE_STATE}
    plain = (bool, int, float, str, tuple, torch.Size, type(None))
    hooks = any(getattr(module, name) for name in ("_forward_hooks", "_forward_pre_hooks"))
    if hooks or module._buffers or not all(isinstance(v, plain) for v in own.values()):
        return module
    return type(module), repr(sorted(own.items())), tuple((name, p.shape) for name, p in module.named_parameters())


def _candidate(module: nn.Module, eps: float) -> _Normalize | None:
    """The norm that the module computes, rounded between its steps as the module rounds; None: none that is known."""
    for centered, offset in itertools.product((True, False), (0.0, 1.0)):
        candidate = functools.partial(_normalize, eps=eps, centered=centered, offset=offset)
        if _difference(module, candidate, eps, torch.float64) <= _TOLERANCE:
            once, twice = (functools.partial(candidate, rounded=rounded) for rounded in (False, True))
            rounding = [_difference(module, each, eps, torch.bfloat16) for each in (once, twice)]
            return once if rounding[0] <= rounding[1] else twice
    return None


def _in_its_dtype(module: nn.Module, candidate: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
    """The candidate where x has the weights' dtype, the module's own code (and promotion of dtypes) elsewhere."""
    own = module.forward

    def forward(x: Tensor) -> Tensor:
        if x.dtype != module.weight.dtype:
            result: Tensor = own(x)
            return result
        return candidate(x, module.weight, getattr(module, "bias", None))

    return forward


def _normalize(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float, centered: bool, offset: float, rounded: bool = False
) -> Tensor:
    if offset:
        weight = (weight.float() if weight.dtype in (torch.bfloat16, torch.float16) else weight) + offset
    return norm(x, weight, bias, eps, centered=centered, rounded=rounded)


def _difference(module: nn.Module, candidate: Callable[..., Tensor], eps: float, dtype: torch.dtype) -> float:
    """Relative difference of a norm from the candidate, on rows large and small against eps."""
    generator = torch.Generator().manual_seed(0)
    twin = copy.deepcopy(module).to("cpu", dtype).requires_grad_(False)
    parameters = [p.copy_(torch.randn(p.shape, generator=generator)) for p in twin.parameters()]
    x = torch.randn(4, len(parameters[0]), generator=generator) + 0.5
    x = torch.cat([x, eps**0.5 * x]).to(dtype)
    try:
        with torch.no_grad(), keep_double(twin):
            y, ours = twin(x), candidate(x, *parameters, *[None] * (2 - len(parameters)))
    except Exception:  # it takes other arguments: no norm
        return math.inf
    if not isinstance(y, Tensor) or y.shape != ours.shape:
        return math.inf
    return float((y.double() - ours.double()).norm() / ours.double().norm())


def _activation(module: nn.Module) -> Callable[[Tensor], Tensor] | None:
    if next(module.parameters(), None) is not None or next(module.buffers(), None) is not None:
        return None
    grid = torch.linspace(-12, 12, 98, dtype=torch.float64).view(2, 49)
    try:
        with torch.no_grad():
            y = module(grid)
    except Exception:  # it takes other arguments: no activation
        return None
    if isinstance(y, Tensor) and y.shape == grid.shape and y.dtype == grid.dtype:
        for name in ACTIVATIONS:
            if bool((y - derivatives(grid, name)[0]).norm() <= _TOLERANCE * y.norm()):
                return functools.partial(activation, name=name)
    return None
