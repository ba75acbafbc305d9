"""`flashbob-curv bench model`: whole models with random weights, every measurement in a process of its own.

A process measures one model at one length with one attention: forward, backward and whole-graph product, or the
streamed product's first and further directions. It reports each row as soon as it has it, so that memory that runs out,
or a process that dies, costs the rows that were still to come and nothing else.
"""

from __future__ import annotations

import itertools
import multiprocessing
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModelForCausalLM, PreTrainedModel

from cli.bench import ATTENTIONS, ModelOptions, Rows, integers, names
from cli.console import memory
from cli.failure import is_out_of_memory
from cli.session import choose_device, choose_dtype
from cli.timing import collect, timed
from curvature import CausalLMLoss, HessianOperator, load_model
from curvature.capture import CAPTURED_TOKENS
from curvature.models import architectures
from curvature.positions import extend
from curvature.report import Measurement
from flashbob import register_attention

__all__ = ["Task", "perform", "run"]

EMBEDDED = "tiny"
PAPER_MODELS = (
    "gpt2,gpt2-medium,gpt2-large,pythia-160m,pythia-410m,llama-3.2-1b,smollm2-135m,smollm2-360m,qwen2.5-1.5b,"
    "granite-3.1-1b-a400m"
)
DEFAULTS = {"cuda": (PAPER_MODELS, "4096"), "cpu": (EMBEDDED, "256,1024")}
"""Models and lengths, by device."""

METHODS = {
    "whole": ("forward", "forward_backward", "hvp_whole"),
    "streamed": ("hvp_streamed_first", "hvp_streamed_further", "hvp_streamed_next"),
}
"""What a process measures, in order: the least memory first.

Of streamed products the first direction of all, a further one of the same batch, and the first one of a next batch of
the same shape, up to the length where such batches share recorded launches."""

GATE_SEQ = 64
LIMITS = {torch.bfloat16: 0.1, torch.float32: 1e-3, torch.float64: 1e-9}
"""Largest relative error of loss, gradient and product at `GATE_SEQ` tokens.

Rounding alone makes 1.5e-2 in bfloat16 (GPT-2, 8,192 tokens), and 1e-5 in float32."""

WARM_TOKENS = 32768
"""Up to here a first run is not counted; beyond, it takes seconds and weighs nothing against them."""

HEAD = f"{'N':>8} {'B':>2} {'model':<20} {'attention':<9} {'measurement':<21} {'p50 ms':>10} {'peak':>10} {'error':>8}"


@dataclass(frozen=True)
class Task:
    """What one process measures.

    Attributes:
        model: Built-in architecture, or "tiny".
        seq: Tokens per sequence.
        batch: Sequences.
        attention: "flashbob", "sdpa" (its choice of kernel for forward and backward, its math path for the product, as
            nothing else of it can be differentiated twice) or "eager".
        method: Key of `METHODS`.
        dtype: Of the parameters.
        device: Where.
        seed: Of weights, tokens and direction.
        reps: Repetitions at most.
    """

    model: str
    seq: int
    batch: int
    attention: str
    method: str
    dtype: torch.dtype
    device: torch.device
    seed: int
    reps: int

    def measurements(self) -> tuple[str, ...]:
        """What is measured, in order."""
        long = self.seq * self.batch > CAPTURED_TOKENS
        return tuple(op for op in METHODS[self.method] if not (long and op == "hvp_streamed_next"))

    def as_row(self, op: str) -> dict[str, Any]:
        """The fields that say what a row is about; figures that it does not have are null."""
        figures = ("ms_p20", "ms_p50", "ms_p80", "tflops", "cublas_tflops", "cublas_fraction", "peak_bytes", "error")
        return {
            "op": op,
            "backend": self.attention,
            "model": self.model,
            "B": self.batch,
            "N": self.seq,
            "dtype": str(self.dtype).removeprefix("torch."),
            "causal": True,
            "window": 0,
            **dict.fromkeys(("H_Q", "H_KV", "D", "parameters")),
            **dict.fromkeys(figures),
        }


def run(options: ModelOptions) -> None:
    """Measure and record every model at every length, shortest first."""
    device = choose_device(options.device)
    dtype = choose_dtype(options.dtype, device)
    usual_models, usual_seqs = DEFAULTS[device.type]
    models = names("--models", options.models or usual_models, [EMBEDDED, *architectures()])
    attentions = names("--attentions", options.attentions, ATTENTIONS)
    seqs = integers("--seqs", options.seqs or usual_seqs, least=GATE_SEQ)
    ends = None if options.budget_seconds is None else time.monotonic() + options.budget_seconds
    first = Task("", 0, options.batch, "", "", dtype, device, options.seed, options.reps)
    new: list[dict[str, Any]] = []
    with Measurement("cpu") as whole:
        settings = {"dtype": dtype, "device": device, "models": models, "seqs": seqs}
        rows = Rows("bench model", options, settings, device, whole)
        rows.say(HEAD)

        def measured(task: Task) -> bool:
            """Whether everything of a task could be measured."""
            found = perform(task, ends, rows.skip)
            for row in found:
                new.append(row)
                rows.add(row, line(row))
            return bool(found) and all(row["status"] == "ok" for row in found)

        kinds = [(a, m) for a in attentions for m in METHODS if a == "flashbob" or m == "whole"]
        for seq in sorted(seqs):
            for model in models:
                for attention, method in kinds:
                    measured(replace(first, model=model, seq=seq, attention=attention, method=method))
        if options.longest:
            for model in models:
                for attention, method in kinds:
                    seq = 2 * max(seqs)
                    while measured(replace(first, model=model, seq=seq, attention=attention, method=method)):
                        seq *= 2
        rows.finish(new)


