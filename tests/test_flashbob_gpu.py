"""The kernels on a GPU: accuracy over head sizes and masks, PyTorch's fused operators, determinism."""

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from flashbob import explain, sdpa_bob
from flashbob.dropout import Dropout
from tests import gpu_accuracy
from tests.attention_cases import Case, errors, inputs, outputs

pytestmark = pytest.mark.gpu
SPECS = gpu_accuracy.specs()


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, Any]]:
    """All measurements, made once by several processes."""
    records = gpu_accuracy.measure_all(SPECS, workers=gpu_accuracy.default_workers())
    return {str(spec): record for spec, record in zip(SPECS, records, strict=True)}


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_errors_stay_within_their_bounds(rows: dict[str, dict[str, Any]], spec: gpu_accuracy.Spec) -> None:
    row = rows[str(spec)]
    assert row["status"] == "ok", row
    assert row["backend"] == "triton"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("size", [64, 128])
def test_fused_first_order_is_used_where_it_covers_the_case(size: int, dtype: torch.dtype) -> None:
    q = torch.empty(1, 2, 256, size, dtype=dtype, device="cuda")
    expected = "torch cuDNN" if torch.cuda.get_device_capability() >= (9, 0) else "torch flash"
    assert explain(q, q, q, is_causal=True) == (expected, "triton")
    assert explain(q, q, q, window_size=8) == ("triton", "triton")
    assert explain(q, q, q, is_causal=True, softcap=2.0) == ("triton", "triton")
    assert explain(q, q, q, is_causal=True, dropout_p=0.1) == ("triton", "triton")
    assert explain(q, q, q, attn_bias=q.new_zeros(256, 256)) == ("triton", "triton")
    assert explain(q.float(), q.float(), q.float(), is_causal=True) == ("triton", "triton")
    assert explain(q.double(), q.double(), q.double(), is_causal=True) == ("blocked", "blocked")


def test_repeatable_under_deterministic_algorithms() -> None:
    """The fused backwards add up dq with atomics; the project's own passes do not."""
    case = Case("causal", (4, 4), (513, 513), (64, 64), 2, {"is_causal": True})
    x = inputs(case, torch.bfloat16, "cuda")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        assert explain(x.q, x.k, x.v, is_causal=True) == ("triton", "triton")
        a, b = outputs(case, x, "auto"), outputs(case, x, "auto")
    finally:
        torch.use_deterministic_algorithms(before)
    assert all(torch.equal(a[label], b[label]) for label in a)


