"""`flashbob-curv evaluate`: perplexity of a model on text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from cli.console import estimate, memory, notice, progress_bar, show_json, show_table, show_written
from cli.options import Method, RunOptions

__all__ = ["EvaluateOptions", "evaluate", "shown_perplexity"]


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(RunOptions):
    """Options of `evaluate`."""

    batches: Annotated[int, typer.Option(min=1, help="Number of batches, weighted by their tokens.")] = 8
    skip: Annotated[int, typer.Option(min=0, help="Batches of the text to leave out at its beginning.")] = 0


def evaluate(options: EvaluateOptions) -> None:
    """Perplexity of a model on text, over windows that do not overlap; packed checkpoints too.

    Writes evaluate.json into --out. The loss has its standard error between batches.
    """
    from cli.session import (
        DEFAULT_SEQ,
        choose_device,
        choose_dtype,
        join_run,
        keeps_no_state,
        own_context,
        repeat_products,
        writable_folder,
    )
    from curvature import load_model, token_windows
    from curvature.report import Measurement, record, to_json, write_json
    from quant import evaluate_perplexity

    join_run("evaluate")
    if options.params is not None:
        raise ValueError("--params restricts a Hessian; evaluate has none")
    if options.method is not Method.auto:
        raise ValueError("--method says how a Hessian's products are computed; evaluate has none")
    out = writable_folder(options.out or Path("runs") / "evaluate")
    device = choose_device(options.device)
    if options.deterministic:
        repeat_products()
    loaded = load_model(
        options.model,
        random_init=options.random_init,
        dtype=choose_dtype(options.dtype, device),
        device=device,
        seq=options.seq,
        extend_positions=options.extend_positions.value,
        seed=options.seed,
    )
    for text in loaded.notices:
        notice(text)
    if options.resume:
        notice(keeps_no_state("evaluate"))
    seq = options.seq or min(DEFAULT_SEQ, own_context(loaded))
    windows = token_windows(loaded.tokenizer, options.data, seq, options.batch, options.batches, skip=options.skip)
    with Measurement(device) as measurement, progress_bar("perplexity", "batch") as report:
        found = evaluate_perplexity(loaded.model, windows.batches, progress=report)
    in_force = {"seq": seq, "dtype": loaded.info.dtype, "device": str(device), "out": out}
    content = record(
        "evaluate",
        model=loaded.info.as_record(),
        data=windows.as_record(),
        settings=options.as_settings("resume", "params", "method") | in_force,
        measurement=measurement,
        device=device,
        results={**found.as_record(), "notices": loaded.notices},
    )
    write_json(out / "evaluate.json", content)
    if options.json:
        show_json(to_json(content))
        return
    show_table(
        [
            ("loss", f"{estimate(found.loss, found.stderr)} nats per token"),
            ("perplexity", shown_perplexity(found.perplexity, ".4f")),
            ("tokens", f"{found.tokens:,}"),
            ("time, peak memory", f"{measurement.seconds:.1f} s, {memory(measurement.peak_memory_bytes)}"),
        ],
        title=f"{options.model} on {options.data}",
    )
    show_written([out / "evaluate.json"])


def shown_perplexity(value: float | None, form: str) -> str:
    """A perplexity in this format, in words where it is None."""
    return "more than a float holds" if value is None else format(value, form)
