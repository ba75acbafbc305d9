"""`flashbob-curv bench attention`: attention's double backward, ours beside other exact ways, row by row."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import typer
from torch import Tensor

from cli.bench import BACKENDS, AttentionOptions, Precision, Rows, integers, names
from cli.console import memory
from cli.failure import is_out_of_memory
from cli.options import Dtype
from cli.session import choose_device, choose_dtype
from cli.timing import Memory, collect, matmul_rate, timed
from curvature.report import Measurement
from flashbob import explain
from flashbob.rivals import OUTPUTS, RIVALS, Problem, Second, draw, reference
from flashbob.spot_check import relative_error, spot_errors

__all__ = ["Case", "run", "tune"]

GATE_SEQ = 193
"""Length of the comparison of all outputs, a multiple of no tile."""

SEQS = {"cuda": "256,1024,4096,8192", "cpu": "128,256,512"}
HEAD = f"{'N':>8} {'D':>4} {'heads':>7} {'B':>2} {'mask':<9} {'dtype':<9} {'backend':<12}"
FIGURES = f"{'p50 ms':>10} {'TFLOP/s':>8} {'of matmul':>9} {'peak':>10} {'error':>8}"


@dataclass(frozen=True)
class Case:
    """One problem of a sweep."""

    seq: int
    dim: int
    heads: tuple[int, int]
    batch: int
    causal: bool
    window: int
    dtype: torch.dtype
    device: torch.device
    seed: int

    @property
    def small(self) -> Case:
        """The case that the gate looks at: the same kernels, one sequence, one group of heads, a short length."""
        heads = (self.heads[0] // self.heads[1], 1)
        return replace(self, seq=min(self.seq, GATE_SEQ), heads=heads, batch=1, window=min(self.window, 64))

    def draw(self) -> Problem:
        """Its tensors."""
        return draw(
            batch=self.batch,
            heads=self.heads,
            seq=self.seq,
            dim=self.dim,
            causal=self.causal,
            window=self.window,
            dtype=self.dtype,
            device=self.device,
            seed=self.seed,
        )

    def as_row(self, backend: str) -> dict[str, Any]:
        """The fields that say what a row is about."""
        return {
            "op": "double_backward",
            "backend": backend,
            "B": self.batch,
            "H_Q": self.heads[0],
            "H_KV": self.heads[1],
            "N": self.seq,
            "D": self.dim,
            "dtype": str(self.dtype).removeprefix("torch."),
            "causal": self.causal or self.window > 0,
            "window": self.window,
        }


ABSOLUTE = {torch.float32: 1e-5, torch.float64: 1e-12}
"""Largest error of any output in these dtypes; in 16 bits it is the dtype's epsilon."""


class Gate:
    """Whether a way is accurate: all four outputs against float64, at a small length of the same shape.

    In 16 bits an error may be twice that of PyTorch's materializing path on the same numbers plus an eighth of the
    dtype's epsilon, and never more than the epsilon; in float32 1e-5, in float64 1e-12. At the timed length, where
    PyTorch's path does not fit, sampled rows must stay within the epsilon (1e-5, 1e-12).
    """

    def __init__(self, ways: dict[str, Callable[[Problem], Second]]) -> None:
        self.ways = ways
        self._exact: dict[Case, tuple[Problem, tuple[Tensor, ...], dict[str, float]]] = {}
        self._reasons: dict[tuple[Case, str], str | None] = {}

    def reason(self, case: Case, backend: str) -> str | None:
        """What is wrong with a way in this case, or None.

        Raises:
            NotImplementedError: If the way does not support the case.
        """
        key = (case.small, backend)
        if key not in self._reasons:
            self._reasons[key] = self._compare(*key)
        return self._reasons[key]

    def _compare(self, case: Case, backend: str) -> str | None:
        if case not in self._exact:
            problem = case.draw()
            exact = reference(problem)
            theirs = {} if case.dtype in ABSOLUTE else _errors(RIVALS["math"](problem)(), exact)
            self._exact[case] = problem, exact, theirs
        problem, exact, theirs = self._exact[case]
        errors = _errors(self.ways[backend](problem)(), exact)
        margin = torch.finfo(case.dtype).eps / 8
        for name, error in errors.items():
            most = min(limit(case.dtype), 2 * theirs[name] + margin if theirs else float("inf"))
            if not error <= most:  # NaN fails
                return f"{name} has error {error:.1e} at N={case.seq}, the limit is {most:.1e}"
        return None


def limit(dtype: torch.dtype) -> float:
    """Largest error that any output may have."""
    return ABSOLUTE.get(dtype, torch.finfo(dtype).eps)


def spot_reason(dtype: torch.dtype, errors: dict[str, float]) -> str | None:
    """What is wrong with sampled rows at the timed length, or None."""
    for name, error in errors.items():
        if not error <= limit(dtype):  # NaN fails
            return f"{name} has error {error:.1e} in sampled rows, the limit is {limit(dtype):.1e}"
    return None


def _errors(found: tuple[Tensor, ...], exact: tuple[Tensor, ...]) -> dict[str, float]:
    return {name: relative_error(f, e) for name, f, e in zip(OUTPUTS, found, exact, strict=True)}


