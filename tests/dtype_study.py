"""What a precision costs and what it spoils: trace, extreme eigenvalues and single products against a reference.

    python3 -m tests.dtype_study --model tiny --seq 128 --device cpu --out notebooks/records/dtype_tiny_cpu.json
    python3 -m tests.dtype_study --model SMOLLM2 --seq 2048 --device cuda --reference float32 --out FILE.json

Every precision gets the same probes and the same start vector, so that what differs is rounding alone. `choice` in the
record is the fastest precision whose error in the trace stays below the standard error of the trace from these probes:
what the default should be for a run that asks for no more than that.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from curvature import HessianOperator, lanczos, load_model, token_windows, trace
from curvature.linear_operator import LinearOperator
from curvature.probes import normal
from curvature.report import environment, write_json
from curvature.vectors import norm

HALF = "half-inside-float32"


@dataclass(frozen=True)
class Precision:
    """One way to compute.

    Attributes:
        name: As the record calls it.
        dtype: Of the weights and activations.
        half_attention: Whether attention alone runs in bfloat16.
        tf32: Whether float32 products of matrices may run in TF32.
    """

    name: str
    dtype: torch.dtype
    half_attention: bool = False
    tf32: bool = False


PRECISIONS = (
    Precision("float64", torch.float64),
    Precision("float32", torch.float32),
    Precision("tf32", torch.float32, tf32=True),
    Precision("float32, bfloat16 attention", torch.float32, half_attention=True),
    Precision("tf32, bfloat16 attention", torch.float32, half_attention=True, tf32=True),
    Precision("bfloat16", torch.bfloat16),
)


@dataclass(frozen=True)
class Work:
    """What is computed in each precision.

    Attributes:
        model: As `curvature.load_model` takes it.
        seq: Tokens of the one window.
        device: Where.
        probes: Of the trace.
        steps: Lanczos steps for the extreme eigenvalues.
        directions: Products that are compared entry by entry.
        reference: The precision that the others are compared with.
    """

    model: str = "tiny"
    seq: int = 128
    device: str = "cpu"
    probes: int = 10
    steps: int = 20
    directions: int = 3
    reference: Literal["float64", "float32"] = "float64"


@dataclass(frozen=True)
class Found:
    """What one precision has computed."""

    seconds: float
    products: list[Tensor]
    trace: float
    trace_stderr: float
    ends: tuple[float, float]
    residuals: tuple[float, float]
    symmetry: float


def register_half_attention() -> None:
    """An attention of transformers that runs ours in bfloat16 on float32 operands."""
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    from flashbob import register_attention

    register_attention()
    ours: Any = AttentionInterface()["flashbob"]

    def attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        out, weights = ours(module, q.bfloat16(), k.bfloat16(), v.bfloat16(), *args, **kwargs)
        return out.to(q.dtype), weights

    AttentionInterface.register(HALF, attend)
    AttentionMaskInterface.register(HALF, AttentionMaskInterface()["flashbob"])


@contextmanager
def _tf32(allowed: bool) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def operator(precision: Precision, work: Work) -> HessianOperator:
    """The Hessian in one precision."""
    loaded = load_model(work.model, dtype=precision.dtype, device=torch.device(work.device))
    if precision.half_attention:
        register_half_attention()
        loaded.model.set_attn_implementation(HALF)
    windows = token_windows(loaded.tokenizer, "sample", work.seq, 1, 1)
    return HessianOperator(loaded.model, windows.batches)


def compute(op: LinearOperator, work: Work) -> Found:
    """Everything that is compared, from the same probes in every precision."""
    products, seconds = [], []
    for index in range(work.directions + 1):
        v = normal(op.space, seed=1, index=index)
        started = time.perf_counter()
        product = op @ v  # its check for finite numbers waits for the device
        seconds.append(time.perf_counter() - started)
        products.append(product.double().cpu())
    estimate = trace(op, probes=work.probes, seed=2)
    run = lanczos(op, steps=work.steps, seed=3, top=1)
    (largest, smallest), (high, low) = run.eigenvalues.tolist(), run.residuals.tolist()
    symmetry = op.symmetry_error()
    # The first product also makes what the others find made.
    later = sorted(seconds[1:])[len(seconds[1:]) // 2]
    return Found(later, products[1:], estimate.value, estimate.stderr, (largest, smallest), (high, low), symmetry)


def row(precision: Precision, found: Found, reference: Found) -> dict[str, Any]:
    """One precision's row of the record: errors relative to the reference."""
    errors = [norm(a - b) / norm(b) for a, b in zip(found.products, reference.products, strict=True)]
    size = max(map(abs, reference.ends))
    error = found.trace - reference.trace
    return {
        "precision": precision.name,
        "status": "ok",
        "seconds_per_product": found.seconds,
        "product_error": {"mean": sum(errors) / len(errors), "max": max(errors), "directions": len(errors)},
        "symmetry_error": found.symmetry,
        "trace": {"value": found.trace, "stderr": found.trace_stderr},
        "trace_error": {
            "value": error,
            "relative": error / reference.trace,
            "of_stderr": error / reference.trace_stderr,
        },
        "eigenvalues": [
            {"value": value, "residual": residual, "error": (value - exact) / size}
            for value, residual, exact in zip(found.ends, found.residuals, reference.ends, strict=True)
        ],
    }


