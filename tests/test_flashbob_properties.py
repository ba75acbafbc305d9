"""What second derivatives of attention must satisfy, whoever computes them."""

import pytest
import torch
from torch import Tensor

from flashbob import blocked, sdpa_bob
from tests.attention_cases import Case, Inputs, inputs, outputs

BACKENDS = ["reference", "blocked"]
CAUSAL = Case("causal", (4, 2), (19, 19), (8, 6), 2, {"is_causal": True})
MASKED = [
    CAUSAL,
    Case("full", (2, 2), (13, 19), (8, 6), 2),
    Case("window", (4, 1), (19, 19), (8, 6), 2, {"window_size": 6, "key_starts": (0, 4)}),
    Case("softcap", (2, 2), (19, 19), (8, 6), 2, {"is_causal": True, "softcap": 1.3}),
    Case("dropout", (4, 2), (19, 19), (8, 6), 2, {"is_causal": True, "dropout_p": 0.3, "seed": 5}),
]
each_mask = pytest.mark.parametrize("case", MASKED, ids=str)
each_backend = pytest.mark.parametrize("backend", BACKENDS)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocked, "TILE_ELEMENTS", 0)
    monkeypatch.setattr(blocked, "MIN_TILE", 5)


def replaced(x: Inputs, **changes: Tensor) -> Inputs:
    return Inputs(**{**vars(x), **changes})


def second(case: Case, x: Inputs, backend: str) -> list[Tensor]:
    found = outputs(case, x, backend)
    return [found[label] for label in ("gq", "gk", "gv", "gdo")]


@each_backend
@each_mask
def test_the_hessian_is_symmetric(case: Case, backend: str) -> None:
    """<w, H u> = <u, H w> for the Hessian of <do, attention> in (q, k, v)."""
    x, other = inputs(case, torch.float64, seed=1), inputs(case, torch.float64, seed=2)
    u, w = (x.uq, x.uk, x.uv), (other.uq, other.uk, other.uv)
    hu = second(case, x, backend)[:3]
    hw = second(case, replaced(x, uq=w[0], uk=w[1], uv=w[2]), backend)[:3]
    left, right = (sum((a * b).sum() for a, b in zip(p, q, strict=True)) for p, q in ((w, hu), (u, hw)))
    torch.testing.assert_close(left, right, rtol=1e-11, atol=1e-11)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@each_backend
