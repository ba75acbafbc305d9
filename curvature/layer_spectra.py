"""Spectra of diagonal blocks, of layers or of any other groups of parameters, and how far apart they are."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from curvature.density import SpectralDensity, spectral_density
from curvature.distributed import ALONE, Processes
from curvature.estimate import Progress
from curvature.groups import Group, GroupOperator, check_disjoint, layer_groups
from curvature.linear_operator import LinearOperator
from curvature.model_operator import ModelOperator
from curvature.state import RunState

__all__ = ["Scaling", "SpectraDistances", "block_operator", "layer_spectra", "spectra_distances"]

_Floats: TypeAlias = npt.NDArray[np.float64]

Scaling: TypeAlias = Literal["none", "largest", "spread"]

_POINTS = 2048


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
            state=state,
            label=f"{number:03d}-{re.sub(r'[^A-Za-z0-9]+', '-', group.name)}-probe",
            processes=processes,
        )
        if isinstance(block, ModelOperator):
            block.release()
    return found


def block_operator(op: LinearOperator, group: Group) -> LinearOperator:
    """The diagonal block of a group: the cheapest operator for it."""
    if isinstance(op, ModelOperator) and group.whole:
        return op.restricted(part.parameter for part in group.parts)
    return GroupOperator(op, group)


def _of_all(progress: Progress | None, number: int, count: int, name: str) -> Progress | None:
    if progress is None:
        return None

    def report(done: int, total: int, status: str) -> None:
        progress(number * total + done, count * total, f"{name}, {status}")

    return report


@dataclass(frozen=True, eq=False)
class SpectraDistances:
    """Jensen-Shannon distances between spectral densities.

    Attributes:
        names: The spectra, in the order of rows and columns.
        values: Distances [n, n], symmetric, zero on the diagonal; between 0 (equal) and 1 (disjoint).
        stderr: Standard error of each, by the jackknife over probes.
        mean: Mean over all pairs of different spectra.
        mean_stderr: Its standard error, by the jackknife over probes.
        floor: Mean distance between two probes of one spectrum: what the noise of single probes alone makes.
        scaling: How the spectra were scaled before they were compared.
        sigma: Width of the Gaussian that smooths each, on the scaled axis.
    """

    names: tuple[str, ...]
    values: _Floats
    stderr: _Floats
    mean: float
    mean_stderr: float
    floor: float
    scaling: Scaling
    sigma: float


def spectra_distances(
    spectra: Mapping[str, SpectralDensity], *, scaling: Scaling = "largest", sigma: float = 0.02
) -> SpectraDistances:
    """Jensen-Shannon distances between the spectra of blocks, as a measure of how heterogeneous a model's blocks are.

        JS(p, q) = sqrt( (KL(p | m) + KL(q | m)) / 2 ),   m = (p + q) / 2,   KL in bits

    p and q are the densities of the eigenvalues on an axis that all share: divided by each spectrum's own scale, and
    smoothed by one Gaussian. Estimated from the Lanczos quadratures; no product is needed.

    Args:
        spectra: {name: density}, each of the same number of probes, at least 2.
        scaling: The scale: each spectrum's largest magnitude ("largest": shapes are compared), its root mean square
            ("spread"), or one for all, the largest magnitude of all ("none": sizes count, too).
        sigma: Width of the Gaussian on the scaled axis. It is a choice; distances fall as it grows.

    Raises:
        ValueError: If there are fewer than two spectra, they have unequal numbers of probes or fewer than two, all
            eigenvalues of one are zero, or an option is out of range.

    Source: Lin, Divergence measures based on the Shannon entropy (1991); of block spectra: Zhang, Chen, Ding, Li, Sun
        and Luo, Why transformers need Adam: a Hessian perspective (2024), arXiv 2402.16788, figure 3, where spectra are
        divided by their tenth largest eigenvalue, which quadratures of a few steps do not know.
    """
    if scaling not in get_args(Scaling):
        raise ValueError(f"scaling must be one of {', '.join(get_args(Scaling))}, got {scaling!r}")
    if not 0 < sigma < 1:
        raise ValueError(f"sigma must be between 0 and 1, got {sigma}")
    counts = {density.probes for density in spectra.values()}
    if len(spectra) < 2 or len(counts) > 1 or min(counts) < 2:
        raise ValueError(
            f"spectra: at least two, of one number of probes that is at least 2; got {len(spectra)} of {sorted(counts)}"
        )
    names, probes = tuple(spectra), counts.pop()
    scales = _scales(spectra, scaling)
    low = min(n.min() / scales[name] for name, density in spectra.items() for n in density.nodes)
    high = max(n.max() / scales[name] for name, density in spectra.items() for n in density.nodes)
    grid = np.linspace(low - 5 * sigma, high + 5 * sigma, max(_POINTS, int(4 * (high - low) / sigma)))
    # [spectrum, probe, point], each summing to one.
    masses = np.stack(
        [
            np.stack(
                [_mass(n / scales[name], w, grid, sigma) for n, w in zip(density.nodes, density.weights, strict=True)]
            )
            for name, density in spectra.items()
        ]
    )
    values = _pairwise(masses.mean(axis=1))
    left_out = np.stack([_pairwise(np.delete(masses, probe, axis=1).mean(axis=1)) for probe in range(probes)])
    pairs = np.triu_indices(len(names), 1)
    means = left_out[:, pairs[0], pairs[1]].mean(axis=1)
    between = [_distance(a[i], a[j]) for a in masses for i in range(probes) for j in range(i)]
    return SpectraDistances(
        names=names,
        values=values,
        stderr=_jackknife(left_out),
        mean=float(values[pairs].mean()),
        mean_stderr=float(_jackknife(means)),
        floor=float(np.mean(between)),
        scaling=scaling,
        sigma=sigma,
    )


def _scales(spectra: Mapping[str, SpectralDensity], scaling: Scaling) -> dict[str, float]:
    largest = {name: max(float(np.abs(n).max()) for n in density.nodes) for name, density in spectra.items()}
    if zero := [name for name, value in largest.items() if value == 0]:
        raise ValueError(f"spectra: all eigenvalues of {zero[0]!r} are zero, which has no scale")
    if scaling == "largest":
        return largest
    if scaling == "none":
        return dict.fromkeys(spectra, max(largest.values()))
    return {
        name: float(np.sqrt(np.mean([w @ n**2 for n, w in zip(density.nodes, density.weights, strict=True)])))
        for name, density in spectra.items()
    }


def _mass(nodes: _Floats, weights: _Floats, grid: _Floats, sigma: float) -> _Floats:
    kernel = np.exp(-0.5 * ((grid[:, None] - nodes[None, :]) / sigma) ** 2)
    mass: _Floats = kernel @ weights
    mass /= mass.sum()
    return mass


def _pairwise(masses: _Floats) -> _Floats:
    distances = np.zeros((len(masses), len(masses)))
    for i in range(len(masses)):
        for j in range(i):
            distances[i, j] = distances[j, i] = _distance(masses[i], masses[j])
    return distances


def _distance(p: _Floats, q: _Floats) -> float:
    middle = (p + q) / 2
    divergence = 0.0
    for x in (p, q):
        there = (x > 0) & (middle > 0)  # half of the smallest number is zero
        divergence += float(np.sum(x[there] * np.log2(x[there] / middle[there]))) / 2
    return math.sqrt(max(divergence, 0.0))


def _jackknife(left_out: _Floats) -> _Floats:
    n = len(left_out)
    spread: _Floats = np.sqrt((n - 1) / n * ((left_out - left_out.mean(axis=0)) ** 2).sum(axis=0))
    return spread
