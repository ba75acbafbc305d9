"""Spectra of diagonal blocks, of layers or of any other groups of parameters, and how far apart they are."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from curvature.density import SpectralDensity, spectral_density
from curvature.distributed import ALONE, Processes
from curvature.estimate import Progress
from curvature.groups import Group, block_operator, check_disjoint, layer_groups
from curvature.linear_operator import LinearOperator
from curvature.model_operator import ModelOperator
from curvature.state import RunState

__all__ = ["Scaling", "SpectraDistances", "layer_spectra", "spectra_distances"]

_Floats: TypeAlias = npt.NDArray[np.float64]

Scaling: TypeAlias = Literal["none", "largest", "spread"]

_PER_SIGMA = 4
"""Points of the grid in one width of the Gaussian."""

_DEALINGS = 999
"""Random dealings of the probes that a mean distance is held against."""


def layer_spectra(
    op: LinearOperator,
    groups: Sequence[Group] | None = None,
    *,
    probes: int = 2,
    steps: int = 20,
    seed: int = 0,
    progress: Progress | None = None,
    state: RunState | None = None,
    processes: Processes = ALONE,
) -> dict[str, SpectralDensity]:
    """Spectral density and extreme eigenvalues of the diagonal block of each layer, or of each of other groups.

    Cost: `probes * steps` products per group. Those of whole parameters are products of the restricted operator
    (`ModelOperator.restricted`), which differentiates nothing ahead of them; those of parts of parameters cost a
    product of the whole operator.

    Args:
        op: The operator.
        groups: Disjoint groups of its entries. None: one per transformer block, and one per kind of the parameters
            outside the blocks (`curvature.groups.layer_groups`).
        probes: Start vectors per group; from two on the density has a standard error.
        steps: Lanczos steps per probe; not more than a group's entries are taken.
        seed: Seed of the probes.
        progress: Called after each product, with the products of all groups.
        state: Where the runs are saved as they go, and continued from; see `curvature.state`.
        processes: Who shares each group's probes.

    Returns:
        {group name: density}, each on a grid of its own; `SpectralDensity.extremes` gives the eigenvalues.

    Raises:
        ValueError: If a number is out of range, or the groups overlap or are empty.
    """
    groups = layer_groups(op.space) if groups is None else list(groups)
    check_disjoint(op.space, groups)
    found = {}
    for number, group in enumerate(groups):
        block = block_operator(op, group)
        found[group.name] = spectral_density(
            block,
            probes=probes,
            steps=steps,
            seed=seed,
            progress=_of_all(progress, number, len(groups), group.name),
            state=None if state is None else state.named(f"{number:03d}-{re.sub(r'[^A-Za-z0-9]+', '-', group.name)}"),
            processes=processes,
        )
        if isinstance(block, ModelOperator):
            block.release()
    return found


def _of_all(progress: Progress | None, number: int, count: int, name: str) -> Progress | None:
    if progress is None:
        return None

    def report(done: int, total: int, status: str) -> None:
        progress(number * total + done, count * total, f"{name}, {status}")

    return report


@dataclass(frozen=True, eq=False)
class SpectraDistances:
    """Squared Jensen-Shannon distances between spectra, without what the noise of the probes adds to them.

    Attributes:
        names: The spectra, in the order of rows and columns.
        values: Squared distances in bits [n, n], symmetric, zero on the diagonal. Between 0 (equal) and 1 (disjoint) on
            average over probes; noise makes some of those of equal spectra negative.
        stderr: Standard error of each, by the jackknife over probes; None for two probes.
        mean: Mean over all pairs of different spectra.
        mean_stderr: Its standard error, by the jackknife over probes. For two probes by that over spectra, which counts
            the differences between pairs in, too; None for two probes of two spectra.
        p_value: How often a mean at least as large comes of spectra that are all alike: its rank among those of 999
            random dealings of the probes to the spectra. Probes of one number are dealt among each other, so that it
            holds, too, where they are one vector. It is valid for any number of probes, where the standard error of a
            few is rough; of two spectra with few probes there are not many dealings, and it cannot be small.
        floor: Mean squared distance between two probes of one spectrum: the noise of single probes, which is taken off.
        scaling: How the spectra were scaled before they were compared.
        sigma: Width of the Gaussian that smooths each, on the scaled axis.
    """

    names: tuple[str, ...]
    values: _Floats
    stderr: _Floats | None
    mean: float
    mean_stderr: float | None
    p_value: float
    floor: float
    scaling: Scaling
    sigma: float


def spectra_distances(
    spectra: Mapping[str, SpectralDensity], *, scaling: Scaling = "largest", sigma: float = 0.02
) -> SpectraDistances:
    """Squared Jensen-Shannon distances between the spectra of blocks, as a measure of how heterogeneous these are.

        JS^2(p, q) = (KL(p | m) + KL(q | m)) / 2,   m = (p + q) / 2,   KL in bits

    Here p and q are quadratures of single probes, on an axis that all share: divided by a scale, and smoothed by one
    Gaussian. What two spectra i and j differ by is how much further apart their probes are than those of one spectrum:

        d(i, j) = mean_ab JS^2(p_ia, p_jb) - mean_ab JS^2(p_ia, p_ib) / 2 - mean_ab JS^2(p_ja, p_jb) / 2,   a != b

    Its mean over probes is zero for equal spectra, however few and noisy the probes, and never negative, since JS is a
    distance in a Hilbert space. (The distance between averages of a few probes is as large as the noise that is left in
    them.) Where probes agree, d is JS^2 of the spectra; where they do not, it tends to be less than JS^2 of their
    averages. It compares what the quadratures' steps see, which with few of them is little of the bulk.

    Estimated from the Lanczos quadratures; no product is needed.

    Args:
        spectra: {name: density}, each of the same number of probes, at least 2, and of the same steps.
        scaling: The scale: each probe's largest magnitude ("largest": shapes are compared), its root mean square
            ("spread"), or one for all, the largest magnitude of all ("none": sizes count, too).
        sigma: Width of the Gaussian on the scaled axis. It is a choice; distances fall as it grows.

    Raises:
        ValueError: If there are fewer than two spectra, they have unequal numbers of probes or steps or fewer than two
            probes, all eigenvalues of one are zero, or an option is out of range.

    Source: Lin, Divergence measures based on the Shannon entropy (1991); JS as a distance in a Hilbert space: Fuglede
        and Topsoe, Jensen-Shannon divergence and Hilbert space embedding (2004); d: Szekely and Rizzo, Energy
        statistics (2013); of block spectra: Zhang, Chen, Ding, Li, Sun and Luo, Why transformers need Adam: a Hessian
        perspective (2024), arXiv 2402.16788, figure 3, where spectra are divided by their tenth largest eigenvalue,
        which quadratures of a few steps do not know.
    """
    if scaling not in get_args(Scaling):
        raise ValueError(f"scaling must be one of {', '.join(get_args(Scaling))}, got {scaling!r}")
    if not 0 < sigma < 1:
        raise ValueError(f"sigma must be between 0 and 1, got {sigma}")
    counts, steps = {density.probes for density in spectra.values()}, {density.steps for density in spectra.values()}
    if len(spectra) < 2 or len(counts) > 1 or min(counts) < 2:
        raise ValueError(
            f"spectra: at least two, of one number of probes that is at least 2; got {len(spectra)} of {sorted(counts)}"
        )
    if len(steps) > 1:
        raise ValueError(f"spectra: of one number of steps, on which their width depends; got {sorted(steps)}")
    names, probes = tuple(spectra), counts.pop()
    scaled = _scaled(spectra, scaling)
    # Points of one lattice, those near a node: further out the masses are below 1e-8.
    step = sigma / _PER_SIGMA
    places = np.round(np.concatenate([nodes for each in scaled for nodes, _ in each]) / step).astype(np.int64)
    grid = step * np.unique(places[:, None] + np.arange(-6 * _PER_SIGMA, 6 * _PER_SIGMA + 1))
    between = _pairwise(np.stack([_mass(*probe, grid, sigma) for each in scaled for probe in each]))
    between = between.reshape(len(names), probes, len(names), probes)
    values, floor = _excess(between)
    pairs = np.triu_indices(len(names), 1)
    stderr, mean_stderr = None, None
    if probes > 2:
        rest = [np.delete(np.arange(probes), probe) for probe in range(probes)]
        left_out = np.stack([_excess(between[:, some][..., some])[0] for some in rest])
        stderr = _jackknife(left_out)
        mean_stderr = float(_jackknife(left_out[:, pairs[0], pairs[1]].mean(axis=1)))
    elif len(names) > 2:
        mean_stderr = float(_jackknife((values.sum() - 2 * values.sum(axis=0)) / ((len(names) - 1) * (len(names) - 2))))
    return SpectraDistances(
        names=names,
        values=values,
        stderr=stderr,
        mean=float(values[pairs].mean()),
        mean_stderr=mean_stderr,
        p_value=_p_value(between),
        floor=floor,
        scaling=scaling,
        sigma=sigma,
    )


def _scaled(spectra: Mapping[str, SpectralDensity], scaling: Scaling) -> list[list[tuple[_Floats, _Floats]]]:
    """Nodes, divided by their scale, and weights of each probe of each spectrum.

    Each probe has a scale of its own: one for all of a spectrum would bring them closer together than those of two
    equal spectra are.
    """
    largest = {name: max(float(np.abs(n).max()) for n in density.nodes) for name, density in spectra.items()}
    if zero := [name for name, value in largest.items() if value == 0]:
        raise ValueError(f"spectra: all eigenvalues of {zero[0]!r} are zero, which has no scale")

    def scale(nodes: _Floats, weights: _Floats) -> float:
        if scaling == "none":
            return max(largest.values())
        found = float(np.abs(nodes).max() if scaling == "largest" else np.sqrt(weights @ nodes**2))
        return found or 1.0  # a start in the null space, whose only node is zero

    return [
        [(n / scale(n, w), w) for n, w in zip(density.nodes, density.weights, strict=True)]
        for density in spectra.values()
    ]


def _mass(nodes: _Floats, weights: _Floats, grid: _Floats, sigma: float) -> _Floats:
    kernel = np.exp(-0.5 * ((grid[:, None] - nodes[None, :]) / sigma) ** 2)
    mass: _Floats = kernel @ weights
    mass /= mass.sum()
    return mass


def _excess(between: _Floats) -> tuple[_Floats, float]:
    """How much further apart probes of two spectra are than those of one, and how far those are, on average.

    Args:
        between: Squared distances [spectrum, probe, spectrum, probe].
    """
    probes = between.shape[1]
    # Probes of one number may be one vector, where spectra of one space are compared: such pairs are left out.
    apart = (between.sum(axis=(1, 3)) - np.einsum("iaja->ij", between)) / (probes * (probes - 1))
    own = np.diag(apart)
    return apart - (own[:, None] + own[None, :]) / 2, float(own.mean())


def _p_value(between: _Floats) -> float:
    """Rank of the mean distance among random dealings of the probes; see `SpectraDistances`.

    Dealing changes neither the sum over all pairs of probes nor how many of them share a spectrum: the mean distance is
    the larger, the smaller the sum within spectra is.
    """
    spectra, probes = between.shape[:2]
    unmoved = np.broadcast_to(np.arange(spectra)[:, None], (1, spectra, probes))
    generator = np.random.default_rng(0)
    dealt = np.concatenate([unmoved, generator.permuted(np.repeat(unmoved, _DEALINGS, axis=0), axis=1)])
    within = np.zeros(len(dealt))
    for a, b in zip(*np.triu_indices(probes, 1), strict=True):
        within += between[dealt[..., a], a, dealt[..., b], b].sum(axis=1)
    return float(np.mean(within <= within[0] * (1 + 1e-9)))


def _pairwise(masses: _Floats) -> _Floats:
    squares = np.zeros((len(masses), len(masses)))
    for i in range(len(masses)):
        for j in range(i):
            squares[i, j] = squares[j, i] = _divergence(masses[i], masses[j])
    return squares


def _divergence(p: _Floats, q: _Floats) -> float:
    middle = (p + q) / 2
    divergence = 0.0
    for x in (p, q):
        there = (x > 0) & (middle > 0)  # half of the smallest number is zero
        divergence += float(np.sum(x[there] * np.log2(x[there] / middle[there]))) / 2
    return max(divergence, 0.0)


def _jackknife(left_out: _Floats) -> _Floats:
    n = len(left_out)
    spread: _Floats = np.sqrt((n - 1) / n * ((left_out - left_out.mean(axis=0)) ** 2).sum(axis=0))
    return spread
