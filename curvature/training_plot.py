"""The picture of a training run: its loss by step and by time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from curvature.plots import BLUE, GREY, ORANGE, tidy

__all__ = ["training_figure"]


def training_figure(
    history: Sequence[Mapping[str, Any]], evaluation: Sequence[Mapping[str, Any]], *, title: str
) -> Figure:
    """Loss of every step, with its running mean and the held-out losses, against steps and against seconds.

    Args:
        history: See `curvature.training.TrainingResult`.
        evaluation: Likewise.
        title: Title of the picture.
    """
    steps, seconds, losses = (np.array([entry[name] for entry in history]) for name in ("step", "seconds", "loss"))
    width = max(1, len(losses) // 50)
    sums = np.cumsum(np.insert(losses, 0, 0.0))
    smooth = (sums[width:] - sums[:-width]) / width
    seconds_at = dict(zip(steps.tolist(), seconds.tolist(), strict=True))
    figure = Figure(figsize=(9.6, 4.2), dpi=150, layout="constrained")
    for axes, x, places, label in zip(
        figure.subplots(1, 2, sharey=True),
        (steps, seconds),
        ([e["step"] for e in evaluation], [seconds_at.get(e["step"], np.nan) for e in evaluation]),
        ("step", "seconds"),
        strict=True,
    ):
        axes.plot(x, losses, color=GREY, lw=0.7, alpha=0.55, label="loss of each step")
        if width > 1:
            axes.plot(x[width - 1 :], smooth, color=BLUE, lw=1.6, label=f"mean of {width} steps")
        axes.plot(places, [e["loss"] for e in evaluation], "o", color=ORANGE, ms=4.5, label="held-out text")
        axes.set_xlabel(label)
        tidy(axes)
    figure.axes[0].set_ylabel("loss, nats per token")
    figure.axes[1].legend(frameon=False, fontsize=9)
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    return figure
