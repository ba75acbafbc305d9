"""From a model and calibration text to a plan, and from there to a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from curvature.estimate import Progress
from curvature.loss import Batch, Loss
from curvature.operators import Method
from quant.allocation import Problem, allocate, make_plan
from quant.autoround import AutoRoundQuantizer
from quant.candidates import Candidates, round_all
from quant.checkpoint import Export, UnreadableError, Written, packable, write_checkpoint
from quant.gguf_file import check_gguf, write_gguf
from quant.gptq import GptqQuantizer
from quant.inputs import input_grams
from quant.plan import Plan, fixed_formats, uniform_plan
from quant.relinearization import Relinearization, relinearize
from quant.scheme import Scheme, schemes
from quant.sensitivity import METRICS, Metric, Sensitivity, sensitivity
from quant.storage import GgufStorage, PackedStorage, Storage
from quant.weights import find_weights, sharing_groups

__all__ = ["Decision", "QuantizedModel", "Settings", "quantize_model"]

Decision: TypeAlias = Metric | Literal["relinearized", "uniform"]
DECISIONS: tuple[str, ...] = (*METRICS, "relinearized", "uniform")

Watch: TypeAlias = Callable[[str], AbstractContextManager[Progress]]
"""Gives a progress function for a named stretch of work."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a model is quantized.

    Attributes:
        bits: Budget: average bits per code of the quantized weights.
        bytes: Budget: size of the weights file, unquantized tensors, scales and header included; for export "dense" of
            the packed file that it stands for.
        max_loss_rise: Budget: predicted rise in nats per token; fewest bytes below it.
        metric: What decides; "relinearized" starts from the best of the `starts` and "uniform".
        starts: Static metrics whose plans "relinearized" may start from; the first one's predictions are reported.
        choices: Bits to choose from.
        group_sizes: Columns per scale to choose from; -1: one scale per row.
        symmetric: Whether formats have no zero points.
        quantizer: "rtn" (round to nearest), "gptq", or "autoround" (`quant.autoround`, its package needed).
        fixed: {regular expression: format} of weights that are not chosen for.
        include: Which weights; see `quant.weights.find_weights`.
        share: Whether weights that engines fuse share a format.
        export: What the result will be written as; it decides sizes.
        storage_dtype: Dtype of scales and unquantized tensors; None: the model's, float16 for "gguf".
        draws: Sign vectors per batch for "quadratic" and "taylor".
        probes: Probe vectors for "trace".
        redraws: Redrawn allocations for the stability table.
        relinearization: Settings of the search.
        method: How Hessian products are computed.
        seed: Seed of all that is drawn.

    Raises:
        ValueError: If a name is unknown or not exactly one budget is given.
    """

    bits: float | None = None
    bytes: int | None = None
    max_loss_rise: float | None = None
    metric: Decision = "relinearized"
    starts: tuple[Metric, ...] = ("quadratic", "fisher")
    choices: tuple[int, ...] = (2, 3, 4, 5, 6, 8)
    group_sizes: tuple[int, ...] = (64,)
    symmetric: bool = True
    quantizer: Literal["rtn", "gptq", "autoround"] = "rtn"
    fixed: Mapping[str, Scheme] = field(default_factory=dict)
    include: str | None = None
    share: bool = True
    export: Export = "compressed-tensors"
    storage_dtype: torch.dtype | None = None
    draws: int = 2
    probes: int = 24
    redraws: int = 0
    relinearization: Relinearization = field(default_factory=Relinearization)
    method: Method = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        for name, known in (("metric", DECISIONS), ("quantizer", ("rtn", "gptq", "autoround")),
                            ("export", get_args(Export))):  # fmt: skip
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}")
        if not self.starts or not set(self.starts) <= set(METRICS):
            raise ValueError(f"starts must be some of {', '.join(METRICS)}, got {self.starts}")
        budgets = {name: getattr(self, name) for name in ("bits", "bytes", "max_loss_rise")}
        given = {name: value for name, value in budgets.items() if value is not None}
        if len(given) != 1:
            raise ValueError(f"give exactly one budget of bits, bytes and max_loss_rise, got {given or 'none'}")
        if self.metric == "relinearized" and self.max_loss_rise is not None:
            raise ValueError(
                "max_loss_rise: the re-linearized search keeps a size and lowers the loss; choose metric "
                "'quadratic' for a ceiling of the loss, or give bits or bytes"
            )
        if self.metric == "uniform" and self.bits not in self.choices:
            raise ValueError(f"metric 'uniform' needs bits to be one of the choices {self.choices}, got {self.bits}")


@dataclass(eq=False)
class QuantizedModel:
    """A model with a plan; its weights are those of the plan, everything else is as it was.

    Attributes:
        model: The model.
        problem: Candidates, sizes, groups.
        plan: The decision.
        scores: The tables that were computed on the way, by metric.
        settings: How.
        notices: Remarks for the report.
        calibration: The batches that scores were taken over: those that decide about steps of the search are not among
            them.
    """

    model: PreTrainedModel
    problem: Problem
    plan: Plan
    scores: dict[str, Sensitivity]
    settings: Settings
    notices: list[str]
    calibration: Sequence[Batch]

    @property
    def candidates(self) -> Candidates:
        """The weights at all options."""
        return self.problem.candidates

    def restore(self) -> None:
        """Give the model its unquantized weights back."""
        self.candidates.restore()

    def write(
        self, folder: str | Path, tokenizer: PreTrainedTokenizerBase | None = None, check: Batch | None = None
    ) -> Written:
        """Write a checkpoint; see `quant.checkpoint.write_checkpoint` and `quant.gguf_file.write_gguf`.

        A model that packed formats do not cover, or that transformers does not read packed, is written dense, with a
        notice.

        Raises:
            quant.checkpoint.CheckpointError: If what was read back differs, or the file has another size than the plan.
        """
        export = self.settings.export
        if export == "gguf":
            written = write_gguf(self.model, tokenizer, self.candidates, self.plan.choices, folder)
            if written.bytes != self.plan.bytes:
                self.notices.append(
                    f"the file has {written.bytes:,} bytes where the plan says {self.plan.bytes:,}: it was planned "
                    "with another tokenizer"
                )
            return written
        reason = packable(self.candidates.weights, self.plan.schemes) if export == "compressed-tensors" else None
        if export == "compressed-tensors" and reason is None:
            try:
                return self._write(folder, tokenizer, check, export)
            except UnreadableError:
                reason = f"transformers does not read packed weights of {type(self.model).__name__}"
        self.notices.append(
            f"{f'{reason}; ' if reason else ''}the checkpoint is dense, its rounded weights in "
            f"{_dtype_name(self.dtype)}, and the plan's bytes are those of a packed one"
        )
        return self._write(folder, tokenizer, check, "dense")

    def _write(
        self, folder: str | Path, tokenizer: PreTrainedTokenizerBase | None, check: Batch | None, export: Export
    ) -> Written:
        return write_checkpoint(
            self.model, tokenizer, self.candidates, self.plan.choices, folder, export=export, dtype=self.dtype,
            check=check,
        )  # fmt: skip

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of stored scales and unquantized tensors."""
        return storage_dtype(self.model, self.settings)


