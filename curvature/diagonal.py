"""Stochastic estimation of the diagonal, entry by entry, each with a standard error."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from curvature.deflated_trace import DEPENDENCE
from curvature.deflation import Deflation
from curvature.estimate import Progress
from curvature.linear_operator import LinearOperator
from curvature.probes import rademacher
from curvature.vectors import ParameterSpace, inner

__all__ = ["DiagonalEstimate", "DiagonalMethod", "diagonal"]

DiagonalMethod: TypeAlias = Literal["hutchinson", "xdiag"]


@dataclass(frozen=True, eq=False)
class DiagonalEstimate:
    """Estimated diagonal with the standard error of each entry, in loss units per squared parameter unit.

    Attributes:
        values: Estimate of diag(H), a flat vector [P].
        stderr: The standard error of each entry [P].
        relative_error: Root of the summed squared standard errors over the norm of the diagonal, the latter corrected
            for the share that the errors themselves have in it; infinite where nothing else is left.
        per_block: {parameter name: (norm of the block's values, root of its summed squared standard errors)}.
        products: Number of operator products used.
        converged: Whether relative_error <= tol.
        seed: Seed of the probes.
        method: "hutchinson" or "xdiag".
    """

    values: Tensor = field(repr=False)
    stderr: Tensor = field(repr=False)
    relative_error: float
    per_block: dict[str, tuple[float, float]] = field(repr=False)
    products: int
    converged: bool
    seed: int
    method: DiagonalMethod


def diagonal(
    op: LinearOperator,
    *,
    method: DiagonalMethod = "hutchinson",
    tol: float = 0.1,
    max_products: int = 100,
    min_products: int = 10,
    seed: int = 0,
    progress: Progress | None = None,
) -> DiagonalEstimate:
    """Estimate of the diagonal, unbiased in every entry.

    - "hutchinson": d_i = E[z_i (Hz)_i] for independent signs z; the variance of an entry is the sum of the squares of
      the other entries of its row, over the number of probes.
    - "xdiag": what a few products capture of H is known exactly, and each of them in turn is the probe of the rest
      (`curvature.deflation`). It gains where few eigenvalues dominate the off-diagonal entries, and costs memory.

    It stops when the root of the summed squared standard errors falls to `tol` times the norm of the diagonal, and not
    before `min_products`. Single entries are far less certain than that: of a diagonal with a relative error of 10 %
    most entries near zero are noise, which their standard errors say.

    Cost: one product per probe ("xdiag": two), four vectors [P]; "xdiag": further `max_products` vectors [P], and half
    as many in int8.

    Args:
        op: The operator.
        method: See above.
        tol: Relative error at which to stop.
        max_products: Stop there in any case; at least 2, "xdiag" 4.
        min_products: Do not stop before.
        seed: Seed of the probes.
        progress: Called as products are made.

    Returns:
        The estimate; see `DiagonalEstimate`.

    Raises:
        ValueError: If a number is out of range or the method unknown.

    Source: Bekas, Kokiopoulou and Saad, An estimator for the diagonal of a matrix (2007); Epperly, Tropp and Webber,
        XTrace (2024), section on XDiag.
    """
    if method not in get_args(DiagonalMethod):
        raise ValueError(f"method must be one of {', '.join(get_args(DiagonalMethod))}, got {method!r}")
    if not (tol > 0 and math.isfinite(tol)):
        raise ValueError(f"tol must be positive and finite, got {tol}")
    least = 2 if method == "hutchinson" else 4
    if not least <= min_products <= max_products:
        raise ValueError(
            f"{least} <= min_products <= max_products must hold for {method!r} (one probe has no standard error), got "
            f"{min_products} and {max_products}"
        )
    if method == "hutchinson":
        return _hutchinson(op, tol, max_products, min_products, seed, progress)
    return _xdiag(op, tol, max_products, min_products, seed, progress)


class _Running:
    """Mean and squared deviations of vectors that come one by one (Welford 1962)."""

    def __init__(self, space: ParameterSpace) -> None:
        self.count = 0
        self.mean = torch.zeros(space.size, dtype=space.dtype, device=space.device)
        self._deviations = torch.zeros_like(self.mean)

    def add(self, sample: Tensor) -> None:
        self.count += 1
        step = sample - self.mean
        self.mean.add_(step, alpha=1 / self.count)
        self._deviations.addcmul_(step, sample - self.mean)

    def stderr(self, dependence: float = 1.0) -> Tensor:
        return (self._deviations * (dependence / (self.count * (self.count - 1)))).sqrt_()


def _hutchinson(
    op: LinearOperator, tol: float, most: int, least: int, seed: int, progress: Progress | None
) -> DiagonalEstimate:
    running, error = _Running(op.space), math.inf
    while running.count < most:
        z = rademacher(op.space, seed=seed, index=running.count)
        running.add(z * (op @ z))
        if running.count >= 2:
            error = _relative_error(running.mean, running.stderr())
        if progress is not None:
            progress(running.count, most, f"relative error {error:.2g}")
        if running.count >= least and error <= tol:
            break
    return _estimate(op, running.mean, running.stderr(), running.count, tol, seed, "hutchinson")


def _xdiag(
    op: LinearOperator, tol: float, most: int, least: int, seed: int, progress: Progress | None
) -> DiagonalEstimate:
    deflation, due = Deflation(op, seed, most // 2), least
    mean = stderr = torch.zeros(op.space.size, dtype=op.dtype, device=op.device)
    while deflation.products + 2 <= most:
        deflation.extend()
        if (deflation.exhausted or deflation.rank == op.space.size) and deflation.products + 2 <= most:
            known, running = deflation.captured_diagonal(), _Running(op.space)
            for index in range(2):
                z = rademacher(op.space, seed=seed, index=deflation.drawn + index)
                running.add(known + z * deflation.rest(z))
            return _estimate(op, running.mean, running.stderr(), deflation.products, tol, seed, "xdiag")
        status = f"{deflation.rank} vectors"
        if deflation.rank >= 2 and (deflation.products >= due or deflation.products + 2 > most):
            mean, stderr = _leave_one_out(op.space, deflation.diagonals())
            error = _relative_error(mean, stderr)
            # The estimates cost as much as a product of small vectors each: not after every product.
            due = deflation.products + max(2, deflation.products // 4)
            status = f"relative error {error:.2g}"
            if error <= tol:
                break
        if progress is not None:
            progress(deflation.products, most, status)
    return _estimate(op, mean, stderr, deflation.products, tol, seed, "xdiag")


def _leave_one_out(space: ParameterSpace, samples: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    running = _Running(space)
    for sample in samples:
        running.add(sample)
    return running.mean, running.stderr(DEPENDENCE)


def _relative_error(mean: Tensor, stderr: Tensor) -> float:
    errors = float(inner(stderr, stderr))
    left = float(inner(mean, mean)) - errors
    if errors == 0:
        return 0.0
    return math.sqrt(errors / left) if left > 0 else math.inf


def _estimate(
    op: LinearOperator, values: Tensor, stderr: Tensor, products: int, tol: float, seed: int, method: DiagonalMethod
) -> DiagonalEstimate:
    error = _relative_error(values, stderr)
    pairs = zip(op.space.split(values), op.space.split(stderr), strict=True)
    norms = [(math.sqrt(float(inner(a, a))), math.sqrt(float(inner(b, b)))) for a, b in pairs]
    per_block = dict(zip(op.space.names, norms, strict=True))
    return DiagonalEstimate(values, stderr, error, per_block, products, error <= tol, seed, method)
