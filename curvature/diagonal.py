"""Stochastic estimation of the diagonal, entry by entry, each with a standard error."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from curvature.deflated_trace import DEPENDENCE
from curvature.deflation import REST_PROBES, Deflation
from curvature.distributed import ALONE, Processes
from curvature.estimate import Progress
from curvature.linear_operator import LinearOperator
from curvature.probes import rademacher
from curvature.state import Part, RunState, Saved
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
    state: RunState | None = None,
    processes: Processes = ALONE,
) -> DiagonalEstimate:
    """Estimate of the diagonal, unbiased in every entry.

    - "hutchinson": d_i = E[z_i (Hz)_i] for independent signs z; the variance of an entry is the sum of the squares of
      the other entries of its row, over the number of probes.
    - "xdiag": what a few products capture of H is known exactly, and each of them in turn is the probe of the rest
      (`curvature.deflation`). It gains where few eigenvalues dominate the off-diagonal entries, and costs memory.

    It stops when the root of the summed squared standard errors falls to `tol` times the norm of the diagonal, and not
    before `min_products`. Single entries are far less certain than that: of a diagonal with a relative error of 10 %
    most entries near zero are noise, which their standard errors say.

    Cost: one product per probe ("xdiag": two), six vectors [P]; "xdiag": further `max_products` vectors [P], and half
    as many in int8.

    Args:
        op: The operator.
        method: See above.
        tol: Relative error at which to stop.
        max_products: Stop there in any case; at least 2, "xdiag" 4.
        min_products: Do not stop before.
        seed: Seed of the probes.
        progress: Called as products are made.
        state: Where the mean and the spread of the samples, two vectors [P], are saved as they come ("xdiag": each
            vector once), and continued from, to the bit; see `curvature.state`.
        processes: "hutchinson" only: who shares the probes. Every process gets the estimate, the same for any number of
            them; each sample, a vector [P], travels to all of them.

    Returns:
        The estimate; see `DiagonalEstimate`.

    Raises:
        ValueError: If a number is out of range or the method unknown.
        NotImplementedError: If "xdiag" is to share its work.

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
    if method == "xdiag" and processes.count > 1:
        raise NotImplementedError(
            "method 'xdiag' runs in one process, since each of its vectors needs all earlier ones; choose 'hutchinson' "
            "or one process"
        )
    arguments = {"seed": seed, "tol": tol, "least": min_products, "most": max_products}

    def part(name: str) -> Part | None:
        return None if state is None else state.part(name, op, arguments)

    if method == "xdiag":
        found = _xdiag(op, tol, max_products, min_products, seed, progress, part("xdiag-vectors"), part("xdiag-rest"))
        return _estimate(op, *found, tol, seed, "xdiag")

    def sample(index: int) -> Tensor:
        z = rademacher(op.space, seed=seed, index=index)
        product: Tensor = op @ z
        return z * product

    running = _Running(op.space, part("diagonal"))
    _average(running, sample, tol, max_products, min_products, progress, processes)
    return _estimate(op, running.mean, running.stderr(), running.count, tol, seed, "hutchinson")


class _Running:
    """Mean and squared deviations of vectors that come one by one (Welford 1962)."""

    def __init__(self, space: ParameterSpace, part: Part | None = None) -> None:
        self.part = part
        zero = torch.zeros(space.size, dtype=space.dtype, device=space.device)
        self._now = 0, zero, torch.zeros_like(zero)
        if part is not None and part.progress is not None:
            # Copied, because sums are rounded by how memory is aligned, and a file's content lies anywhere.
            (piece,) = part.pieces
            self._now = (
                part.progress["samples"],
                *(piece[name].to(space.device, copy=True) for name in ("mean", "deviations")),
            )

    @property
    def count(self) -> int:
        return self._now[0]

    @property
    def mean(self) -> Tensor:
        return self._now[1]

    def add(self, sample: Tensor) -> None:
        count, mean, deviations = self._now
        step = sample - mean
        mean = mean.add(step, alpha=1 / (count + 1))
        # In one step, so that an interruption leaves the three as of one sample.
        self._now = count + 1, mean, deviations.addcmul(step, sample - mean)

    def snapshot(self) -> Saved:
        count, mean, deviations = self._now
        return Saved({"samples": count}, {"mean": mean, "deviations": deviations})

    def stderr(self, dependence: float = 1.0) -> Tensor:
        count, _, deviations = self._now
        return (deviations * (dependence / (count * (count - 1)))).sqrt_()

    def error(self) -> float:
        return _relative_error(self.mean, self.stderr()) if self.count >= 2 else math.inf