def choice(rows: list[dict[str, Any]]) -> str:
    """The fastest precision whose error in the trace is below the trace's standard error."""
    sound = [r for r in rows if r["status"] == "ok" and abs(r["trace_error"]["of_stderr"]) < 1]
    return str(min(sound, key=lambda r: r["seconds_per_product"])["precision"])


def study(work: Work) -> dict[str, Any]:
    """All precisions that the device has, compared."""
    wanted = [p for p in PRECISIONS if work.reference == "float64" or p.dtype != torch.float64]
    first = next(p for p in wanted if p.name == work.reference)
    rows, reference = [], None
    for precision in [first, *(p for p in wanted if p is not first)]:
        if precision.tf32 and not work.device.startswith("cuda"):
            rows.append({"precision": precision.name, "status": "unsupported"})
            continue
        with _tf32(precision.tf32):
            op = operator(precision, work)
            parameters = op.space.size
            found = compute(op, work)
            del op
        reference = reference or found
        rows.append(row(precision, found, reference))
        print(_shown(rows[-1]), flush=True)
    settings = {name: value for name, value in vars(work).items() if name != "model"}
    return {
        "model": Path(work.model).name,
        "parameters": parameters,
        "settings": settings,
        "environment": environment(work.device),
        "rows": rows,
        "choice": choice(rows),
    }


def _shown(found: dict[str, Any]) -> str:
    ends = ", ".join(f"{end['error']:+.1e}" for end in found["eigenvalues"])
    error = found["trace_error"]["of_stderr"]
    shown = f"{error:+.2g}" if math.isfinite(error) else "none"
    return (
        f"{found['precision']:28} {found['seconds_per_product']:.3g} s  product {found['product_error']['mean']:.1e}  "
        f"trace error {shown} s.e.  eigenvalues {ends} of the largest"
    )


def main() -> None:
    """The command line; see the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = Work()
    for name in ("model", "device"):
        parser.add_argument(f"--{name}", default=getattr(defaults, name))
    for name in ("seq", "probes", "steps", "directions"):
        parser.add_argument(f"--{name}", type=int, default=getattr(defaults, name))
    parser.add_argument("--reference", choices=("float64", "float32"), default=defaults.reference)
    parser.add_argument("--out", type=Path, required=True)
    given = vars(parser.parse_args())
    out = given.pop("out")
    record = study(Work(**given))
    write_json(out, record)
    print(f"choice: {record['choice']}\nwrote {out}")


if __name__ == "__main__":
    main()
