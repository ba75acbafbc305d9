"""`blocked` never holds an N x N tensor: peak memory of a double backward, in a process of its own."""

import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flashbob import blocked, sdpa_bob
from flashbob.api import Backend

PROGRAM = """
import json, resource, sys, time
import torch
from flashbob import sdpa_bob

torch.set_num_threads(2)
tokens, heads, causal = int(sys.argv[1]), 4, sys.argv[2] == "causal"
q, k, v = (torch.randn(1, heads, tokens, 64, requires_grad=True) for _ in range(3))
start = time.perf_counter()
o = sdpa_bob(q, k, v, is_causal=causal, backend="blocked")
first = torch.autograd.grad(o, (q, k, v), torch.randn_like(o), create_graph=True)
second = torch.autograd.grad(first, (q, k, v), [torch.randn_like(g) for g in first])
seconds = time.perf_counter() - start
assert all(torch.isfinite(x).all() for x in second)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
print(json.dumps({"seconds": seconds, "peak_mib": peak / 2**20}))
"""


def measured(tokens: int, mask: str) -> dict[str, float]:
    """Seconds and peak resident MiB of value, gradient and double backward over 4 heads of size 64 in float32."""
    pytest.importorskip("resource", reason="needs getrusage")
    command = [sys.executable, "-c", PROGRAM, str(tokens), mask]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)  # type: ignore[no-any-return]


@pytest.mark.slow
def test_double_backward_over_16384_tokens_stays_under_one_and_a_half_gib() -> None:
    found = measured(16384, "causal")
    assert found["peak_mib"] < 1536, found


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.untyped_storage().nbytes() // x.element_size())
        return out


def derivatives(backend: Backend, **options: Any) -> None:
    """Value, gradient, double backward and forward derivative over two sequences of 300 tokens, 4 heads of size 8."""
    q, k, v, u = (torch.randn(2, 4, 300, 8, requires_grad=True) for _ in range(4))
    first = torch.autograd.grad(sdpa_bob(q, k, v, **options, backend=backend), (q, k, v), u, create_graph=True)
    torch.autograd.grad(first, (q, k, v), [torch.randn_like(g) for g in first])
    torch.func.jvp(lambda x: sdpa_bob(x, k, v, **options, backend=backend), (q,), (u,))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize(
    "options",
    [{"is_causal": True}, {}, {"key_lengths": [300, 17]}, {"window_size": 40, "softcap": 2.0}],
    ids=["causal", "full", "padded", "window-softcap"],
)
def test_no_tensor_is_larger_than_the_input_or_a_tile(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    monkeypatch.setattr(blocked, "TILE_ELEMENTS", 1 << 13)
    with LargestTensor() as largest:
        derivatives("blocked", **options)
    assert largest.elements <= max(2 * 4 * 300 * 8, 1 << 13)
    with LargestTensor() as largest:
        derivatives("reference", **options)
    assert largest.elements >= 2 * 4 * 300 * 300, "the measure itself sees the score matrix where there is one"
