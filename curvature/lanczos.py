"""Lanczos with full re-orthogonalisation: eigenvalues at both ends of the spectrum, each with its residual."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from scipy.linalg import eigh_tridiagonal
from torch import Tensor

from curvature.estimate import Progress
from curvature.operators import LinearOperator
from curvature.probes import rademacher
from curvature.vectors import norm

__all__ = ["LanczosResult", "lanczos"]

_Floats: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class LanczosResult:
    """Ritz pairs of one Lanczos run.

    Attributes:
        eigenvalues: Ritz values, descending: all of them, or the `top` largest and the `top` smallest.
        residuals: ||H v - lambda v|| for each, v of unit norm. An eigenvalue of H lies within this distance.
        eigenvectors: [P, number of eigenvalues] in the operator's dtype and device, or None if not asked for.
        alphas: Diagonal of the tridiagonal matrix, one per step.
        betas: Its off-diagonal, and as the last entry the norm that couples the run to the step after the last.
        asymmetry: Frobenius norm of what re-orthogonalisation removed beyond the three-term recurrence. Zero up to
            rounding for a symmetric operator; it is part of the residuals.
        steps: Steps taken: the steps asked for, or fewer after a breakdown or at the dimension of the space.
        products: Operator products used (one per step).
        seed: Seed of the start vector, or None where it was given.
        converged: Whether the pairs asked for (with `top` None: the largest and the smallest) have residuals of at most
            `tol` times the largest magnitude.
        breakdown: Whether the run ended in an invariant subspace. The Ritz values are then eigenvalues, and from a
            random start they are all the distinct ones; multiplicities cannot be told from one start vector.
    """

    eigenvalues: _Floats
    residuals: _Floats
    eigenvectors: Tensor | None = field(repr=False)
    alphas: _Floats = field(repr=False)
    betas: _Floats = field(repr=False)
    asymmetry: float
    steps: int
    products: int
    seed: int | None
    converged: bool
    breakdown: bool

    def extremes(self, top: int) -> tuple[_Floats, _Floats]:
        """The `top` largest and `top` smallest Ritz values, descending, with their residuals."""
        chosen = _ends(len(self.eigenvalues), top)
        return self.eigenvalues[chosen], self.residuals[chosen]

    def quadrature(self) -> tuple[_Floats, _Floats]:
        """Gauss quadrature of the spectral measure of the start vector.

        Returns:
            Nodes (all Ritz values, descending) and weights (squared first entries of the tridiagonal matrix's
            eigenvectors), which sum to one; `sum(weights * f(nodes))` is exactly `v.f(H)v` for the unit start vector v
            and polynomials f of degree below twice the number of steps.
        """
        nodes, vectors = _eigh(self.alphas, self.betas)
        return nodes, vectors[0] ** 2


def lanczos(
    op: LinearOperator,
    *,
    steps: int,
    seed: int = 0,
    start: Tensor | None = None,
    top: int | None = None,
    vectors: bool = False,
    tol: float = 1e-3,
    progress: Progress | None = None,
) -> LanczosResult:
    """Extreme eigenvalues of a symmetric operator, at both ends, by Lanczos with full re-orthogonalisation.

    Each new vector is orthogonalised against all earlier ones, twice, so that the basis stays orthonormal to rounding
    and no eigenvalue is reported more often than it is there.

    The residual of a Ritz pair (lambda, Q s) is `sqrt((beta_m s_m)^2 + ||D s||^2)`, where D holds the projections on
    earlier vectors that re-orthogonalisation removed and a symmetric operator would not have. With an orthonormal basis
    this *is* ||H v - lambda v|| of the products as computed. It cannot know how far those products are from the true
    Hessian's: a bf16 product is off by about 1e-2, and `symmetry_error` is the check for that.

    Cost: one product per step, and steps * P numbers in the vectors' dtype on the operator's device for the basis.

    Args:
        op: The operator.
        steps: Steps to take; not more than the dimension are taken.
        seed: Seed of the start vector (random signs; see `curvature.probes`).
        start: A flat start vector [P] in place of the random one; eigenvectors orthogonal to it are not found.
        top: Report this many pairs from each end. None: report all.
        vectors: Whether to return the eigenvectors.
        tol: Residual, relative to the largest magnitude found, below which a pair counts as converged.
        progress: Called after each product.

    Returns:
        The Ritz pairs; see `LanczosResult`.

    Raises:
        ValueError: If steps or top is not positive, or the start vector is zero, not finite, or of the wrong shape.

    Source: Lanczos (1950); Parlett, The Symmetric Eigenvalue Problem, chapter 13.
    """
    for name, value in (("steps", steps), ("top", top)):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    first = rademacher(op.space, seed=seed, index=0) if start is None else _checked_start(start, op)
    return run(op, first, steps, None if start is not None else seed, top, vectors, tol, progress)


def run(
    op: LinearOperator,
    start: Tensor,
    steps: int,
    seed: int | None,
    top: int | None = None,
    vectors: bool = False,
    tol: float = 1e-3,
    progress: Progress | None = None,
) -> LanczosResult:
    """`lanczos` from a given start vector, with validated arguments."""
    basis, projected, betas, breakdown = _tridiagonalise(op, start, min(steps, op.space.size), progress)
    alphas = projected.diagonal().copy()
    values, ritz = _eigh(alphas, betas)
    removed = projected - np.diag(alphas) - np.diag(betas[:-1], 1)
    residuals = np.hypot(betas[-1] * np.abs(ritz[-1]), np.linalg.norm(np.triu(removed) @ ritz, axis=0))

    chosen = np.arange(len(values)) if top is None else _ends(len(values), top)
    asked_for = _ends(len(values), 1 if top is None else top)
    eigenvectors = None
    if vectors:
        weights = torch.as_tensor(np.ascontiguousarray(ritz[:, chosen]), dtype=op.dtype, device=op.device)
        eigenvectors = basis.T @ weights
    return LanczosResult(
        eigenvalues=values[chosen],
        residuals=residuals[chosen],
        eigenvectors=eigenvectors,
        alphas=alphas,
        betas=betas,
        asymmetry=float(np.linalg.norm(np.triu(removed))),
        steps=len(alphas),
        products=len(alphas),
        seed=seed,
        converged=bool((residuals[asked_for] <= tol * np.abs(values).max()).all()),
        breakdown=breakdown,
    )


def _tridiagonalise(
    op: LinearOperator, start: Tensor, steps: int, progress: Progress | None
) -> tuple[Tensor, _Floats, _Floats, bool]:
    """Orthonormal basis Q [m, P], the upper triangle of Q H Q^T [m, m], betas [m], and whether a breakdown ended it."""
    basis = torch.empty(steps, len(start), dtype=op.dtype, device=op.device)
    projected, betas = np.zeros((steps, steps)), np.zeros(steps)
    vector, eps = start / norm(start), torch.finfo(op.dtype).eps
    for step in range(steps):
        basis[step] = vector
        vector = op @ vector
        length = norm(vector)
        for _ in range(2):
            overlap = basis[: step + 1] @ vector
            vector -= basis[: step + 1].T @ overlap
            projected[: step + 1, step] += overlap.double().cpu().numpy()
        betas[step] = norm(vector)
        if progress is not None:
            progress(step + 1, steps, f"largest Rayleigh quotient {projected.diagonal()[: step + 1].max():.4g}")
        # What is left of the product after projection is rounding noise: of the product itself, or of the largest part
        # of the operator. To go on from there would be to start anew in a random direction.
        if betas[step] <= eps * max(10 * length, float(np.abs(projected).max())):
            m = step + 1
            return basis[:m], projected[:m, :m], betas[:m], True
        vector /= betas[step]
    return basis, projected, betas, steps == op.space.size


def _eigh(alphas: _Floats, betas: _Floats) -> tuple[_Floats, _Floats]:
    """Eigenvalues, descending, and eigenvectors (columns) of the tridiagonal matrix."""
    values, vectors = eigh_tridiagonal(alphas, betas[:-1])
    return np.asarray(values[::-1], dtype=np.float64), np.asarray(vectors[:, ::-1], dtype=np.float64)


def _ends(count: int, top: int) -> npt.NDArray[np.intp]:
    """Indices of the first and last `top` of a descending array; all of them where the two would overlap."""
    if 2 * top >= count:
        return np.arange(count)
    return np.concatenate([np.arange(top), np.arange(count - top, count)])


def _checked_start(start: Tensor, op: LinearOperator) -> Tensor:
    rows, _ = op.space.rows(start)
    if start.ndim != 1:
        raise ValueError(f"start must be a flat vector [{op.space.size}], got shape {list(start.shape)}")
    if not (length := norm(rows[0])) or not np.isfinite(length):
        raise ValueError(f"start must be finite and not zero, its norm is {length}")
    return rows[0]