def cases(options: AttentionOptions) -> Iterator[Case]:
    """The sweep: head sizes, then heads, then lengths.

    Raises:
        typer.BadParameter: If an option is no list of what it takes.
        ValueError: If the device is not there.
    """
    device = choose_device(options.device)
    half = options.dtype is Precision.float16
    dtype = torch.float16 if half else choose_dtype(Dtype(options.dtype.value), device)
    batch = options.batch or (4 if device.type == "cuda" else 1)
    for dim in integers("--dims", options.dims):
        for heads in _heads(options.heads):
            for seq in integers("--seqs", options.seqs or SEQS[device.type], least=16):
                fits = options.max_tokens is None or batch * seq <= options.max_tokens
                yield Case(
                    seq, dim, heads, batch if fits else 1, options.causal, options.window, dtype, device, options.seed
                )


def _heads(text: str) -> list[tuple[int, int]]:
    pairs = []
    for part in text.split(","):
        query, _, key = part.partition("/")
        values = integers("--heads", f"{query},{key or query}")
        if values[0] % values[1]:
            raise typer.BadParameter(f"--heads: {part}: query heads must be a multiple of key heads")
        pairs.append((values[0], values[1]))
    return pairs


def run(options: AttentionOptions) -> None:
    """Check, time and record every way in every case."""
    backends = names("--backends", options.backends, BACKENDS)
    sweep = list(cases(options))
    device, dtype = sweep[0].device, sweep[0].dtype
    settings = {
        "batch": max(c.batch for c in sweep),
        "dtype": dtype,
        "device": device,
        "seqs": sorted({c.seq for c in sweep}),
    }
    gate, new = Gate(dict(RIVALS)), []
    with Measurement(device) as whole:
        rows = Rows("bench attention", options, settings, device, whole)
        rows.say(f"{HEAD} {FIGURES}")
        for case in sweep:
            rate = matmul_rate(device)
            for backend in backends:
                row = measure(case, backend, gate, reps=options.reps, rate=rate)
                new.append(row)
                rows.add(row, line(row))
                collect(device)
        rows.finish(new)


def measure(case: Case, backend: str, gate: Gate, *, reps: int, rate: float) -> dict[str, Any]:
    """One row: accuracy first, then memory, then time.

    Status "ok"; "oom" where memory runs out; "unsupported" where the way does not take the case; "inaccurate" where it
    is not exact enough, "failed" where it raises. All but the first come with a `reason`, and without times.

    Args:
        case: The problem.
        backend: The way.
        gate: What exact enough is.
        reps: Timed repetitions at most.
        rate: TFLOP/s of the yardstick product.
    """
    row = case.as_row(backend)
    nothing = dict.fromkeys(("ms_p20", "ms_p50", "ms_p80", "tflops", "cublas_fraction", "peak_bytes", "error"))
    row |= nothing | {"cublas_tflops": rate}
    try:
        return row | _measure(case, backend, gate, reps, rate)
    except NotImplementedError as error:
        return row | {"status": "unsupported", "reason": str(error)}
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        if is_out_of_memory(error):
            return row | {"status": "oom", "reason": reason}
        # One way that breaks is a row; the sweep goes on and the command ends with exit code 1.
        return row | {"status": "failed", "reason": f"{type(error).__name__}: {reason}"}


def _measure(case: Case, backend: str, gate: Gate, reps: int, rate: float) -> dict[str, Any]:
    if reason := gate.reason(case, backend):
        return {"status": "inaccurate", "reason": reason}
    problem = case.draw()
    held = (problem.q, problem.k, problem.v, problem.do, *problem.directions)
    way = gate.ways[backend]
    with Memory(case.device, held) as used:
        second = way(problem)
        answer = second()
    errors = spot_errors(problem, answer, seed=case.seed)
    del answer
    row: dict[str, Any] = {"peak_bytes": used.peak, "error": max(errors.values()), "errors": errors}
    if reason := spot_reason(case.dtype, errors):
        return row | {"error": None, "errors": None, "status": "inaccurate", "reason": reason}
    spent = timed(second, case.device, reps=reps)
    tflops = problem.flops / spent.p50 / 1e9
    if backend == "ours":
        row["implementation"] = "; ".join(
            explain(problem.q, problem.k, problem.v, is_causal=case.causal, window_size=case.window)
        )
    return row | spent.as_row() | {"tflops": tflops, "cublas_fraction": tflops / rate, "status": "ok"}


def line(row: dict[str, Any]) -> str:
    """A row as a line under `HEAD`."""
    heads = str(row["H_Q"]) if row["H_Q"] == row["H_KV"] else f"{row['H_Q']}/{row['H_KV']}"
    mask = f"w {row['window']}" if row["window"] else "causal" if row["causal"] else "full"
    text = f"{row['N']:>8} {row['D']:>4} {heads:>7} {row['B']:>2} {mask:<9} {row['dtype']:<9} {row['backend']:<12}"
    if row["status"] != "ok":
        return f"{text} {row['status']}: {row['reason'][:120]}"
    figures = f"{row['ms_p50']:>10.3f} {row['tflops']:>8.3g} {row['cublas_fraction']:>9.1%}"
    return f"{text} {figures} {memory(row['peak_bytes']):>10} {row['error']:>8.1e}"


def tune(options: AttentionOptions) -> None:
    """Find the general kernels' tile shapes on this GPU; see `cli.tuning`.

    Raises:
        typer.BadParameter: If an option is given that is about rows.
    """
    from cli.tuning import tune as find

    given = [f"--{name}" for name in ("json", "out", "append", "backends") if options.origins.get(name) == "flag"]
    if given:
        raise typer.BadParameter(f"--tune writes a launch table and no rows: leave out {', '.join(given)}")
    find(list(cases(options)), reps=options.reps)
