"""What all estimators share: progress, the standard error of a mean, and how a value is written with its error."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from scipy.stats import t as student

__all__ = ["Progress", "confidence_interval", "mean_and_stderr", "with_error"]

Progress: TypeAlias = Callable[[int, int, str], None]
"""Called after each product with (products done, products at most, a short status)."""


def mean_and_stderr(samples: npt.NDArray[np.float64]) -> tuple[float, float]:
    """Mean of independent samples and its standard error s / sqrt(n), s^2 the unbiased variance (NaN for one)."""
    n = len(samples)
    return float(samples.mean()), float(samples.std(ddof=1) / math.sqrt(n)) if n > 1 else math.nan


def confidence_interval(samples: npt.NDArray[np.float64], level: float = 0.95) -> tuple[float, float]:
    """Confidence interval of the mean of independent samples that may be skewed.

    With one dominant eigenvalue the samples of a trace are as skewed as a chi-square of one degree, and the symmetric
    interval `mean ± t s / sqrt(n)` then holds the true value in 87 % of all cases where it claims 95 % (n = 10; 92 % at
    n = 40). Here the studentized mean is transformed so that its skewness vanishes before Student's quantiles are read:

        g(t) = t + a t^2/3 + a^2 t^3/27 + a/6,   a = skewness / sqrt(n)

    (g is increasing; the interval is the mean minus s / sqrt(n) times g^-1 at the two quantiles). Measured on definite
    matrices from a flat to a rank-one spectrum it holds the true value in 93 to 96 % of all cases from n = 10 on; where
    n itself was chosen by a stopping rule, in 91 to 96 %. Samples of indefinite ones may have heavy tails and no skew:
    with one dominant eigenvalue of each sign it holds it in 91 to 92 %.

    Args:
        samples: Independent samples, at least 3.
        level: Probability that the interval holds the mean.

    Returns:
        Lower and upper end; (NaN, NaN) for fewer than 3 samples.

    Raises:
        ValueError: If the level is not between 0 and 1.

    Source: Hall, On the removal of skewness by transformation (1992).
    """
    if not 0 < level < 1:
        raise ValueError(f"level must be between 0 and 1, got {level}")
    n = len(samples)
    if n < 3:
        return math.nan, math.nan
    mean, stderr = mean_and_stderr(samples)
    centred = samples - mean
    spread = float(np.mean(centred**2))
    if spread == 0:
        return mean, mean
    a: float = float(np.mean(centred**3)) / spread**1.5 * math.sqrt(n - 1) / (n - 2)  # unbiased skewness over sqrt(n)
    quantile = float(student.ppf((1 + level) / 2, n - 1))

    def original(value: float) -> float:
        if abs(a) < 1e-9:
            return value
        root = float(np.cbrt(1 + a * (value - a / 6)))
        return 3 / a * (root - 1)

    return mean - stderr * original(quantile), mean - stderr * original(-quantile)


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
