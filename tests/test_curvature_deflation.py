"""Hutch++, XTrace, the diagonal, the Frobenius norm and condition numbers on matrices of known spectrum."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from curvature_oracles import MatrixOperator, with_spectrum
from scipy.stats import t as student

from curvature import condition_number, diagonal, eigenpairs, frobenius_norm, hutchpp, lanczos, trace, xtrace
from curvature.deflation import Deflation
from curvature.estimate import mean_and_stderr

SPECTRA: dict[str, Any] = {
    "flat": np.linspace(-3, 10, 40),
    "decaying": [100 / (i + 1) ** 1.5 for i in range(40)],
    "indefinite": [100, -50, 20, 10, 5, *np.linspace(-3, 3, 35)],
}
SEEDS = 200


def matrix(name: str) -> torch.Tensor:
    return with_spectrum(SPECTRA[name], seed=1)[0]


@pytest.mark.parametrize("spectrum", ["flat", "indefinite"])
@pytest.mark.parametrize(
    ("estimator", "options", "highest"),
    [
        (hutchpp, {"max_products": 24, "rank": 4}, 0.99),
        # Its error is an upper estimate: up to twice too large where the spectrum falls off fast.
        (xtrace, {"max_products": 24, "min_products": 24}, 1.0),
    ],
    ids=["hutchpp", "xtrace"],
)
def test_traces_are_unbiased_and_their_errors_honest(
    estimator: Callable[..., Any], options: dict[str, Any], highest: float, spectrum: str
) -> None:
    """Total and blocks over many seeds: means within 4 standard errors, 95 % intervals right as often as they say.

    Of 200 intervals of coverage 92 to 98 %, between 90 and 99 % hold the value. Blocks have Student's interval, which
    does not allow for skewed samples.
    """
    dense = matrix(spectrum)
    op = MatrixOperator(dense, [15, 25])
    exact = np.array([float(dense.trace()), float(dense.diagonal()[:15].sum()), float(dense.diagonal()[15:].sum())])
    runs = [estimator(op, tol=1e-12, seed=seed, **options) for seed in range(SEEDS)]
    found = np.array([[r.value, *(value for value, _ in r.per_block.values())] for r in runs])
    errors = np.array([[r.stderr, *(stderr for _, stderr in r.per_block.values())] for r in runs])
    assert (np.abs(found.mean(0) - exact) < 4 * found.std(0) / SEEDS**0.5).all()
    np.testing.assert_allclose(found[:, 0], found[:, 1:].sum(1))
    quantile = student.ppf(0.975, len(runs[0].samples) - 1)
    coverage = (np.abs(found - exact) < quantile * errors).mean(0)
    assert (coverage[1:] > 0.88).all()
    low, high = np.array([r.interval() for r in runs]).T
    assert 0.90 <= np.mean((low < exact[0]) & (exact[0] < high)) <= highest
    assert (coverage[1:] <= max(highest, 0.995)).all()
    assert all(r.products == 24 and not r.converged for r in runs)
    for r in runs[:3]:
        assert mean_and_stderr(r.samples.sum(1)) == pytest.approx((r.value, r.stderr))


@pytest.mark.parametrize("estimator", [hutchpp, xtrace])
def test_deflation_pays_where_few_eigenvalues_dominate(estimator: Callable[..., Any]) -> None:
    op = MatrixOperator(matrix("decaying"))
    spread = [np.std([f(op, seed=s, **o).value for s in range(30)]) for f, o in (
        (trace, {"probes": 24}), (estimator, {"max_products": 24, "tol": 1e-12}),
    )]  # fmt: skip
    assert spread[1] < spread[0] / 2


@pytest.mark.parametrize("estimator", [hutchpp, xtrace])
def test_a_matrix_of_low_rank_has_an_exact_trace(estimator: Callable[..., Any]) -> None:
    dense, _ = with_spectrum([5.0, -2.0, 1.0, *[0.0] * 27])
    op = MatrixOperator(dense, [10, 20])
    found = estimator(op, max_products=60, seed=3)
    assert found.value == pytest.approx(4.0, rel=1e-10)
    assert found.stderr < 1e-12
    assert found.converged
    assert found.products == op.applied == 17  # three vectors, one product that brings nothing new, ten probes
    assert found.per_block["block0"][0] == pytest.approx(float(dense.diagonal()[:10].sum()), rel=1e-9)


@pytest.mark.parametrize("estimator", [hutchpp, xtrace, partial(diagonal, method="xdiag")])
def test_nothing_left_is_confirmed(estimator: Callable[..., Any]) -> None:
    """Of diag(3, 1, 0, ...) half of all pairs of signs give parallel products."""
    zero = estimator(MatrixOperator(torch.zeros(9, 9, dtype=torch.float64), [4, 5]))
    assert zero.converged
    assert zero.per_block["block0"] == (0, 0)
    dense = torch.diag(torch.tensor([3.0, 1.0, *[0.0] * 30], dtype=torch.float64))
    for seed in range(20):
        found = estimator(MatrixOperator(dense), seed=seed)
        value, stderr = found.per_block["block0"]
        expected = 10**0.5 if "xdiag" in str(estimator) else 4.0
        assert stderr > 0 or value == pytest.approx(expected)


@pytest.mark.parametrize("estimator", [hutchpp, xtrace])
def test_it_stops_on_the_standard_error(estimator: Callable[..., Any]) -> None:
    op = MatrixOperator(matrix("decaying"))
    told: list[int] = []
    found = estimator(op, tol=0.1, max_products=60, progress=lambda done, most, status: told.append(done))
    assert found.converged
    assert found.stderr <= 0.1 * abs(found.value)
    assert found.products == op.applied == told[-1] < 60
    assert told == sorted(told)
    again = estimator(op, tol=0.1, max_products=60)
    assert again.value == found.value


def test_leave_one_out_traces_are_sums_of_leave_one_out_diagonals() -> None:
    op = MatrixOperator(matrix("indefinite"), [15, 25])
    deflation = Deflation(op, seed=2, capacity=6)
    for _ in range(6):
        deflation.extend()
    traces, diagonals = deflation.small().traces(), list(deflation.diagonals())
    for row, entries in zip(traces, diagonals, strict=True):
        np.testing.assert_allclose(row, [float(entries[:15].sum()), float(entries[15:].sum())], rtol=1e-10)


def test_leaving_one_out_is_a_deflation_of_the_others() -> None:
    """Against the definition: a basis of the other products, and the probe left out on what they leave."""
    dense = matrix("indefinite")
    deflation = Deflation(MatrixOperator(dense), seed=0, capacity=5)
    for _ in range(5):
        deflation.extend()
    w = deflation._w.double()
    for i, found in enumerate(deflation.diagonals()):
        others = [j for j in range(5) if j != i]
        q, _ = torch.linalg.qr(dense @ w[others].T)
        p = q @ q.T
        rest = (torch.eye(40) - p) @ dense @ (torch.eye(40) - p)
        expected = (dense - rest).diagonal() + w[i] * (rest @ w[i])
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


# Diagonal


@pytest.mark.parametrize(("method", "spectrum"), [("hutchinson", "flat"), ("xdiag", "decaying")])
def test_diagonal_is_unbiased_and_its_errors_honest(method: Any, spectrum: str) -> None:
    dense = matrix(spectrum)
    op, exact = MatrixOperator(dense), dense.diagonal().numpy()
    options = {"method": method, "max_products": 24, "min_products": 24, "tol": 1e-12}
    runs = [diagonal(op, seed=seed, **options) for seed in range(SEEDS)]
    found = np.stack([r.values.numpy() for r in runs])
    errors = np.stack([r.stderr.numpy() for r in runs])
    z = (found.mean(0) - exact) / (found.std(0) / SEEDS**0.5)
    assert np.abs(z).max() < 4.5
    assert np.mean(z**2) == pytest.approx(1, abs=0.8)
    samples = 24 if method == "hutchinson" else 12
    coverage = np.mean(np.abs(found - exact) < student.ppf(0.975, samples - 1) * errors)
    assert 0.92 < coverage < 0.99
    claimed = np.mean([r.relative_error**2 for r in runs])
    actual = np.mean(((found - exact) ** 2).sum(1)) / (exact**2).sum()
    assert 0.6 < claimed / actual < 2.5


def test_xdiag_pays_where_few_eigenvalues_dominate() -> None:
    dense = matrix("decaying")
    off = {
        method: np.mean([
            float((diagonal(MatrixOperator(dense), method=method, max_products=24, min_products=24, seed=s).values
            - dense.diagonal()).norm()) for s in range(15)
        ])
        for method in ("hutchinson", "xdiag")
    }  # fmt: skip
    assert off["xdiag"] < off["hutchinson"] / 2


def test_the_diagonal_stops_on_its_error() -> None:
    op = MatrixOperator(torch.diag(torch.arange(1.0, 8.0, dtype=torch.float64)), [3, 4])
    found = diagonal(op, tol=0.05)
    assert found.products == op.applied == 10
    assert torch.equal(found.values, torch.arange(1.0, 8.0, dtype=torch.float64))
    assert (found.relative_error, found.converged) == (0.0, True)
    assert found.per_block["block0"] == (pytest.approx(14**0.5), 0.0)
    low_rank = MatrixOperator(with_spectrum([3.0, 1.0, *[0.0] * 18])[0])
    exact = diagonal(low_rank, method="xdiag", max_products=20)
    assert exact.products == 15
    torch.testing.assert_close(exact.values, low_rank.matrix.diagonal(), rtol=1e-10, atol=1e-12)
    assert exact.stderr.max() < 1e-13
    noise = MatrixOperator(with_spectrum(np.linspace(-1, 1, 200))[0])
    short = diagonal(noise, max_products=2, min_products=2)
    assert not short.converged
    assert short.relative_error > 1


# Frobenius norm


def test_frobenius_norm_is_within_its_error() -> None:
    dense = matrix("indefinite")
    exact, rows = float(dense.norm()), float(dense[:15].norm())
    runs = [frobenius_norm(MatrixOperator(dense, [15, 25]), tol=1e-9, max_products=40, seed=s) for s in range(60)]
    squares = np.array([r.value**2 for r in runs])
    assert abs(squares.mean() - exact**2) < 4 * squares.std() / len(runs) ** 0.5
    z = np.array([(r.value - exact) / r.stderr for r in runs])
    assert 0.7 < z.std() < 1.4
    blocks = np.array([r.per_block["block0"][0] ** 2 for r in runs])
    assert abs(blocks.mean() - rows**2) < 4 * blocks.std() / len(runs) ** 0.5
    assert frobenius_norm(MatrixOperator(dense), tol=0.5).products == 10


# Condition numbers


def test_condition_of_a_definite_matrix() -> None:
    op = MatrixOperator(with_spectrum(np.geomspace(1, 50, 30))[0])
    found = condition_number(op)
    assert found.value == pytest.approx(50, rel=1e-8)
    assert found.definite
    assert found.converged
    assert found.lower_bound == pytest.approx(50, rel=1e-6)
    damped = condition_number(op.shifted(9))
    assert damped.value == pytest.approx(59 / 10, rel=1e-8)
    negative = condition_number(-1 * op)
    assert (negative.value, negative.definite) == (pytest.approx(50, rel=1e-8), True)


def test_condition_of_an_indefinite_matrix_is_not_made_up() -> None:
    op = MatrixOperator(with_spectrum([100.0, -50.0, *np.linspace(-3, 3, 118)])[0])
    few = condition_number(op, max_products=15)
    assert few.value is None
    assert not few.converged
    assert few.lower_bound <= 100 / 0.0256
    assert few.largest == pytest.approx(100, rel=1e-6)
    every = condition_number(MatrixOperator(with_spectrum([100.0, -50.0, 4.0, 2.0])[0]))
    assert every.value == pytest.approx(50, rel=1e-8)
    singular = condition_number(MatrixOperator(with_spectrum([4.0, 2.0, 0.0])[0]))
    assert singular.value is None
    assert singular.lower_bound > 1e12


def test_each_eigenvalue_once() -> None:
    """80 steps on 30 eigenvalues, five of which dominate: without re-orthogonalisation these would repeat."""
    values = [100.0, 50.0, 20.0, 10.0, 5.0, *np.linspace(0.1, 1, 25)]
    found = lanczos(MatrixOperator(torch.diag(torch.tensor(values, dtype=torch.float64))), steps=80)
    np.testing.assert_allclose(found.eigenvalues, sorted(values, reverse=True), rtol=1e-10)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda op: hutchpp(op, tol=0), "tol must be positive"),
        (lambda op: hutchpp(op, rank=50), r"rank must be in \[1, 49\]"),
        (lambda op: hutchpp(op, min_probes=1), "at least 2 probes"),
        (lambda op: xtrace(op, max_products=3), "max_products must be at least 4"),
        (lambda op: diagonal(op, method="bekas"), "method must be one of hutchinson, xdiag, got 'bekas'"),
        (lambda op: diagonal(op, tol=float("inf")), "tol must be positive and finite"),
        (lambda op: diagonal(op, max_products=5), "2 <= min_products <= max_products"),
        (lambda op: diagonal(op, method="xdiag", min_products=2), "4 <= min_products"),
        (lambda op: frobenius_norm(op, min_products=1), "2 <= min_products"),
        (lambda op: condition_number(op, tol=-1), "tol must be positive"),
    ],
    ids=["tol", "rank", "probes", "products", "method", "infinite", "fewest", "pairs", "one", "condition"],
)
def test_bad_settings_are_refused(call: Callable[[MatrixOperator], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(MatrixOperator(torch.eye(3, dtype=torch.float64)))


@pytest.mark.parametrize("size", [2, 4])
def test_no_eigenvector_is_missed_by_its_symmetry(size: int) -> None:
    """Random signs are orthogonal to some eigenvectors of such a matrix as often as not."""
    dense = torch.eye(size, dtype=torch.float64) + torch.ones(size, size, dtype=torch.float64)
    for seed in range(10):
        found = condition_number(MatrixOperator(dense), seed=seed)
        assert (found.value, found.converged) == (pytest.approx(size + 1), True)
        pairs = eigenpairs(MatrixOperator(dense), top=1, seed=seed)
        assert list(pairs.eigenvalues) == pytest.approx([size + 1, 1])


def test_numbers_of_products_out_of_range_are_refused() -> None:
    op = MatrixOperator(matrix("flat"))
    with pytest.raises(ValueError, match="max_products must be at least 4"):
        hutchpp(op, max_products=3)
    with pytest.raises(ValueError, match=r"rank must be in \[1, 49\], which leaves two probes, got 80"):
        hutchpp(op, rank=80)
