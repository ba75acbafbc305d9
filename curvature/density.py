"""Spectral density by stochastic Lanczos quadrature."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from curvature.distributed import ALONE, Processes
from curvature.estimate import Progress, mean_and_stderr
from curvature.lanczos import LanczosResult, part_of, run
from curvature.operators import LinearOperator
from curvature.probes import rademacher
from curvature.state import RunState

__all__ = ["SpectralDensity", "spectral_density"]

_Floats: TypeAlias = npt.NDArray[np.float64]

_MARGIN = 5.0
"""Widths sigma that the grid reaches beyond the outermost nodes: the mass outside is below 1e-6."""


@dataclass(frozen=True, eq=False)
class SpectralDensity:
    """Density of the eigenvalues, convolved with a Gaussian; it integrates to one.

    Attributes:
        grid: Eigenvalue axis, ascending.
        values: Density on the grid: the share of eigenvalues per unit of eigenvalue.
        stderr: Standard error of each value from the spread of the probes; None for a single probe.
        sigma: Standard deviation of the Gaussian, in units of the eigenvalues.
        trace: Estimate of tr(H) from the same products (P times the mean first moment).
        trace_stderr: Its standard error; None for a single probe.
        probes: Number of start vectors.
        steps: Lanczos steps asked for, per probe.
        products: Operator products used.
        seed: Seed of the probes.
        nodes: Quadrature nodes, one array per probe.
        weights: Quadrature weights, one array per probe, each summing to one.
        runs: The Lanczos runs behind them, whose Ritz values and residuals cost nothing further; see `extremes`.
    """

    grid: _Floats = field(repr=False)
    values: _Floats = field(repr=False)
    stderr: _Floats | None = field(repr=False)
    sigma: float
    trace: float
    trace_stderr: float | None
    probes: int
    steps: int
    products: int
    seed: int
    nodes: tuple[_Floats, ...] = field(repr=False)
    weights: tuple[_Floats, ...] = field(repr=False)
    runs: tuple[LanczosResult, ...] = field(repr=False)

    @property
    def converged(self) -> bool:
        """Whether the outermost Ritz pairs of every run have converged, so that the support is settled.

        How well the curve between them is known, `stderr` says.
        """
        return all(run.converged for run in self.runs)

    def extremes(self, top: int) -> tuple[_Floats, _Floats]:
        """The `top` largest and `top` smallest Ritz values with their residuals, descending.

        They come from one run, the one whose reported residuals have the smallest sum: eigenvalues gathered from
        several runs would repeat each other.
        """
        return min((run.extremes(top) for run in self.runs), key=lambda pairs: float(pairs[1].sum()))


def spectral_density(
    op: LinearOperator,
    *,
    probes: int = 4,
    steps: int = 30,
    seed: int = 0,
    grid: int | Sequence[float] | _Floats = 512,
    sigma: float | None = None,
    progress: Progress | None = None,
    state: RunState | None = None,
    processes: Processes = ALONE,
) -> SpectralDensity:
    """Stochastic Lanczos quadrature of the spectral density.

        density(t) = E_z sum_j w_j(z) N(t; node_j(z), sigma^2)  ~  1/P sum_i N(t; lambda_i, sigma^2)

    with nodes and weights from `steps` Lanczos steps started at random signs z. The quadrature is exact for the
    moments of each start vector up to degree 2 * steps - 1; what is estimated is the mean over z.

    Cost: probes * steps products, and the basis of one Lanczos run at a time.

    Args:
        op: The operator.
        probes: Number of start vectors; at least 2 give standard errors.
        steps: Lanczos steps per probe.
        seed: Seed of the probes; the first run is that of `lanczos(op, steps=steps, seed=seed)`.
        grid: Where to evaluate: a number of points spread evenly over all nodes and 5 sigma beyond, or the points.
        sigma: Width of the Gaussian. None: 1 % of the distance between the outermost nodes.
        progress: Called after each product, in each process with the products of its own probes.
        state: Where the runs are saved as they go, and continued from, to the bit; see `curvature.state`.
        processes: Who shares the probes: probe i is done by process `i % processes.count`, and every process gets the
            whole result, which is the same for any number of them. With several processes they share the folder too.

    Returns:
        The density; see `SpectralDensity`.

    Raises:
        ValueError: If a count, sigma or the grid is out of range.

    Source: Lin, Saad and Yang, Approximating spectral densities of large matrices (2016); Ubaru, Chen and Saad, Fast
        estimation of tr(f(A)) via stochastic Lanczos quadrature (2017).
    """
    for name, value in (("probes", probes), ("steps", steps)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if sigma is not None and not (sigma > 0 and math.isfinite(sigma)):
        raise ValueError(f"sigma must be positive and finite, got {sigma}")
    if isinstance(grid, int | np.integer):
        if grid < 2:
            raise ValueError(f"grid must have at least 2 points, got {grid}")
    elif np.ndim(grid) != 1 or not np.size(grid) or not np.isfinite(grid).all():
        raise ValueError(f"grid must be a number of points or a list of finite points, got {grid!r}")
    own = range(processes.rank, probes, processes.count)

    def one(i: int) -> LanczosResult:
        start = rademacher(op.space, seed=seed, index=i)
        part = None if state is None else part_of(state, f"probe-{i}", op, steps, seed)
        told = _shifted(processes.listening(progress), own.index(i), len(own), i, probes)
        return run(op, start, steps, seed, progress=told, part=part)

    runs = tuple(processes.share([partial(one, i) for i in range(probes)]))
    nodes, weights = zip(*(r.quadrature() for r in runs), strict=True)
    low, high = min(n.min() for n in nodes), max(n.max() for n in nodes)
    if sigma is None:
        sigma = 0.01 * float((high - low) or max(abs(high), 1.0))
    points = (
        np.linspace(low - _MARGIN * sigma, high + _MARGIN * sigma, grid)
        if isinstance(grid, int | np.integer)
        else np.asarray(grid, dtype=np.float64)
    )
    curves = np.stack([_broadened(n, w, points, sigma) for n, w in zip(nodes, weights, strict=True)])
    moments = np.array([op.space.size * float(w @ n) for n, w in zip(nodes, weights, strict=True)])
    trace, trace_stderr = mean_and_stderr(moments)
    return SpectralDensity(
        grid=points,
        values=curves.mean(axis=0),
        stderr=curves.std(axis=0, ddof=1) / math.sqrt(probes) if probes > 1 else None,
        sigma=sigma,
        trace=trace,
        trace_stderr=trace_stderr if probes > 1 else None,
        probes=probes,
        steps=steps,
        products=sum(r.products for r in runs),
        seed=seed,
        nodes=nodes,
        weights=weights,
        runs=runs,
    )


def _broadened(nodes: _Floats, weights: _Floats, points: _Floats, sigma: float) -> _Floats:
    distance = (points[:, None] - nodes[None, :]) / sigma
    kernel: _Floats = np.exp(-0.5 * distance**2) / (sigma * math.sqrt(2 * math.pi))
    return kernel @ weights


def _shifted(progress: Progress | None, place: int, count: int, probe: int, probes: int) -> Progress | None:
    """The progress of one of several runs, told as the progress of all that this process does."""
    if progress is None:
        return None

    def report(done: int, steps: int, status: str) -> None:
        progress(place * steps + done, count * steps, f"probe {probe + 1}/{probes}, {status}")

    return report