def perform(task: Task, ends: float | None, skip: Callable[[str], None]) -> list[dict[str, Any]]:
    """Run a task in a process of its own.

    Args:
        task: What to measure.
        ends: Value of `time.monotonic()` at which no time is left, or None.
        skip: Told what was not measured because time ran out.

    Returns:
        One row per measurement that was made or that failed.
    """
    name = f"{task.model}, {task.seq} tokens, {task.attention}, {task.method}"
    if ends is not None and time.monotonic() >= ends:
        skip(name)
        return []
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(task, there))
    process.start()
    there.close()
    rows: list[dict[str, Any]] = []
    try:
        while here.poll(None if ends is None else max(0.0, ends - time.monotonic())):
            rows.append(here.recv())
    except EOFError:
        process.join()
    else:
        skip(name)
        return rows
    finally:
        process.kill()
        process.join()
        here.close()
    return rows + [_lost(task, op, process.exitcode) for op in task.measurements()[len(rows) :]]


def _lost(task: Task, op: str, exitcode: int | None) -> dict[str, Any]:
    """The row of a measurement whose process died; SIGKILL is how a system short of memory ends one."""
    status = "oom" if exitcode == -9 else "failed"
    return task.as_row(op) | {"status": status, "reason": f"the process ended with exit code {exitcode}"}


def _work(task: Task, rows: Connection) -> None:
    """The process: one row per measurement of the task's method, in order."""
    facts: dict[str, Any] = {}
    try:
        subject = Subject.make(task)
        facts = subject.facts()
        errors = subject.errors()
    except Exception as error:
        for op in task.measurements():
            rows.send(task.as_row(op) | facts | _failure(error))
        return
    for op in task.measurements():
        row = task.as_row(op) | facts
        try:
            row |= {"error": errors[op]} | subject.measure(op)
            row["status"] = "ok"
        except Exception as error:
            row |= _failure(error)
        limit = float("inf") if subject.routed else LIMITS[task.dtype]
        if not errors[op] <= limit:  # NaN fails
            row |= {"status": "inaccurate", "reason": f"error {errors[op]:.1e} at {GATE_SEQ} tokens, limit {limit:.0e}"}
        rows.send(row)
        collect(task.device)


def _failure(error: Exception) -> dict[str, Any]:
    reason = " ".join(str(error).split())[:300]
    error.__traceback__ = None  # its frames hold the tensors that did not fit
    if isinstance(error, NotImplementedError):
        return {"status": "unsupported", "reason": reason}
    if is_out_of_memory(error):
        return {"status": "oom", "reason": reason}
    return {"status": "failed", "reason": f"{type(error).__name__}: {reason}"}


