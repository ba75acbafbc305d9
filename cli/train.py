"""`flashbob-curv train`: language-model training with AdamW or Sophia-H."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from tqdm import tqdm

from cli.console import leads, notice, show_json, show_table, show_written
from cli.failure import at_end, how_to_go_on
from cli.options import Method, RunOptions
from cli.train_report import median, median_step, training_table

if TYPE_CHECKING:
    import torch

    from curvature import LoadedModel
    from curvature.distributed import Processes
    from curvature.state import RunState
    from curvature.training import Training
    from curvature.training_settings import TrainingSettings
    from curvature.training_text import TrainingText

__all__ = ["TrainOptions", "train"]


class OptimizerName(StrEnum):
    """Who updates the weights."""

    adamw = "adamw"
    sophia = "sophia"


class AttentionName(StrEnum):
    """How attention is differentiated."""

    flashbob = "flashbob"
    math = "math"
    hybrid = "hybrid"


class CurvatureName(StrEnum):
    """What divides Sophia-H's momentum."""

    diagonal = "diagonal"
    row_norm = "row-norm"


DEFAULTS: dict[str, dict[str, float]] = {
    "adamw": {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8},
    "sophia": {"lr": 4e-4, "beta1": 0.96, "beta2": 0.99, "eps": 1e-12},
}
"""Settings by optimizer: of the paper's AdamW reference, and of Sophia's authors."""


@dataclass(frozen=True, kw_only=True)
class TrainOptions(RunOptions):
    """Options of `train`."""

    max_steps: Annotated[int, typer.Option(min=1, help="Steps of the whole schedule.")] = 200
    optimizer: Annotated[OptimizerName, typer.Option(help="Who updates the weights.")] = OptimizerName.sophia
    attention: Annotated[
        AttentionName,
        typer.Option(
            help="`math`: PyTorch's math path throughout. `hybrid`: fused first derivatives, math path for the second."
        ),
    ] = AttentionName.flashbob
    data: Annotated[
        str,
        typer.Option(
            help="`sample` (shipped), .txt, .jsonl or .parquet files separated by commas, or "
            "hub:DATASET[:CONFIG[:SPLIT]], which is streamed."
        ),
    ] = "sample"
    params: Annotated[str | None, typer.Option(help="Regular expression: train only the parameters it finds.")] = None
    batches: Annotated[
        int, typer.Option(min=1, help="Batches that a step adds up in each process (gradient accumulation).")
    ] = 1
    lr: Annotated[float | None, typer.Option(help="Peak rate. [default: 1e-3 for adamw, 4e-4 for sophia]")] = None
    min_lr: Annotated[float | None, typer.Option(help="Rate of the last step. [default: a tenth of --lr]")] = None
    warmup: Annotated[
        int | None, typer.Option(min=0, help="Steps of linear warmup. [default: a tenth of the steps, 150 at most]")
    ] = None
    beta1: Annotated[float | None, typer.Option(help="Decay of the momentum. [default: 0.9, sophia 0.96]")] = None
    beta2: Annotated[float | None, typer.Option(help="Decay of the divisor. [default: 0.95, sophia 0.99]")] = None
    eps: Annotated[float | None, typer.Option(help="Least divisor. [default: 1e-8, sophia 1e-12]")] = None
    weight_decay: Annotated[float, typer.Option(help="Decoupled decay of matrices.")] = 0.1
    clip: Annotated[float, typer.Option(help="Bound on the gradient's norm; 0: none.")] = 1.0
    gamma: Annotated[float, typer.Option(help="Sophia: share of the curvature that divides the momentum.")] = 0.01
    rho: Annotated[float, typer.Option(help="Sophia: bound on the update's entries.")] = 1.0
    curvature: Annotated[
        CurvatureName,
        typer.Option(help="Sophia: estimate of the Hessian's `diagonal`, as published, or of the norms of its rows."),
    ] = CurvatureName.diagonal
    hessian_every: Annotated[int, typer.Option(min=1, help="Sophia: steps between Hessian estimates.")] = 10
    hessian_batches: Annotated[
        int | None, typer.Option(min=1, help="Sophia: batches of an estimate, in all. [default: one per process]")
    ] = None
    dropout: Annotated[float, typer.Option(help="Rate of every dropout; estimates and evaluations are without.")] = 0.0
    eval_data: Annotated[
        str | None, typer.Option(help="Held-out text. [default: the end of files, the beginning of a stream]")
    ] = None
    eval_every: Annotated[int, typer.Option(min=0, help="Steps between evaluations; 0: only at the end.")] = 0
    eval_batches: Annotated[int, typer.Option(min=1, help="Batches of an evaluation, at most.")] = 32
    save_every: Annotated[int, typer.Option(min=1, help="Steps between saved states, for --resume.")] = 100
    checkpoint_every: Annotated[int, typer.Option(min=0, help="Steps between stored models; 0: only the last.")] = 0


