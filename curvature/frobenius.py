"""Stochastic estimation of the Frobenius norm."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from curvature.estimate import Progress, mean_and_stderr, with_error
from curvature.linear_operator import LinearOperator
from curvature.probes import rademacher
from curvature.vectors import inner

__all__ = ["FrobeniusEstimate", "frobenius_norm"]


@dataclass(frozen=True)
class FrobeniusEstimate:
    """Estimated Frobenius norm.

    Attributes:
        value: Estimate of ||H||_F = sqrt(sum_ij H_ij^2), the root of the sum of the squared eigenvalues.
        stderr: Its standard error, to first order.
        per_block: {parameter name: (estimate of the norm of the block's rows, over all columns, standard error)}.
        products: Number of operator products used.
        converged: Whether stderr <= tol * value.
        seed: Seed of the probes.
    """

    value: float
    stderr: float
    per_block: dict[str, tuple[float, float]]
    products: int
    converged: bool
    seed: int


def frobenius_norm(
    op: LinearOperator,
    *,
    tol: float = 0.05,
    max_products: int = 100,
    min_products: int = 10,
    seed: int = 0,
    progress: Progress | None = None,
) -> FrobeniusEstimate:
    """Frobenius norm of a symmetric operator, and of the rows of each block.

        ||H||_F^2 = E |Hz|^2,   ||H_t||_F^2 = E |(Hz)_t|^2   for independent signs z

    The squares are unbiased; their roots are biased downwards by the order of stderr^2 / value. Cost: one product per
    probe.

    Args:
        op: The operator.
        tol: Relative standard error at which to stop.
        max_products: Stop there in any case.
        min_products: Do not stop before.
        seed: Seed of the probes.
        progress: Called after each product.

    Raises:
        ValueError: If a number is out of range.
    """
    if not (tol > 0 and math.isfinite(tol)):
        raise ValueError(f"tol must be positive and finite, got {tol}")
    if not 2 <= min_products <= max_products:
        raise ValueError(
            "2 <= min_products <= max_products must hold (one probe has no standard error), got "
            f"{min_products} and {max_products}"
        )
    samples = np.zeros((0, len(op.space.blocks)))
    value = stderr = math.nan
    for index in range(max_products):
        product = op.space.split(op @ rademacher(op.space, seed=seed, index=index))
        squares = torch.stack([inner(piece, piece) for piece in product]).cpu().numpy()
        samples = np.concatenate([samples, squares[None]])
        value, stderr = _root(*mean_and_stderr(samples.sum(axis=1)))
        if progress is not None:
            progress(index + 1, max_products, with_error(value, stderr))
        if index + 1 >= min_products and stderr <= tol * value:
            break
    per_block = {name: _root(*mean_and_stderr(column)) for name, column in zip(op.space.names, samples.T, strict=True)}
    return FrobeniusEstimate(value, stderr, per_block, len(samples), stderr <= tol * value, seed)


def _root(square: float, stderr: float) -> tuple[float, float]:
    value = math.sqrt(square)
    return value, stderr / (2 * value) if value else 0.0