@each_mask
def test_the_output_gradient_part_is_the_forward_derivative(case: Case, backend: str) -> None:
    """<dQ, U_Q> + <dK, U_K> + <dV, U_V> = <dO, J U>, so gdo does not depend on do and equals J U."""
    x = inputs(case, torch.float64)
    gdo = second(case, x, backend)[3]
    _, tangent = torch.func.jvp(
        lambda q, k, v: sdpa_bob(q, k, v, **case.options, backend=backend),  # type: ignore[arg-type]
        (x.q, x.k, x.v),
        (x.uq, x.uk, x.uv),
    )
    torch.testing.assert_close(gdo, tangent, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(gdo, second(case, replaced(x, do=2 * x.do + 1), backend)[3], rtol=1e-11, atol=1e-12)


@each_backend
@each_mask
def test_the_product_is_linear_in_the_direction(case: Case, backend: str) -> None:
    x, other = inputs(case, torch.float64, seed=1), inputs(case, torch.float64, seed=2)
    directions = ("uq", "uk", "uv")
    mixed = {label: 3 * getattr(x, label) - 2 * getattr(other, label) for label in directions}
    swapped = {label: getattr(other, label) for label in directions}
    parts = [second(case, replaced(x, **change), backend) for change in ({}, swapped)]
    expected = [3 * a - 2 * b for a, b in zip(*parts, strict=True)]
    for found, exact in zip(second(case, replaced(x, **mixed), backend), expected, strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-10, atol=1e-11)


@each_backend
@each_mask
def test_the_product_is_linear_in_the_output_gradient(case: Case, backend: str) -> None:
    x = inputs(case, torch.float64)
    *scaled, gdo = second(case, replaced(x, do=-4 * x.do), backend)
    *exact, same = second(case, x, backend)
    torch.testing.assert_close(gdo, same, rtol=1e-11, atol=1e-12)
    for found, unscaled in zip(scaled, exact, strict=True):
        torch.testing.assert_close(found, -4 * unscaled, rtol=1e-10, atol=1e-11)


@each_backend
@pytest.mark.parametrize("options", [{"is_causal": True}, {"window_size": 6}], ids=["causal", "window"])
def test_no_derivative_leaks_from_the_future(options: dict[str, int], backend: str) -> None:
    """Outputs up to token t, and all their derivatives, are the same whatever stands after t."""
    t = 11
    case = Case("leak", (4, 2), (19, 19), (8, 8), 1, dict(options))
    x, other = inputs(case, torch.float64, seed=1), inputs(case, torch.float64, seed=2)

    def spliced(a: Tensor, b: Tensor) -> Tensor:
        return torch.cat([a[:, :, :t], b[:, :, t:]], dim=2)

    zero = torch.zeros_like(x.do)
    asked = replaced(x, do=spliced(x.do, zero))
    changed = replaced(
        asked, **{n: spliced(getattr(x, n), getattr(other, n)) for n in ("q", "k", "v", "uq", "uk", "uv")}
    )
    a, b = outputs(case, asked, backend), outputs(case, changed, backend)
    for label in a:
        torch.testing.assert_close(a[label][:, :, :t], b[label][:, :, :t], rtol=1e-12, atol=1e-13, msg=label)
    for label in ("dq", "dk", "dv", "gq", "gk", "gv"):
        assert (a[label][:, :, t:] == 0).all(), f"{label}: tokens after t got a gradient from outputs before it"


@each_backend
def test_a_window_forgets_the_past(backend: str) -> None:
    case = Case("forget", (2, 2), (19, 19), (8, 8), 1, {"window_size": 4})
    x = inputs(case, torch.float64)
    late = torch.zeros_like(x.do)
    late[:, :, 12:] = x.do[:, :, 12:]
    found = outputs(case, replaced(x, do=late), backend)
    for label in ("dk", "dv", "gk", "gv"):
        assert (found[label][:, :, :9] == 0).all()
        assert (found[label][:, :, 9:] != 0).any()


@each_backend
def test_sequences_of_a_batch_do_not_mix(backend: str) -> None:
    case = Case(
        "batch", (4, 2), (9, 9), (8, 8), 3, {"is_causal": True, "key_starts": [0, 2, 0], "key_lengths": [9, 9, 5]}
    )
    order = torch.tensor([2, 0, 1])
    options = {**case.options, "key_starts": [0, 0, 2], "key_lengths": [5, 9, 9]}
    shuffled = Case("shuffled", case.heads, case.tokens, case.sizes, 3, options)
    x = inputs(case, torch.float64)
    y = Inputs(*(None if t is None else t[order] for t in vars(x).values()))  # type: ignore[arg-type]
    a, b = outputs(case, x, backend), outputs(shuffled, y, backend)
    for label in a:
        torch.testing.assert_close(a[label][order], b[label], rtol=1e-12, atol=1e-13, msg=label)


@each_backend
def test_grouped_heads_are_repeated_heads(backend: str) -> None:
    """A key/value head shared by a group has the sum of the derivatives of its copies."""
    grouped, full = (
        Case("grouped", (6, 2), (9, 9), (8, 5), 2, {"is_causal": True}),
        Case("full", (6, 6), (9, 9), (8, 5), 2, {"is_causal": True}),
    )
    x = inputs(grouped, torch.float64)
    copies = {n: getattr(x, n).repeat_interleave(3, dim=1) for n in ("k", "v", "uk", "uv")}
    a, b = outputs(grouped, x, backend), outputs(full, replaced(x, **copies), backend)
    for label, exact in b.items():
        folded = exact.unflatten(1, (2, 3)).sum(2) if label in ("dk", "dv", "gk", "gv") else exact
        torch.testing.assert_close(a[label], folded, rtol=1e-11, atol=1e-12, msg=label)


@each_backend
@each_mask
def test_the_product_is_the_finite_difference_of_the_gradient(case: Case, backend: str) -> None:
    """Central differences: error O(h^2) from the third derivative, so h = 1e-4 leaves about 1e-7."""
    x, h = inputs(case, torch.float64), 1e-4

    def gradient(sign: float) -> list[Tensor]:
        moved = {n: getattr(x, n) + sign * h * getattr(x, "u" + n) for n in ("q", "k", "v")}
        found = outputs(case, replaced(x, **moved), backend)
        return [found[label] for label in ("dq", "dk", "dv", "o")]

    differences = [(a - b) / (2 * h) for a, b in zip(gradient(1), gradient(-1), strict=True)]
    for found, approximate in zip(second(case, x, backend), differences, strict=True):
        torch.testing.assert_close(found, approximate, rtol=1e-5, atol=1e-6)


@each_backend
def test_moving_all_keys_together_changes_nothing(backend: str) -> None:
    """Softmax ignores a score that all keys share: the direction uk = constant over keys has no derivative."""
    case = Case("shift", (2, 2), (9, 9), (8, 8), 1)
    x = inputs(case, torch.float64)
    zero = {n: torch.zeros_like(getattr(x, n)) for n in ("uq", "uv")}
    found = outputs(case, replaced(x, uk=torch.randn(1, 2, 1, 8, dtype=torch.float64).expand_as(x.k), **zero), backend)
    for label in ("gq", "gk", "gv", "gdo"):
        torch.testing.assert_close(found[label], torch.zeros_like(found[label]), rtol=0, atol=1e-12)
