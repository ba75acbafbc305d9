"""The linear term of a prediction, g.D, and how much of it is more than the sampling noise of the text.

At a model that is trained to the end the gradient over all text is zero, and what a calibration text shows of it is
noise. Weights that have been rounded before, or are not at a minimum, do have a gradient. The two are told apart
between batches: of an estimate m with the standard error s, the share max(0, 1 - s^2 / m^2) is kept (the positive-part
estimator of James and Stein, 1961), so that noise is shrunk and what repeats in every batch is kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from curvature.estimate import Progress
from curvature.loss import Batch, Loss
from curvature.vectors import inner
from curvature.whole_graph import batch_gradient
from quant.candidates import Candidates
from quant.perplexity import evaluating, on_device

__all__ = ["batch_gradients", "linear_terms", "only", "shrunk"]

_Table: TypeAlias = npt.NDArray[np.float64]


def batch_gradients(
    model: nn.Module, candidates: Candidates, batches: Sequence[Batch], loss: Loss, progress: Progress | None = None
) -> Iterator[Sequence[Tensor | None]]:
    """For each batch the gradient of its mean loss by every weight (None where it is zero): a backward pass each."""
    parameters = [w.parameter for w in candidates.weights]
    for number, batch in enumerate(batches):
        with evaluating(model), only(model, parameters):
            gradients, _, _ = batch_gradient(model, loss, on_device(batch, parameters[0].device), parameters)
            yield gradients
        if progress is not None:
            progress(number + 1, len(batches), "gradient")


def linear_terms(
    model: nn.Module, candidates: Candidates, batches: Sequence[Batch], loss: Loss, progress: Progress | None = None
) -> _Table:
    """g.D of every batch, weight and option: float64 [batches, weights, options], NaN where an option does not fit."""
    samples = np.full((len(batches), len(candidates.weights), len(candidates.options)), np.nan)
    for number, gradients in enumerate(batch_gradients(model, candidates, batches, loss, progress)):
        places: list[tuple[int, int]] = []
        found: list[Tensor] = []
        for t, gradient in enumerate(gradients):
            if gradient is None:
                samples[number, t, candidates.available(t)] = 0.0
                continue
            for b in candidates.available(t):
                places.append((t, b))
                found.append(inner(gradient, candidates.delta(t, b)))
        if found:  # one transfer for all, so that a GPU need not wait for the host in between
            samples[(number, *np.array(places).T)] = torch.stack(found).cpu().numpy()
    return samples


def shrunk(samples: _Table) -> tuple[_Table, _Table]:
    """The mean over the first axis, shrunk towards zero as far as it may be noise, and the mean's standard error.

    The error is that of the mean as it was: of pure noise half or more of the magnitude is still there.

    Args:
        samples: [batches, ...]. Of a single batch nothing is kept: noise cannot be told.
    """
    if len(samples) < 2:
        return np.zeros(samples.shape[1:]), np.zeros(samples.shape[1:])
    mean, stderr = samples.mean(axis=0), samples.std(axis=0, ddof=1) / math.sqrt(len(samples))
    with np.errstate(divide="ignore", invalid="ignore"):
        kept = np.where(mean == 0, 0.0, np.maximum(0.0, 1.0 - np.square(stderr / mean)))
    return kept * mean, stderr


@contextmanager
def only(model: nn.Module, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Only these parameters require a gradient inside the block."""
    before = [(p, p.requires_grad) for p in model.parameters()]
    wanted = set(parameters)
    try:
        for p, _ in before:
            p.requires_grad_(p in wanted)
        yield
    finally:
        for p, flag in before:
            p.requires_grad_(flag)
