"""Training a language model with AdamW or Sophia-H: one loop, the same on one device and on several.

Every random choice is a function of the seed and the step: the order of windows, the probes, the dropout masks. A run
that goes on from its saved state therefore goes on exactly. Of several processes each works on every `count`-th
micro-batch; gradients and Hessian products are averaged over all of them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel, masking_utils
from transformers.pytorch_utils import Conv1D

from curvature.chain import Segments
from curvature.cross_entropy import cross_entropy_sum
from curvature.distributed import ALONE, Processes
from curvature.layers.substitutes import Forwards, find_substitutes, substituted
from curvature.model_operator import evaluation
from curvature.model_state import Structure
from curvature.operators import HessianOperator
from curvature.precision import one_pass, precision_of
from curvature.readout import aligned_logits
from curvature.sophia import SophiaH, signs
from curvature.state import Part, RunState, Saved, StateError, fingerprint
from curvature.streaming import Streaming
from curvature.training_derivatives import Derivatives
from curvature.training_settings import TrainingSettings, make_optimizer
from curvature.training_text import TrainingText
from curvature.vectors import ParameterSpace

__all__ = ["Report", "Training", "TrainingResult", "average"]

Report: TypeAlias = Callable[[int, float, int, float], None]
"""Called after each step with (steps done, loss, tokens so far, seconds so far)."""

_IGNORED = -100


@dataclass
class TrainingResult:
    """What a run has measured.

    Attributes:
        history: {step, loss, lr, tokens, seconds} of each step: mean loss of the step's tokens before its update,
            tokens and seconds from the beginning on; where the step had a Hessian estimate also `estimate_seconds`
            and `bounded_share` (see `SophiaH.bounded_share`).
        evaluation: {step, loss} after that many steps, on the held-out windows.
    """

    history: list[dict[str, Any]] = field(default_factory=list)
    evaluation: list[dict[str, Any]] = field(default_factory=list)


class Training:
    """A model, its text and an optimizer, and the loop.

    Norms, activations and the loss run as fused layers with closed-form second derivatives, whatever the attention:
    runs with different attention differ in nothing else.

    Args:
        model: A causal language model, its weights in float32 or float64.
        text: Windows for training.
        held_out: int64 [n, seq], windows for evaluation.
        settings: See `TrainingSettings`.
        parameters: What is trained; None: all that require a gradient.
        processes: Who shares the run.

    Attributes:
        result: What has been measured so far.
        step: Steps done.

    Raises:
        ValueError: If the settings do not fit the processes.
    """

    def __init__(
        self,
        model: nn.Module,
        text: TrainingText,
        held_out: Tensor,
        settings: TrainingSettings,
        *,
        parameters: Sequence[nn.Parameter] | None = None,
        processes: Processes = ALONE,
    ) -> None:
        self.model, self.settings, self.processes = model, settings, processes
        self.result, self.step = TrainingResult(), 0
        self._text, self._held_out = text, held_out
        chosen = [p for p in model.parameters() if p.requires_grad] if parameters is None else list(parameters)
        self.optimizer = make_optimizer(chosen, settings)
        self._parameters: list[nn.Parameter] = [p for g in self.optimizer.param_groups for p in g["params"]]
        self._device = self._parameters[0].device
        with evaluation(model, self._parameters):
            fused = find_substitutes(m for m in model.modules() if not isinstance(m, nn.Linear | Conv1D))
        self._fused = {**fused, **_aligned_head(model)}
        self._derivatives = Derivatives(self._loss, self._parameters)
        self._estimates = settings.estimates_of(processes.count) if settings.optimizer == "sophia" else 0
        self._structure: Structure | None = None
        self._segments: Segments | None = None
        self._tokens, self._seconds, self._consistent = 0, 0.0, True
        self._place = text.position()

    def run(self, state: RunState | None = None, report: Report | None = None) -> TrainingResult:
        """Train to the end of the schedule, from the saved state if there is one.

        Args:
            state: Where the run is saved: every `save_every` steps, and where it ends early between two updates.
            report: Progress.

        Returns:
            The measurements of the whole run, those before an interruption included.

        Raises:
            FloatingPointError: If the loss, the gradient or a Hessian estimate is not finite; the weights are then
                those before that step.
            curvature.state.StateError: If the state cannot be read or written.
        """
        part = None if state is None else state.part("training", None, self._arguments())
        if part is not None and part.progress is not None:
            self._restore(part)
        begun = time.perf_counter() - self._seconds
        saved, steps = self.step, self.settings.schedule.steps
        try:
            while True:
                if self._evaluation_due():
                    self.result.evaluation.append({"step": self.step, "loss": self.evaluate()})
                if part is not None and self.step > saved and self._save_due():
                    self.processes.together(lambda: self._save(part))
                    saved = self.step
                if self.step == steps:
                    return self.result
                try:
                    self._one_step(begun)
                except FloatingPointError as error:
                    raise FloatingPointError(f"step {self.step + 1}: {error}; {self._remedy()}") from error
                if report is not None:
                    last = self.result.history[-1]
                    report(self.step, last["loss"], last["tokens"], last["seconds"])
        except StateError:
            raise
        except BaseException:
            if part is not None and self.step > saved and self._consistent:
                self._save(part)
            raise

    def _remedy(self) -> str:
        if self.step == 0:
            return "no update was made yet, so check the model's weights and the dtype"
        return "lower --lr or lengthen --warmup, and begin anew (the weights are those before that step)"

    def _evaluation_due(self) -> bool:
        every, done = self.settings.evaluate_every, self.result.evaluation
        if self.step == 0 or (done and done[-1]["step"] == self.step):
            return False
        return self.step == self.settings.schedule.steps or bool(every and self.step % every == 0)

    def _save_due(self) -> bool:
        return self.step % self.settings.save_every == 0 or self.step == self.settings.schedule.steps

    def evaluate(self) -> float:
        """Mean loss over all predictions of the held-out windows, dropout off."""
        batches = self._held_out.split(self.settings.batch)

        def part() -> tuple[float, int]:
            total, tokens = 0.0, 0
            for ids in batches[self.processes.rank :: self.processes.count]:
                total += float(self._loss(ids.to(self._device))) * (predictions := ids.numel() - len(ids))
                tokens += predictions
            return total, tokens

        with torch.no_grad(), evaluation(self.model, self._parameters):
            parts = self.processes.gather(part)
        loss = sum(total for total, _ in parts) / sum(tokens for _, tokens in parts)
        if not math.isfinite(loss):
            raise FloatingPointError(f"the held-out loss after step {self.step} is {loss}; lower --lr and begin anew")
        return loss

    def _one_step(self, begun: float) -> None:
        settings, processes = self.settings, self.processes
        windows = self._text.take(settings.batch * settings.accumulate * processes.count)
        micro = windows.split(settings.batch)[processes.rank :: processes.count]
        rate = settings.schedule.rate(self.step)
        diagonal, estimate_seconds = self._estimate(micro)
        loss = sum(processes.gather(lambda: self._gradients(micro))) / processes.count
        if not math.isfinite(loss):
            raise FloatingPointError(f"the loss is {loss}")
        gradients = average([p.grad for p in self._parameters], self._parameters, processes)
        for p, gradient in zip(self._parameters, gradients, strict=True):
            p.grad = gradient
        norm = float(nn.utils.clip_grad_norm_(self._parameters, settings.clip or math.inf))
        if not math.isfinite(norm):
            raise FloatingPointError(f"the gradient's norm is {norm}")
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        place = self._text.position()
        self._consistent = False
        if diagonal is not None and isinstance(self.optimizer, SophiaH):
            self.optimizer.update_curvature(diagonal)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self._tokens += windows.numel()
        self._seconds = time.perf_counter() - begun
        entry = {"step": self.step, "loss": loss, "lr": rate, "tokens": self._tokens, "seconds": self._seconds}
        if diagonal is not None:
            entry["estimate_seconds"] = estimate_seconds
            if isinstance(self.optimizer, SophiaH):
                entry["bounded_share"] = self.optimizer.bounded_share()
        self.result.history.append(entry)
        self._place, self._consistent = place, True

    def _gradients(self, micro: Sequence[Tensor]) -> float:
        """Add up the gradients of this process's micro-batches, and return their mean loss."""
        settings = self.settings
        total = torch.zeros((), device=self._device, dtype=torch.float64)
        self.optimizer.zero_grad(set_to_none=True)  # of a step that ended before its update
        self.model.train(settings.dropout)
        try:
            for number, ids in enumerate(micro):
                if settings.dropout:
                    place = number * self.processes.count + self.processes.rank
                    torch.manual_seed(_mixed(settings.seed, 1, self.step, place))
                ids = ids.to(self._device, non_blocking=True)
                total += self._derivatives.add_gradient(ids, len(micro), record=self.step > 0 and not settings.dropout)
        finally:
            self.model.eval()
        return float(total) / len(micro)

    def _estimate(self, micro: Sequence[Tensor]) -> tuple[list[Tensor | None] | None, float]:
        """The averaged Hessian estimate of this step and the seconds that it took; (None, 0) where none is due."""
        if not (isinstance(self.optimizer, SophiaH) and self.optimizer.curvature_due):
            return None, 0.0
        self._wait()
        started = time.perf_counter()
        mine = micro[: self._estimates // self.processes.count]
        kept: list[list[Tensor | None]] = []

        def part() -> None:
            with evaluation(self.model, self._parameters):
                for number, ids in enumerate(mine):
                    place = number * self.processes.count + self.processes.rank
                    seed = _mixed(self.settings.seed, 2, self.step, place)
                    kept.append(_sum(kept.pop() if kept else None, self._sample(ids.to(self._device), seed)))

        self.processes.gather(part)
        diagonal = average(kept[0], self._parameters, self.processes)
        if len(mine) > 1:
            torch._foreach_div_([d for d in diagonal if d is not None], len(mine))
        self._wait()
        return diagonal, time.perf_counter() - started

    def _sample(self, ids: Tensor, seed: int) -> list[Tensor | None]:
        if not self.settings.streamed:
            return self._derivatives.hutchinson_diagonal(ids, seed, record=self.step > 0)
        names, structure = self._names(), Structure(self.model)
        # Inspecting the model takes longer than the product.
        segments = self._segments if structure == self._structure else None
        operator = HessianOperator(
            self.model,
            [{"input_ids": ids}],
            params=names,
            method="streamed",
            streaming=Streaming(keep=False, segments=segments),
        )
        self._structure, self._segments = structure, operator.segments
        z = dict(zip(names, signs(self._parameters, seed), strict=True))
        products: dict[str, Tensor] = operator @ z
        return [products[name] * z[name] for name in names]

    def _loss(self, ids: Tensor) -> Tensor:
        """Mean cross-entropy of tokens 1.. of each window given those before, in nats."""
        targets = torch.full_like(ids, _IGNORED)
        targets[:, :-1] = ids[:, 1:]
        with (
            torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=self.settings.autocast),
            precision_of(self.model)(),
            substituted(self._fused),
            self._attending(),
            _one_sequence_per_row(),
        ):
            logits = self.model(input_ids=ids, use_cache=False, return_dict=True).logits
        return cross_entropy_sum(logits, targets, _IGNORED) / (ids.numel() - len(ids))

    def _attending(self) -> AbstractContextManager[object]:
        return sdpa_kernel(SDPBackend.MATH) if self.settings.attention == "math" else nullcontext()

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _arguments(self) -> dict[str, Any]:
        space = ParameterSpace.of(dict(zip(self._names(), self._parameters, strict=True)))
        settings = vars(self.settings) | {"schedule": vars(self.settings.schedule)}
        return {"settings": settings, "space": fingerprint(space)}

    def _names(self) -> list[str]:
        """Names of the parameters that are trained, in their order."""
        names = {p: name for name, p in self.model.named_parameters()}
        return [names[p] for p in self._parameters]

    def _save(self, part: Part) -> None:
        if not self.processes.leads:
            return
        place, tensors = self._place
        progress = {
            "step": self.step,
            "tokens": self._tokens,
            "seconds": self._seconds,
            "history": self.result.history,
            "evaluation": self.result.evaluation,
            "text": place,
            "groups": [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups],
        }
        stored = {f"text.{name}": t for name, t in tensors.items()}
        for number, p in enumerate(self._parameters):
            stored[f"weight.{number}"] = p.detach()
            stored |= {f"optimizer.{number}.{name}": t for name, t in self.optimizer.state[p].items()}
        part.offer(lambda: Saved(progress, stored))
        part.flush()

    def _restore(self, part: Part) -> None:
        progress, stored = part.progress or {}, dict[str, Tensor]()
        for piece in part.pieces:
            stored |= piece
        self.step, self._tokens, self._seconds = (progress[name] for name in ("step", "tokens", "seconds"))
        self.result = TrainingResult(progress["history"], progress["evaluation"])
        rest = {name.removeprefix("text."): t for name, t in stored.items() if name.startswith("text.")}
        self._text.seek(progress["text"], rest)
        self._place = self._text.position()
        states: dict[int, dict[str, Tensor]] = {}
        for name, t in stored.items():
            if name.startswith("optimizer."):
                _, place, entry = name.split(".")
                states.setdefault(int(place), {})[entry] = t
        with torch.no_grad():
            for number, p in enumerate(self._parameters):
                p.copy_(stored[f"weight.{number}"])
        present = self.optimizer.state_dict()
        groups = [
            kept | {"betas": tuple(kept["betas"]), "params": group["params"]}
            for kept, group in zip(progress["groups"], present["param_groups"], strict=True)
        ]
        self.optimizer.load_state_dict({"state": states, "param_groups": groups})