@dataclass
class Subject:
    """A model and a batch to measure."""

    task: Task
    model: PreTrainedModel
    loss: CausalLMLoss = field(default_factory=CausalLMLoss)
    operator: HessianOperator | None = None

    @classmethod
    def make(cls, task: Task) -> Subject:
        """The model of a task, its random weights drawn on the device.

        Records of other commands draw them on the CPU, where a seed gives the same ones everywhere; for times and
        memory it does not matter, and a billion of them would take most of the time.
        """
        if task.model == EMBEDDED:
            loaded = load_model(
                EMBEDDED, dtype=task.dtype, device=task.device, seq=task.seq, attention=task.attention, seed=task.seed
            )
            return cls(task, loaded.model)
        register_attention()
        config = architectures()[task.model].configuration()
        config.use_cache = False
        torch.manual_seed(task.seed)
        with torch.device(task.device):
            model = AutoModelForCausalLM.from_config(config, dtype=task.dtype, attn_implementation=task.attention)
        extend(model, task.seq, "interpolate")
        return cls(task, model.eval())

    @property
    def routed(self) -> bool:
        """Whether tokens choose experts: rounding then changes which ones, and no error tells right from wrong."""
        return getattr(self.model.config, "num_local_experts", 0) > 0

    def facts(self) -> dict[str, Any]:
        """Fields of a row about the model."""
        config = self.model.config
        heads = config.num_attention_heads
        return {
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "H_Q": heads,
            "H_KV": getattr(config, "num_key_value_heads", None) or heads,
            "D": getattr(config, "head_dim", None) or config.hidden_size // heads,
        }

    def batch(self, seq: int, number: int = 0) -> dict[str, Tensor]:
        """Random tokens."""
        generator = torch.Generator().manual_seed(self.task.seed + number)
        ids = torch.randint(self.model.config.vocab_size, (self.task.batch, seq), generator=generator)
        return {"input_ids": ids.to(self.task.device)}

    def direction(self) -> Tensor:
        """A normal direction over all parameters."""
        size = sum(p.numel() for p in self.model.parameters())
        generator = torch.Generator(self.task.device).manual_seed(self.task.seed)
        dtype = torch.float64 if self.task.dtype == torch.float64 else torch.float32
        return torch.randn(size, generator=generator, dtype=dtype, device=self.task.device)

    def twice_differentiable(self) -> AbstractContextManager[object]:
        """Inside it, PyTorch's fused attention takes the path that has a second derivative."""
        return sdpa_kernel(SDPBackend.MATH) if self.task.attention == "sdpa" else nullcontext()

    def errors(self) -> dict[str, float]:
        """Relative error by measurement on a few tokens, against eager attention and the whole graph in more digits.

        In float32 for 16-bit models, else in float64. It warms up, too.
        """
        task, batch, v = self.task, self.batch(GATE_SEQ), self.direction()
        more = torch.float32 if task.dtype == torch.bfloat16 else torch.float64
        self._cast(more, "eager")
        exact = self._derivatives(batch, v.to(torch.promote_types(more, torch.float32)), "whole")
        self._cast(task.dtype, task.attention)
        with self.twice_differentiable():
            found = self._derivatives(batch, v, task.method)
        loss, gradient, product = (
            float((f.double() - e.double()).norm() / e.double().norm()) for f, e in zip(found, exact, strict=True)
        )
        collect(task.device)
        return dict.fromkeys(METHODS["streamed"], product) | {
            "forward": loss,
            "forward_backward": gradient,
            "hvp_whole": product,
        }

    def _cast(self, dtype: torch.dtype, attention: str) -> None:
        """Parameters only: rotary frequencies stay what they are."""
        for parameter in self.model.parameters():
            parameter.data = parameter.data.to(dtype)
        self.model.set_attn_implementation(attention)

    def _derivatives(self, batch: Mapping[str, Any], v: Tensor, method: Any) -> tuple[Tensor, Tensor, Tensor]:
        operator = HessianOperator(self.model, [batch], loss=self.loss, method=method)
        gradient = operator.gradient()
        return torch.tensor(operator.loss_value()), gradient, operator @ v

    def measure(self, op: str) -> dict[str, Any]:
        """Time and peak memory of one measurement, as fields of a row.

        Peak memory is all that PyTorch held on a GPU, weights included; on a CPU the process's resident memory.
        """
        task = self.task
        # The second product of a short batch records its launches, once.
        warmup = 1 if task.seq * task.batch <= WARM_TOKENS else 0
        steps = {"forward": self._forward, "forward_backward": self._backward}
        setup = time.perf_counter()
        run = steps[op]() if op in steps else self._product(op)
        setup = time.perf_counter() - setup
        collect(task.device)
        context = self.twice_differentiable() if op == "hvp_whole" else nullcontext()
        with context, Measurement(task.device) as used:
            spent = timed(run, task.device, reps=task.reps, least=1, warmup=warmup)
        figures = spent.as_row() | {"peak_bytes": used.peak_memory_bytes}
        return figures if op in steps else figures | {"setup_seconds": setup}

    def _forward(self) -> Callable[[], object]:
        batch = self.batch(self.task.seq)

        def forward() -> None:
            with torch.no_grad():
                self.loss(self.model, batch)

        return forward

    def _backward(self) -> Callable[[], object]:
        batch, parameters = self.batch(self.task.seq), list(self.model.parameters())

        def backward() -> None:
            total, tokens = self.loss(self.model, batch)
            torch.autograd.grad(total / tokens, parameters, allow_unused=True)

        return backward

    def _product(self, op: str) -> Callable[[], object]:
        v = self.direction()
        if op == "hvp_streamed_further" and self.operator is not None:
            operator = self.operator  # what its first direction left is what makes this one a further one
            return lambda: operator @ v
        if op == "hvp_streamed_next" and self.operator is not None:
            operator, others = self.operator, itertools.cycle([self.batch(self.task.seq, i) for i in (1, 2)])

            def next_batch() -> None:
                operator.batches[0] = next(others)
                operator @ v

            return next_batch
        method: Any = "whole" if op == "hvp_whole" else "streamed"
        operator = HessianOperator(self.model, [self.batch(self.task.seq)], loss=self.loss, method=method)
        self.operator = operator

        def product() -> None:
            operator.release()
            operator @ v

        return product


def line(row: Mapping[str, Any]) -> str:
    """A row as a line under `HEAD`."""
    text = f"{row['N']:>8} {row['B']:>2} {row['model']:<20} {row['backend']:<9} {row['op']:<21}"
    if row["status"] != "ok":
        return f"{text} {row['status']}: {row['reason'][:120]}"
    return f"{text} {row['ms_p50']:>10.1f} {memory(row['peak_bytes']):>10} {row['error']:>8.1e}"