def test_the_second_derivative_is_repeatable_bit_by_bit() -> None:
    case = Case("causal", (4, 2), (513, 513), (64, 64), 2, {"is_causal": True})
    x = inputs(case, torch.bfloat16, "cuda")
    leaves = [t.requires_grad_() for t in (x.q, x.k, x.v)]
    first = torch.autograd.grad(sdpa_bob(*leaves, is_causal=True), leaves, x.do, create_graph=True)
    products = [torch.autograd.grad(first, leaves, (x.uq, x.uk, x.uv), retain_graph=True) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*products, strict=True))


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_the_hopper_kernels_agree_with_the_general_ones_and_keep_the_layout(
    size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flashbob.kernels import launch

    if launch.hopper_kernels(torch.device("cuda", 0)) is None:
        pytest.skip("needs a Hopper GPU and the Triton that the Hopper kernels are written for")
    case = Case("gqa", (4, 2), (333, 333), (size, size), 2, {"is_causal": True})
    x = inputs(case, dtype, "cuda")
    # Tokens before heads in memory, as transformers has them.
    leaves = [t.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for t in (x.q, x.k, x.v)]
    first = torch.autograd.grad(sdpa_bob(*leaves, is_causal=True), leaves, x.do, create_graph=True)
    fast = torch.autograd.grad(first, leaves, (x.uq, x.uk, x.uv), retain_graph=True)
    monkeypatch.setattr(launch, "hopper_kernels", lambda device: None)
    general = torch.autograd.grad(first, leaves, (x.uq, x.uk, x.uv))
    labels = ("gq", "gk", "gv")
    assert not all(torch.equal(a, b) for a, b in zip(fast, general, strict=True)), "the same kernels ran twice"
    rounding = 2 * torch.finfo(dtype).eps
    assert (
        max(errors(dict(zip(labels, fast, strict=True)), dict(zip(labels, general, strict=True))).values()) < rounding
    )
    assert [t.stride() for t in fast] == [t.stride() for t in leaves]


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "float32"])
def test_the_dropout_mask_is_the_same_on_the_gpu(size: int, dtype: torch.dtype) -> None:
    """Forward (tiles of queries by keys) and dv (keys by queries) apply the mask that PyTorch computes, bit by bit."""
    seed, keys, queries = 2**63 + 99, size, 300
    factors = Dropout(0.3, seed, 2).factors((2, 3), 0, queries, 0, keys, torch.device("cuda"), torch.float32)
    q, k = (torch.zeros(2, 3, n, size, dtype=dtype, device="cuda") for n in (queries, keys))
    v = torch.eye(keys, dtype=dtype, device="cuda").expand(2, 3, keys, keys).clone().requires_grad_()
    do = torch.zeros_like(q)
    do[:, :, -size:] = torch.eye(size, dtype=dtype, device="cuda")
    o = sdpa_bob(q, k, v, dropout_p=0.3, seed=seed)
    (dv,) = torch.autograd.grad(o, v, do)
    assert torch.equal(o > 0, factors > 0)
    assert torch.equal(dv.mT > 0, factors[:, :, -size:] > 0)
    torch.testing.assert_close(keys * o.float(), factors, rtol=torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("given", ["q", "k", "v", "qk", "qv", "kv"])
@pytest.mark.parametrize("size", [64, 128])
def test_absent_parts_of_a_direction_are_zeros(size: int, given: str) -> None:
    """With one part absent the Hopper kernels run on zeros, with two the general ones run without its products."""
    case = Case("gqa", (4, 2), (333, 333), (size, size), 2, {"is_causal": True})
    x = inputs(case, torch.bfloat16, "cuda")
    parts = {n: getattr(x, n) if n[1] in given else torch.zeros_like(getattr(x, n)) for n in ("uq", "uk", "uv")}
    exact = outputs(case, replace(x, **parts).to(torch.float64), "reference")
    leaves = [t.requires_grad_() for t in (x.q, x.k, x.v, x.do)]
    first = torch.autograd.grad(sdpa_bob(*leaves[:3], is_causal=True), leaves[:3], x.do, create_graph=True)
    chosen = [g for g, n in zip(first, "qkv", strict=True) if n in given]
    found = torch.autograd.grad(chosen, leaves, [getattr(x, f"u{n}") for n in "qkv" if n in given])
    labels = ("gq", "gk", "gv", "gdo")
    worst = errors(dict(zip(labels, found, strict=True)), {label: exact[label] for label in labels})
    assert max(worst.values()) < 1e-2, worst


def test_padding_beyond_the_keys_is_caught() -> None:
    """On a GPU the check runs asynchronously, so it is tried in a process that may die of it."""
    code = (
        "import torch; from flashbob import sdpa_bob; q = torch.zeros(2, 1, 4, 8, device='cuda');"
        "sdpa_bob(q, q, q, key_lengths=torch.tensor([4, 9], device='cuda')); torch.cuda.synchronize()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "key_lengths must lie in 0..4" in done.stderr + done.stdout or "device-side assert" in done.stderr


def test_forward_over_reverse_and_batched_gradients_on_the_gpu() -> None:
    case = Case("gqa", (4, 2), (65, 65), (32, 32), 1, {"is_causal": True})
    x = inputs(case, torch.float32, "cuda")

    def loss(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return (sdpa_bob(q, k, v, is_causal=True) * x.do).sum()

    product = torch.func.jvp(torch.func.grad(loss, (0, 1, 2)), (x.q, x.k, x.v), (x.uq, x.uk, x.uv))[1]
    exact = outputs(case, x.to(torch.float64), "reference")
    found = dict(zip(("gq", "gk", "gv"), product, strict=True))
    assert max(errors(found, {label: exact[label] for label in found}).values()) < 1e-5
    leaves = [t.clone().requires_grad_() for t in (x.q, x.k, x.v)]
    o = sdpa_bob(*leaves, is_causal=True)
    batched = torch.autograd.grad(o, leaves, torch.stack([x.do, -2 * x.do]), is_grads_batched=True)
    for label, gradient in zip(("dq", "dk", "dv"), batched, strict=True):
        both = {"one": gradient[0], "two": gradient[1]}
        assert max(errors(both, {"one": exact[label], "two": -2 * exact[label]}).values()) < 1e-5