def quantize_model(
    model: PreTrainedModel,
    batches: Sequence[Batch],
    settings: Settings,
    *,
    held_out: Sequence[Batch] | None = None,
    rounding: Sequence[Batch] | None = None,
    loss: Loss | None = None,
    cache: str | Path | None = None,
    watch: Watch | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> QuantizedModel:
    """Round every weight to every option, score, allocate, and set the model to the plan.

    Args:
        model: An unquantized causal language model; on return its weights are rounded, see `QuantizedModel.restore`.
        batches: Calibration batches of equal size.
        settings: See `Settings`.
        held_out: For "relinearized": batches that decide whether a step is taken; None: a quarter of `batches`, the
            last ones, which are then not used for anything else.
        rounding: For "gptq" and "autoround": batches that they round by, of other text than `batches`; None: `batches`
            themselves. Errors that were made small on some text look harmless there, and predictions become too low.
        loss: The loss; `curvature.CausalLMLoss` if None.
        cache: A folder for score files, reused for any budget.
        watch: Gives a progress function for each stretch of work.
        tokenizer: For "gguf", whose file holds the vocabulary: the one that the checkpoint will be written with.

    Returns:
        See `QuantizedModel`.

    Raises:
        ValueError: For settings that do not fit the model; the message names the remedy.
        quant.choice.InfeasibleError: If the budget is too small; the message names the smallest.
    """
    watch = watch or _unwatched
    _check_batches(batches, settings, held_out)
    if held_out is None and settings.metric == "relinearized":
        kept = max(1, len(batches) // 4)
        batches, held_out = batches[:-kept], batches[-kept:]
    if settings.export == "gguf":
        check_gguf(model, tokenizer)
    problem, notices = make_problem(model, batches if rounding is None else rounding, settings, watch, tokenizer)
    if settings.quantizer != "rtn" and settings.metric != "uniform":
        notices.append(
            f"scores are taken on the text that {settings.quantizer} has rounded by, where its errors look harmless: "
            "predicted rises are too low"
            if rounding is None
            else f"{settings.quantizer} rounds by {len(rounding)} batches of other text than scores are taken on"
        )
    if settings.bits is not None and settings.bits > max(settings.choices):
        notices.append(f"{settings.bits:g} bits are more than the largest choice, {max(settings.choices)} bits")
    if settings.metric != "uniform" and settings.max_loss_rise is None:
        problem.limit(settings.bits, settings.bytes)  # an infeasible budget is told before the long work
    scores: dict[str, Sensitivity] = {}
    if settings.metric == "uniform":
        choices = uniform_plan(problem.candidates, int(settings.bits or 0))
        plan = make_plan(problem, choices, "uniform", {"bits": float(settings.bits or 0)}, None)
        if settings.fixed and plan.average_bits > plan.budget["bits"]:
            notices.append(
                f"uniform {settings.bits:g} bits and the fixed formats are {plan.average_bits:.3g} bits on average, "
                "more than the budget; other metrics keep within it"
            )
    else:
        static = _static(settings, problem)
        for metric in static:
            scores[metric] = score(model, problem.candidates, batches, metric, settings, loss, cache, watch)
        plans = [_allocated(scores[metric], problem, settings) for metric in static]
        plan = plans[0]
    if settings.metric == "relinearized":
        with watch("re-linearization") as progress:
            found = relinearize(
                model, problem, [*plans, *_uniform(problem, plan, settings)], batches, held_out or [],
                settings=settings.relinearization, loss=loss, method=settings.method, progress=progress,
            )  # fmt: skip
        stability = plan.facts.get("stability")
        if stability is not None:  # of a plan that the search has left
            stability |= {"metric": plan.metric, "bits": [scheme.bits for scheme in plan.schemes]}
        facts = {**found.facts, "stability": stability}
        predictions = scores[plan.metric]
        plan = make_plan(problem, found.choices, "relinearized", found.budget, predictions, facts)
    problem.candidates.apply(plan.choices)
    return QuantizedModel(model, problem, plan, scores, settings, notices, batches)


def make_problem(
    model: PreTrainedModel, batches: Sequence[Batch], settings: Settings, watch: Watch | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> tuple[Problem, list[str]]:  # fmt: skip
    """Round every weight to every option, by these batches where the quantizer looks at any.

    Returns:
        The problem, and remarks on weights that needed something else than what was asked for.
    """
    watch = watch or _unwatched
    weights = find_weights(model, settings.include)
    groups = sharing_groups(weights) if settings.share else [(i,) for i in range(len(weights))]
    dtype = storage_dtype(model, settings)
    quantizer: GptqQuantizer | AutoRoundQuantizer | None = None
    if settings.quantizer == "gptq":
        with watch("inputs") as progress:
            grams = input_grams(model, weights, batches, progress=progress)
        quantizer = GptqQuantizer(grams, scale_dtype=dtype)
    elif settings.quantizer == "autoround":
        quantizer = AutoRoundQuantizer(model, batches, scale_dtype=dtype, seed=settings.seed)
    options = schemes(settings.choices, settings.group_sizes, (settings.symmetric,))
    fixed = fixed_formats([w.name for w in weights], settings.fixed)
    candidates = round_all(weights, options, quantizer=quantizer, scale_dtype=dtype, fixed=fixed, groups=groups)
    notices = list(quantizer.notices) if quantizer is not None else []
    if candidates.replaced:
        notices.append(
            f"{len(candidates.replaced)} weights have columns that no group size of {settings.group_sizes} divides, "
            f"such as {candidates.replaced[0]}; they take one scale per row"
        )
    storage: Storage
    if settings.export == "gguf":
        storage = GgufStorage(model, weights, tokenizer)
        for t in range(len(weights)):
            for b in candidates.available(t):
                storage.weight_bytes(weights[t], candidates.options[b])
    else:
        storage = PackedStorage(model, weights, dtype)
    return Problem(candidates, storage, tuple(groups)), notices


def score(
    model: nn.Module, candidates: Candidates, batches: Sequence[Batch], metric: Metric, settings: Settings,
    loss: Loss | None = None, cache: str | Path | None = None, watch: Watch | None = None,
) -> Sensitivity:  # fmt: skip
    """One table of scores at the unquantized model, from the cache where it holds the answer."""
    path = None
    if cache is not None:
        Path(cache).mkdir(parents=True, exist_ok=True)
        path = Path(cache) / f"sensitivity-{metric}-{settings.quantizer}.safetensors"
    with (watch or _unwatched)(f"sensitivity: {metric}") as progress:
        return sensitivity(
            model, candidates, batches, metric, loss=loss, draws=settings.draws, probes=settings.probes,
            seed=settings.seed, method=settings.method, cache=path, progress=progress,
        )  # fmt: skip


def storage_dtype(model: nn.Module, settings: Settings) -> torch.dtype:
    """Dtype of stored scales and unquantized tensors."""
    if settings.export == "gguf":
        return torch.float16
    return settings.storage_dtype or next(model.parameters()).dtype


def _static(settings: Settings, problem: Problem) -> list[Metric]:
    """The static metrics to score by."""
    if settings.metric in ("relinearized", "uniform"):
        stacked = any(w.layout == "experts" for w in problem.candidates.weights)
        kept: list[Metric] = [m for m in settings.starts if not (m == "fisher" and stacked)]
        return kept or [settings.starts[0]]
    return [m for m in METRICS if m == settings.metric]


def _allocated(scores: Sensitivity, problem: Problem, settings: Settings) -> Plan:
    return allocate(
        scores, problem, bits=settings.bits, bytes=settings.bytes, max_loss_rise=settings.max_loss_rise,
        redraws=settings.redraws, seed=settings.seed,
    )  # fmt: skip


def _uniform(problem: Problem, static: Plan, settings: Settings) -> list[Plan]:
    """The uniform plan, where it keeps within the budget and the groups."""
    if settings.bits is None or settings.bits not in settings.choices:
        return []
    choices = uniform_plan(problem.candidates, int(settings.bits))
    limit = problem.limit(settings.bits, None)
    shared = all(choices[i] == choices[members[0]] for members in problem.groups for i in members)
    if not shared or limit.total(np.array([choices[members[0]] for members in problem.groups])) > limit.most:
        return []
    return [make_plan(problem, choices, "uniform", static.budget, None)]


def _check_batches(batches: Sequence[Batch], settings: Settings, held_out: Sequence[Batch] | None) -> None:
    needed = 2 if settings.metric == "relinearized" and held_out is None else 1
    if len(batches) < needed:
        raise ValueError(
            f"batches: metric {settings.metric!r} needs at least {needed} calibration batches, got {len(batches)}; "
            "some of them decide whether a step is taken"
        )


def _unwatched(_what: str) -> AbstractContextManager[Any]:
    return nullcontext(lambda _done, _total, _status: None)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
