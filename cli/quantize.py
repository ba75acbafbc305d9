"""`flashbob-curv quantize`: sensitivity, allocation, a quantized checkpoint, and a report."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.console import progress_bar
from cli.options import RunOptions

if TYPE_CHECKING:
    from cli.session import Session
    from quant import QuantizedModel, Scheme, Settings, Written

__all__ = ["QuantizeOptions", "quantize"]


class MetricName(StrEnum):
    """What decides about bits."""

    relinearized = "relinearized"
    quadratic = "quadratic"
    trace = "trace"
    taylor = "taylor"
    interaction = "interaction"
    fisher = "fisher"
    first_order = "first_order"
    weight_error = "weight_error"
    random = "random"
    uniform = "uniform"


class QuantizerName(StrEnum):
    """How weights are rounded."""

    rtn = "rtn"
    gptq = "gptq"
    autoround = "autoround"


class ExportName(StrEnum):
    """Format of the checkpoint."""

    compressed_tensors = "compressed-tensors"
    dense = "dense"
    gguf = "gguf"


class StorageName(StrEnum):
    """Dtype of scales and unquantized tensors."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


@dataclass(frozen=True, kw_only=True)
class QuantizeOptions(RunOptions):
    """Options of `quantize`."""

    bits: Annotated[
        float | None, typer.Option(min=2, max=8, help="Budget: average bits per weight. [default: 4, if no other]")
    ] = None
    bytes: Annotated[
        int | None, typer.Option("--bytes", min=1, help="Budget: size of the packed weights file, everything in it.")
    ] = None
    max_loss_rise: Annotated[
        float | None,
        typer.Option(
            help="Budget: predicted rise of the loss in nats, fewest bytes below it; with --metric quadratic, say."
        ),
    ] = None
    choices: Annotated[str, typer.Option(help="Bits to choose from.")] = "2,3,4,5,6,8"
    group_size: Annotated[str, typer.Option(help="Columns that share a scale, to choose from; -1: the row.")] = "64"
    metric: Annotated[MetricName, typer.Option(help="What decides about bits.")] = MetricName.relinearized
    quantizer: Annotated[QuantizerName, typer.Option(help="How weights are rounded.")] = QuantizerName.rtn
    export: Annotated[ExportName, typer.Option(help="Format of the checkpoint.")] = ExportName.compressed_tensors
    weights: Annotated[
        str | None, typer.Option(help="Regular expression: which weights. [default: all inside transformer blocks]")
    ] = None
    fix: Annotated[
        str | None, typer.Option(help="Formats not to choose: REGEX=BITS or REGEX=BITS:GROUP, separated by ';'.")
    ] = None
    share: Annotated[
        bool, typer.Option(help="Same format for q/k/v, gate/up, experts, which inference engines fuse.")
    ] = True
    untie: Annotated[bool, typer.Option("--untie", help="Give a tied head its own weight first.")] = False
    storage: Annotated[
        StorageName, typer.Option(help="Dtype of scales and unquantized tensors; auto: as the model's files say.")
    ] = StorageName.auto
    batches: Annotated[int, typer.Option(min=1, help="Number of calibration batches.")] = 8
    draws: Annotated[int, typer.Option(min=1, help="Random sign vectors per batch and option.")] = 2
    probes: Annotated[int, typer.Option(min=2, help="Probe vectors of the trace metric.")] = 24
    rounds: Annotated[int, typer.Option(min=1, help="Re-linearizations at most.")] = 6
    redraws: Annotated[int, typer.Option(min=0, help="Redrawn allocations for the stability table.")] = 10
    scores: Annotated[Path | None, typer.Option(help="Folder of score files, reused for any budget.")] = None
    eval_data: Annotated[
        str | None, typer.Option(help="Evaluation text. [default: the windows of --data after the calibration]")
    ] = None
    eval_batches: Annotated[int, typer.Option(min=1, help="Number of evaluation batches.")] = 4
    compare: Annotated[str, typer.Option(help="Metrics to set beside in the frontier, or `none`.")] = (
        "uniform,fisher,weight_error"
    )
    measure: Annotated[int, typer.Option(min=0, help="Single weights to measure against their prediction.")] = 16


def quantize(options: QuantizeOptions) -> None:
    """Quantize a model: bits where the exact Hessian says they matter, a checkpoint that loads, and a report.

    Writes model/ (the checkpoint, read back and compared), plan.json, quantize.json and report.html into --out; those
    of an earlier run give way when the new checkpoint has been read back.
    Calibration and evaluation use different windows; gptq and autoround round by further ones, where the text has them.
    """
    from cli.quantize_report import page, results, table
    from cli.session import open_session, writable_folder
    from curvature.report import Measurement, to_json
    from quant import evaluate_perplexity, expand, quantize_model, untie
    from quant.comparison import frontier, single_weights

    if options.params is not None:
        raise ValueError("--params restricts a Hessian; which weights are quantized is said by --weights")
    compared = _compared(options.compare)
    if options.scores is not None:
        writable_folder(options.scores, "--scores")
    session = open_session("quantize", options)
    settings = _settings(options, session)
    evaluation, rounding = _evaluation(options, session), _rounding(options, session)
    model = session.loaded.model
    if options.untie and not untie(model):
        session.remark("--untie: the head is not tied; nothing to do")
    with Measurement(session.operator.device) as measurement:
        before = evaluate_perplexity(model, evaluation)
        found = quantize_model(
            model, session.windows.batches, settings, rounding=rounding, cache=options.scores, watch=progress_bar,
            tokenizer=session.loaded.tokenizer,
        )  # fmt: skip
        after = evaluate_perplexity(model, evaluation)
        found.restore()
        # Ahead of what is only compared: a product that does not fit into memory then costs no checkpoint.
        written = _store(found, session)
        with progress_bar("prediction") as progress:
            choices, method = found.plan.choices, session.operator.method
            whole = expand(model, found.candidates, choices, evaluation, method=method, progress=progress)
        others = []
        if compared:
            others = frontier(found, found.calibration, evaluation, before, compared, watch=progress_bar)
        singles = single_weights(found, found.calibration, options.measure)
    for text in found.notices:
        session.remark(text)
    content = session.record(measurement, results(found, written, before, after, whole, others, singles))
    files: dict[str, bytes | str] = {
        "plan.json": to_json(session.record(measurement, found.plan.as_record())),
        "report.html": page(session, found, content, others, singles),
    }
    session.finish(content, table(content), files)


