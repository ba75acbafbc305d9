"""Scores of other allocators, as baselines: gradients and rounding errors, no curvature."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from curvature.estimate import Progress
from curvature.loss import Batch, Loss
from curvature.vectors import inner
from quant.candidates import Candidates
from quant.linear import batch_gradients, only
from quant.perplexity import evaluating, on_device

__all__ = ["first_order_scores", "fisher_scores", "random_scores", "weight_errors"]


def weight_errors(candidates: Candidates) -> npt.NDArray[np.float64]:
    """|D|^2 of every weight and option; NaN where an option does not fit. float64 [weights, options]."""

    def score(weight: int, option: int) -> float:
        delta = candidates.delta(weight, option)
        return float(inner(delta, delta))

    return _table(candidates, score)


def random_scores(candidates: Candidates, seed: int) -> npt.NDArray[np.float64]:
    """A uniform random number per weight, times n 4^-bits: falls with the bits, knows nothing else."""
    numbers = np.random.default_rng(seed).uniform(size=len(candidates.weights))
    return _table(
        candidates, lambda t, b: float(numbers[t] * candidates.weights[t].numel * 4.0 ** -candidates.options[b].bits)
    )


def first_order_scores(
    model: nn.Module, candidates: Candidates, batches: Sequence[Batch], loss: Loss, progress: Progress | None = None
) -> npt.NDArray[np.float64]:
    """Sum |g * D| over the entries of a weight, with g the gradient of one batch's mean loss.

    Returns:
        float64 [batches, weights, options]. Cost: one backward pass per batch.
    """
    samples = []
    for gradients in batch_gradients(model, candidates, batches, loss, progress):

        def score(weight: int, option: int, gradients: Sequence[Tensor | None] = gradients) -> float:
            gradient = gradients[weight]
            if gradient is None:
                return 0.0
            return float((gradient * candidates.delta(weight, option)).abs().sum(dtype=torch.float64))

        samples.append(_table(candidates, score))
    return np.stack(samples)


def fisher_scores(
    model: nn.Module, candidates: Candidates, batches: Sequence[Batch], loss: Loss, progress: Progress | None = None
) -> npt.NDArray[np.float64]:
    """Squared output gradients times squared output errors, summed over a batch's tokens and outputs.

        sum (dL/dy)^2 (D x)^2,   y = W x the output of a module that holds the weight, L the batch's summed loss

    Returns:
        float64 [batches, weights, options], divided by each batch's tokens. Cost: one backward pass per batch, and one
        layer product per weight and option.

    Raises:
        NotImplementedError: For stacks of experts.
    """
    stacked = [w.name for w in candidates.weights if w.layout == "experts"]
    if stacked:
        raise NotImplementedError(
            f"metric 'fisher' needs the inputs of a module per weight, which stacks of experts such as {stacked[0]!r} "
            "do not have; use another metric, or leave the experts out with include"
        )
    samples = []
    for number, batch in enumerate(batches):
        scores = np.full((len(candidates.weights), len(candidates.options)), np.nan)
        for t in range(len(candidates.weights)):
            scores[t, candidates.available(t)] = 0.0
        with evaluating(model), only(model, []), _output_gradients(model, candidates, scores):
            device = next(model.parameters()).device
            total, tokens = loss(model, on_device(batch, device))
            total.backward()
        samples.append(scores / max(tokens, 1))
        if progress is not None:
            progress(number + 1, len(batches), "output gradients")
    return np.stack(samples)


def _table(candidates: Candidates, score: Callable[[int, int], float]) -> npt.NDArray[np.float64]:
    values = np.full((len(candidates.weights), len(candidates.options)), np.nan)
    for t in range(len(candidates.weights)):
        for b in candidates.available(t):
            values[t, b] = score(t, b)
    return values


@contextmanager
def _output_gradients(model: nn.Module, candidates: Candidates, scores: npt.NDArray[np.float64]) -> Iterator[None]:
    """Add each module's score to `scores` as soon as the gradient of its output is there."""
    handles: list[torch.utils.hooks.RemovableHandle] = []

    def watch(weight: int) -> Callable[[nn.Module, tuple[Any, ...], Tensor], Tensor]:
        def forward_hook(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
            x = inputs[0].detach()
            if not output.requires_grad:
                # The first watched module: nothing before it requires a gradient.
                output = output.detach().requires_grad_(True)

            def backward_hook(gradient: Tensor) -> None:
                squares = gradient.detach().square()
                for option in candidates.available(weight):
                    delta = candidates.weights[weight].matrix(candidates.delta(weight, option))
                    error = delta[x] if isinstance(module, nn.Embedding) else x @ delta.T
                    scores[weight, option] += float((squares * error.square()).sum(dtype=torch.float64))

            output.register_hook(backward_hook)
            return output

        return forward_hook

    try:
        for t, weight in enumerate(candidates.weights):
            handles += [model.get_submodule(path).register_forward_hook(watch(t)) for path in weight.modules]
        yield
    finally:
        for handle in handles:
            handle.remove()
