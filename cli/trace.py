"""`flashbob-curv trace`: the Hessian's trace, in all and by parameter, layer and kind."""

from __future__ import annotations

import csv
import io
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.console import estimate, memory, progress_bar
from cli.options import RunOptions

if TYPE_CHECKING:
    from cli.session import Session
    from curvature import TraceEstimate

__all__ = ["TraceOptions", "trace"]

MIN_PRODUCTS = 10
"""Fewer probes say too little about their own spread to stop on it."""

COLUMNS = ("name", "layer", "kind", "shape", "numel", "trace", "stderr", "mean_eigenvalue")


@dataclass(frozen=True, kw_only=True)
class TraceOptions(RunOptions):
    """Options of `trace`."""

    tol: Annotated[float, typer.Option(help="Relative standard error of the total at which to stop.")] = 0.05
    max_products: Annotated[int, typer.Option(min=2, help="Stop after this many products in any case.")] = 100


def trace(options: TraceOptions) -> None:
    """Trace of the Hessian and of each parameter's diagonal block, by Hutchinson's estimator.

    Writes trace.json, trace.csv, trace.png and report.html into --out. Every product with a random sign vector gives
    one sample of every block's trace; it stops when the total's standard error is small enough. The samples are saved
    as they come, so that an interrupted run can go on with --resume; under torchrun several processes share them.
    """
    from cli.session import open_session
    from curvature import trace as estimate_trace
    from curvature.plots import figure_png, trace_figure
    from curvature.report import Measurement

    session = open_session("trace", options, long=True)
    operator = session.operator
    with Measurement(operator.device) as measurement:
        loss = session.loss()
        symmetry_error = session.check_symmetry()
        with progress_bar("Hutchinson") as report:
            found = estimate_trace(
                operator,
                tol=options.tol,
                max_products=options.max_products,
                min_products=min(MIN_PRODUCTS, options.max_products),
                seed=options.seed,
                progress=report,
                state=session.state,
                processes=session.processes,
            )
    if not found.converged:
        session.remark(
            f"after {found.products} products the trace is {estimate(found.value, found.stderr)}, not yet within "
            f"{options.tol:.2g} of its value; raise --max-products"
        )
    blocks = _blocks(session, found)
    numel = {block["name"]: block["numel"] for block in blocks}
    png = figure_png(trace_figure(found, numel, title=f"Hessian trace of {session.label}"))
    content = session.record(
        measurement,
        {
            "operator": "hessian",
            "loss": loss,
            "total": {"value": found.value, "stderr": found.stderr, "interval": _interval(found)},
            "blocks": blocks,
            "symmetry_error": symmetry_error,
            "products": found.products,
            "converged": found.converged,
        },
    )
    files: dict[str, bytes | str] = {
        "trace.csv": _csv(blocks),
        "trace.png": png,
        "report.html": _page(session, found, content, png),
    }
    session.finish(content, _table(content, found), files)


def _interval(found: TraceEstimate) -> list[float] | None:
    """The 95 % interval of the total, or None where there are too few probes for one."""
    low, high = found.interval(0.95)
    return [low, high] if math.isfinite(low) else None


def _blocks(session: Session, found: TraceEstimate) -> list[dict[str, Any]]:
    from curvature.blocks import kind_of, layer_of

    return [
        {
            "name": block.name,
            "layer": layer_of(block.name),
            "kind": kind_of(block.name),
            "shape": list(block.shape),
            "numel": block.numel,
            "trace": found.per_block[block.name][0],
            "stderr": found.per_block[block.name][1],
            "mean_eigenvalue": found.per_block[block.name][0] / block.numel,
        }
        for block in session.operator.space.blocks
    ]


def _csv(blocks: list[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows({**block, "shape": "x".join(map(str, block["shape"]))} for block in blocks)
    return text.getvalue()


def _by_layer(found: TraceEstimate) -> list[tuple[str, float, float]]:
    from curvature.blocks import kind_of, layer_of

    def place(name: str) -> str:
        layer = layer_of(name)
        return kind_of(name) if layer is None else f"layer {layer}"

    return [(group, value, stderr) for group, (value, stderr) in found.grouped(place).items()]


def _table(content: dict[str, Any], found: TraceEstimate) -> list[tuple[str, str]]:
    return [
        ("loss", f"{content['loss']:.4f} nats per token"),
        ("trace", estimate(found.value, found.stderr)),
        *([("95 % interval", "{:.5g} to {:.5g}".format(*interval))] if (interval := _interval(found)) else []),
        *((group, estimate(value, stderr)) for group, value, stderr in _by_layer(found)),
        ("symmetry error", f"{content['symmetry_error']:.1e}"),
        ("products", f"{found.products}" + ("" if found.converged else ", not converged")),
        ("time, peak memory", f"{content['seconds']:.1f} s, {memory(content['peak_memory_bytes'])}"),
    ]


def _page(session: Session, found: TraceEstimate, content: dict[str, Any], png: bytes) -> str:
    from curvature.blocks import kind_of
    from curvature.page import PageFigure, PageTable, report_html

    unit = "loss units per squared parameter unit"
    kinds = [(kind, value, stderr) for kind, (value, stderr) in found.grouped(kind_of).items()]
    return report_html(
        "Hessian trace",
        lead=f"{session.subject}. Trace {estimate(found.value, found.stderr)} from {found.products} products.",
        figures=[
            PageFigure(
                png,
                alt="Bars with standard errors: trace of the Hessian's diagonal block by layer, and mean eigenvalue "
                "by kind of parameter",
                caption="Left: trace by layer. Right: trace divided by the number of parameters, by kind. Bars show "
                "one standard error.",
            )
        ],
        tables=[
            PageTable(f"Trace by layer, in {unit}", ("layer", "trace", "standard error"), _by_layer(found)),
            PageTable(f"Trace by kind of parameter, in {unit}", ("kind", "trace", "standard error"), kinds),
            PageTable(
                f"Trace by parameter, in {unit}",
                COLUMNS,
                [[block[column] for column in COLUMNS] for block in content["blocks"]],
            ),
        ],
        facts={name: content[name] for name in ("settings", "model", "data", "environment")},
        notices=session.notices,
    )
