"""`flashbob-curv hvp`: time and memory of one exact Hessian-vector product."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Annotated

import typer

from cli.console import memory, progress_bar
from cli.options import RunOptions

__all__ = ["HvpOptions", "hvp"]


@dataclass(frozen=True, kw_only=True)
class HvpOptions(RunOptions):
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
    symmetry_error = session.check_symmetry()
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
            "symmetry_error": symmetry_error,
            "method": operator.method,
        },
    )
    table = [
        ("seconds per product", f"{content['seconds_per_product']:.4g} (median of {options.repeat})"),
        ("peak memory", memory(content["peak_memory_bytes"])),
        ("symmetry error", f"{symmetry_error:.1e}"),
        ("method", operator.method),
    ]
    session.finish(content, table)
