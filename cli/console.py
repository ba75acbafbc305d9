"""What a command shows: notices and bars on stderr, short tables or JSON on stdout.

Of several processes that share a run only the first one shows anything.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tqdm import tqdm

__all__ = [
    "estimate",
    "leads",
    "memory",
    "notice",
    "progress_bar",
    "show_json",
    "show_table",
    "show_written",
    "shown_checks",
]


def leads() -> bool:
    """Whether this process shows things: it is the only one, or the first of those that a launcher has started."""
    return "WORLD_SIZE" not in os.environ or os.environ.get("RANK", "0") == "0"


def notice(text: str) -> None:
    """One remark for the user, on stderr."""
    if leads():
        print(f"flashbob-curv: {text}", file=sys.stderr, flush=True)


@contextmanager
def progress_bar(description: str, unit: str = "product") -> Iterator[Callable[[int, int, str], None]]:
    """A bar on stderr, as the function that estimators call with (products done, products at most, status)."""
    with tqdm(
        desc=description, unit=unit, file=sys.stderr, mininterval=0.5, dynamic_ncols=True, disable=not leads()
    ) as bar:

        def report(done: int, total: int, status: str) -> None:
            if bar.total is None:
                # The products of an earlier, interrupted run must not count into the rate of this one.
                bar.initial = bar.n = done - 1
            bar.total = total
            bar.set_postfix_str(status, refresh=False)
            bar.update(done - bar.n)

        yield report


def show_json(text: str) -> None:
    """A record's JSON text, alone on stdout."""
    if leads():
        print(text, end="", flush=True)


def show_table(rows: Sequence[Sequence[str]], *, head: Sequence[str] = (), title: str = "") -> None:
    """Rows of cells on stdout, in aligned columns."""
    if not leads():
        return
    if title:
        print(title)
    lines = [head, *rows] if head else list(rows)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    print(flush=True)


def show_written(paths: Sequence[Path]) -> None:
    """The files that a command wrote."""
    if leads():
        print("wrote " + ", ".join(map(str, paths)), flush=True)


def estimate(value: float, stderr: float | None) -> str:
    """A value with its standard error, such as `12.34 ± 0.41`; without one it says so."""
    if stderr is None or not math.isfinite(stderr):
        return f"{value:.4g} (one sample, no standard error)"
    if not (stderr > 0 and 1e-3 <= max(abs(value), stderr) < 1e6):
        return f"{value:.3e} ± {stderr:.1e}"
    decimals = max(0, 1 - math.floor(math.log10(stderr)))  # two digits of the error
    return f"{value:.{decimals}f} ± {stderr:.{decimals}f}"


def shown_checks(errors: Mapping[str, float | None]) -> list[tuple[str, str]]:
    """Table rows of the errors that checks have found, by the record's names."""
    rows = [("symmetry error", "symmetry_error"), ("repeatability error", "repeatability_error")]
    rows.append(("finite-difference error", "finite_difference_error"))
    return [(label, f"{error:.1e}") for label, name in rows if (error := errors.get(name)) is not None]


def memory(amount: int) -> str:
    """A number of bytes in GiB or MiB."""
    return f"{amount / 2**30:.2f} GiB" if amount >= 2**30 else f"{amount / 2**20:.0f} MiB"
