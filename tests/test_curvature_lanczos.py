"""Lanczos: prescribed spectra, honest residuals, no ghosts, breakdowns."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from curvature_oracles import MatrixOperator, with_spectrum
from scipy.sparse.linalg import eigsh
from torch import Tensor

from curvature import HessianOperator, LanczosResult, lanczos, load_model, token_windows

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
