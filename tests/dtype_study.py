"""What a precision costs and what it spoils: trace, extreme eigenvalues and single products against a reference.

    python3 -m tests.dtype_study --model tiny --seq 64 --device cpu --out notebooks/records/dtype_tiny_cpu.json
    python3 -m tests.dtype_study --model SMOLLM2 --seq 2048 --device cuda --reference float32 --out FILE.json
    python3 -m tests.readme_figures     # then brings the README and the table that runs quote up to date

Every precision gets the same probes and the same start vector, so that what differs is rounding alone. `choice` in the
record is the fastest precision whose error in the trace stays below the standard error of the trace from these probes,
also when it is two of its own standard errors larger than it was found. The record is written after each precision.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from curvature import HessianOperator, lanczos, load_model, token_windows, trace
from curvature.estimate import mean_and_stderr
from curvature.linear_operator import LinearOperator
from curvature.probes import normal
from curvature.report import environment, write_json
from curvature.vectors import inner, norm

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
    Precision("bfloat16", torch.bfloat16),  # the default of a GPU, ahead of those that are not offered
    Precision("tf32", torch.float32, tf32=True),
    Precision("tf32, bfloat16 attention", torch.float32, half_attention=True, tf32=True),
    Precision("float32, bfloat16 attention", torch.float32, half_attention=True),
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
        directions: Products that are compared entry by entry; at least 2.
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
    """What one precision has computed: seconds of a product, products, samples of the trace, both ends."""

    seconds: float
    products: list[Tensor]
    samples: npt.NDArray[np.float64]
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


def directions_of(op: LinearOperator, work: Work) -> list[Tensor]:
    """The directions of the single products; drawn once, since that takes longer than a product of a GPU."""
    return [normal(op.space, seed=1, index=index) for index in range(work.directions)]


def compute(op: LinearOperator, work: Work, directions: Sequence[Tensor]) -> Found:
    """Everything that is compared, from the same probes in every precision."""
    products, seconds = [], []
    for v in (directions[0], *directions):  # the first product also makes what the others find made
        v = v.to(op.dtype)
        started = time.perf_counter()
        products.append(op @ v)  # its check for finite numbers waits for the device
        seconds.append(time.perf_counter() - started)
    products, later = products[1:], sorted(seconds[1:])
    estimate = trace(op, probes=work.probes, seed=2)
    run = lanczos(op, steps=work.steps, seed=3, top=1)
    (largest, smallest), (high, low) = run.eigenvalues.tolist(), run.residuals.tolist()
    samples = estimate.samples.sum(axis=1)
    symmetry = symmetry_of(directions, products)
    return Found(later[len(later) // 2], products, samples, (largest, smallest), (high, low), symmetry)


def symmetry_of(directions: Sequence[Tensor], products: Sequence[Tensor]) -> float:
    """`LinearOperator.symmetry_error` of the first two products that are there already."""
    (u, v), (hu, hv) = directions[:2], products[:2]
    return abs(float(inner(u, hv) - inner(v, hu))) / (norm(u) * norm(hv) / u.numel() ** 0.5)


def row(precision: Precision, found: Found, reference: Found) -> dict[str, Any]:
    """One precision's row of the record: errors relative to the reference."""
    pairs = zip(found.products, reference.products, strict=True)
    errors = [norm(a.double() - b.double()) / norm(b) for a, b in pairs]
    size = max(map(abs, reference.ends))
    value, stderr = mean_and_stderr(found.samples)
    exact, spread = mean_and_stderr(reference.samples)
    error, its_stderr = mean_and_stderr(found.samples - reference.samples)
    return {
        "precision": precision.name,
        "status": "ok",
        "seconds_per_product": found.seconds,
        "product_error": {"mean": sum(errors) / len(errors), "max": max(errors), "directions": len(errors)},
        "symmetry_error": found.symmetry,
        "trace": {"value": value, "stderr": stderr},
        "trace_error": {
            "value": error,
            "stderr": its_stderr,
            "relative": error / exact,
            "of_stderr": error / spread,
            "at_most_of_stderr": (abs(error) + 2 * its_stderr) / spread,
        },
        "eigenvalues": [
            {"value": value, "residual": residual, "error": (value - exact) / size}
            for value, residual, exact in zip(found.ends, found.residuals, reference.ends, strict=True)
        ],
    }


def choice(rows: list[dict[str, Any]]) -> str:
    """The fastest precision whose error in the trace is below the trace's standard error."""
    sound = [r for r in rows if r["status"] == "ok" and r["trace_error"]["at_most_of_stderr"] < 1]
    return str(min(sound, key=lambda r: r["seconds_per_product"])["precision"])


def study(work: Work, tell: Callable[[dict[str, Any]], None] = lambda _: None) -> dict[str, Any]:
    """All precisions that the device has, compared.

    Args:
        work: What is computed.
        tell: Called with the record so far after each precision.
    """
    wanted = [p for p in PRECISIONS if work.reference == "float64" or p.dtype != torch.float64]
    first = next(p for p in wanted if p.name == work.reference)
    record: dict[str, Any] = {
        "model": Path(work.model).name,
        "settings": {name: value for name, value in vars(work).items() if name != "model"},
        "environment": environment(work.device),
        "rows": [],
    }
    directions, reference = list[Tensor](), None
    for precision in [first, *(p for p in wanted if p is not first)]:
        if precision.tf32 and not work.device.startswith("cuda"):
            record["rows"].append({"precision": precision.name, "status": "unsupported"})
            continue
        with _tf32(precision.tf32):
            op = operator(precision, work)
            directions = directions or directions_of(op, work)
            found = compute(op, work, directions)
        reference = reference or found
        record["rows"].append(row(precision, found, reference))
        tell(record | {"parameters": op.space.size, "choice": choice(record["rows"])})
        del op, found
    return record | {"parameters": directions[0].numel(), "choice": choice(record["rows"])}


def _shown(found: dict[str, Any]) -> str:
    ends = ", ".join(f"{end['error']:+.1e}" for end in found["eigenvalues"])
    error = found["trace_error"]
    return (
        f"{found['precision']:28} {found['seconds_per_product']:.3g} s  product {found['product_error']['mean']:.1e}  "
        f"trace error {error['of_stderr']:+.2g} s.e. (at most {error['at_most_of_stderr']:.2g})  "
        f"eigenvalues {ends} of the largest"
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

    def tell(record: dict[str, Any]) -> None:
        print(_shown(record["rows"][-1]), flush=True)
        write_json(out, record)

    record = study(Work(**given), tell)
    write_json(out, record)
    print(f"choice: {record['choice']}\nwrote {out}")


if __name__ == "__main__":
    main()