def _average(
    running: _Running,
    sample: Callable[[int], Tensor],
    tol: float,
    most: int,
    least: int,
    progress: Progress | None,
    processes: Processes = ALONE,
) -> None:
    """Add samples of independent probes, by the probes' numbers, until their mean is known well enough."""
    error, part = running.error(), running.part

    def done() -> bool:
        return running.count == most or (running.count >= least and error <= tol)

    def own() -> Tensor | None:
        index = running.count + processes.rank
        if index >= most:
            return None
        found = sample(index)
        return found.cpu() if processes.count > 1 else found

    with nullcontext() if part is None or not processes.leads else part.saving():
        while not done():
            for found in processes.gather(own):
                if found is None or done():
                    continue
                running.add(found.to(running.mean.device))
                error = running.error()
                if progress is not None:
                    progress(running.count, most, f"relative error {error:.2g}")
            if part is not None and processes.leads:
                part.offer(running.snapshot)


def _xdiag(
    op: LinearOperator,
    tol: float,
    most: int,
    least: int,
    seed: int,
    progress: Progress | None,
    vectors: Part | None,
    rest: Part | None,
) -> tuple[Tensor, Tensor, int]:
    """Diagonal, standard errors, and number of products."""
    deflation = Deflation(op, seed, most // 2, vectors)
    with nullcontext() if vectors is None else vectors.saving():
        while not (deflation.exhausted or deflation.rank == op.space.size):
            # Ahead of the next vector, so that a run that is continued stops where it would have stopped.
            if deflation.begun:
                deflation.extend()
                continue
            last, status = deflation.products + 2 > most, f"{deflation.rank} vectors"
            if deflation.rank >= 2 and (last or _is_due(deflation.products, least)):
                mean, stderr = _leave_one_out(op.space, deflation.diagonals())
                error = _relative_error(mean, stderr)
                if last or error <= tol:
                    return mean, stderr, deflation.products
                status = f"relative error {error:.2g}"
            if progress is not None and deflation.rank:
                progress(deflation.products, most, status)
            deflation.extend()
    return _with_rest(op, deflation, most, seed, rest)


def _is_due(products: int, least: int) -> bool:
    """Whether to look at the error: after `least` products, and then not after every pair of them.

    The leave-one-out estimates cost as much as a product of small vectors each.
    """
    due = least
    for done in range(4, products, 2):
        if done >= due:
            due = done + max(2, done // 4)
    return products >= due


def _with_rest(
    op: LinearOperator, deflation: Deflation, most: int, seed: int, part: Part | None
) -> tuple[Tensor, Tensor, int]:
    """The diagonal of what spans the whole range, with probes of the rest, if they may be taken, that say so."""
    known, probes = deflation.captured_diagonal(), min(REST_PROBES, most - deflation.products)
    if probes < 2:
        return known, torch.zeros_like(known), deflation.products

    def sample(index: int) -> Tensor:
        z = rademacher(op.space, seed=seed, index=deflation.drawn + index)
        return known + z * deflation.rest(z)

    running = _Running(op.space, part)
    _average(running, sample, tol=1.0, most=probes, least=probes, progress=None)
    return running.mean, running.stderr(), deflation.products + probes


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
