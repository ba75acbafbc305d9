"""Lanczos with full re-orthogonalisation: eigenvalues at both ends of the spectrum, each with its residual."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from scipy.linalg import eigh_tridiagonal
from torch import Tensor

from curvature.estimate import Progress
from curvature.krylov import Krylov
from curvature.operators import LinearOperator
from curvature.probes import rademacher
from curvature.state import Part, RunState
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
        breakdown: Whether the run ended in an invariant subspace. The Ritz values are then eigenvalues, and all the
            distinct ones to which the start vector is not orthogonal; multiplicities cannot be told from one start.
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
    offload: bool | None = None,
    progress: Progress | None = None,
    state: RunState | None = None,
) -> LanczosResult:
    """Extreme eigenvalues of a symmetric operator, at both ends, by Lanczos with full re-orthogonalisation.

    Each new vector is orthogonalised against all earlier ones, twice, so that the basis stays orthonormal to rounding
    and no eigenvalue is reported more often than it is there.

    The residual of a Ritz pair (lambda, Q s) is `sqrt((beta_m s_m)^2 + ||D s||^2)`, where D holds the projections on
    earlier vectors that re-orthogonalisation removed and a symmetric operator would not have. With an orthonormal basis
    this *is* ||H v - lambda v|| of the products as computed. It cannot know how far those products are from the true
    Hessian's: a bf16 product is off by about 1e-2, and `symmetry_error` is the check for that.

    Cost: one product per step, and steps * P numbers in the vectors' dtype for the basis, on the operator's device or
    in host memory. `curvature.eigenpairs` finds converged pairs in the memory of a basis of fixed size.

    Args:
        op: The operator.
        steps: Steps to take; not more than the dimension are taken.
        seed: Seed of the start vector (random signs; see `curvature.probes`).
        start: A flat start vector [P] in place of the random one; eigenvectors orthogonal to it are not found.
        top: Report this many pairs from each end. None: report all.
        vectors: Whether to return the eigenvectors.
        tol: Residual, relative to the largest magnitude found, below which a pair counts as converged.
        offload: Whether the basis waits in (pinned) host memory, at the cost of two transfers of it per step. None:
            where half of the GPU's free memory is too small for it.
        progress: Called after each product.
        state: Where the run is saved as it goes, and continued from, to the bit; see `curvature.state`. The start
            vector is part of what is saved, not of what is compared.

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
    given = None if start is not None else seed
    part = None if state is None else part_of(state, "lanczos", op, steps, given, vectors)
    return run(op, first, steps, given, top, vectors, tol, progress, offload, part)


def part_of(
    state: RunState, name: str, op: LinearOperator, steps: int, seed: int | None, vectors: bool = False
) -> Part:
    """The saved state of one Lanczos run."""
    return state.part(name, op, {"steps": steps, "seed": seed, "vectors": vectors})


def run(
    op: LinearOperator,
    start: Tensor,
    steps: int,
    seed: int | None,
    top: int | None = None,
    vectors: bool = False,
    tol: float = 1e-3,
    progress: Progress | None = None,
    offload: bool | None = None,
    part: Part | None = None,
) -> LanczosResult:
    """`lanczos` from a given start vector, with validated arguments."""
    steps = min(steps, op.space.size)
    krylov = Krylov(op, start, steps, offload=offload, part=part)
    with nullcontext() if part is None else part.saving():
        largest = max(krylov.matrix.diagonal(), default=-np.inf)
        while not krylov.full:
            krylov.step()
            largest = max(largest, krylov.matrix[-1, -1])
            krylov.save(vectors=vectors or not krylov.full)
            if progress is not None:
                progress(krylov.steps, steps, f"largest Rayleigh quotient {largest:.4g}")
    alphas, betas = krylov.matrix.diagonal().copy(), np.append(krylov.matrix.diagonal(-1), krylov.beta)
    values, ritz = _eigh(alphas, betas)
    removed = np.triu(krylov.matrix) - np.diag(alphas) - np.diag(betas[:-1], 1)
    residuals = np.hypot(betas[-1] * np.abs(ritz[-1]), np.linalg.norm(removed @ ritz, axis=0))

    chosen = np.arange(len(values)) if top is None else _ends(len(values), top)
    asked_for = _ends(len(values), 1 if top is None else top)
    return LanczosResult(
        eigenvalues=values[chosen],
        residuals=residuals[chosen],
        eigenvectors=krylov.basis.combine(ritz[:, chosen]) if vectors else None,
        alphas=alphas,
        betas=betas,
        asymmetry=float(np.linalg.norm(removed)),
        steps=len(alphas),
        products=len(alphas),
        seed=seed,
        converged=bool((residuals[asked_for] <= tol * np.abs(values).max()).all()),
        breakdown=krylov.breakdown,
    )


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
