"""Every backend computes the reference's value, gradient and second derivative, over one table of cases."""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from flashbob import blocked, fused, kernels, sdpa_bob
from flashbob.geometry import Geometry
from flashbob.plan import FirstOrder, Plan, SecondOrder
from tests.attention_cases import CASES, OUTPUTS, Case, attend, errors, inputs, outputs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BY_NAME = {case.name: case for case in CASES}
COVERED_BY_FUSED = ["full", "causal", "causal-odd", "one-token", "scale", "head-1", "head-3", "head-40", "head-256"]
QUICK = [
    "causal-odd",
    "few-queries-window",
    "starts-and-lengths-causal",
    "gqa-rectangular",
    "mqa-everything",
    "head-64",
    "bias-strided",
    "softcap-everything",
    "dropout-full",
]


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uninitialized memory is NaN, so that an element that nobody writes is seen."""

    def poisoned(empty: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def filled(*args: Any, **kwargs: Any) -> Tensor:
            x = empty(*args, **kwargs)
            return x.detach().fill_(float("nan")) if x.is_floating_point() else x

        return filled

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))
    assert torch.empty(2).isnan().all()


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of five tokens, so that a handful of tokens crosses tile edges many times."""
    monkeypatch.setattr(blocked, "TILE_ELEMENTS", 0)
    monkeypatch.setattr(blocked, "MIN_TILE", 5)


@pytest.fixture
def without_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and first backward of the backend itself, also where PyTorch's fused ones cover the case."""
    monkeypatch.setattr(fused, "find", lambda *_: None)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.usefixtures("small_tiles", "without_fused")
def test_blocked_is_the_reference(case: Case) -> None:
    x = inputs(case, torch.float64)
    found = errors(outputs(case, x, "blocked"), outputs(case, x, "reference"))
    assert max(found.values()) < 1e-12, found


@pytest.mark.parametrize("name", COVERED_BY_FUSED)
@pytest.mark.usefixtures("small_tiles")
def test_blocked_after_a_fused_first_backward_is_the_reference(name: str) -> None:
    case = BY_NAME[name]
    x = inputs(case, torch.float64)
    geometry = Geometry.build(
        *case.tokens, is_causal=case.options.get("is_causal", False), window_size=0, q_offset=None, k_offset=0
    )
    assert fused.find(x.q, x.k, x.v, geometry) is not None, "this case is here because the fused kernels cover it"
    found = errors(outputs(case, x, "blocked"), outputs(case, x, "reference"))
    assert max(found.values()) < 1e-12, found


def _by_speed(case: Case) -> Any:
    """Triton's interpreter takes about a second a case: a cross-section of them runs quickly, the rest is `slow`."""
    return pytest.param(case, id=case.name, marks=[] if case.name in QUICK else [pytest.mark.slow])


def _refusal(case: Case) -> str | None:
    x = inputs(case, torch.float32, DEVICE)
    return kernels.unsupported(x.q, x.k, x.v, bias=x.bias)


@pytest.mark.skipif(
    "not built" in (_refusal(CASES[0]) or ""), reason="the Triton kernels are not built yet (kernels.unsupported)"
)
@pytest.mark.parametrize("case", [_by_speed(case) for case in CASES])
@pytest.mark.usefixtures("without_fused")
def test_triton_is_the_reference(case: Case) -> None:
    x = inputs(case, torch.float32, DEVICE)
    if _refusal(case):
        with pytest.raises(NotImplementedError, match="backend='triton' does not support this call"):
            attend(case, x, "triton")
        return
    found = errors(outputs(case, x, "triton"), outputs(case, x.to(torch.float64), "reference"))
    assert max(found.values()) < 1e-5, found


def test_triton_takes_every_case() -> None:
    assert [case.name for case in CASES if _refusal(case)] == []


@pytest.mark.usefixtures("small_tiles")
def test_small_tiles_are_really_used() -> None:
    q = torch.zeros(2, 3, 17, 4)
    problem = blocked._Problem(q, q, None, None, _plan(17, 17))
    assert list(problem.row_blocks()) == [(0, 5), (5, 10), (10, 15), (15, 17)]
    assert list(problem.column_blocks(3, 11)) == [(3, 8), (8, 11)]


def _plan(queries: int, keys: int) -> Plan:
    return Plan(Geometry(queries, keys), 1.0, None, cast(FirstOrder, blocked), cast(SecondOrder, blocked))


def test_blocked_tile_stays_within_its_budget() -> None:
    for batch, heads in [(1, 1), (1, 12), (4, 32), (64, 64)]:
        x = torch.empty(batch, heads, 4096, 1)
        block = blocked._Problem(x, x, None, None, _plan(4096, 4096)).block
        assert blocked.MIN_TILE <= block <= blocked.MAX_TILE
        assert batch * heads * block**2 <= max(blocked.TILE_ELEMENTS, batch * heads * blocked.MIN_TILE**2)


@pytest.mark.parametrize("case", ["causal", "gqa-padded", "window-odd", "value-head-gqa-padded", "softcap", "strided"])
def test_blocked_in_float32(case: str) -> None:
    x = inputs(BY_NAME[case], torch.float32)
    found = errors(outputs(BY_NAME[case], x, "blocked"), outputs(BY_NAME[case], x.to(torch.float64), "reference"))
    assert max(found.values()) < 2e-6, found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("case", ["full-odd", "causal-odd", "gqa-padded", "window-odd", "value-head-gqa-padded"])
