"""Fused layers: their derivatives, their kernels, and which modules they stand in for."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck
from torch.nn import functional as F
from torch.nn.utils import prune
from transformers.activations import ACT2FN
from transformers.models.bloom.modeling_bloom import BloomGelu
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.pytorch_utils import Conv1D

from curvature.layers import kernels
from curvature.layers.activation import ACTIVATIONS, Name, activation, derivatives
from curvature.layers.linear import linear
from curvature.layers.norm import norm
from curvature.layers.substitutes import find_substitutes, substituted
from curvature.layers.unread import unread_gradients
from curvature.readout import Readout, TokenLoss


def _random(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def _leaf(*shape: int, seed: int = 0) -> Tensor:
    return _random(*shape, seed=seed).requires_grad_()


@pytest.mark.parametrize("transposed", [False, True], ids=["linear", "conv1d"])
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
def test_linear_derivatives(transposed: bool, biased: bool) -> None:
    arguments = [_leaf(2, 3, 4), _leaf(4, 5) if transposed else _leaf(5, 4)] + ([_leaf(5)] if biased else [])

    def run(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        return linear(x, w, b, transposed=transposed)

    assert gradcheck(run, arguments)
    assert gradgradcheck(run, arguments)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_derivatives(name: Name) -> None:
    x = _leaf(3, 7)
    assert gradcheck(lambda t: activation(t, name), [x])
    assert gradgradcheck(lambda t: activation(t, name), [x])


@pytest.mark.parametrize("centered", [True, False], ids=["layer", "rms"])
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
def test_norm_derivatives(centered: bool, biased: bool) -> None:
    arguments = [_leaf(2, 2, 6), _leaf(6, seed=1)] + ([_leaf(6, seed=2)] if biased else [])

    def run(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        return norm(x, w, b, 0.3, centered=centered)

    assert gradcheck(run, arguments)
    assert gradgradcheck(run, arguments)


def _small_network(x: Tensor, w: Tensor, b: Tensor, g: Tensor, v: Tensor) -> Tensor:
    return linear(activation(linear(norm(x, g, None, 0.1, centered=True), w, b), "silu"), v, None)


def test_unread_gradients_change_no_second_derivative() -> None:
    leaves = [_leaf(5, 4), _leaf(3, 4, seed=1), _leaf(3, seed=2), _leaf(4, seed=3), _leaf(2, 3, seed=4)]
    results = []
    for context in (nullcontext(), unread_gradients()):
        with context:
            y = _small_network(*leaves)
        dy = torch.ones_like(y, requires_grad=True)
        first = torch.autograd.grad(y, leaves, dy, create_graph=True)
        results.append((first, torch.autograd.grad(first, [*leaves, dy], [_random(*t.shape, seed=7) for t in first])))
    (values, expected), (unread, found) = results
    torch.testing.assert_close(unread[0], values[0], rtol=0, atol=0)  # not a parameter: read by what comes before
    assert all(bool(g.isnan().all()) for g in unread[1:])
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize(
    "layer",
    [
        lambda x, w: linear(x, w, None),
        lambda x, w: norm(x, w[0], None, 0.1, centered=True),
        lambda x, w: activation(x * w[0], "silu"),
    ],
    ids=["linear", "norm", "activation"],
)
def test_third_derivatives_are_refused(layer: Callable[[Tensor, Tensor], Tensor]) -> None:
    x, w = _leaf(2, 3), _leaf(3, 3)
    (first,) = torch.autograd.grad(layer(x, w).square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x, create_graph=True)
    with pytest.raises((NotImplementedError, RuntimeError), match=r"third derivative|does not require grad"):
        torch.autograd.grad(second.square().sum(), x)


# The kernels, interpreted in float32, against the formulas above.


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_kernels(name: Name) -> None:
    x, dy, u = (_random(3, 700, dtype=torch.float32, seed=seed) for seed in range(3))
    x *= 4
    value, first, second = derivatives(x.double(), name)
    close = {"rtol": 2e-5, "atol": 5e-5, "check_dtype": False}
    torch.testing.assert_close(kernels.activation(x, name), value, **close)
    torch.testing.assert_close(kernels.activation_backward(x, dy, name), dy * first, **close)
    by_x, by_dy = kernels.activation_second(x, dy, u, name)
    torch.testing.assert_close(by_x, u * dy * second, **close)
    torch.testing.assert_close(by_dy, u * first, **close)


@pytest.mark.parametrize("centered", [True, False], ids=["layer", "rms"])
@pytest.mark.parametrize("upstream", ["x", "w", "b", "xwb"])
@pytest.mark.parametrize("shape", [(5, 48), (70, 128)], ids=str)
def test_norm_kernels(centered: bool, upstream: str, shape: tuple[int, int]) -> None:
    n, d = shape
    x, dy, ux = (_random(n, d, dtype=torch.float32, seed=seed) + 0.3 for seed in range(3))
    w, b, uw, ub = (_random(d, dtype=torch.float32, seed=seed) for seed in range(3, 7))
    given = [u if key in upstream else None for key, u in zip("xwb", (ux, uw, ub), strict=True)]
    eps = 1e-3
    leaves = [t.double().requires_grad_() for t in (x, w, b)]
    y = norm(*leaves, eps, centered=centered)
    up = dy.double().requires_grad_()
    first = torch.autograd.grad(y, leaves, up, create_graph=True)
    pairs = [(g, u.double()) for g, u in zip(first, given, strict=True) if u is not None]
    into = [leaves[0], leaves[1], up]
    expected = torch.autograd.grad([g for g, _ in pairs], into, [u for _, u in pairs], allow_unused=True)
    close = {"rtol": 1e-4, "atol": 1e-4, "check_dtype": False}
    torch.testing.assert_close(kernels.norm(x, w, b, eps, centered, False), y, **close)
    for a, e in zip(kernels.norm_backward(x, w, dy, eps, centered, True), first, strict=True):
        torch.testing.assert_close(a, e, **close)
    for a, e in zip(kernels.norm_second(x, w, dy, *given, eps, centered), expected, strict=True):
        torch.testing.assert_close(torch.zeros(d) if a is None else a, torch.zeros(d) if e is None else e, **close)


@pytest.mark.parametrize("vocabulary", [50, 130])
def test_token_kernels(vocabulary: int) -> None:
    width = vocabulary + (-vocabulary % 64)
    z, u = (3 * _random(6, width, dtype=torch.float32, seed=seed) for seed in range(2))
    targets = torch.tensor([3, -1, 0, vocabulary - 1, 7, -1])
    logits = z[:, :vocabulary].double().requires_grad_()
    losses = F.cross_entropy(logits, targets, ignore_index=-1, reduction="none")
    (gradient,) = torch.autograd.grad(0.25 * losses.sum(), logits, create_graph=True)
    (second,) = torch.autograd.grad(gradient, logits, u[:, :vocabulary].double())
    close = {"rtol": 1e-5, "atol": 1e-5, "check_dtype": False}
    kernels.token_second(z, targets, u, vocabulary, 0.25)
    torch.testing.assert_close(u[:, :vocabulary], second, **close)
    torch.testing.assert_close(kernels.token_loss(z, targets, vocabulary, 0.25), losses, **close)
    torch.testing.assert_close(z[:, :vocabulary], gradient, **close)
    assert not z[:, vocabulary:].any()
    assert not u[:, vocabulary:].any()


# The readout.


@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize("given", ["h", "w", "hw", "hwb", "b", ""])
def test_readout_equals_autograd(biased: bool, given: str) -> None:
    if "b" in given and not biased:
        pytest.skip("there is no bias to move")
    h, w, b = _leaf(2, 3, 4), _leaf(11, 4, seed=1), _leaf(11, seed=2) if biased else None
    targets = torch.tensor([[1, 5, -100, 0, 2], [10, -100, 3, 3, 1]])
    span = (1, 4)
    readout = Readout(lambda x: x, nn.Parameter(w.detach()), None if b is None else b.detach(), targets, -100)
    moves = {"h": _random(2, 3, 4, seed=5), "w": _random(11, 4, seed=6), "b": _random(11, seed=7)}
    hdot, wdot, bdot = (moves[key] if key in given else None for key in "hwb")
    logits = F.linear(h, w, b)
    mean = F.cross_entropy(logits.flatten(0, 1), targets[:, 1:4].flatten(), reduction="sum") / 8
    leaves = [t for t in (h, w, b) if t is not None]
    first = torch.autograd.grad(mean, leaves, create_graph=True)
    loss = TokenLoss(readout, 8, [(wdot, bdot)])
    value, dh, (dw, db) = loss.first(h.detach(), span, parameters=True)
    for a, e in zip([value, dh, dw, db], [mean, *first], strict=False):
        torch.testing.assert_close(a, e, rtol=1e-12, atol=1e-14)
    [(by_h, pieces)] = loss.second(h.detach(), span, [hdot], parameters=True)
    pairs = [(g, u) for g, u in zip(first, (hdot, wdot, bdot), strict=False) if u is not None]
    if not pairs:
        assert by_h is None
        assert not pieces
        return
    expected = torch.autograd.grad([g for g, _ in pairs], leaves, [u for _, u in pairs])
    torch.testing.assert_close(by_h, expected[0], rtol=1e-12, atol=1e-14)
    for place, e in enumerate(expected[1:]):
        found = sum(piece[place] for piece in pieces if piece[place] is not None)
        torch.testing.assert_close(found, e, rtol=1e-12, atol=1e-14)


# Recognition.


@pytest.mark.parametrize(
    ("module", "known"),
    [
        (nn.Linear(8, 3), True),
        (nn.Linear(8, 3, bias=False), True),
        (Conv1D(3, 8), True),
        (nn.LayerNorm(8, eps=1e-3), True),
        (nn.LayerNorm(8, bias=False), True),
        (LlamaRMSNorm(8, eps=1e-6), True),
        (GemmaRMSNorm(8, eps=1e-6), True),
        (ACT2FN["gelu_new"], True),
        (ACT2FN["gelu_pytorch_tanh"], True),
        (ACT2FN["gelu"], True),
        (ACT2FN["silu"], True),
        (nn.GELU(), True),
        (ACT2FN["relu"], False),
        (BloomGelu(), False),  # its constant has eight digits
        (nn.Softmax(-1), False),
        (nn.Dropout(0.1).eval(), False),
        (nn.Embedding(8, 8), False),
        (nn.BatchNorm1d(8).eval(), False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_modules_are_recognized_by_what_they_compute(module: nn.Module, known: bool) -> None:
    forwards = find_substitutes([module])
    assert (module in forwards) == known
    if known:
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            x = _random(5, 8).to(dtype)
            module.to(dtype)
            own = module(x)
            with substituted(forwards):
                ours = module(x)
            tolerance = 4 * torch.finfo(torch.float32 if dtype == torch.float64 else dtype).eps
            torch.testing.assert_close(ours, own, rtol=tolerance, atol=tolerance)
        assert "forward" not in vars(module)


class ShiftedNorm(LlamaRMSNorm):
    """A norm whose result depends on a setting, or on a hook."""

    def __init__(self, shift: float) -> None:
        super().__init__(8, eps=1e-6)
        self.shift = shift

    def forward(self, hidden_states: Tensor) -> Tensor:
        plain: Tensor = super().forward(hidden_states)
        return plain + self.shift * plain / self.weight


def test_norms_of_one_class_are_told_apart_by_their_settings_and_hooks() -> None:
    zero, again, one, half, hooked = (ShiftedNorm(shift) for shift in (0.0, 0.0, 1.0, 0.5, 0.0))
    hooked.register_forward_hook(lambda _, __, y: 2 * y)
    forwards = find_substitutes([zero, again, one, half, hooked])
    assert set(forwards) == {zero, again, one}
    for module in (zero, again, one):
        with torch.no_grad():
            module.weight.copy_(_random(8))
        x = _random(5, 8).float()
        torch.testing.assert_close(forwards[module](x), module(x), rtol=1e-5, atol=1e-6)


class GatedNorm(LlamaRMSNorm):
    """A norm, if it is called without a gate."""

    def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        plain: Tensor = super().forward(hidden_states if gate is None else hidden_states * F.silu(gate))
        return plain


def test_a_call_with_further_arguments_runs_the_modules_own_code() -> None:
    module, x, gate = GatedNorm(8), _random(5, 8).float(), _random(5, 8, seed=1).float()
    forwards = find_substitutes([module])
    expected = [module(x), module(x, gate), module(x, gate=gate), module(hidden_states=x)]
    with substituted(forwards):
        found = [module(x), module(x, gate), module(x, gate=gate), module(hidden_states=x)]
    assert module in forwards
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert not torch.equal(expected[0], expected[1])


def test_weights_that_are_computed_before_each_call_are_not_taken_for_parameters() -> None:
    """They are no leaves, so that their gradients are read on the way to those that they are computed from."""
    modules = nn.Linear(8, 8), nn.LayerNorm(8), LlamaRMSNorm(8), Conv1D(8, 8)
    assert set(find_substitutes(modules)) == set(modules)
    for module in modules:
        prune.random_unstructured(module, "weight", 0.3)
    assert not find_substitutes(modules)
