"""Pictures of spectra and traces, each with its error bars."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from curvature.breakdown import KINDS, Breakdown
from curvature.density import SpectralDensity

__all__ = ["BLUE", "GREY", "ORANGE", "UNIT", "figure_png", "spectra_figure", "spectrum_figure", "tidy", "trace_figure"]

UNIT = "loss units per squared parameter unit"

BLUE, ORANGE, GREY = "#1f5fa8", "#c8551b", "#6b7480"
"""What is measured, what it is set against, and axes: told apart with any colour vision, and in print."""


def spectrum_figure(
    density: SpectralDensity,
    eigenvalues: Sequence[float],
    residuals: Sequence[float],
    *,
    title: str,
    matrix: str = "Hessian",
) -> Figure:
    """Spectral density on a logarithmic scale, with Ritz values and their residuals below it.

    Args:
        density: From `spectral_density`.
        eigenvalues: Ritz values to mark.
        residuals: Their residuals, drawn as horizontal bars; an eigenvalue of the operator lies within each bar.
        title: Title of the picture.
        matrix: What the eigenvalues are of.
    """
    figure = Figure(figsize=(8.4, 4.9), dpi=150, layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(5, 1))
    floor = density.values.max() * 1e-7
    values = np.maximum(density.values, floor)
    upper.semilogy(density.grid, values, color=BLUE, lw=1.4)
    if density.stderr is not None:
        low, high = density.values - density.stderr, density.values + density.stderr
        upper.fill_between(
            density.grid,
            np.maximum(low, floor),
            np.maximum(high, floor),
            color=BLUE,
            alpha=0.22,
            lw=0,
            label="± 1 s.e.",
        )
        upper.legend(frameon=False, loc="upper right")
    upper.set_ylim(floor, density.values.max() * 4)
    upper.set_ylabel("share of eigenvalues per unit")
    upper.set_title(title, loc="left", fontsize=11)
    upper.annotate(
        f"{density.probes} probes × {density.steps} Lanczos steps, Gaussian width σ = {density.sigma:.3g}",
        (0.0, 1.0), xytext=(4, -4), xycoords="axes fraction", textcoords="offset points", va="top", fontsize=8,
        color=GREY,
    )  # fmt: skip
    level = np.zeros(len(eigenvalues))
    lower.errorbar(eigenvalues, level, xerr=residuals, fmt="|", ms=13, color=ORANGE, ecolor=ORANGE, capsize=3, lw=1)
    lower.set_ylim(-1, 1)
    lower.set_yticks([])
    lower.set_ylabel("Ritz values", rotation=0, ha="right", va="center")
    lower.set_xlabel(f"eigenvalue λ of the {matrix} ({UNIT})")
    tidy(upper, lower)
    return figure


def spectra_figure(
    spectra: Mapping[str, SpectralDensity], *, top: int = 10, title: str, matrix: str = "Hessian"
) -> Figure:
    """Spectral densities of several blocks, a panel each, with the Ritz values and their residuals below each curve.

    Args:
        spectra: {name: density}.
        top: Ritz values to mark from each end.
        title: Title of the picture.
        matrix: What the blocks are of.
    """
    columns = min(3, len(spectra))
    rows = -(-len(spectra) // columns)
    figure = Figure(figsize=(3.3 * columns + 0.4, 1.9 * rows + 0.9), dpi=150, layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes, (name, density) in zip(panels, spectra.items(), strict=False):
        highest = float(density.values.max())
        draw_density(axes, density, BLUE, name)
        values, residuals = density.extremes(top)
        level = np.full(len(values), highest * 1e-7)
        axes.errorbar(values, level, xerr=residuals, fmt="|", ms=9, color=ORANGE, ecolor=ORANGE, capsize=2, lw=0.9)
        axes.set_ylim(highest * 1e-8, highest * 4)
        axes.set_title(name, loc="left", fontsize=9)
        axes.tick_params(labelsize=7)
        tidy(axes)
    for axes in panels[len(spectra) :]:
        axes.set_visible(False)
    figure.suptitle(f"{title} (band: ± 1 s.e.)", fontsize=10, x=0.01, ha="left")
    figure.supxlabel(f"eigenvalue λ of the diagonal block of the {matrix} ({UNIT})", fontsize=8)
    figure.supylabel("share of eigenvalues per unit", fontsize=8)
    return figure


def draw_density(axes: Axes, density: SpectralDensity, color: str, label: str) -> None:
    """One density on a logarithmic axis, down to 1e-7 of its maximum, with its standard error as a band."""
    floor = density.values.max() * 1e-7
    axes.semilogy(density.grid, np.maximum(density.values, floor), color=color, lw=1.3, label=label)
    if density.stderr is not None:
        low, high = density.values - density.stderr, density.values + density.stderr
        axes.fill_between(density.grid, np.maximum(low, floor), np.maximum(high, floor), color=color, alpha=0.22, lw=0)


def trace_figure(breakdown: Breakdown, *, title: str) -> Figure:
    """Trace by layer, and mean eigenvalue by kind of parameter, with one standard error as bars.

    Args:
        breakdown: The trace in pieces.
        title: Title of the picture.
    """
    layers = breakdown.by(lambda piece: piece.kind if piece.layer is None else str(piece.layer))
    found = breakdown.by(lambda piece: piece.kind)
    kinds = {kind: found[kind] for kind in KINDS if kind in found}
    figure = Figure(figsize=(9.6, 4.6), dpi=150, layout="constrained")
    left, right = figure.subplots(1, 2)
    values = np.array([(share.trace, share.stderr) for share in layers.values()])
    left.bar(np.arange(len(layers)), values[:, 0], color=BLUE, width=0.72)
    _errors(left, list(layers), values, marker="")
    left.set_xlabel("layer")
    left.set_ylabel(f"trace of the diagonal block\n({UNIT})", fontsize=9)
    means = np.array([(share.mean_eigenvalue, share.mean_stderr) for share in kinds.values()])
    _errors(right, list(kinds), means, marker="o")
    # Kinds differ by orders of magnitude, and an indefinite Hessian has negative traces too.
    magnitudes = np.abs(means[:, 0])
    if (magnitudes > 0).any():
        right.set_yscale("symlog", linthresh=float(max(magnitudes[magnitudes > 0].min(), 1e-4 * magnitudes.max())))
    right.set_xlabel("kind of parameter")
    right.set_ylabel("mean eigenvalue\n(trace / number of parameters)", fontsize=9)
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    tidy(left, right)
    return figure


def figure_png(figure: Figure) -> bytes:
    """The figure as the bytes of a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _errors(axes: Axes, labels: list[str], estimates: npt.NDArray[np.float64], marker: str) -> None:
    """Error bars at numbered places, which get the labels."""
    places = np.arange(len(labels))
    values, errors = estimates.T
    axes.errorbar(places, values, errors, fmt=marker or "none", color=BLUE, ecolor=ORANGE, capsize=3, lw=1.2)
    crowded = len(labels) > 12 or any(len(label) > 4 for label in labels)
    axes.set_xticks(places, labels, rotation=60 if crowded else 0, ha="right" if crowded else "center", fontsize=8)
    axes.axhline(0, color=GREY, lw=0.8)


def tidy(*all_axes: Axes) -> None:
    """Grid behind, no frame at the top and right."""
    for axes in all_axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="both", color="#e4e7eb", lw=0.6)
        axes.set_axisbelow(True)
