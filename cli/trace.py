"""`flashbob-curv trace`: a curvature matrix's trace, in all and by parameter, layer, kind and attention head."""

from __future__ import annotations

import csv
import io
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.console import estimate, memory, progress_bar, shown_checks
from cli.options import MatrixOptions, check_tolerance

if TYPE_CHECKING:
    from cli.session import Session
    from curvature import Group, TraceEstimate

__all__ = ["TraceOptions", "trace"]

MIN_PRODUCTS = 10
"""Fewer probes say too little about their own spread to stop on it."""

COLUMNS = ("name", "layer", "kind", "shape", "numel", "trace", "stderr", "mean_eigenvalue")


@dataclass(frozen=True, kw_only=True)
class TraceOptions(MatrixOptions):
    """Options of `trace`."""

    tol: Annotated[
        float,
        typer.Option(callback=check_tolerance, help="Relative standard error of the total at which to stop."),
    ] = 0.05
    max_products: Annotated[int, typer.Option(min=2, help="Stop after this many products in any case.")] = 100
    per_head: Annotated[
        bool,
        typer.Option(
            "--per-head", help="Also the trace of what belongs to each attention head, from the same products."
        ),
    ] = False

    @property
    def most_probes(self) -> int:
        """See `RunOptions`."""
        return self.max_products

    @property
    def stop(self) -> tuple[float, int]:
        """See `RunOptions`."""
        return self.tol, min(MIN_PRODUCTS, self.max_products)


def trace(options: TraceOptions) -> None:
    """Trace of the Hessian and of each parameter's diagonal block, by Hutchinson's estimator.

    Writes trace.json, trace.csv, trace.png and report.html into --out. Every product with a random sign vector gives
    one sample of every block's trace; it stops when the total's standard error is small enough. The samples are saved
    as they come, so that an interrupted run can go on with --resume; under torchrun several processes share them.
    Heads (--per-head) are rows behind those of the parameters, whose entries they share.
    """
    from cli.session import open_session
    from cli.trace_report import pictures, report
    from curvature import trace as estimate_trace
    from curvature.attention_heads import fused_groups
    from curvature.breakdown import Breakdown
    from curvature.report import Measurement

    session = open_session("trace", options, long=True)
    operator = session.operator
    heads = _heads(session) if options.per_head else []
    fused = _if_any(fused_groups, session)
    with Measurement(operator.device) as measurement:
        loss = session.loss()
        checks = session.checks(wanted=options.check)
        with progress_bar("Hutchinson") as progress:
            found = estimate_trace(
                operator,
                tol=options.tol,
                max_products=options.max_products,
                min_products=options.stop[1],
                seed=options.seed,
                groups=[*fused, *heads],
                progress=progress,
                state=session.state,
                processes=session.processes,
            )
    if not found.converged:
        session.remark(
            f"after {found.products} products the trace is {estimate(found.value, found.stderr)}, not yet within "
            f"{options.tol:.2g} of its value; raise --max-products"
        )
    breakdown = Breakdown.of(found, operator.space, fused)
    results = {
        "operator": options.operator.value,
        "loss": loss,
        "total": {"value": found.value, "stderr": found.stderr, "interval": _interval(found)},
        "blocks": _blocks(session, found),
        **_sums(breakdown),
        "heads": [_head(session, group, found) for group in heads] if options.per_head else None,
        **checks,
        "products": found.products,
        "converged": found.converged,
        "precision": session.precision(found.products),
    }
    content = session.record(measurement, results)
    drawn = pictures(session, breakdown, content)
    files: dict[str, bytes | str] = {
        "trace.csv": _csv(content),
        "trace.png": drawn["trace"],
        "report.html": report(session, content, drawn),
    }
    session.finish(content, _table(content), files)


def _if_any(find: Any, session: Session) -> list[Group]:
    """Groups of attention's projections; none in a model whose projections are not known."""
    try:
        found: list[Group] = find(session.loaded.model, session.operator.space.names)
    except (ValueError, NotImplementedError):
        return []
    return found


def _heads(session: Session) -> list[Group]:
    from curvature import head_groups

    found = head_groups(session.loaded.model, session.operator.space.names)
    if not found:
        raise ValueError(
            f"--per-head: none of the parameters that --params {session.options.params!r} selects belongs to a head; "
            "leave out --per-head, or select attention projections"
        )
    return found


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


def _head(session: Session, group: Group, found: TraceEstimate) -> dict[str, Any]:
    from curvature.blocks import layer_of

    (value, stderr), numel = found.per_group[group.name], group.numel(session.operator.space)
    return {
        "name": group.name,
        "layer": layer_of(group.parts[0].parameter),
        "head": group.name.split(maxsplit=2)[2].removeprefix("head ").removeprefix("heads "),
        "numel": numel,
        "trace": value,
        "stderr": stderr,
        "mean_eigenvalue": value / numel,
    }


def _sums(breakdown: Any) -> dict[str, list[dict[str, Any]]]:
    """Sums by layer, by kind and by both, with the standard errors of the sums."""

    def rows(names: tuple[str, ...], key: Any) -> list[dict[str, Any]]:
        return [
            {
                **dict(zip(names, place, strict=True)),
                "numel": share.numel,
                "trace": share.trace,
                "stderr": share.stderr,
                "mean_eigenvalue": share.mean_eigenvalue,
                "mean_stderr": share.mean_stderr,
            }
            for place, share in breakdown.by(key).items()
        ]

    return {
        "layers": rows(("name",), lambda piece: (piece.place,)),
        "kinds": rows(("kind",), lambda piece: (piece.kind,)),
        "layers_and_kinds": rows(("layer", "kind"), lambda piece: (piece.layer, piece.kind)),
    }


def _csv(content: dict[str, Any]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    writer.writerows({**block, "shape": "x".join(map(str, block["shape"]))} for block in content["blocks"])
    writer.writerows({**head, "kind": "attention head"} for head in content["heads"] or ())
    return text.getvalue()


def _table(content: dict[str, Any]) -> list[tuple[str, str]]:
    total = content["total"]
    return [
        ("loss", f"{content['loss']:.4f} nats per token"),
        ("trace", estimate(total["value"], total["stderr"])),
        ("95 % interval", "{:.5g} to {:.5g}".format(*total["interval"]) if total["interval"] else "too few probes"),
        *((row["name"], estimate(row["trace"], row["stderr"])) for row in content["layers"]),
        *shown_checks(content),
        ("products", f"{content['products']}" + ("" if content["converged"] else ", not converged")),
        ("time, peak memory", f"{content['seconds']:.1f} s, {memory(content['peak_memory_bytes'])}"),
    ]
