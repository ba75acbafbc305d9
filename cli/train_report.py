"""What `flashbob-curv train` shows of its record."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from cli.console import memory

__all__ = ["median", "median_step", "training_table"]


def median(values: list[float]) -> float | None:
    """The median, the first value (which pays for compilation) aside where there are others."""
    return statistics.median(values[1:] or values) if values else None


def median_step(history: list[dict[str, Any]]) -> float | None:
    """Median seconds of a step without a Hessian estimate."""
    return median([b["seconds"] - a["seconds"] for a, b in pairwise(history) if "estimate_seconds" not in b])


def training_table(content: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The rows that the command shows, from its record."""
    history, step, estimate = content["history"], content["seconds_per_step"], content["seconds_per_estimate"]
    tail = [entry["loss"] for entry in history[-max(1, len(history) // 20) :]]
    rows = [
        ("loss, first step", f"{history[0]['loss']:.4f} nats per token"),
        (f"loss, mean of the last {len(tail)}", f"{statistics.mean(tail):.4f}"),
        ("loss, held-out text", f"{content['evaluation'][-1]['loss']:.4f}"),
        ("tokens", f"{content['tokens']:,}, {content['tokens_per_second']:,.0f} per second"),
    ]
    if step is not None:
        rows.append(("ordinary step", f"{step:.3f} s"))
    if estimate is not None:
        rows.append(("Hessian estimate", f"{estimate:.3f} s, every {content['settings']['hessian_every']} steps"))
    if shares := [entry["bounded_share"] for entry in history if "bounded_share" in entry]:
        rows.append(
            ("updates at their bound", f"{statistics.median(shares):.0%} of the weights, median of the estimates")
        )
    rows.append(("time, peak memory", f"{content['seconds']:.1f} s, {memory(content['peak_memory_bytes'])}"))
    return rows
