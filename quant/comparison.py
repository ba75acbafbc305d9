"""Plans set beside others at equal size, and predictions beside measurements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from scipy.stats import spearmanr

from curvature.loss import Batch
from quant.allocation import allocate, make_plan
from quant.choice import InfeasibleError
from quant.perplexity import Perplexity, evaluate_perplexity, rise
from quant.pipeline import QuantizedModel, Watch, score
from quant.plan import Plan, uniform_plan
from quant.sensitivity import METRICS, Sensitivity

__all__ = ["frontier", "single_weights"]


def frontier(
    found: QuantizedModel, batches: Sequence[Batch], evaluation: Sequence[Batch], before: Perplexity,
    metrics: Sequence[str], *, watch: Watch | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Rise of the loss of static plans on evaluation text, around the budget of a decision.

    The sizes are the decision's own and those of one bit more and less. The model is unquantized before and after.

    Args:
        found: The decision; its model is unquantized now (`QuantizedModel.restore`).
        batches: Calibration batches, for scores that were not computed yet.
        evaluation: Evaluation batches.
        before: The unquantized model's loss on them.
        metrics: "uniform" or static metrics.
        watch: Gives a progress function for each stretch of work.

    Returns:
        Rows of metric, average_bits, bytes, rise, rise_stderr (None for a single batch).

    Raises:
        ValueError: If a metric is unknown.
    """
    unknown = [m for m in metrics if m not in (*METRICS, "uniform")]
    if unknown:
        raise ValueError(f"metrics: {unknown[0]!r} is not one of uniform, {', '.join(METRICS)}")
    center = found.plan.average_bits
    low, high = min(found.settings.choices), max(found.settings.choices)
    budgets = sorted({min(max(round(center + step, 3), low), high) for step in (-1.0, 0.0, 1.0)})
    settings = replace(found.settings, bits=4.0, bytes=None, max_loss_rise=None, metric="quadratic")
    plans: list[Plan] = []
    for metric in METRICS:
        if metric in metrics or metric in found.scores:
            table = found.scores.get(metric) or score(
                found.model, found.candidates, batches, metric, settings, watch=watch
            )
            plans += _plans(found, table, budgets)
    if "uniform" in metrics:
        for bits in found.settings.choices:
            if abs(bits - center) <= 1.5:
                choices = uniform_plan(found.candidates, bits)
                plans.append(make_plan(found.problem, choices, "uniform", {"bits": float(bits)}, None))
    return [_outcome(found, plan, evaluation, before) for plan in plans]


def _plans(found: QuantizedModel, table: Sensitivity, budgets: Sequence[float]) -> list[Plan]:
    plans = []
    for bits in budgets:
        try:
            plans.append(allocate(table, found.problem, bits=bits))
        except InfeasibleError:
            continue  # a budget below the smallest of the fixed formats has no plan to compare
    return plans


def _outcome(found: QuantizedModel, plan: Plan, evaluation: Sequence[Batch], before: Perplexity) -> dict[str, Any]:
    with found.candidates.applied(plan.choices):
        change, stderr = rise(evaluate_perplexity(found.model, evaluation), before)
    row = {"metric": plan.metric, "average_bits": plan.average_bits, "bytes": plan.bytes, "rise": change}
    return row | {"rise_stderr": stderr if math.isfinite(stderr) else None}


def single_weights(found: QuantizedModel, batches: Sequence[Batch], count: int) -> dict[str, Any] | None:
    """Single weights at their fewest bits: the predicted change of the loss against the measured one.

    Args:
        found: The decision; its model is unquantized now.
        batches: The calibration batches, on which predictions are to hold.
        count: How many weights, spread over the model.

    Returns:
        weights [{name, bits, predicted, predicted_stderr, measured, misses_by}] with the largest misses first, the
        Spearman correlation, and the ratio of the sums; None where no score predicts or count is zero.
    """
    table = next((t for t in found.scores.values() if t.predicts), None)
    if table is None or count == 0:
        return None
    total = len(found.candidates.weights)
    places = np.unique(np.linspace(0, total - 1, min(count, total)).round().astype(int))
    before = evaluate_perplexity(found.model, batches)
    rows = []
    for t in places:
        # Two widths each, where there are two, so that the comparison spans orders of magnitude.
        for b in dict.fromkeys((found.candidates.available(t)[0], found.candidates.available(t)[-1])):
            with found.candidates.single(t, b):
                change, _ = rise(evaluate_perplexity(found.model, batches), before)
            value = float(table.values[t, b])
            error = None if table.stderr is None else float(table.stderr[t, b])
            rows.append(
                {
                    "name": table.weights[t], "bits": found.candidates.options[b].bits, "predicted": value,
                    "predicted_stderr": error, "measured": change, "misses_by": change - value,
                }
            )  # fmt: skip
    predicted, measured = (np.array([row[key] for row in rows]) for key in ("predicted", "measured"))
    rows.sort(key=lambda row: -abs(float(row["misses_by"])))
    varied = len(rows) > 2 and np.ptp(predicted) > 0 and np.ptp(measured) > 0
    correlation = float(spearmanr(predicted, measured).statistic) if varied else None
    sums = float(measured.sum())
    return {
        "metric": table.metric, "weights": rows, "spearman": correlation,
        "sum_ratio": float(predicted.sum()) / sums if sums else None,
    }  # fmt: skip


def known_metrics(text: str) -> list[str]:
    """Metrics of a comma-separated list; "none" for none."""
    return [] if text == "none" else [part.strip() for part in text.split(",")]
