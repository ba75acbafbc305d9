"""What all estimators share: progress, the standard error of a mean, and how a value is written with its error."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["Progress", "mean_and_stderr", "with_error"]

Progress: TypeAlias = Callable[[int, int, str], None]
"""Called after each product with (products done, products at most, a short status)."""


def mean_and_stderr(samples: npt.NDArray[np.float64]) -> tuple[float, float]:
    """Mean of independent samples and its standard error s / sqrt(n), s^2 the unbiased variance (NaN for one)."""
    n = len(samples)
    return float(samples.mean()), float(samples.std(ddof=1) / math.sqrt(n)) if n > 1 else math.nan


def with_error(value: float, stderr: float | None) -> str:
    """A value and its standard error as text, both to the error's second digit: "2015 ± 303", "0.0412 ± 0.0031"."""
    if stderr is None or not math.isfinite(stderr):
        return f"{value:.4g}"
    if stderr == 0:
        return f"{value:.6g} ± 0"
    if 1e-4 <= max(abs(value), stderr) < 1e7:
        decimals = min(max(0, 1 - math.floor(math.log10(stderr))), 12)
        return f"{value:.{decimals}f} ± {stderr:.{decimals}f}"
    return f"{value:.4g} ± {stderr:.2g}"
