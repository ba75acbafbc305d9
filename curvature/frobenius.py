"""Stochastic estimation of the Frobenius norm."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from curvature.distributed import ALONE, Processes
from curvature.estimate import Progress, mean_and_stderr
from curvature.linear_operator import LinearOperator
from curvature.probes import rademacher
from curvature.sampling import check_rule, collect
from curvature.state import RunState
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
    state: RunState | None = None,
    processes: Processes = ALONE,
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
        state: Where the samples are saved as they come, and continued from, to the bit; see `curvature.state`.
        processes: Who shares the probes. Every process gets the estimate, the same for any number of them.

    Raises:
        ValueError: If a number is out of range.
    """
    check_rule(tol, min_products, max_products)
    part = None
    if state is not None:
        arguments = {"seed": seed, "tol": tol, "least": min_products, "most": max_products}
        part = state.part("frobenius", op, arguments)
    found = collect(
        partial(_squares, op, seed),
        tol=tol,
        least=min_products,
        most=max_products,
        value_of=_root,
        progress=progress,
        part=part,
        processes=processes,
    )
    columns = zip(op.space.names, found.rows.T, strict=True)
    per_block = {name: _root(*mean_and_stderr(column)) for name, column in columns}
    return FrobeniusEstimate(found.value, found.stderr, per_block, len(found.rows), found.converged, seed)


def _squares(op: LinearOperator, seed: int, index: int) -> npt.NDArray[np.float64]:
    """|(Hz)_t|^2 of every block, by one probe."""
    pieces = op.space.split(op @ rademacher(op.space, seed=seed, index=index))
    return torch.stack([inner(piece, piece) for piece in pieces]).cpu().numpy()


def _root(square: float, stderr: float) -> tuple[float, float]:
    value = math.sqrt(square)
    return value, stderr / (2 * value) if value else 0.0
