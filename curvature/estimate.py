"""What all estimators share: how they report progress, and the standard error of a mean."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["Progress", "mean_and_stderr"]

Progress: TypeAlias = Callable[[int, int, str], None]
"""Called after each product with (products done, products at most, a short status)."""


def mean_and_stderr(samples: npt.NDArray[np.float64]) -> tuple[float, float]:
    """Mean of independent samples and its standard error s / sqrt(n), s^2 the unbiased variance (NaN for one)."""
    n = len(samples)
    return float(samples.mean()), float(samples.std(ddof=1) / math.sqrt(n)) if n > 1 else math.nan