def test_blocked_in_half_precision_is_no_worse_than_materializing(case: str, dtype: torch.dtype) -> None:
    """Budget: twice the error of the materializing reference in the same dtype, plus one rounding of the result."""
    x = inputs(BY_NAME[case], dtype)
    exact = outputs(BY_NAME[case], x.to(torch.float64), "reference")
    found = errors(outputs(BY_NAME[case], x, "blocked"), exact)
    materialized = errors(outputs(BY_NAME[case], x, "reference"), exact)
    rounding = torch.finfo(dtype).eps / 2
    assert all(found[label] <= 2 * materialized[label] + rounding for label in OUTPUTS), (found, materialized)


FULLY_MASKED = [
    pytest.param({"key_lengths": [0, 6]}, id="no-keys"),
    pytest.param({"key_lengths": [0, 6], "is_causal": True}, id="no-keys-causal"),
    pytest.param({"key_starts": [3, 0], "is_causal": True}, id="left-padding"),
    pytest.param({"key_starts": [4, 0], "key_lengths": [4, 6]}, id="empty-range"),
    pytest.param({"key_starts": [5, 0], "key_lengths": [2, 6]}, id="reversed-range"),
    pytest.param({"is_causal": True, "k_offset": 4, "q_offset": 0}, id="keys-after-queries"),
    pytest.param({"window_size": 2, "q_offset": 40}, id="window-past-the-keys"),
    pytest.param({"attn_bias": torch.zeros(2, 1, 6, 6).index_fill(2, torch.tensor([0, 3]), -torch.inf)}, id="bias"),
]


@pytest.mark.parametrize("options", FULLY_MASKED)
@pytest.mark.parametrize("backend", ["reference", "blocked", "triton"])
def test_a_query_that_sees_no_key_gives_zeros(options: dict[str, object], backend: str) -> None:
    dtype = torch.float32 if backend == "triton" else torch.float64
    device = DEVICE if backend == "triton" else "cpu"
    q, k, v, do = (torch.randn(2, 1, 6, 8, dtype=dtype, device=device, requires_grad=True) for _ in range(4))
    seen = _visible(options)
    o = sdpa_bob(q, k, v, **options, backend=backend)  # type: ignore[arg-type]
    first = torch.autograd.grad(o, (q, k, v), do, create_graph=True)
    second = torch.autograd.grad(first, (q, k, v, do), [torch.randn_like(x) for x in first])
    for x in (o, *first, *second):
        assert torch.isfinite(x).all()
    blind_queries, unseen_keys = ~seen.any(-1), ~seen.any(-2)
    assert blind_queries.any()
    for x in (o, first[0], second[0], second[3]):
        assert (x.transpose(1, 2)[blind_queries] == 0).all()
    for x in (first[1], first[2], second[1], second[2]):
        assert (x.transpose(1, 2)[unseen_keys] == 0).all()


def _visible(options: dict[str, object]) -> Tensor:
    """Which key each query sees, [2, 6, 6], read off the weights: attention over one-hot values returns them."""
    q = torch.zeros(2, 1, 6, 1, dtype=torch.float64)
    weights = sdpa_bob(q, q, torch.eye(6, dtype=torch.float64).expand(2, 1, 6, 6), **options, backend="reference")  # type: ignore[arg-type]
    return weights[:, 0] > 0


@pytest.mark.parametrize("shape", [(0, 2, 5, 4), (2, 2, 0, 4), (2, 0, 5, 4)], ids=["batch", "tokens", "heads"])
def test_no_elements(shape: tuple[int, ...]) -> None:
    q = torch.zeros(shape, dtype=torch.float64, requires_grad=True)
    k = (
        torch.empty(shape[0], 2, 5, 4, dtype=torch.float64)
        if shape[1] == 0
        else torch.empty(shape, dtype=torch.float64)
    )
    o = sdpa_bob(q, k, k, backend="blocked")
    (dq,) = torch.autograd.grad(o.sum(), q)
    assert o.shape == dq.shape == shape


def test_no_keys_at_all_gives_attached_zeros() -> None:
    q = torch.full((2, 2, 5, 4), torch.inf, dtype=torch.float64, requires_grad=True)
    k = torch.zeros(2, 2, 0, 4, dtype=torch.float64)
    o = sdpa_bob(q, k, k, backend="blocked")
    (dq,) = torch.autograd.grad(o.sum(), q)
    assert (o == 0).all()
    assert (dq == 0).all()


@pytest.mark.parametrize("score", [torch.finfo(torch.float32).min, -1e9, 1e6])
def test_blocked_derivatives_stay_exact_where_a_score_swallows_the_log_of_the_sum(score: float) -> None:
    """All scores of one row are large and equal, in float32: a row that is masked with a large number, say."""
    q, k, v = (torch.randn(1, 1, 6, 4) for _ in range(3))
    q[:, :, 3], bias = 0.0, torch.zeros(6, 6)
    bias[3] = score
    direction = [torch.randn_like(t) for t in (q, k, v)]
    results = []
    for backend, dtype in (("blocked", torch.float32), ("reference", torch.float64)):
        call = partial(sdpa_bob, attn_bias=bias.to(dtype), backend=backend)  # type: ignore[arg-type]
        x, u = ([t.to(dtype) for t in tensors] for tensors in ((q, k, v), direction))
        leaves = [t.clone().requires_grad_() for t in x]
        o = call(*leaves)
        first = torch.autograd.grad(o.sin().sum(), leaves, create_graph=True)
        second = torch.autograd.grad(first, leaves, u)
        tangent = torch.func.jvp(call, tuple(x), tuple(u))[1]
        results.append([t.detach().double() for t in (o, *first, *second, tangent)])
    for found, exact in zip(*results, strict=True):
        assert float((found - exact).abs().max()) <= 1e-5 * max(1.0, float(exact.abs().max()))
