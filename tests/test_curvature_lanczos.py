"""Lanczos: prescribed spectra, honest residuals, no ghosts, breakdowns."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from curvature_oracles import MatrixOperator, with_spectrum
from scipy.sparse.linalg import eigsh
from torch import Tensor

from curvature import HessianOperator, LanczosResult, eigenpairs, lanczos, load_model, token_windows
from curvature.basis import Basis

SPECTRUM = torch.cat([torch.tensor([100.0, 50, 20, 10, 5]), torch.linspace(-1, 1, 190), torch.tensor([-3.0, -6, -15])])


def true_residuals(matrix: Tensor, result: LanczosResult) -> np.ndarray:
    assert result.eigenvectors is not None
    v = result.eigenvectors
    values = torch.from_numpy(result.eigenvalues.copy()).to(v.dtype)
    return torch.linalg.norm((matrix @ v - v * values).double(), dim=0).numpy()


def test_both_ends_of_a_prescribed_spectrum() -> None:
    matrix, _ = with_spectrum(SPECTRUM)
    result = lanczos(MatrixOperator(matrix), steps=60, top=3, vectors=True)
    np.testing.assert_allclose(result.eigenvalues, [100, 50, 20, -3, -6, -15], atol=1e-9)
    assert result.residuals.max() < 1e-7
    assert result.converged
    assert not result.breakdown
    assert result.eigenvectors is not None
    assert result.eigenvectors.shape == (198, 6)
    np.testing.assert_allclose((result.eigenvectors.T @ result.eigenvectors).numpy(), np.eye(6), atol=1e-12)
    assert (result.steps, result.products, result.seed) == (60, 60, 0)


@pytest.mark.parametrize("steps", [1, 2, 5, 20, 60])
def test_residuals_are_the_true_ones(steps: int) -> None:
    matrix, _ = with_spectrum(SPECTRUM)
    result = lanczos(MatrixOperator(matrix), steps=steps, seed=3, vectors=True)
    np.testing.assert_allclose(result.residuals, true_residuals(matrix, result), rtol=1e-6, atol=1e-12)
    distance = np.abs(result.eigenvalues[:, None] - SPECTRUM.numpy()).min(axis=1)
    assert (distance <= result.residuals + 1e-12).all()


def test_residuals_are_the_true_ones_in_float32() -> None:
    matrix = with_spectrum(SPECTRUM)[0].float()
    result = lanczos(MatrixOperator(matrix), steps=60, vectors=True)
    assert result.eigenvectors is not None
    assert result.eigenvectors.dtype == torch.float32
    np.testing.assert_allclose(result.residuals, true_residuals(matrix, result), rtol=1e-3, atol=5e-5)


def test_residuals_and_asymmetry_tell_of_an_operator_that_is_not_symmetric() -> None:
    """As a product in low precision is not: the textbook residual would report convergence to machine precision."""
    matrix, _ = with_spectrum(SPECTRUM)
    noisy = matrix + 1e-3 * torch.randn(matrix.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    result = lanczos(MatrixOperator(noisy), steps=60, vectors=True)
    np.testing.assert_allclose(result.residuals, true_residuals(noisy, result), rtol=1e-6)
    assert result.residuals[0] > 1e-3
    assert result.asymmetry > 1e-2
    assert lanczos(MatrixOperator(matrix), steps=60).asymmetry < 1e-11


def test_no_eigenvalue_is_reported_twice() -> None:
    values = [100.0, 50, 20, 10, 5, *torch.linspace(0.01, 1, 115)]
    result = lanczos(MatrixOperator(torch.diag(torch.tensor(values, dtype=torch.float64))), steps=80)
    found = result.eigenvalues
    for value in values[:5]:
        assert np.sum(np.abs(found - value) < 1e-6) == 1
    assert np.diff(found).max() < 0, "strictly descending"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_more_steps_than_dimensions(dtype: torch.dtype) -> None:
    values = torch.tensor([100.0, 50, 20, 10, 5, 2, 1, 0.5, -4, -7], dtype=dtype)
    op = MatrixOperator(torch.diag(values))
    result = lanczos(op, steps=80)
    assert result.steps == op.applied == 10
    assert result.breakdown
    tolerance = 1e-10 if dtype == torch.float64 else 1e-3
    np.testing.assert_allclose(result.eigenvalues, sorted(values.tolist(), reverse=True), atol=tolerance)
    assert result.residuals.max() < tolerance


def test_an_invariant_subspace_ends_the_run_with_every_distinct_eigenvalue_once() -> None:
    matrix, _ = with_spectrum([3.0] * 4 + [-1.0] * 5 + [0.0] * 20 + [7.0])
    op = MatrixOperator(matrix)
    result = lanczos(op, steps=25)
    assert result.breakdown
    assert result.converged
    assert result.products == op.applied == 4
    np.testing.assert_allclose(result.eigenvalues, [7, 3, 0, -1], atol=1e-12)
    assert result.residuals.max() < 1e-12


def test_the_zero_operator() -> None:
    result = lanczos(MatrixOperator(torch.zeros(6, 6)), steps=3)
    assert result.eigenvalues.tolist() == [0.0]
    assert result.breakdown


def test_a_given_start_vector() -> None:
    matrix, vectors = with_spectrum(SPECTRUM)
    result = lanczos(MatrixOperator(matrix), steps=10, start=5 * (vectors[:, 1] + vectors[:, 4]))
    assert result.seed is None
    assert result.breakdown
    np.testing.assert_allclose(result.eigenvalues, [50, 5], atol=1e-10)


def test_progress_and_seeds() -> None:
    matrix, _ = with_spectrum(SPECTRUM)
    seen: list[tuple[int, int, str]] = []
    first = lanczos(MatrixOperator(matrix), steps=4, seed=7, progress=lambda *a: seen.append(a))
    assert [(done, total) for done, total, _ in seen] == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert np.array_equal(first.eigenvalues, lanczos(MatrixOperator(matrix), steps=4, seed=7).eigenvalues)
    assert not np.array_equal(first.eigenvalues, lanczos(MatrixOperator(matrix), steps=4, seed=8).eigenvalues)
    assert not first.converged


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"steps": 3, "top": 0}, "top must be at least 1"),
        ({"steps": 3, "start": torch.zeros(4)}, "start must be finite and not zero"),
        ({"steps": 3, "start": torch.ones(3)}, "must have shape"),
        ({"steps": 3, "start": torch.ones(4, 1)}, "start must be a flat vector"),
        ({"steps": 3, "start": torch.full((4,), float("nan"))}, "start must be finite"),
    ],
    ids=["steps", "top", "zero start", "short start", "column start", "nan start"],
)
def test_bad_settings_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lanczos(MatrixOperator(torch.eye(4)), **options)  # type: ignore[arg-type]


def test_a_basis_in_host_memory_gives_the_same_pairs() -> None:
    matrix, _ = with_spectrum(SPECTRUM)
    there, here = (
        lanczos(MatrixOperator(matrix), steps=30, vectors=True, offload=offload) for offload in (True, False)
    )
    np.testing.assert_allclose(there.eigenvalues, here.eigenvalues, atol=1e-11)
    np.testing.assert_allclose(there.residuals, true_residuals(matrix, there), rtol=1e-6, atol=1e-12)
    assert np.linalg.norm((there.eigenvectors.T @ there.eigenvectors).numpy() - np.eye(30)) < 1e-12


@pytest.mark.parametrize("offload", [False, True], ids=["on the device", "in host memory"])
def test_a_basis_is_a_matrix_of_rows(offload: bool) -> None:
    rows, _ = torch.linalg.qr(torch.randn(50, 19, dtype=torch.float64))
    basis = Basis(19, 50, torch.float64, torch.device("cpu"), offload=offload)
    for row in rows.T:
        basis.append(row)
    assert torch.equal(basis.rows(3, 17), rows.T[3:17])
    vector = torch.randn(50, dtype=torch.float64)
    rest = vector.clone()
    np.testing.assert_allclose(basis.remove_from(rest), (rows.T @ vector).numpy(), atol=1e-13)
    torch.testing.assert_close(rest, vector - rows @ (rows.T @ vector))
    weights = np.random.default_rng(0).standard_normal((19, 5))
    mixed = rows @ torch.from_numpy(weights)
    torch.testing.assert_close(basis.combine(weights), mixed)
    basis.replace(weights)
    torch.testing.assert_close(basis.rows(0, 5), mixed.T)
    assert basis.count == 5


# Restarted


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(("top", "size"), [(1, 4), (3, 8), (3, None), (4, 20)])
def test_restarts_reach_the_tolerance_in_bounded_memory(top: int, size: int | None, dtype: torch.dtype) -> None:
    matrix = with_spectrum(SPECTRUM)[0].to(dtype)
    tol = 1e-9 if dtype == torch.float64 else 1e-5
    found = eigenpairs(MatrixOperator(matrix), top=top, tol=tol, basis=size, vectors=True, max_products=600)
    assert found.converged
    assert (found.restarts > 0) == (size is not None and size < 20) or top == 4
    ordered = SPECTRUM.sort(descending=True).values.numpy()
    expected = np.concatenate([ordered[:top], ordered[-top:]])
    np.testing.assert_allclose(found.eigenvalues, expected, atol=100 * tol)
    assert found.residuals.max() <= 100 * tol * 1.001
    v = found.eigenvectors
    assert v is not None
    true = torch.linalg.norm((matrix @ v - v * torch.from_numpy(found.eigenvalues).to(dtype)).double(), dim=0).numpy()
    np.testing.assert_allclose(found.residuals, true, rtol=2e-2, atol=1e-9 if dtype == torch.float64 else 2e-4)
    np.testing.assert_allclose((v.T @ v).numpy(), np.eye(2 * top), atol=1e-11 if dtype == torch.float64 else 1e-5)


@pytest.mark.parametrize(("ends", "expected"), [("largest", [100, 50]), ("smallest", [-6, -15])])
def test_one_end_alone(ends: str, expected: list[float]) -> None:
    found = eigenpairs(MatrixOperator(with_spectrum(SPECTRUM)[0]), top=2, ends=ends, tol=1e-10, basis=9)  # type: ignore[arg-type]
    np.testing.assert_allclose(found.eigenvalues, expected, atol=1e-8)


def test_restarts_report_no_eigenvalue_twice_and_agree_with_scipy() -> None:
    values = torch.cat([torch.tensor([100.0, 50, 20, 10, 5]), torch.linspace(0.0, 1, 115)]).double()
    op = MatrixOperator(torch.diag(values))
    found = eigenpairs(op, top=8, ends="largest", tol=1e-9, basis=18, max_products=900)
    assert found.converged
    assert found.restarts > 3
    assert found.products == op.applied
    expected = eigsh(op.to_scipy(), k=8, which="LA", tol=1e-12, return_eigenvectors=False, rng=0)
    np.testing.assert_allclose(found.eigenvalues, np.sort(expected)[::-1], atol=1e-7)


def test_an_invariant_subspace_ends_a_restarted_run() -> None:
    matrix, _ = with_spectrum([3.0] * 4 + [-1.0] * 5 + [0.0] * 20 + [7.0])
    found = eigenpairs(MatrixOperator(matrix), top=3, basis=9)
    assert found.breakdown
    assert found.converged
    np.testing.assert_allclose(found.eigenvalues, [7, 3, 0, -1], atol=1e-12)
    small = eigenpairs(MatrixOperator(torch.diag(torch.tensor([2.0, 1.0, -1.0]))), top=2)
    np.testing.assert_allclose(small.eigenvalues, [2, 1, -1], atol=1e-6)
    assert small.products == 3


def test_a_restarted_run_that_may_not_go_on_says_that_it_has_not_converged() -> None:
    found = eigenpairs(MatrixOperator(with_spectrum(SPECTRUM)[0]), top=3, tol=1e-12, max_products=11)
    assert (found.products, found.converged) == (11, False)
    assert found.residuals.max() > 1e-10


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top": 0}, "top must be at least 1, got 0"),
        ({"top": 1, "tol": 0.0}, "tol must be positive"),
        ({"top": 1, "max_products": 0}, "max_products must be at least 1"),
        ({"top": 3, "basis": 7}, "basis must be at least 8, two more than the 6 pairs"),
        ({"top": 1, "ends": "middle"}, "ends must be one of both, largest, smallest, got 'middle'"),
    ],
    ids=["top", "tol", "products", "basis", "ends"],
)
def test_bad_settings_of_a_restarted_run_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        eigenpairs(MatrixOperator(torch.eye(4)), **options)  # type: ignore[arg-type]


@pytest.mark.slow
def test_top_eigenvalue_of_a_trained_model_agrees_with_scipy(shared: Path) -> None:
    loaded = load_model(str(shared / "models" / "stories260k"), dtype=torch.float64, attention="eager")
    windows = token_windows(loaded.tokenizer, str(shared / "data" / "tinyshakespeare.txt"), seq=64)
    op = HessianOperator(loaded.model, windows.batches)
    assert op.symmetry_error() < 1e-12
    result = lanczos(op, steps=30, top=1)
    assert result.residuals[0] < 1e-6 * result.eigenvalues[0]
    expected = eigsh(op.to_scipy(), k=1, which="LA", ncv=20, tol=1e-9, return_eigenvectors=False, rng=0)[0]
    assert result.eigenvalues[0] == pytest.approx(expected, rel=1e-6)
