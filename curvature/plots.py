"""Pictures of spectra and traces, each with its error bars."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from curvature.blocks import kind_of, layer_of
from curvature.density import SpectralDensity
from curvature.estimate import with_error
from curvature.trace import TraceEstimate

__all__ = ["figure_png", "spectrum_figure", "trace_figure"]

UNIT = "loss units per squared parameter unit"

_BLUE, _ORANGE, _GREY = "#1f5fa8", "#c8551b", "#6b7480"


def spectrum_figure(
    density: SpectralDensity, eigenvalues: Sequence[float], residuals: Sequence[float], *, title: str
) -> Figure:
    """Spectral density on a logarithmic scale, with Ritz values and their residuals below it.

    Args:
        density: From `spectral_density`.
        eigenvalues: Ritz values to mark.
        residuals: Their residuals, drawn as horizontal bars; an eigenvalue of the operator lies within each bar.
        title: Title of the picture.
    """
    figure = Figure(figsize=(8.4, 4.9), dpi=150, layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(5, 1))
    floor = density.values.max() * 1e-7
    values = np.maximum(density.values, floor)
    upper.semilogy(density.grid, values, color=_BLUE, lw=1.4)
    if density.stderr is not None:
        low, high = density.values - density.stderr, density.values + density.stderr
        upper.fill_between(
            density.grid,
            np.maximum(low, floor),
            np.maximum(high, floor),
            color=_BLUE,
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
        color=_GREY,
    )  # fmt: skip
    level = np.zeros(len(eigenvalues))
    lower.errorbar(eigenvalues, level, xerr=residuals, fmt="|", ms=13, color=_ORANGE, ecolor=_ORANGE, capsize=3, lw=1)
    lower.set_ylim(-1, 1)
    lower.set_yticks([])
    lower.set_ylabel("Ritz values", rotation=0, ha="right", va="center")
    lower.set_xlabel(f"eigenvalue λ of the Hessian ({UNIT})")
    _tidy(upper, lower)
    return figure


def trace_figure(estimate: TraceEstimate, numel: Mapping[str, int], *, title: str) -> Figure:
    """Trace by layer, and mean eigenvalue by kind of parameter, with one standard error as bars.

    Args:
        estimate: From `trace`.
        numel: Number of entries of each block.
        title: Title of the picture.
    """
    layers = estimate.grouped(_layer_label)
    kinds = estimate.grouped(kind_of)
    figure = Figure(figsize=(9.6, 4.6), dpi=150, layout="constrained")
    left, right = figure.subplots(1, 2)
    values = np.array(list(layers.values()))
    left.bar(np.arange(len(layers)), values[:, 0], color=_BLUE, width=0.72)
    _errors(left, list(layers), values, marker="")
    left.set_xlabel("layer")
    left.set_ylabel(f"trace of the diagonal block\n({UNIT})", fontsize=9)
    sizes = np.array([sum(numel[n] for n in estimate.per_block if kind_of(n) == kind) for kind in kinds])
    means = np.array(list(kinds.values())) / sizes[:, None]
    _errors(right, list(kinds), means, marker="o")
    # Kinds differ by orders of magnitude, and an indefinite Hessian has negative traces too.
    magnitudes = np.abs(means[:, 0])
    if (magnitudes > 0).any():
        right.set_yscale("symlog", linthresh=float(magnitudes[magnitudes > 0].min()))
    right.set_xlabel("kind of parameter")
    right.set_ylabel("mean eigenvalue\n(trace / number of parameters)", fontsize=9)
    total = with_error(estimate.value, estimate.stderr)
    figure.suptitle(f"{title}: {total} from {estimate.products} products, ± 1 s.e.", fontsize=11, x=0.01, ha="left")
    _tidy(left, right)
    return figure


def figure_png(figure: Figure) -> bytes:
    """The figure as the bytes of a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _layer_label(name: str) -> str:
    layer = layer_of(name)
    return kind_of(name) if layer is None else str(layer)


def _errors(axes: Axes, labels: list[str], estimates: npt.NDArray[np.float64], marker: str) -> None:
    """Error bars at numbered places, which get the labels."""
    places = np.arange(len(labels))
    values, errors = estimates.T
    axes.errorbar(places, values, errors, fmt=marker or "none", color=_BLUE, ecolor=_ORANGE, capsize=3, lw=1.2)
    crowded = len(labels) > 12 or any(len(label) > 4 for label in labels)
    axes.set_xticks(places, labels, rotation=60 if crowded else 0, ha="right" if crowded else "center", fontsize=8)
    axes.axhline(0, color=_GREY, lw=0.8)


def _tidy(*all_axes: Axes) -> None:
    for axes in all_axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="both", color="#e4e7eb", lw=0.6)
        axes.set_axisbelow(True)
