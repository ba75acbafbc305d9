"""Time, rate and memory of a piece of work on a device, as benchmarks report them."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from curvature.storage import LiveBytes

__all__ = ["Memory", "Quantiles", "collect", "matmul_rate", "timed"]

MATMUL_SIZE = {"cuda": 8192, "cpu": 1024}
"""Order of the square matrices whose product is the yardstick of a device."""


@dataclass(frozen=True)
class Quantiles:
    """Milliseconds of repeated work: the fastest fifth ends at p20, the slowest begins at p80."""

    p20: float
    p50: float
    p80: float
    reps: int

    @classmethod
    def of(cls, milliseconds: list[float]) -> Quantiles:
        """Quantiles, linear between neighbours."""
        p20, p50, p80 = np.quantile(milliseconds, (0.2, 0.5, 0.8)).tolist()
        return cls(p20, p50, p80, len(milliseconds))

    def as_row(self) -> dict[str, float]:
        """The fields of a record's row."""
        return {"ms_p20": self.p20, "ms_p50": self.p50, "ms_p80": self.p80, "reps": self.reps}


def timed(
    run: Callable[[], object], device: torch.device, *, reps: int, seconds: float = 2.0, least: int = 3, warmup: int = 1
) -> Quantiles:
    """Time a piece of work again and again.

    On a GPU between two events on the current stream, so that a launch that the host is too slow for counts; caches
    stay as the previous repetition left them. On a CPU by `time.perf_counter`.

    Args:
        run: The work.
        device: Where it runs.
        reps: Repetitions at most.
        seconds: What all of them may take together, judged by the last warm-up.
        least: Repetitions at least, whatever they take.
        warmup: Runs that are not counted.
    """
    one = 0.0
    for _ in range(warmup):
        _wait(device)
        started = time.perf_counter()
        run()
        _wait(device)
        one = time.perf_counter() - started
    count = max(min(least, reps), min(reps, int(seconds / one) if one else reps))
    if device.type != "cuda":
        return Quantiles.of([_milliseconds(run) for _ in range(count)])
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
    with torch.cuda.device(device):
        for start, stop in marks:
            start.record()
            run()
            stop.record()
        torch.cuda.synchronize()
    return Quantiles.of([start.elapsed_time(stop) for start, stop in marks])


def _milliseconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - started)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def matmul_rate(device: torch.device) -> float:
    """TFLOP/s of one large square product: 8192^3 in bfloat16 by cuBLAS on a GPU, 1024^3 in float32 on a CPU."""
    n = MATMUL_SIZE[device.type]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    spent = timed(lambda: torch.mm(a, b, out=out), device, reps=20, seconds=0.5, warmup=3)
    return 2 * n**3 / spent.p50 / 1e9


class Memory:
    """Peak of the memory that a `with` block takes beyond what was there before, in bytes.

    On a GPU by PyTorch's allocator, everything included; on a CPU the tensors that operations return.

    Args:
        device: Where the work runs.
        keep: Tensors from before the block that views of them must not count (CPU only).
    """

    def __init__(self, device: torch.device, keep: tuple[Tensor, ...] = ()) -> None:
        self._device, self._before, self._peak = device, 0, 0
        self._live = None if device.type == "cuda" else LiveBytes()
        if self._live is not None:
            self._live.ignore(keep)
        self._mode: AbstractContextManager[object] = nullcontext() if self._live is None else self._live

    def __enter__(self) -> Memory:
        if self._device.type == "cuda":
            collect(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            self._before = torch.cuda.memory_allocated(self._device)
        self._mode.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._mode.__exit__(*error)  # type: ignore[arg-type]
        if self._live is not None:
            self._peak = self._live.peak
        elif error[0] is None:
            torch.cuda.synchronize(self._device)
            self._peak = torch.cuda.max_memory_allocated(self._device) - self._before

    @property
    def peak(self) -> int:
        """The peak, after the block."""
        return self._peak


def collect(device: torch.device) -> None:
    """Give back what nothing refers to any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
