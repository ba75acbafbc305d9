"""torch.autocast: operands are cast once, as PyTorch's own attention casts them, and derivatives keep their dtype."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from flashbob import register_attention, sdpa_bob
from flashbob.hybrid import hybrid_attention
from tests.attention_models import CONFIGURATIONS, tokens

HALF = torch.bfloat16


def inside() -> torch.autocast:
    return torch.autocast("cpu", dtype=HALF)


def inputs(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(1, 2, 9, 8, dtype=dtype, requires_grad=True) for _ in range(3)]


CALLS: dict[str, Any] = {
    "fused": lambda q, k, v: sdpa_bob(q, k, v, is_causal=True),
    "blocked": lambda q, k, v: sdpa_bob(q, k, v, window_size=4),
    "bias": lambda q, k, v: sdpa_bob(q, k, v, attn_bias=torch.linspace(-1, 1, 81).view(9, 9)),
    "reference": lambda q, k, v: sdpa_bob(q, k, v, window_size=4, backend="reference"),
    "hybrid": lambda q, k, v: hybrid_attention(q, k, v, is_causal=True),
}
every_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())


@every_call
def test_operands_are_cast_to_the_dtype_of_the_block(call: Any) -> None:
    q, k, v = inputs()
    with inside():
        mixed, single = call(q, k, v.to(HALF)), call(q, k, v)
    exact = call(q.to(HALF), k.to(HALF), v.to(HALF))
    assert mixed.dtype == single.dtype == HALF
    assert torch.equal(mixed, exact)
    assert torch.equal(single, exact)
    assert all(g.dtype == torch.float32 for g in torch.autograd.grad(mixed.float().sum(), (q, k, v)))


@every_call
def test_float64_stays(call: Any) -> None:
    x = inputs(torch.float64)
    with inside():
        found = call(*x)
    assert torch.equal(found, call(*x))


def test_no_keys_and_autocast() -> None:
    q, k, v = inputs()
    with inside():
        assert sdpa_bob(q, k[:, :, :0], v[:, :, :0]).dtype == HALF


@pytest.mark.parametrize("name", ["fused", "blocked", "bias", "hybrid"])
def test_derivatives_inside_a_block_are_those_outside(name: str) -> None:
    x, call = inputs(), CALLS[name]
    o = call(*x)
    do = torch.randn_like(o, requires_grad=True)
    first = torch.autograd.grad(o, x, do, create_graph=True)
    direction = [torch.randn_like(g) for g in first]
    second = torch.autograd.grad(first, (*x, do), direction, retain_graph=True, create_graph=name != "hybrid")
    with inside():
        found = torch.autograd.grad(o, x, do, create_graph=True)
        for keeps_graph in (True, False):
            again = torch.autograd.grad(found, (*x, do), direction, retain_graph=True, create_graph=keeps_graph)
            assert all(map(torch.equal, again, second))
    assert all(map(torch.equal, found, first))


@pytest.mark.parametrize("name", ["llama-gqa", "qwen3"])
def test_models_train_under_autocast_as_with_torch(name: str) -> None:
    """Rotary positions and norms of q and k leave these in float32 beside bfloat16 values."""
    register_attention()
    ids, results = tokens(), []
    for implementation in ("sdpa", "flashbob"):
        torch.manual_seed(0)
        config = CONFIGURATIONS[name]()
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
        with inside():
            loss = model(ids, labels=ids).loss
        results.append((loss, torch.autograd.grad(loss, list(model.parameters()))))
    (exact, gradients), (found, ours) = results
    torch.testing.assert_close(found, exact, rtol=2e-3, atol=0)
    for g, e in zip(ours, gradients, strict=True):
        assert float((g - e).norm()) <= 0.03 * float(e.norm()) + 1e-6
