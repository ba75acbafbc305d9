"""Which dtype a run computes in: the fastest whose rounding stays below the error that the run has anyway.

What rounding costs is measured by `tests/dtype_study.py`, which compares precisions on the same probes; its committed
records are condensed in `dtype_errors.yaml`, one per kind of device. Let d_i be what rounding changes in the sample of
probe i. Their mean is what it changes in the estimate; in the worst case it is the same at any number of probes, while
the standard error falls as s / sqrt(n) with s the standard deviation of a sample. So with n probes

    rounding / standard error  <=  (|mean d| + 2 s.e. of it) / s * sqrt(n)

is an upper estimate as far as the model measured stands for the model at hand. A run that stops at a relative standard
error has one that is no smaller than that, unless its least number of probes already suffices: there rounding may not
exceed the standard error of so few, nor, relative to the trace, the tolerance. Lanczos' eigenvalues have a residual in
place of a standard error, and their rounding, relative to the largest, is compared with that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import yaml

__all__ = ["OFFERED", "MeasuredRounding", "PrecisionNote", "condensed", "default_dtype", "measured_roundings"]

OFFERED = ("float64", "float32", "bfloat16")
"""Dtypes that `--dtype` takes, the most precise first."""

_UNMEASURED = {"cpu": "float32", "cuda": "bfloat16"}


@dataclass(frozen=True)
class MeasuredRounding:
    """What computing in one dtype was found to change, on one model and one kind of device.

    Attributes:
        dtype: The dtype of the model.
        seconds: Of one product.
        product: |error| / |product|, the mean over some normal directions.
        trace: Error of a trace over the standard deviation of one probe's sample, two of its standard errors added.
        relative: The same error over the trace.
        eigenvalue: The larger error of the two outermost eigenvalues, over the largest magnitude.
        reference: What it was compared with; that dtype's own errors are zero.
        model: The model measured.
        parameters: Its size.
        tokens: Of the one window.
        device: Where.
    """

    dtype: str
    seconds: float
    product: float
    trace: float
    relative: float
    eigenvalue: float
    reference: str
    model: str
    parameters: int
    tokens: int
    device: str

    def of_stderr(self, probes: int) -> float:
        """At most this many standard errors of an estimate from so many probes; see the module."""
        return self.trace * math.sqrt(probes)


@cache
def measured_roundings(device_type: str) -> Mapping[str, MeasuredRounding]:
    """{dtype: what it was found to change} on a kind of device ("cpu", "cuda"); empty where nothing was measured."""
    text = (Path(__file__).parent / "dtype_errors.yaml").read_text(encoding="utf-8")
    rows = (yaml.safe_load(text) or {}).get(device_type, [])
    return {row["dtype"]: MeasuredRounding(**row) for row in rows}


def default_dtype(
    device: torch.device, probes: int = 1, residual: float | None = None, stop: tuple[float, int] | None = None
) -> torch.dtype:
    """The fastest dtype whose rounding stays below what the run leaves open.

    Args:
        device: Where the run computes.
        probes: Independent probes that the run takes at most; see the module.
        residual: What eigenvalues are asked for to, relative to the largest magnitude; None: nothing in particular.
        stop: The relative standard error of a trace at which the run ends before `probes`, and the least number of
            probes; None: it takes all of them.

    Returns:
        That dtype; where none is precise enough, the most precise; where nothing was measured, float32 on a CPU and
        bfloat16 on a GPU.
    """
    found = measured_roundings(device.type)
    if not found:
        return getattr(torch, _UNMEASURED.get(device.type, "float32"))  # type: ignore[no-any-return]

    def sound_trace(m: MeasuredRounding) -> bool:
        if stop is None or m.of_stderr(probes) < 1:
            return m.of_stderr(probes) < 1
        tol, least = stop
        # The last probe takes the standard error below the tolerance by sqrt(n / (n - 1)) at most, as a rule.
        return m.of_stderr(least) < 1 and m.relative < tol * math.sqrt(1 - 1 / max(least, 2))

    sound = [m for m in found.values() if sound_trace(m) and (residual is None or m.eigenvalue < residual)]
    name = min(sound, key=lambda m: m.seconds).dtype if sound else next(n for n in OFFERED if n in found)
    return getattr(torch, name)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class PrecisionNote:
    """What a record and a report say about the precision of a run.

    Attributes:
        dtype: What was computed in.
        device_type: On what kind of device.
        origin: "default", "flag" or "file": who chose it.
        probes: Independent probes behind the run's standard error; None where the run has none.
    """

    dtype: str
    device_type: str
    origin: str = "default"
    probes: int | None = None

    @property
    def measured(self) -> MeasuredRounding | None:
        """What this dtype was found to change on this kind of device."""
        return measured_roundings(self.device_type).get(self.dtype)

    @property
    def of_stderr(self) -> float | None:
        """How many standard errors of this run its rounding is at most, by that measurement."""
        return None if self.measured is None or self.probes is None else self.measured.of_stderr(self.probes)

    def as_record(self) -> dict[str, Any]:
        """JSON fields."""
        measured = None if self.measured is None else asdict(self.measured)
        fields = {"dtype": self.dtype, "chosen_by": self.origin, "measured": measured, "probes": self.probes}
        return {**fields, "rounding_of_stderr_at_most": self.of_stderr, "text": self.text}

    @property
    def text(self) -> str:
        """The same in words."""
        where = "GPU" if self.device_type == "cuda" else self.device_type.upper()
        chosen = f"Computed in {self.dtype}, "
        chosen += {
            "default": f"the default on a {where}: the fastest dtype whose rounding stays below the error of the run",
            "flag": "as asked for by --dtype",
            "file": "as asked for by the configuration file",
        }[self.origin]
        m = self.measured
        if m is None:
            return f"{chosen}. What its rounding changes on a {where} has not been measured."
        if m.dtype == m.reference:
            found = f"the precision that the others were measured against, on {m.model} over {m.tokens:,} tokens"
            return f"{chosen}; it is {found} ({m.device})."
        text = (
            f"{chosen}. Measured on {m.model} over {m.tokens:,} tokens ({m.device}, against {m.reference}): rounding "
            f"changes a product by {m.product:.1e} of its length, an outermost eigenvalue by {m.eigenvalue:.1e} of the "
            f"largest, and a trace by at most {m.trace:.1e} of one probe's standard deviation"
        )
        if self.of_stderr is None or self.probes is None:
            return f"{text}."
        verdict = "below" if self.of_stderr < 1 else "NOT below"
        return (
            f"{text}: with {self.probes} probe{'s' if self.probes > 1 else ''} at most {self.of_stderr:.1e} of the "
            f"standard error, {verdict} it."
        )


def condensed(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of `dtype_errors.yaml` that a record of `tests/dtype_study.py` makes."""
    settings = record["settings"]
    about = {
        "reference": settings["reference"],
        "model": record["model"],
        "parameters": record["parameters"],
        "tokens": settings["seq"],
        "device": record["environment"]["device"],
    }
    return [
        {
            "dtype": row["precision"],
            "seconds": _rounded(row["seconds_per_product"]),
            "product": _rounded(row["product_error"]["mean"]),
            "trace": _rounded(row["trace_error"]["at_most_of_stderr"] / math.sqrt(settings["probes"])),
            "relative": _rounded(_relative(row)),
            "eigenvalue": _rounded(max(abs(end["error"]) for end in row["eigenvalues"])),
            **about,
        }
        for row in record["rows"]
        if row["status"] == "ok" and row["precision"] in OFFERED
    ]


def _relative(row: Mapping[str, Any]) -> float:
    error, value = row["trace_error"], row["trace"]["value"]
    return float((abs(error["value"]) + 2 * error["stderr"]) / abs(value))


def _rounded(value: float) -> float:
    """Three digits: more than is known."""
    return float(f"{value:.3g}")
