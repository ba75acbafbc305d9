"""Heat maps of estimates: colour for the value, a mark where the value is not beyond its error."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.colors import SymLogNorm
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke

__all__ = ["CERTAIN", "heat_map"]

CERTAIN = 2.0
"""Standard errors that a value must be away from zero to be drawn without a mark."""

_ROOM = 12
"""Rows up to which every cell holds its value and standard error in figures."""


def heat_map(
    cells: Mapping[tuple[str, str], tuple[float, float]], rows: Sequence[str], columns: Sequence[str], *, title: str
) -> Figure:
    """Values by row and column on a logarithmic colour scale with both signs: blue negative, white zero, red positive.

    A cell whose value lies within two standard errors of zero is hatched: its sign is not known. Where the rows are few
    every cell holds its value and, below it, its standard error. Cells that do not exist stay grey.

    Args:
        cells: {(row, column): (value, standard error)}.
        rows: Labels, from top to bottom.
        columns: Labels, from left to right.
        title: Title of the picture.

    Raises:
        ValueError: If there is no cell, or one lies outside the rows and columns.
    """
    if not cells:
        raise ValueError("cells: there is none; a heat map needs at least one value")
    if outside := [place for place in cells if place[0] not in rows or place[1] not in columns]:
        raise ValueError(f"cells: {outside[0]} lies outside the rows and columns")
    values = np.full((len(rows), len(columns)), np.nan)
    for (row, column), (value, _) in cells.items():
        values[rows.index(row), columns.index(column)] = value
    figure = Figure(figsize=(2.2 + 0.95 * len(columns), 1.6 + (0.5 if len(rows) <= _ROOM else 0.26) * len(rows)))
    figure.set_dpi(150)
    figure.set_layout_engine("constrained")
    axes = figure.subplots()
    image = axes.imshow(np.ma.masked_invalid(values), cmap="RdBu_r", norm=_scale(values), aspect="auto")
    axes.set_facecolor("#d7dbe0")
    for (row, column), (value, stderr) in cells.items():
        y, x = rows.index(row), columns.index(column)
        if not abs(value) >= CERTAIN * stderr:
            axes.fill_between(
                [x - 0.5, x + 0.5], y - 0.5, y + 0.5, hatch="////", facecolor="none", edgecolor="#8a9199", lw=0
            )
        if len(rows) <= _ROOM:
            behind = np.asarray(image.cmap(image.norm(np.array([value]))), dtype=np.float64)[0].tolist()
            red, green, blue, _ = behind
            ink = "#ffffff" if 0.3 * red + 0.59 * green + 0.11 * blue < 0.5 else "#1c2127"
            note = axes.text(x, y, f"{value:.1e}\n± {stderr:.0e}", ha="center", va="center", fontsize=6.5, color=ink)
            note.set_path_effects([withStroke(linewidth=2.5, foreground=behind)])
    axes.set_xticks(range(len(columns)), columns, fontsize=8)
    axes.set_yticks(range(len(rows)), rows, fontsize=8)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_title(title, loc="left", fontsize=10)
    bar = figure.colorbar(image, ax=axes, pad=0.02, fraction=0.05)
    bar.ax.tick_params(labelsize=7)
    return figure


def _scale(values: np.ndarray[tuple[int, int], np.dtype[np.float64]]) -> SymLogNorm:
    """Linear up to the smallest tenth of the magnitudes, but at most four decades of logarithm."""
    sizes = np.abs(values[np.isfinite(values) & (values != 0)])
    largest = float(sizes.max()) if len(sizes) else 1.0
    linear = max(float(np.quantile(sizes, 0.1)), largest * 1e-4) if len(sizes) else 1.0
    largest = max(largest, linear * math.sqrt(10))
    return SymLogNorm(linthresh=linear, vmin=-largest, vmax=largest, base=10)
