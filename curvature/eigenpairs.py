"""Extreme eigenpairs to a given accuracy in the memory of a basis of fixed size: thick-restart Lanczos."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt
from torch import Tensor

from curvature.estimate import Progress
from curvature.krylov import Krylov
from curvature.operators import LinearOperator
from curvature.probes import normal
from curvature.state import RunState

__all__ = ["Eigenpairs", "Ends", "eigenpairs"]

_Floats: TypeAlias = npt.NDArray[np.float64]

Ends: TypeAlias = Literal["both", "largest", "smallest"]


@dataclass(frozen=True, eq=False)
class Eigenpairs:
    """Extreme Ritz pairs.

    Attributes:
        eigenvalues: Descending: the `top` largest, then the `top` smallest, or one of the two.
        residuals: ||H v - lambda v|| for each, v of unit norm. An eigenvalue of H lies within this distance.
        eigenvectors: [P, number of eigenvalues] in the operator's dtype and device, or None if not asked for.
        products: Operator products used.
        restarts: How often the basis was condensed.
        converged: Whether every residual is at most `tol` times the largest magnitude.
        breakdown: Whether an invariant subspace was reached: the values are then exact, and all distinct ones are
            known, so that there may be fewer than asked for.
        seed: Seed of the start vector.
    """

    eigenvalues: _Floats
    residuals: _Floats
    eigenvectors: Tensor | None = field(repr=False)
    products: int
    restarts: int
    converged: bool
    breakdown: bool
    seed: int


def eigenpairs(
    op: LinearOperator,
    *,
    top: int,
    ends: Ends = "both",
    tol: float = 1e-3,
    max_products: int = 300,
    basis: int | None = None,
    seed: int = 0,
    vectors: bool = False,
    offload: bool | None = None,
    progress: Progress | None = None,
    state: RunState | None = None,
) -> Eigenpairs:
    """The largest and the smallest eigenvalues, each to a residual of `tol` times the largest magnitude.

    Lanczos with full re-orthogonalisation (each vector twice against all others: no eigenvalue is reported more often
    than it is there). When the basis is full it is condensed to the Ritz vectors closest to both ends, and the process
    goes on from there. It stops when the residual of every pair asked for is small enough, which an eigenvalue of H
    near each of them follows from; that none further out was missed is as good as certain from a random start vector,
    but no residual can prove it. Of a multiple eigenvalue one copy is found.

    The residuals are those of the products as computed; below the error of the products themselves (about 1e-2 of the
    largest magnitude in bfloat16) they cannot fall, and `tol` is then not reached.

    Cost: one product per step; memory for `basis` + 1 vectors [P] on the device or in host memory.

    Args:
        op: The operator.
        top: Pairs from each end.
        ends: Which ends.
        tol: Residual at which to stop, relative to the largest magnitude found.
        max_products: Stop there in any case.
        basis: Vectors kept at most; at least two more than the pairs asked for. None: twice the pairs and 8 more, at
            least 20.
        seed: Seed of the start vector (normal entries; see `curvature.probes`).
        vectors: Whether to return the eigenvectors.
        offload: Whether the basis waits in host memory; see `curvature.lanczos`.
        progress: Called after each product.
        state: Where the run is saved as it goes, and continued from, to the bit; see `curvature.state`.

    Returns:
        The pairs; see `Eigenpairs`.

    Raises:
        ValueError: If a number is out of range, or `ends` is unknown.

    Source: Wu and Simon, Thick-restart Lanczos method for large symmetric eigenvalue problems (2000).
    """
    for name, value in (("top", top), ("max_products", max_products)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if not (tol > 0 and math.isfinite(tol)):
        raise ValueError(f"tol must be positive and finite, got {tol}")
    if ends not in get_args(Ends):
        raise ValueError(f"ends must be one of {', '.join(get_args(Ends))}, got {ends!r}")
    wanted = 2 * top if ends == "both" else top
    capacity = max(20, 2 * wanted + 8) if basis is None else basis
    if capacity < wanted + 2:
        raise ValueError(
            f"basis must be at least {wanted + 2}, two more than the {wanted} pairs asked for, got {basis}"
        )
    capacity = min(capacity, op.space.size)
    part = None
    if state is not None:
        arguments = {"top": top, "ends": ends, "tol": tol, "max_products": max_products, "basis": capacity}
        part = state.part("eigenpairs", op, {**arguments, "seed": seed, "vectors": vectors})
    start = normal(op.space, seed=seed, index=0)
    krylov = Krylov(op, start, capacity, last=True, offload=offload, part=part)
    with nullcontext() if part is None else part.saving():
        found = _iterate(krylov, top, ends, tol, min(max_products, 2**62), progress)
    values, coefficients, residuals, converged = found
    return Eigenpairs(
        eigenvalues=values,
        residuals=residuals,
        eigenvectors=krylov.basis_of(coefficients) if vectors else None,
        products=krylov.products,
        restarts=krylov.restarts,
        converged=converged,
        breakdown=krylov.breakdown,
        seed=seed,
    )


def _iterate(
    krylov: Krylov, top: int, ends: Ends, tol: float, most: int, progress: Progress | None
) -> tuple[_Floats, _Floats, _Floats, bool]:
    """Steps and restarts until the pairs have converged: their values, coefficients and residuals."""
    while True:
        if krylov.steps:
            values, vectors, residuals = krylov.ritz()
            asked_for = _outermost(len(values), top, ends)
            reached = residuals[asked_for] <= tol * np.abs(values).max()
            converged = bool(reached.all()) and (len(reached) == _wanted(top, ends) or krylov.breakdown)
            if progress is not None and krylov.products:
                progress(krylov.products, most, f"{int(reached.sum())} of {_wanted(top, ends)} pairs converged")
            if converged or krylov.breakdown or krylov.products >= most:
                return values[asked_for], vectors[:, asked_for], residuals[asked_for], converged
            if krylov.full:
                krylov.restart(vectors[:, _kept(len(values), top, ends)])
        krylov.step()
        krylov.save()


def _wanted(top: int, ends: Ends) -> int:
    return 2 * top if ends == "both" else top


def _outermost(count: int, top: int, ends: Ends) -> npt.NDArray[np.intp]:
    """Indices of the pairs asked for among `count` in descending order."""
    largest, smallest = np.arange(min(top, count)), np.arange(max(count - top, 0), count)
    if ends == "both":
        return np.union1d(largest, smallest)
    return largest if ends == "largest" else smallest


def _kept(count: int, top: int, ends: Ends) -> npt.NDArray[np.intp]:
    """Indices of the pairs that a restart keeps: those asked for, and two fifths of the others beside them."""
    further = 2 * (count - _wanted(top, ends)) // 5
    return _outermost(count, top + (further // 2 if ends == "both" else further), ends)