def average(tensors: Sequence[Tensor | None], like: Sequence[Tensor], processes: Processes) -> list[Tensor | None]:
    """Means of tensors over the processes, in the tensors' own memory; all processes get the same bits.

    Whatever was computed by `torch.autograd.grad` needs this, since `DistributedDataParallel` averages only what
    arrives in `parameter.grad`. All processes exchange as much, whichever tensors they have. Memory: one copy of all.

    Args:
        tensors: What this process has; None counts as zero.
        like: Tensors of their shapes, of one device and dtype, the same in every process.
        processes: Who takes part.

    Returns:
        The means; None where no process has a tensor.
    """
    if processes.count == 1:
        return list(tensors)
    summands = [torch.zeros_like(p) if t is None else t for t, p in zip(tensors, like, strict=True)]
    held = torch.tensor([t is not None for t in tensors]).to(like[0])
    flat = torch.cat([t.reshape(-1) for t in (*summands, held)])
    dist.all_reduce(flat)
    flat.div_(processes.count)
    *means, held = flat.split([t.numel() for t in (*summands, held)])
    torch._foreach_copy_(summands, [mean.view_as(t) for mean, t in zip(means, summands, strict=True)])
    return [t if share else None for t, share in zip(summands, held.tolist(), strict=True)]


def _aligned_head(model: nn.Module) -> Forwards:
    """On a GPU, a forward pass for a map to logits whose vocabulary is not a multiple of what suits products there."""
    head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    if type(head) is not nn.Linear or not one_pass(head.weight) or "forward" in vars(head):
        return {}
    return {head: lambda h: aligned_logits(h, head.weight, head.bias)}


@contextmanager
def _one_sequence_per_row() -> Iterator[None]:
    """Windows hold one sequence each. transformers would ask the device, which takes a wait and cannot be recorded."""
    present = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = present


def _sum(total: list[Tensor | None] | None, more: list[Tensor | None]) -> list[Tensor | None]:
    if total is None:
        return more
    return [b if a is None else a if b is None else a.add_(b) for a, b in zip(total, more, strict=True)]


def _mixed(seed: int, purpose: int, step: int, place: int) -> int:
    """A seed for one draw, from what it is for; distinct for all that a run can ask for."""
    word = 0
    for number in (seed, purpose, step, place):
        # The finalizer of SplitMix64, which spreads every bit of its input over all of its output.
        word = (word ^ number) + 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
        word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        word = (word ^ word >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
        word ^= word >> 31
    return word >> 1
