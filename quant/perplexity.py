"""Loss and perplexity of a model on text, with the standard error between windows."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from curvature.estimate import Progress
from curvature.loss import Batch, CausalLMLoss, Loss

__all__ = ["Perplexity", "evaluate_perplexity", "on_device", "rise"]


@dataclass(frozen=True, eq=False)
class Perplexity:
    """Mean next-token loss over all counted tokens, and its exponential.

    Attributes:
        loss: Nats per token.
        stderr: Standard error of the loss from its spread between batches; NaN for a single batch. Batches of one text
            are not independent, so this is a lower bound of the error for other texts.
        perplexity: exp(loss); None where that is more than a float holds.
        tokens: Counted tokens.
        losses: Mean loss of each batch with counted tokens, float64.
        counts: Their counted tokens.
    """

    loss: float
    stderr: float
    perplexity: float | None
    tokens: int
    losses: npt.NDArray[np.float64]
    counts: npt.NDArray[np.int64]

    def as_record(self) -> dict[str, Any]:
        """As JSON fields; a standard error that does not exist is None."""
        stderr = self.stderr if math.isfinite(self.stderr) else None
        return {"perplexity": self.perplexity, "loss": self.loss, "loss_stderr": stderr, "tokens": self.tokens}


def evaluate_perplexity(
    model: nn.Module, batches: Iterable[Batch], *, loss: Loss | None = None, progress: Progress | None = None
) -> Perplexity:
    """Perplexity of a model: every batch on its own, tokens weighted equally.

        loss = sum_b total_b / sum_b tokens_b,   perplexity = exp(loss)

    Windows do not overlap and their first tokens are not predicted. Padding and labels of -100 are not counted.
    Dropout is off. Exact up to the model's dtype. Cost: one forward pass per batch, memory of one batch.

    Args:
        model: A causal language model.
        batches: Batches as Hugging Face collators make them; moved to the model's device one at a time.
        loss: What is averaged; `CausalLMLoss` if None.
        progress: Called after each batch.

    Returns:
        See `Perplexity`.

    Raises:
        ValueError: If no token is counted.
        FloatingPointError: If a batch's loss is not finite.
    """
    loss = CausalLMLoss() if loss is None else loss
    batches = list(batches)
    device = next(model.parameters()).device
    losses, counts = [], []
    with torch.no_grad(), evaluating(model):
        for number, batch in enumerate(batches):
            total, tokens = loss(model, on_device(batch, device))
            if tokens:
                losses.append(float(total) / tokens)
                counts.append(tokens)
                if not math.isfinite(losses[-1]):
                    raise FloatingPointError(
                        f"batch {number}: the loss is {losses[-1]}; check the weights and the dtype"
                    )
            if progress is not None:
                progress(number + 1, len(batches), f"{losses[-1]:.4f}" if losses else "")
    if not counts:
        raise ValueError("batches: no token is counted (there is no batch, or every label is ignored or padding)")
    return _summary(np.array(losses), np.array(counts, dtype=np.int64))


def rise(after: Perplexity, before: Perplexity) -> tuple[float, float]:
    """Change of the loss and its standard error, paired batch by batch (NaN for a single batch).

    Raises:
        ValueError: If the two were not taken on the same batches.
    """
    if not np.array_equal(after.counts, before.counts):
        raise ValueError("after, before: the losses were taken on different batches; evaluate both on the same ones")
    paired = _summary(after.losses - before.losses, after.counts)
    return paired.loss, paired.stderr


def on_device(batch: Batch, device: torch.device) -> Mapping[str, Any]:
    """The batch with its tensors on a device."""
    return {key: value.to(device) if isinstance(value, Tensor) else value for key, value in batch.items()}


@contextmanager
def evaluating(model: nn.Module) -> Any:
    """Evaluation mode inside the block; every module's own mode afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _summary(losses: npt.NDArray[np.float64], counts: npt.NDArray[np.int64]) -> Perplexity:
    shares = counts / counts.sum()
    mean = float(shares @ losses)
    n = len(losses)
    # Of a weighted mean: sum of squared weighted deviations, with the small-sample factor n / (n - 1).
    spread = math.sqrt(float(np.sum((shares * (losses - mean)) ** 2)) * n / (n - 1)) if n > 1 else math.nan
    perplexity = math.exp(mean) if mean < math.log(sys.float_info.max) else None
    return Perplexity(mean, spread, perplexity, int(counts.sum()), losses, counts)
