"""Errors of all eight outputs on a GPU against float64, beside those of PyTorch's own materializing path.

    python3 -m tests.gpu_accuracy --out FILE.json [--full] [--masks causal,bias] [--append] [--workers N]

measures every head size under the causal mask and every mask at two head sizes (with --full, every mask at every head
size), each in bf16, fp16 and float32, prints a table and writes one record per measurement, as soon as it is there;
--append keeps the records of other measurements that the file holds. Most of the time goes into compiling kernels,
which several processes share.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashbob import explain
from flashbob.geometry import Geometry
from tests.attention_cases import OUTPUTS, Case, Inputs, errors, inputs, outputs

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "float32": torch.float32}
HEAD_SIZES = (8, 16, 32, 40, 64, 80, 96, 128, 192, 256)
THOROUGH_SIZES = (64, 128)
FLOAT32_BOUND = 1e-5

# Lengths are multiples of nothing; no query of these masks is blind, which PyTorch's path does not define.
MASKS: dict[str, dict[str, Any]] = {
    "causal": {"is_causal": True},
    "full": {},
    "window": {"window_size": 100},
    "gqa": {"heads": (6, 2), "is_causal": True},
    "rectangular": {"tokens": (131, 321), "is_causal": True},
    "padded": {"key_starts": (0, 60), "key_lengths": (321, 250)},
    "value-size": {"is_causal": True},
    "softcap": {"is_causal": True, "softcap": 1.5},
    "bias": {"bias": (1, 3)},
    "dropout": {"is_causal": True, "dropout_p": 0.2, "seed": 3},
    "everything": {
        "heads": (6, 2),
        "bias": (2, 6),
        "window_size": 200,
        "softcap": 1.5,
        "key_starts": (0, 0),
        "key_lengths": (321, 250),
        "dropout_p": 0.2,
        "seed": 4,
    },
}


@dataclass(frozen=True)
class Spec:
    """One measurement."""

    size: int
    mask: str
    dtype: str

    def __str__(self) -> str:
        return f"{self.size}-{self.mask}-{self.dtype}"

    def case(self) -> Case:
        options = dict(MASKS[self.mask])
        heads, tokens = options.pop("heads", (3, 3)), options.pop("tokens", (321, 321))
        bias = options.pop("bias", None)
        sizes = (self.size, self.size // 2 if self.mask == "value-size" else self.size)
        return Case(str(self), heads, tokens, sizes, 2, options, bias)


def specs(*, full: bool = False, masks: Iterable[str] = MASKS) -> list[Spec]:
    """All measurements, those that share compiled kernels next to each other."""
    return [
        Spec(size, mask, dtype)
        for dtype in DTYPES
        for size in HEAD_SIZES
        for mask in masks
        if full or mask == "causal" or size in THOROUGH_SIZES
    ]


def materialized(case: Case, x: Inputs) -> dict[str, Tensor]:
    """The eight outputs through `scaled_dot_product_attention` held to its math path, in the dtype of `x`.

    What that has no argument for (soft-caps, a given dropout mask), and biases, go through the materializing reference.
    """
    if x.bias is not None or {"softcap", "dropout_p"} & case.options.keys():
        return outputs(case, x, "reference")
    options = {**case.options}
    padding = [options.pop(name, None) for name in ("key_starts", "key_lengths")]
    bounds = None if padding[0] is None else torch.tensor(list(zip(*padding, strict=True)), device=x.q.device)
    geometry = Geometry.build(
        *case.tokens,
        is_causal=options.get("is_causal", False),
        window_size=options.get("window_size", 0),
        q_offset=None,
        k_offset=0,
    )
    hidden = geometry.hidden(0, geometry.queries, 0, geometry.keys, bounds, x.q.device)
    hidden = hidden[:, 0] if hidden is not None and hidden.ndim == 5 else hidden
    leaves = [t.detach().requires_grad_() for t in (x.q, x.k, x.v, x.do)]
    with sdpa_kernel(SDPBackend.MATH):
        o = torch.nn.functional.scaled_dot_product_attention(
            *leaves[:3],
            attn_mask=None if hidden is None or (geometry.is_square_causal and bounds is None) else ~hidden,
            is_causal=geometry.is_square_causal and bounds is None,
            enable_gqa=case.heads[0] != case.heads[1],
        )
    first = torch.autograd.grad(o, leaves[:3], leaves[3], create_graph=True)
    second = torch.autograd.grad(first, leaves, (x.uq, x.uk, x.uv))
    return {label: t.detach() for label, t in zip(OUTPUTS, (o, *first, *second), strict=True)}


def measure(spec: Spec, device: str = "cuda") -> dict[str, Any]:
    """The record of one measurement: `error` is the worst of `errors`, `margin` the worst share of the bound used."""
    case = spec.case()
    x = inputs(case, DTYPES[spec.dtype], device)
    first, second = explain(
        x.q,
        x.k,
        x.v,
        is_causal=case.options.get("is_causal", False),
        window_size=case.options.get("window_size", 0),
        padded="key_lengths" in case.options,
        softcap=case.options.get("softcap"),
        attn_bias=x.bias,
        dropout_p=case.options.get("dropout_p", 0.0),
    )
    row: dict[str, Any] = {
        "op": "attention double backward",
        "backend": second,
        "first_order": first,
        "B": case.batch,
        "H_Q": case.heads[0],
        "H_KV": case.heads[1],
        "N": case.tokens[0],
        "N_KV": case.tokens[1],
        "D": case.sizes[0],
        "D_v": case.sizes[1],
        "dtype": spec.dtype,
        "mask": spec.mask,
        "causal": bool(case.options.get("is_causal")),
        "window": case.options.get("window_size", 0),
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "torch": torch.__version__,
    }
    try:
        exact = outputs(case, x.to(torch.float64), "reference")
        found, math = errors(outputs(case, x, "auto"), exact), errors(materialized(case, x), exact)
    except torch.OutOfMemoryError:
        return {**row, "status": "oom"}
    except NotImplementedError as error:
        return {**row, "status": "unsupported", "reason": str(error)}
    except Exception as error:  # a kernel that does not run is a row like one that is wrong; the others go on
        return {**row, "status": "failed", "reason": f"{type(error).__name__}: {error}"}
    bounds = {label: bound(spec.dtype, math[label]) for label in OUTPUTS}
    margin = max(found[label] / bounds[label] for label in OUTPUTS)
    # not (<= 1) instead of > 1: NaN fails.
    status = "ok" if margin <= 1 and all(found[label] <= bounds[label] for label in OUTPUTS) else "inaccurate"
    return {
        **row,
        "error": max(found.values()),
        "errors": found,
        "math_errors": math,
        "bounds": bounds,
        "margin": margin,
        "status": status,
    }


def bound(dtype: str, math_error: float) -> float:
    """Largest accepted error: 1e-5 in float32, else twice PyTorch's own plus an eighth of the dtype's epsilon."""
    return FLOAT32_BOUND if dtype == "float32" else 2 * math_error + torch.finfo(DTYPES[dtype]).eps / 8


def measure_all(asked: Iterable[Spec], *, workers: int, device: str = "cuda") -> Iterator[dict[str, Any]]:
    """Records of all measurements, in order, from several processes that compile side by side."""
    asked = list(asked)
    if workers <= 1:
        yield from (measure(spec, device) for spec in asked)
        return
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"), initializer=_one_thread) as pool:
        yield from pool.map(measure, asked, [device] * len(asked))


def _one_thread() -> None:
    torch.set_num_threads(1)


def default_workers() -> int:
    """Processes that compile side by side: one a core, and not more than a GPU's memory holds contexts for."""
    return max(1, min(12, (os.cpu_count() or 1) - 1))