def _settings(options: QuantizeOptions, session: Session) -> Settings:
    from quant import Relinearization, Settings

    none = options.bits is None and options.bytes is None and options.max_loss_rise is None
    quarter = max(1, len(session.windows.batches) // 4)
    return Settings(
        bits=4.0 if none else options.bits,
        bytes=options.bytes,
        max_loss_rise=options.max_loss_rise,
        metric=options.metric.value,
        choices=_numbers("--choices", options.choices),
        group_sizes=_numbers("--group-size", options.group_size),
        quantizer=options.quantizer.value,
        fixed=_fixed(options.fix),
        include=options.weights,
        share=options.share,
        export=options.export.value,
        storage_dtype=_storage(options, session),
        draws=max(options.draws, 2 if len(session.windows.batches) < 3 else 1),
        probes=options.probes,
        redraws=options.redraws,
        relinearization=Relinearization(rounds=options.rounds, curvature_batches=quarter, seed=options.seed),
        method=session.operator.method,
        seed=options.seed,
    )


def _compared(text: str) -> list[str]:
    """The metrics of --compare."""
    from quant import METRICS
    from quant.comparison import known_metrics

    metrics, known = known_metrics(text), ("uniform", *METRICS)
    if unknown := [metric for metric in metrics if metric not in known]:
        raise ValueError(f"--compare: {unknown[0]!r} is not one of {', '.join(known)}; or give 'none' alone")
    return metrics


def _storage(options: QuantizeOptions, session: Session) -> Any:
    """The dtype in the model's own files: a model that was raised to float32 for the work is stored as it came."""
    import json

    import torch

    name = options.storage.value
    if name == "auto":
        folder = session.loaded.info.path
        said = None
        if folder is not None and not session.loaded.info.random_init:
            config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
            said = config.get("dtype") or config.get("torch_dtype")
        name = said if said in ("float32", "bfloat16", "float16") else session.loaded.info.dtype
    return getattr(torch, name)


def _numbers(flag: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{flag} must be whole numbers separated by commas, got {text!r}") from None


def _fixed(text: str | None) -> dict[str, Scheme]:
    from quant import Scheme

    found = {}
    for rule in (text or "").split(";"):
        if not rule.strip():
            continue
        expression, separator, form = rule.strip().rpartition("=")
        bits, _, group = form.partition(":")
        try:
            numbers = int(bits), int(group or -1)
        except ValueError:
            separator = ""
        if not separator or not expression:
            raise ValueError(f"--fix: {rule!r} must be REGEX=BITS or REGEX=BITS:GROUP, such as 'v_proj=8:64'")
        found[expression] = Scheme(*numbers)
    return found


def _evaluation(options: QuantizeOptions, session: Session) -> list[dict[str, Any]]:
    """Evaluation batches: of their own text, or of the same text after the calibration windows."""
    from curvature import token_windows

    seq, tokenizer = session.settings["seq"], session.loaded.tokenizer
    if options.eval_data is not None and not _same_text(options):
        return list(token_windows(tokenizer, options.eval_data, seq, options.batch, options.eval_batches).batches)
    every = token_windows(tokenizer, options.data, seq, options.batch, options.batches + options.eval_batches)
    return list(every.batches[options.batches :])


def _same_text(options: QuantizeOptions) -> bool:
    """Whether the evaluation text is the calibration text, however it is spelled."""
    if options.eval_data == options.data:
        return True
    paths = [Path(source) for source in (options.eval_data, options.data) if source is not None]
    return len(paths) == 2 and all(path.exists() for path in paths) and paths[0].samefile(paths[1])


def _rounding(options: QuantizeOptions, session: Session) -> list[dict[str, Any]] | None:
    """As many windows as for calibration, behind all others, for quantizers that look at text; None: there are none."""
    from curvature import token_windows

    if options.quantizer is QuantizerName.rtn:
        return None
    ahead = options.batches + (options.eval_batches if options.eval_data is None or _same_text(options) else 0)
    seq, count = session.settings["seq"], ahead + options.batches
    try:
        every = token_windows(session.loaded.tokenizer, options.data, seq, options.batch, count)
    except ValueError:  # the text ends before
        return None
    return list(every.batches[ahead:])


def _store(found: QuantizedModel, session: Session) -> Written:
    """Write the checkpoint; once it is read back, it replaces an earlier one, and the records of that one go first.

    Whatever fails before that leaves the earlier run whole; whatever fails after leaves no record of another
    checkpoint.
    """
    folder, beside = session.out / "model", session.out / ".model.part"
    shutil.rmtree(beside, ignore_errors=True)  # of a run that was killed
    try:
        written = found.write(beside, session.loaded.tokenizer, _check(session))
        for name in ("quantize.json", "plan.json", "report.html"):
            (session.out / name).unlink(missing_ok=True)
        shutil.copytree(beside, folder, copy_function=shutil.move, dirs_exist_ok=True)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return written


def _check(session: Session) -> dict[str, Any]:
    return {"input_ids": session.windows.batches[0]["input_ids"][:1, :64]}
