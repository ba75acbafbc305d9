"""Condition numbers of operators, as far as extreme eigenvalues with residuals tell them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from curvature.estimate import Progress
from curvature.lanczos import part_of, run
from curvature.linear_operator import LinearOperator
from curvature.probes import normal
from curvature.state import RunState

__all__ = ["Condition", "condition_number"]

_ROUNDING = 10
"""Units of the dtype's precision, relative to the largest magnitude, below which an eigenvalue may be zero."""


@dataclass(frozen=True)
class Condition:
    """What is known of a symmetric operator's condition number.

    Attributes:
        largest: Largest Ritz value.
        smallest: Smallest Ritz value.
        largest_residual: An eigenvalue lies within this distance of `largest`.
        smallest_residual: An eigenvalue lies within this distance of `smallest`.
        value: The condition number max |lambda| / min |lambda|; None where it is not known: where the operator is
            indefinite and has more dimensions than steps were taken (the eigenvalue closest to zero then lies inside
            the spectrum), or the smallest eigenvalue is zero within its residual and
            rounding.
        lower_bound: The condition number is at least this, by the residuals. Infinite is possible.
        definite: Whether both ends have one sign, beyond their residuals.
        products: Number of operator products used.
        converged: Whether `value` is known with both residuals within `tol` of their eigenvalues.
        seed: Seed of the start vector (normal entries; see `curvature.probes`).
    """

    largest: float
    smallest: float
    largest_residual: float
    smallest_residual: float
    value: float | None
    lower_bound: float
    definite: bool
    products: int
    converged: bool
    seed: int


def condition_number(
    op: LinearOperator,
    *,
    tol: float = 0.05,
    max_products: int = 100,
    seed: int = 0,
    progress: Progress | None = None,
    state: RunState | None = None,
) -> Condition:
    """Condition number of a symmetric operator, such as a diagonal block, damped (`op.shifted`) or not.

    Lanczos finds the ends of the spectrum. For a definite operator they give the condition number; for an indefinite
    one only a run through the whole space does, and otherwise there is a lower bound. Hessian blocks of networks have
    eigenvalues at and around zero; a number that is not known is None here and not a large number.

    Cost: at most `max_products` products, and that many vectors [P].

    Args:
        op: The operator; for a block `ModelOperator.restricted` or `curvature.groups.GroupOperator`.
        tol: Residual of an extreme eigenvalue relative to its size below which it counts as known.
        max_products: Lanczos steps at most.
        seed: Seed of the start vector (normal entries; see `curvature.probes`).
        progress: Called after each product.
        state: Where the run is saved as it goes, and continued from, to the bit; see `curvature.state`.

    Raises:
        ValueError: If a number is out of range.
    """
    if not (tol > 0 and math.isfinite(tol)):
        raise ValueError(f"tol must be positive and finite, got {tol}")
    if max_products < 1:
        raise ValueError(f"max_products must be at least 1, got {max_products}")
    part = None if state is None else part_of(state, "condition", op, max_products, seed)
    start = normal(op.space, seed=seed, index=0)
    found = run(op, start, max_products, seed, progress=progress, part=part)
    values, residuals = found.eigenvalues, found.residuals
    high, low = float(values[0]), float(values[-1])
    high_residual, low_residual = float(residuals[0]), float(residuals[-1])
    rounding = _ROUNDING * torch.finfo(op.dtype).eps * float(abs(values).max())
    definite = low - low_residual > rounding or high + high_residual < -rounding
    magnitudes = sorted(zip(abs(values).tolist(), residuals.tolist(), strict=True))
    nearest, nearest_residual = magnitudes[0]
    furthest, furthest_residual = magnitudes[-1]
    # An eigenvalue lies within each residual: one at most nearest + residual, one at least furthest - residual.
    lower = max(1.0, max(furthest - furthest_residual, 0.0) / (nearest + nearest_residual + rounding or math.nan))
    lower = math.inf if math.isnan(lower) else lower
    known = (definite or found.breakdown) and nearest > nearest_residual + rounding
    settled = known and nearest_residual <= tol * nearest and furthest_residual <= tol * furthest
    return Condition(
        largest=high,
        smallest=low,
        largest_residual=high_residual,
        smallest_residual=low_residual,
        value=furthest / nearest if known else None,
        lower_bound=lower,
        definite=definite,
        products=found.products,
        converged=settled,
        seed=seed,
    )
