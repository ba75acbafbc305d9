"""torch.compile calls attention between two graphs of its own: same values, same first and second derivatives."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from transformers import CompileConfig

from flashbob import register_attention, sdpa_bob
from flashbob.hybrid import hybrid_attention
from tests.attention_models import pair, tokens

# torch's compiler looks at the gradient of what enters a graph, leaf or not.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


@pytest.fixture(autouse=True)
def forgets() -> Iterator[None]:
    """No test meets what another compiled."""
    yield
    torch.compiler.reset()


def derived(f: Callable[..., Tensor], x: list[Tensor]) -> list[Tensor]:
    """Value, gradients and one Hessian product."""
    out = f(*x)
    first = torch.autograd.grad(out.sin().sum(), x, create_graph=True)
    return [out, *first, *torch.autograd.grad(sum(g.square().sum() for g in first), x)]


@pytest.mark.parametrize("attention", [sdpa_bob, hybrid_attention], ids=["sdpa_bob", "hybrid"])
def test_a_compiled_function_equals_itself(attention: Callable[..., Tensor]) -> None:
    x = [torch.randn(1, 2, 5, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]

    def f(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(2 * q, k, v, is_causal=True) + q

    graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., object]:
        graphs.append(len(graph.graph.nodes))
        return graph.forward

    torch.testing.assert_close(derived(torch.compile(f, backend=backend), x), derived(f, x), rtol=1e-12, atol=1e-13)
    assert len(graphs) == 2, "one graph before the call, one behind it"


def test_attention_itself_can_be_compiled() -> None:
    x = [torch.randn(1, 2, 5, 4, dtype=torch.float64) for _ in range(3)]
    assert torch.equal(torch.compile(sdpa_bob, backend="eager")(*x, window_size=2), sdpa_bob(*x, window_size=2))


@pytest.mark.slow
def test_a_model_with_a_static_cache_is_compiled() -> None:
    register_attention()
    model, ids = pair("llama-gqa")[0], tokens()
    asked = {"max_new_tokens": 3, "do_sample": False, "cache_implementation": "static", "eos_token_id": None}
    compiled = CompileConfig(backend="eager", mode="default", fullgraph=False)
    compiled._compile_all_devices = True  # type: ignore[attr-defined]
    exact = model.generate(ids, disable_compile=True, **asked)
    assert torch.equal(model.generate(ids, compile_config=compiled, **asked), exact)
