"""`flashbob-curv diagonal`: the Hessian's diagonal, entry by entry."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.console import memory, progress_bar, shown_checks
from cli.options import MatrixOptions, check_tolerance

if TYPE_CHECKING:
    from cli.session import Session
    from curvature.diagonal import DiagonalEstimate

__all__ = ["DiagonalOptions", "diagonal"]

MIN_PRODUCTS = 10


class Estimator(StrEnum):
    """How the diagonal is estimated."""

    hutchinson = "hutchinson"
    xdiag = "xdiag"


@dataclass(frozen=True, kw_only=True)
class DiagonalOptions(MatrixOptions):
    """Options of `diagonal`."""

    tol: Annotated[
        float,
        typer.Option(
            callback=check_tolerance,
            help="Stop when the errors' root sum of squares is this share of the diagonal's norm.",
        ),
    ] = 0.1
    max_products: Annotated[int, typer.Option(min=4, help="Stop after this many products in any case.")] = 100
    estimator: Annotated[
        Estimator, typer.Option(help="`xdiag` deflates: two products and three vectors of memory per probe.")
    ] = Estimator.hutchinson

    @property
    def most_probes(self) -> int:
        """See `RunOptions`."""
        return self.max_products


def diagonal(options: DiagonalOptions) -> None:
    """Diagonal of the Hessian, with a standard error for every entry.

    Writes diagonal.safetensors into --out (each parameter's diagonal under its name, its standard errors under the name
    with ".stderr" behind it) and diagonal.json. Products with random signs each give a sample of every entry; it stops
    when the errors are small against the diagonal as a whole. It is saved as it goes, so that an interrupted run can go
    on with --resume; with the hutchinson estimator several processes under torchrun share it.
    """
    from safetensors.torch import save

    from cli.session import open_session
    from curvature.diagonal import diagonal as estimate_diagonal
    from curvature.report import Measurement

    session = open_session("diagonal", options, long=True)
    operator = session.operator
    if options.estimator is Estimator.xdiag and session.processes.count > 1:
        raise ValueError("--estimator xdiag runs in one process; choose hutchinson, or start it without torchrun")
    with Measurement(operator.device) as measurement:
        loss = session.loss()
        checks = session.checks(wanted=options.check)
        with progress_bar("diagonal") as report:
            found = estimate_diagonal(
                operator,
                method=options.estimator.value,
                tol=options.tol,
                max_products=options.max_products,
                min_products=min(MIN_PRODUCTS, options.max_products),
                seed=options.seed,
                progress=report,
                state=session.state,
                processes=session.processes,
            )
    if not found.converged:
        error = f"relative error is {found.relative_error:.2g}, not yet {options.tol:.2g}"
        if not math.isfinite(found.relative_error):
            error = "error is larger than the diagonal"
        session.remark(f"after {found.products} products the diagonal's {error}; raise --max-products")
    finite = found.relative_error if found.relative_error < float("inf") else None
    content = session.record(
        measurement,
        {
            "operator": options.operator.value,
            "loss": loss,
            "estimator": found.method,
            "relative_error": finite,
            "trace": float(found.values.double().sum()),
            "blocks": _blocks(session, found),
            **checks,
            "products": found.products,
            "converged": found.converged,
            "precision": session.precision(found.products),
        },
    )
    tensors = {name: piece.cpu().contiguous() for name, piece in operator.space.named(found.values).items()}
    errors = operator.space.named(found.stderr).items()
    tensors |= {f"{name}.stderr": piece.cpu().contiguous() for name, piece in errors}
    about = {"command": "diagonal", "seed": str(found.seed), "products": str(found.products)}
    about["settings"] = json.dumps(session.settings, default=str)
    session.finish(content, _table(content), {"diagonal.safetensors": save(tensors, about)})


def _blocks(session: Session, found: DiagonalEstimate) -> list[dict[str, Any]]:
    from curvature.blocks import kind_of, layer_of

    named = session.operator.space.named(found.values)
    return [
        {
            "name": block.name,
            "layer": layer_of(block.name),
            "kind": kind_of(block.name),
            "shape": list(block.shape),
            "numel": block.numel,
            "norm": found.per_block[block.name][0],
            "stderr": found.per_block[block.name][1],
            "negative_share": float((named[block.name] < 0).double().mean()),
        }
        for block in session.operator.space.blocks
    ]


def _table(content: dict[str, Any]) -> list[tuple[str, str]]:
    error = content["relative_error"]
    return [
        ("loss", f"{content['loss']:.4f} nats per token"),
        ("relative error", "larger than the diagonal" if error is None else f"{error:.2g}"),
        ("sum of the entries", f"{content['trace']:.5g}"),
        *shown_checks(content),
        ("products", f"{content['products']}" + ("" if content["converged"] else ", not converged")),
        ("time, peak memory", f"{content['seconds']:.1f} s, {memory(content['peak_memory_bytes'])}"),
    ]
