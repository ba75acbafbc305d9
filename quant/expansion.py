"""What a whole plan does to the loss, to second order: one gradient and one Hessian product per batch.

The sum of single weights' predictions leaves out how rounding errors in different weights act together, and it flatters
a plan that was chosen by those predictions. With D the perturbation of all weights at once, this does neither:

    L(W + D) - L(W) = g.D + 1/2 D.H D + third order

Best on text that did not choose the plan.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from torch import nn

from curvature.estimate import Progress
from curvature.loss import Batch, Loss
from curvature.operators import Method
from curvature.vectors import inner
from quant.candidates import Candidates
from quant.quadratic import block_order, hessians

__all__ = ["Expansion", "expand"]


@dataclass(frozen=True)
class Expansion:
    """Change of the mean loss along a plan's perturbation D, to second order, in nats per token.

    Attributes:
        change: linear + quadratic.
        stderr: Its standard error between batches; None for a single batch.
        linear: g.D.
        quadratic: 1/2 D.H D.
        batches: How many batches.
    """

    change: float
    stderr: float | None
    linear: float
    quadratic: float
    batches: int

    def as_record(self) -> dict[str, Any]:
        """As JSON fields."""
        return asdict(self)


def expand(
    model: nn.Module,
    candidates: Candidates,
    choices: Sequence[int | None],
    batches: Sequence[Batch],
    *,
    loss: Loss | None = None,
    method: Method = "auto",
    progress: Progress | None = None,
) -> Expansion:
    """Expand the loss at the unquantized model along a plan.

    Args:
        model: The model, with its unquantized weights.
        candidates: The weights at all options.
        choices: The option of each weight; None: unquantized.
        batches: Text, each batch of equal weight; best what neither scores nor the search have seen.
        loss: The loss; `CausalLMLoss` if None.
        method: How products are computed; see `HessianOperator`.
        progress: Called after each batch.

    Returns:
        See `Expansion`. Exact but for the third order. Cost: one gradient and one product per batch.

    Raises:
        ValueError: If there is no batch.
    """
    if not batches:
        raise ValueError("batches: there is none; give at least one")
    names, rows = [weight.name for weight in candidates.weights], []
    for number, make in enumerate(hessians(model, names, batches, loss, method)):
        operator = make()
        order = block_order(operator, candidates.weights)
        direction = operator.space.flatten([candidates.delta(t, choices[t]) for t in order])
        quadratic = 0.5 * float(inner(direction, operator @ direction))
        slope = float(inner(operator.gradient().to(direction.dtype), direction))  # from what the product has kept
        rows.append((slope, quadratic))
        operator.release()
        if progress is not None:
            progress(number + 1, len(batches), "whole plan")
    linear, quadratic = np.array(rows).T
    total = linear + quadratic
    stderr = float(total.std(ddof=1) / math.sqrt(len(total))) if len(total) > 1 else None
    return Expansion(float(total.mean()), stderr, float(linear.mean()), float(quadratic.mean()), len(total))
