"""Pictures of plans: bits by layer and kind, loss against bytes, predictions against measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from curvature.blocks import kind_of, layer_of
from quant.plan import Plan

__all__ = ["bits_figure", "frontier_figure", "prediction_figure"]

_BLUE, _ORANGE, _GREY = "#1f5fa8", "#c8551b", "#6b7480"


def bits_figure(plan: Plan, *, title: str) -> Figure:
    """Bits of every weight as a heat map: layers across, kinds of weights down."""
    kinds = list(dict.fromkeys(kind_of(name) for name in plan.weights))
    layers = sorted({layer for name in plan.weights if (layer := layer_of(name)) is not None})
    columns: list[int | None] = [*layers, *([None] if any(layer_of(n) is None for n in plan.weights) else [])]
    table = np.full((len(kinds), len(columns)), np.nan)
    counts = np.zeros_like(table)
    for name, scheme in zip(plan.weights, plan.schemes, strict=True):
        place = kinds.index(kind_of(name)), columns.index(layer_of(name))
        # Kinds that a layer holds several times, such as experts, show their mean.
        table[place] = (np.nan_to_num(table[place]) * counts[place] + scheme.bits) / (counts[place] + 1)
        counts[place] += 1
    figure = Figure(
        figsize=(max(5.0, 0.34 * len(columns) + 2.2), 0.36 * len(kinds) + 1.7), dpi=150, layout="constrained"
    )
    axes = figure.subplots()
    picture = axes.imshow(table, cmap="viridis", vmin=2, vmax=8, aspect="auto")
    for i, j in np.argwhere(np.isfinite(table)):
        dark = table[i, j] < 5.5
        axes.text(j, i, f"{table[i, j]:.3g}", ha="center", va="center", fontsize=7, color="white" if dark else "black")
    axes.set_xticks(range(len(columns)), ["outside" if c is None else str(c) for c in columns], fontsize=8)
    axes.set_yticks(range(len(kinds)), kinds, fontsize=8)
    axes.set_xlabel("layer")
    axes.set_title(title, loc="left", fontsize=10)
    figure.colorbar(picture, ax=axes, label="bits", ticks=range(2, 9))
    return figure


def frontier_figure(rows: Sequence[Mapping[str, object]], *, title: str) -> Figure:
    """Rise of the loss against bytes, a line per metric, with the paired standard error as bars.

    Args:
        rows: Each with metric, bytes, rise and rise_stderr (a number or None).
        title: Title of the picture.
    """
    figure = Figure(figsize=(7.2, 4.4), dpi=150, layout="constrained")
    axes = figure.subplots()
    for number, metric in enumerate(dict.fromkeys(str(row["metric"]) for row in rows)):
        points = sorted(
            (float(str(r["bytes"])), float(str(r["rise"])), float(str(r["rise_stderr"] or 0)))
            for r in rows
            if r["metric"] == metric
        )
        sizes, rises, errors = np.array(points).T
        axes.errorbar(
            sizes / 2**20, rises, errors, marker="o", ms=4, lw=1.3, capsize=2, color=f"C{number}", label=metric
        )
    axes.axhline(0, color=_GREY, lw=0.8)
    axes.set_xlabel("size of the weights file (MiB)")
    axes.set_ylabel("rise of the loss (nats per token)")
    axes.set_title(title, loc="left", fontsize=10)
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def prediction_figure(
    predicted: Sequence[float], stderr: Sequence[float] | None, measured: Sequence[float], *, title: str
) -> Figure:
    """Measured against predicted changes of the loss, one point per weight and option, on symmetric log scales."""
    figure = Figure(figsize=(5.4, 4.8), dpi=150, layout="constrained")
    axes = figure.subplots()
    x, y = np.asarray(predicted, dtype=float), np.asarray(measured, dtype=float)
    axes.errorbar(x, y, xerr=stderr, fmt="o", ms=3.5, color=_BLUE, ecolor=_ORANGE, lw=0.8, alpha=0.8)
    magnitudes = np.abs(np.concatenate([x, y]))
    threshold = max(float(np.quantile(magnitudes, 0.25)), 1e-12)
    axes.set_xscale("symlog", linthresh=threshold)
    axes.set_yscale("symlog", linthresh=threshold)
    ends = np.array([min(x.min(), y.min()), max(x.max(), y.max())])
    axes.plot(ends, ends, color=_GREY, lw=0.9, label="as predicted")
    axes.set_xlabel("predicted change of the loss (nats per token)")
    axes.set_ylabel("measured on the calibration text")
    axes.set_title(title, loc="left", fontsize=10)
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    return figure