@dataclass(frozen=True)
class _Run:
    """What a run works on."""

    out: Path
    loaded: LoadedModel
    model: dict[str, Any]
    text: TrainingText
    training: Training
    settings: dict[str, Any]
    processes: Processes
    state: RunState


def train(options: TrainOptions) -> None:
    """Train a causal language model on text, with AdamW or with Sophia-H and exact Hessian products.

    Writes model/ (weights and tokenizer), train.json and train.png into --out. With --dtype bfloat16, the default on a
    GPU, the model runs under autocast and its weights stay in float32. --data takes several files separated by commas;
    a hub dataset is streamed. --random-init trains from scratch. An interrupted run goes on exactly with --resume;
    under torchrun every process takes its share of each step.
    """
    from curvature.distributed import join, leave
    from curvature.report import Measurement

    at_end(leave)
    processes = join()
    run = processes.together(lambda: _open(options, processes))
    training = run.training
    device = next(training.model.parameters()).device
    with Measurement(device) as measurement, _bar(options.max_steps, training) as shown:

        def report(step: int, loss: float, tokens: int, seconds: float) -> None:
            shown(step, loss, tokens, seconds)
            if options.checkpoint_every and step % options.checkpoint_every == 0 and processes.leads:
                _store_model(run.loaded, run.out / "checkpoints" / f"step-{step:06d}")

        try:
            training.run(run.state, report)
        except (FloatingPointError, NotImplementedError):
            how_to_go_on.set("")  # what is saved would come to the same end
            raise
    _finish(options, run, _record(run, measurement))


def _open(options: TrainOptions, processes: Processes) -> _Run:
    from cli.session import (
        DEFAULT_SEQ,
        choose_device,
        choose_dtype,
        own_context,
        repeat_products,
        show_given,
        writable_folder,
    )
    from curvature.state import weights_digest
    from curvature.training import Training
    from curvature.training_model import load_for_training
    from curvature.training_text import open_training_text
    from curvature.vectors import select_parameters

    out = options.out or Path("runs") / "train"
    if processes.leads:
        writable_folder(out)
    device = choose_device(options.device)
    if options.deterministic:
        repeat_products()
    torch_dtype = choose_dtype(options.dtype, device)
    settings, in_force = _settings(options, str(torch_dtype).removeprefix("torch."), processes)
    loaded, seq = load_for_training(
        options.model,
        lambda model: options.seq or min(DEFAULT_SEQ, own_context(model)),
        random_init=options.random_init,
        dtype=_weights_dtype(settings, torch_dtype),
        device=device,
        extend_positions=options.extend_positions.value,
        attention=options.attention.value,
        dropout=options.dropout,
        seed=options.seed,
    )
    parts = open_training_text(
        loaded.tokenizer,
        options.data,
        seq,
        held_out=options.eval_batches * options.batch,
        evaluation=options.eval_data,
        seed=options.seed,
    )
    chosen = set(select_parameters(loaded.model, options.params).values())
    for parameter in loaded.model.parameters():
        parameter.requires_grad_(parameter in chosen)
    training = Training(loaded.model, parts.training, parts.held_out, settings, processes=processes)
    shown = options.as_settings("resume") | in_force | {"seq": seq, "device": str(device), "out": out}
    for remark in loaded.notices:
        notice(remark)
    show_given(shown)
    model = loaded.info.as_record()
    if processes.leads:
        model["weights"] = weights_digest(loaded.model)
    facts = {"command": "train", "settings": shown, "model": model, "data": parts.training.as_record()}
    state = _open_state(out, options.resume, facts, next(loaded.model.parameters()).device, processes)
    return _Run(out, loaded, model, parts.training, training, shown, processes, state)


