"""`blocked` never holds an N x N tensor: peak memory of a double backward, in a process of its own."""

import json
import subprocess
import sys

import pytest

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


def test_memory_grows_linearly() -> None:
    """Twice the tokens: one score matrix over 4 heads would add 192 MiB, and the materializing path holds about eight."""
    short, long = measured(2048, "full"), measured(4096, "full")
    assert long["peak_mib"] - short["peak_mib"] < 192, (short, long)
