"""Sophia-H inside `transformers.Trainer`: a callback that estimates the curvature when it is due."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from curvature.loss import CausalLMLoss, Loss
from curvature.model_operator import evaluation
from curvature.sophia import SophiaH, hutchinson_diagonal

__all__ = ["SophiaCallback"]

_FIELDS = ("input_ids", "attention_mask", "labels", "position_ids")


class SophiaCallback(TrainerCallback):
    """Gives a `SophiaH` its estimates of the Hessian's diagonal during `Trainer.train`.

        optimizer = SophiaH(model.parameters(), lr=4e-4)
        trainer = Trainer(model, arguments, train_dataset=data, data_collator=collator,
                          optimizers=(optimizer, None), callbacks=[SophiaCallback(optimizer)])

    An estimate is due ahead of every `optimizer.interval`-th update. It is taken at the micro-batch that the model has
    seen last, in evaluation mode (dropout off), under the precision of the arguments (`bf16=True`), and averaged over
    the processes of a data-parallel run, which gradients taken by `torch.autograd.grad` otherwise are not. The model
    needs an attention with a second derivative: `attn_implementation="flashbob"` (or "eager").

    Args:
        optimizer: The optimizer that was handed to the trainer.
        loss: The loss whose Hessian it is; None: `CausalLMLoss()`.
        seed: Of the probes: estimate i of process r draws from seed + i * processes + r. The optimizer keeps the number
            of the estimate in its state, so that a run that is resumed goes on with probes of its own.
    """

    def __init__(self, optimizer: SophiaH, *, loss: Loss | None = None, seed: int = 0) -> None:
        if not isinstance(optimizer, SophiaH):
            raise TypeError(f"optimizer must be the SophiaH that the trainer uses, got {type(optimizer).__name__}")
        self.optimizer = optimizer
        self._loss: Loss = CausalLMLoss() if loss is None else loss
        self._seed, self._seen = seed, dict[str, Any]()
        self._hook: Any = None

    @property
    def estimates(self) -> int:
        """How many estimates the optimizer has taken in, those before a run was resumed included."""
        return int(self.optimizer.param_groups[0]["estimates"])

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Begin to note what the model sees."""
        self._release()
        self._hook = kwargs["model"].register_forward_pre_hook(self._note, with_kwargs=True)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Stop to note it."""
        self._release()

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Estimate the curvature, if that is due.

        Raises:
            RuntimeError: If the model was not called with keyword arguments that hold `input_ids`.
        """
        if not self.optimizer.curvature_due:
            return
        if "input_ids" not in self._seen:
            raise RuntimeError(
                "SophiaCallback has seen no batch with input_ids: the model must be called with keyword arguments, as "
                "Trainer does with batches that are dictionaries"
            )
        count = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        rank = dist.get_rank() if count > 1 else 0
        diagonal = self._estimate(kwargs["model"], args, self._seed + self.estimates * count + rank)
        if count > 1:
            # All of them in every process: what is None in one, for want of counted tokens, need not be in another.
            present = [
                torch.zeros_like(p) if d is None else d
                for d, p in zip(diagonal, self.optimizer.parameters, strict=True)
            ]
            for d in present:
                dist.all_reduce(d)
                d.div_(count)
            diagonal = [*present]
        self.optimizer.update_curvature(diagonal)

    def _estimate(self, model: nn.Module, args: TrainingArguments, seed: int) -> list[Tensor | None]:
        parameters = self.optimizer.parameters
        batch, self._seen = self._seen, {}
        with evaluation(model, [p for p in parameters if isinstance(p, nn.Parameter)]), torch.enable_grad():
            with torch.autocast(parameters[0].device.type, dtype=torch.bfloat16, enabled=bool(args.bf16)):
                total, tokens = self._loss(model, batch)
            if tokens == 0:
                return [None] * len(parameters)
            return hutchinson_diagonal(total / tokens, parameters, seed=seed)

    def _note(self, model: nn.Module, _: tuple[Any, ...], given: dict[str, Any]) -> None:
        if model.training:
            self._seen = {name: given[name] for name in _FIELDS if isinstance(given.get(name), Tensor)}

    def _release(self) -> None:
        if self._hook is not None:
            self._hook.remove()
        self._hook, self._seen = None, {}
