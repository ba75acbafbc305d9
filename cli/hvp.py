"""`flashbob-curv hvp`: time and memory of one exact Hessian-vector product."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Annotated

import typer

from cli.console import memory, progress_bar, shown_checks
from cli.options import CheckedOptions

__all__ = ["HvpOptions", "hvp"]


@dataclass(frozen=True, kw_only=True)
class HvpOptions(CheckedOptions):
    """Options of `hvp`."""

    repeat: Annotated[int, typer.Option(min=1, help="Timed products; the median is reported.")] = 3


def hvp(options: HvpOptions) -> None:
    """Time and memory of one exact Hessian-vector product, checked for symmetry.

    Writes hvp.json into --out. The symmetry check runs first and warms up; then the products are timed one by one.
    """
    from cli.session import open_session
    from curvature.probes import normal
    from curvature.report import Measurement

    session = open_session("hvp", options)
    operator = session.operator
    checks = session.checks(wanted=options.check)
    seconds = []
    with Measurement(operator.device) as whole, progress_bar("products") as report:
        for index in range(options.repeat):
            direction = normal(operator.space, seed=options.seed, index=index)
            started = time.perf_counter()
            operator @ direction  # its check for finite numbers waits for the device
            seconds.append(time.perf_counter() - started)
            report(index + 1, options.repeat, f"{seconds[-1]:.3g} s")
    content = session.record(
        whole,
        {
            "seconds_per_product": statistics.median(seconds),
            "seconds_each": seconds,
            **checks,
            "method": operator.method,
            "precision": session.precision(None),
        },
    )
    table = [
        ("seconds per product", f"{content['seconds_per_product']:.4g} (median of {options.repeat})"),
        ("peak memory", memory(content["peak_memory_bytes"])),
        *shown_checks(checks),
        ("method", operator.method),
    ]
    session.finish(content, table)
