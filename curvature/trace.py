"""Stochastic estimation of the trace and of the traces of all diagonal blocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from curvature.estimate import Progress, mean_and_stderr, with_error
from curvature.operators import LinearOperator
from curvature.probes import rademacher
from curvature.vectors import inner

__all__ = ["TraceEstimate", "trace"]

_Key = TypeVar("_Key", bound=Hashable)


@dataclass(frozen=True, eq=False)
class TraceEstimate:
    """Estimated trace with its standard error, in loss units per squared parameter unit.

    Attributes:
        value: Estimate of tr(H).
        stderr: Its standard error, from the spread of the probes.
        per_block: {parameter name: (estimate of tr(H_tt), standard error)}. The blocks' errors are correlated: sums of
            blocks get theirs from `grouped`, not from adding these up.
        products: Number of operator products used.
        converged: Whether stderr <= tol * |value|.
        seed: Seed of the probes.
        samples: The probes' contributions, float64 [products, blocks], blocks in the order of `per_block`.
    """

    value: float
    stderr: float
    per_block: dict[str, tuple[float, float]]
    products: int
    converged: bool
    seed: int
    samples: npt.NDArray[np.float64] = field(repr=False)

    def grouped(self, key: Callable[[str], _Key]) -> dict[_Key, tuple[float, float]]:
        """Traces of sums of blocks, with the standard error of each sum.

        Args:
            key: Maps a parameter's name to its group (a layer, a kind).

        Returns:
            {group: (value, stderr)}, groups in order of their first parameter.
        """
        groups: dict[_Key, list[int]] = {}
        for column, name in enumerate(self.per_block):
            groups.setdefault(key(name), []).append(column)
        return {g: mean_and_stderr(self.samples[:, columns].sum(axis=1)) for g, columns in groups.items()}


def trace(
    op: LinearOperator,
    *,
    probes: int | None = None,
    tol: float = 0.05,
    max_products: int = 100,
    min_products: int = 10,
    seed: int = 0,
    progress: Progress | None = None,
) -> TraceEstimate:
    """Hutchinson's estimator of the trace, for the whole matrix and every diagonal block at once.

        tr(H) = E[z . Hz],   tr(H_tt) = E[z_t . (Hz)_t]   for independent signs z

    Unbiased. It stops when the standard error of the total falls to `tol * |value|`; the rule looks at the spread of
    all probes and never at how the running mean moves, and not before `min_products`, because the spread of a few
    probes says little. A total near zero against the size of its parts cannot reach a relative tolerance, and runs to
    `max_products`.

    Cost: one product per probe.

    Args:
        op: The operator.
        probes: Use exactly this many probes (at least 2) and no stopping rule.
        tol: Relative standard error at which to stop.
        max_products: Stop there in any case.
        min_products: Do not stop before.
        seed: Seed of the probes; see `curvature.probes`.
        progress: Called after each product.

    Returns:
        The estimate; see `TraceEstimate`.

    Raises:
        ValueError: If a count or the tolerance is out of range.

    Source: Hutchinson, A stochastic estimator of the trace of the influence matrix (1990).
    """
    if not (tol > 0 and math.isfinite(tol)):
        raise ValueError(f"tol must be positive and finite, got {tol}")
    if probes is not None:
        min_products = max_products = probes
    if not 2 <= min_products <= max_products:
        what = "probes must be at least 2" if probes is not None else "2 <= min_products <= max_products must hold"
        raise ValueError(f"{what} (one probe has no standard error), got {min_products} and {max_products}")

    samples: list[npt.NDArray[np.float64]] = []
    converged = False
    for index in range(max_products):
        samples.append(_sample(op, seed, index))
        value, stderr = mean_and_stderr(np.stack(samples).sum(axis=1))
        converged = stderr <= tol * abs(value)
        if progress is not None:
            progress(index + 1, max_products, with_error(value, stderr))
        if converged and len(samples) >= min_products:
            break
    table = np.stack(samples)
    per_block = {name: mean_and_stderr(column) for name, column in zip(op.space.names, table.T, strict=True)}
    return TraceEstimate(value, stderr, per_block, len(samples), converged, seed, table)


def _sample(op: LinearOperator, seed: int, index: int) -> npt.NDArray[np.float64]:
    """One probe's contribution to each block's trace."""
    z = rademacher(op.space, seed=seed, index=index)
    pairs = zip(op.space.split(z), op.space.split(op @ z), strict=True)
    return torch.stack([inner(a, b) for a, b in pairs]).cpu().numpy()