def _place(row: dict[str, Any]) -> tuple[int, int, int]:
    """Where a record stands in the file: by dtype, head size and mask."""
    return list(DTYPES).index(row["dtype"]), row["D"], list(MASKS).index(row["mask"])


def table(rows: list[dict[str, Any]]) -> str:
    """One line a shape: worst error of the eight outputs, and which share of its bound the worst one used."""
    shapes = dict.fromkeys((row["D"], row["mask"]) for row in rows)
    lines = [f"{'D':>4} {'mask':<12}" + "".join(f"{dtype:>12} {'of bound':>9}" for dtype in DTYPES)]
    for size, mask in shapes:
        line = f"{size:>4} {mask:<12}"
        for dtype in DTYPES:
            row = next((r for r in rows if (r["D"], r["mask"], r["dtype"]) == (size, mask, dtype)), None)
            if row is None or "error" not in row:
                line += f"{'-' if row is None else row['status']:>12} {'':>9}"
            else:
                line += f"{row['error']:>12.2e} {row['margin']:>8.0%}{'' if row['status'] == 'ok' else '!'}"
        lines.append(line)
    return "\n".join(lines)


def main() -> int:
    """Measure, print, write; exit status 1 when a bound is exceeded."""
    parser = argparse.ArgumentParser(prog="python3 -m tests.gpu_accuracy", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--full", action="store_true", help="every mask at every head size")
    parser.add_argument("--masks", default=",".join(MASKS), help="of %(default)s")
    parser.add_argument("--append", action="store_true", help="keep what else the file holds")
    parser.add_argument("--workers", type=int, default=default_workers(), help="processes (default: %(default)s)")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu measures the blocked backend")
    settings = parser.parse_args()
    if settings.device == "cuda" and not torch.cuda.is_available():
        print("there is no CUDA device; --device cpu measures the blocked backend", file=sys.stderr)
        return 1
    masks = settings.masks.split(",")
    if unknown := set(masks) - set(MASKS):
        print(f"--masks {','.join(sorted(unknown))}: not of {','.join(MASKS)}", file=sys.stderr)
        return 1
    rows: list[dict[str, Any]] = []
    if settings.append and settings.out.exists():
        rows = json.loads(settings.out.read_text())["rows"]
    settings.out.parent.mkdir(parents=True, exist_ok=True)
    for row in measure_all(specs(full=settings.full, masks=masks), workers=settings.workers, device=settings.device):
        rows = sorted([old for old in rows if _place(old) != _place(row)] + [row], key=_place)
        settings.out.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    print(table(rows))
    inaccurate = [row for row in rows if row["status"] != "ok"]
    print(f"{len(rows)} measurements, {len(inaccurate)} beyond their bounds; written to {settings.out}")
    return 1 if inaccurate else 0


if __name__ == "__main__":
    sys.exit(main())
