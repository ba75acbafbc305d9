"""What a training run is made of: its schedule, its optimizer, and the settings of the loop."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from torch import nn
from torch.optim import AdamW, Optimizer

from curvature.sophia import Curvature, SophiaH

__all__ = ["Attention", "OptimizerName", "Schedule", "TrainingSettings", "make_optimizer"]

OptimizerName: TypeAlias = Literal["adamw", "sophia"]
Attention: TypeAlias = Literal["flashbob", "math", "hybrid"]


@dataclass(frozen=True)
class Schedule:
    """Learning rate by step: linear warmup, then half a cosine from `peak` down to `floor`.

        lr(t) = peak (t + 1) / warmup                                        t < warmup
        lr(t) = floor + (peak - floor) (1 + cos(pi u)) / 2                   u = (t - warmup) / (steps - 1 - warmup)

    A single step after the warmup is the cosine's first one, u = 0, and is taken at `peak`.

    Args:
        peak: Largest rate.
        floor: Rate of the last step, where the warmup leaves two or more.
        warmup: Steps of warmup, fewer than `steps`.
        steps: All steps.

    Raises:
        ValueError: If there is no such schedule.
    """

    peak: float
    floor: float
    warmup: int
    steps: int

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"max-steps must be at least 1, got {self.steps}")
        if not 0 <= self.warmup < self.steps:
            raise ValueError(
                f"warmup must be at least 0 and less than the {self.steps} steps, got {self.warmup}; shorten it, or "
                "raise max-steps"
            )
        if not (math.isfinite(self.peak) and self.peak > 0):
            raise ValueError(f"lr must be finite and above 0, got {self.peak}")
        if not 0 <= self.floor <= self.peak:
            raise ValueError(f"min-lr must be between 0 and lr ({self.peak:g}), got {self.floor:g}")

    def rate(self, step: int) -> float:
        """Learning rate of step number `step`, from 0 on."""
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        share = (step - self.warmup) / max(1, self.steps - 1 - self.warmup)
        return self.floor + (self.peak - self.floor) * (1 + math.cos(math.pi * min(share, 1.0))) / 2


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """What a training run is made of, apart from its model and text.

    Attributes:
        schedule: Learning rates.
        optimizer: "adamw" or "sophia".
        betas: Decay of the optimizer's averages.
        eps: AdamW: added to the divisor. Sophia-H: least divisor.
        weight_decay: Of weights with two or more dimensions; biases and norms are not decayed.
        clip: Bound on the norm of the gradient; 0: none.
        gamma: See `SophiaH`.
        rho: See `SophiaH`.
        curvature: See `SophiaH`.
        interval: Steps from one Hessian estimate to the next.
        estimates: Micro-batches of an estimate, each with a probe of its own, over all processes; 0: one per process.
        batch: Windows per micro-batch.
        accumulate: Micro-batches per step and process.
        evaluate_every: Steps between evaluations; 0: only at the end.
        save_every: Steps between saved states.
        attention: How attention is differentiated: "flashbob"; "math", PyTorch's math path throughout; "hybrid", fused
            first derivatives and the math path for the second.
        streamed: Whether Hessian products are streamed, in the memory of one segment of the model.
        autocast: Whether the model runs in bfloat16 (weights, gradients and optimizer stay as they are).
        dropout: Whether dropout is on in ordinary steps; estimates and evaluations are always without.
        seed: Of probes and dropout.
    """

    schedule: Schedule
    optimizer: OptimizerName = "sophia"
    betas: tuple[float, float] = (0.96, 0.99)
    eps: float = 1e-12
    weight_decay: float = 0.1
    clip: float = 1.0
    gamma: float = 0.01
    rho: float = 1.0
    curvature: Curvature = "diagonal"
    interval: int = 10
    estimates: int = 0
    batch: int = 1
    accumulate: int = 1
    evaluate_every: int = 0
    save_every: int = 100
    attention: Attention = "flashbob"
    streamed: bool = False
    autocast: bool = False
    dropout: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        least = {"batch": 1, "accumulate": 1, "interval": 1, "save_every": 1, "estimates": 0, "evaluate_every": 0}
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise ValueError(f"{name.replace('_', '-')} must be at least {bound}, got {getattr(self, name)}")
        # Before the optimizers, which name their arguments otherwise or, AdamW's decay, do not look at all.
        ranges = {
            "beta1": (self.betas[0], 0 <= self.betas[0] < 1, "in [0, 1)"),
            "beta2": (self.betas[1], 0 <= self.betas[1] < 1, "in [0, 1)"),
            "eps": (self.eps, self.eps > 0, "above 0"),
            "weight-decay": (self.weight_decay, self.weight_decay >= 0, "at least 0"),
            "clip": (self.clip, self.clip >= 0, "at least 0 (0: no clipping)"),
        }
        for name, (value, fits, rule) in ranges.items():
            if not (fits and math.isfinite(value)):
                raise ValueError(f"{name} must be finite and {rule}, got {value}")
        if self.streamed and self.autocast:
            raise ValueError("streamed Hessian products need --dtype float32 or float64; use --method whole")
        if self.streamed and self.attention != "flashbob":
            raise ValueError(f"streamed Hessian products need attention 'flashbob', got {self.attention!r}")

    def estimates_of(self, processes: int) -> int:
        """Micro-batches of an estimate, over all processes.

        Raises:
            ValueError: If they cannot be shared out.
        """
        count = self.estimates or processes
        if count % processes or count > self.accumulate * processes:
            raise ValueError(
                f"hessian-batches must be a multiple of the {processes} processes and at most the "
                f"{self.accumulate * processes} micro-batches of a step, got {count}"
            )
        return count


def make_optimizer(parameters: Sequence[nn.Parameter], settings: TrainingSettings) -> Optimizer:
    """The optimizer of the settings; weights of two and more dimensions are decayed, the others are not.

    Raises:
        ValueError: If a setting is out of the optimizer's range.
    """
    decayed = [p for p in parameters if p.dim() >= 2]
    plain = [p for p in parameters if p.dim() < 2]
    groups = [
        {"params": group, "weight_decay": decay}
        for group, decay in ((decayed, settings.weight_decay), (plain, 0.0))
        if group
    ]
    lr = settings.schedule.peak
    if settings.optimizer == "adamw":
        fused = parameters[0].device.type == "cuda"
        return AdamW(groups, lr=lr, betas=settings.betas, eps=settings.eps, fused=fused)
    return SophiaH(
        groups,
        lr=lr,
        betas=settings.betas,
        gamma=settings.gamma,
        rho=settings.rho,
        eps=settings.eps,
        interval=settings.interval,
        curvature=settings.curvature,
    )