def _settings(options: TrainOptions, dtype: str, processes: Processes) -> tuple[TrainingSettings, dict[str, Any]]:
    """The loop's settings, and the options' values in force."""
    from curvature.training_settings import Schedule, TrainingSettings

    usual = DEFAULTS[options.optimizer]
    given = {name: getattr(options, name) for name in usual}
    force = {name: usual[name] if given[name] is None else given[name] for name in usual}
    floor = force["lr"] / 10 if options.min_lr is None else options.min_lr
    warmup = min(150, options.max_steps // 10) if options.warmup is None else options.warmup
    settings = TrainingSettings(
        schedule=Schedule(force["lr"], floor, warmup, options.max_steps),
        optimizer=options.optimizer.value,
        betas=(force["beta1"], force["beta2"]),
        eps=force["eps"],
        weight_decay=options.weight_decay,
        clip=options.clip,
        gamma=options.gamma,
        rho=options.rho,
        curvature=options.curvature.value,
        interval=options.hessian_every,
        estimates=options.hessian_batches or 0,
        batch=options.batch,
        accumulate=options.batches,
        evaluate_every=options.eval_every,
        save_every=options.save_every,
        attention=options.attention.value,
        streamed=options.method is Method.streamed,
        autocast=dtype == "bfloat16",
        dropout=options.dropout > 0,
        seed=options.seed,
    )
    method = "streamed" if settings.streamed else "whole"
    in_force: dict[str, Any] = force | {"min_lr": floor, "warmup": warmup, "dtype": dtype, "method": method}
    if options.optimizer is OptimizerName.sophia:
        in_force["hessian_batches"] = settings.estimates_of(processes.count)
    return settings, in_force


def _weights_dtype(settings: TrainingSettings, asked: Any) -> Any:
    import torch

    return torch.float32 if settings.autocast else asked


def _open_state(
    out: Path, resume: bool, facts: Mapping[str, Any], device: torch.device, processes: Processes
) -> RunState:
    """Continue or begin the saved state, and say which."""
    import torch

    from cli.session import NOT_COMPARED, end_if_finished, let_go
    from curvature.report import environment
    from curvature.state import RunState
    from flashbob import __version__

    versions = {"flashbob-curv": __version__, **environment(device), "processes": processes.count}
    if device.type == "cpu":
        versions["threads"] = torch.get_num_threads()  # how sums on a CPU are rounded depends on it
    compared = {name: value for name, value in facts["settings"].items() if name not in NOT_COMPARED}
    identity = {**facts, "settings": compared, "environment": versions}
    folder = out / "state" / "train"
    state = RunState.open(folder, identity, resume=resume, processes=processes)
    at_end(partial(let_go, state))
    saved = f"the state is saved in {folder}: the same command with --resume goes on from there"
    how_to_go_on.set(lambda: "" if state.empty else saved)
    if state.replaced is not None:
        notice(f"{folder} held the state of a run that did not end; it is now {state.replaced} until this run ends")
    if resume and not state.resumed:
        text = facts["data"]
        known = text if text["tokens"] else {"source": text["source"]}  # of a stream nothing has been read yet
        end_if_finished(out, {**facts, "data": known})
        notice(f"there is no state in {folder} to go on from; this run starts anew")
    elif state.resumed:
        notice(f"going on from {folder}, after {state.seconds_before:.1f} s")
    return state


@contextmanager
def _bar(steps: int, training: Training) -> Iterator[Callable[[int, float, int, float], None]]:
    """A bar over the steps on stderr: the loss, Sophia-H's share of bounded updates, tokens per second of this life."""
    with tqdm(
        total=steps,
        desc="train",
        unit="step",
        file=sys.stderr,
        mininterval=0.5,
        dynamic_ncols=True,
        disable=not leads(),
    ) as bar:
        before: list[dict[str, Any]] = []
        bounded = ""

        def shown(step: int, loss: float, tokens: int, seconds: float) -> None:
            nonlocal bounded
            history = training.result.history
            if "bounded_share" in history[-1]:
                bounded = f" {history[-1]['bounded_share']:.0%} at bound,"
            if not before:
                first = history[-2] if len(history) > 1 else {"tokens": 0, "seconds": 0.0}
                before.append(first)
                bar.initial = bar.n = step - 1
            rate = (tokens - before[0]["tokens"]) / max(seconds - before[0]["seconds"], 1e-9)
            bar.set_postfix_str(f"loss {loss:.4f},{bounded} {rate:,.0f} tokens/s", refresh=False)
            bar.update(step - bar.n)

        yield shown


def _record(run: _Run, measurement: Any) -> dict[str, Any]:
    from curvature.report import record

    result = run.training.result
    history = result.history
    content = record(
        "train",
        model=run.model,
        data=run.text.as_record(),
        settings=run.settings,
        measurement=measurement,
        device=next(run.loaded.model.parameters()).device,
        results={
            "history": history,
            "evaluation": result.evaluation,
            "tokens": history[-1]["tokens"],
            "tokens_per_second": history[-1]["tokens"] / history[-1]["seconds"],
            "seconds_per_step": median_step(history),
            "seconds_per_estimate": median([e["estimate_seconds"] for e in history if "estimate_seconds" in e]),
            "notices": run.loaded.notices,
        },
    )
    content["seconds"] += run.state.seconds_before
    content["environment"]["processes"] = run.processes.count
    return content


def _store_model(loaded: LoadedModel, folder: Path) -> None:
    """Write the model's folder, whole or not at all."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    beside = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    loaded.model.save_pretrained(beside)
    loaded.tokenizer.save_pretrained(beside)
    shutil.rmtree(folder, ignore_errors=True)
    beside.rename(folder)


def _finish(options: TrainOptions, run: _Run, content: dict[str, Any]) -> None:
    """Store the model, the picture and, last, the record; then the state is no longer needed."""
    from curvature.plots import figure_png
    from curvature.report import to_json, write_bytes, write_json
    from curvature.training_plot import training_figure

    paths = [run.out / "model", run.out / "train.png", run.out / "train.json"]

    def store() -> None:
        if not run.processes.leads:
            return
        try:
            _store_model(run.loaded, paths[0])
            figure = training_figure(content["history"], content["evaluation"], title=_subject(run))
            write_bytes(paths[1], figure_png(figure))
            write_json(paths[2], content)
        except OSError as error:
            reason = error.strerror or str(error)
            raise ValueError(f"--out {run.out}: the results cannot be written ({reason}); make room") from error
        run.state.remove()
        with suppress(OSError):  # another command's state lies beside it
            run.state.folder.parent.rmdir()
        how_to_go_on.set("")

    run.processes.together(store)
    if options.json:
        show_json(to_json(content))
        return
    show_table(training_table(content), title=_subject(run))
    show_written(paths)


def _subject(run: _Run) -> str:
    s, info = run.settings, run.loaded.info
    start = "from random weights" if info.random_init else "from its weights"
    windows = s["batch"] * s["batches"] * run.processes.count
    name = info.name if len(info.name) <= 40 else Path(info.name).name
    return (
        f"{name} ({info.parameters:,} parameters) {start}, {s['optimizer']}, attention {s['attention']}: "
        f"{s['max_steps']:,} steps of {windows} x {s['seq']:,} tokens, {s['dtype']}"
    )
