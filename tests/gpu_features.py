"""Time of the double backward with every option of `sdpa_bob` on a GPU, beside the plain causal one, and its error.

    python3 -m tests.gpu_features --out notebooks/records/features_h200.json [--seq 8192] [--dims 64,128] [--dtype bf16]

The time is that of one `torch.autograd.grad` on recorded first gradients; the error is the worst of the four outputs
against the materializing reference in float64, on the tensors that were timed. TFLOP/s count 18 products over the pairs
that the mask leaves.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

from cli.timing import Quantiles, collect, matmul_rate, timed
from curvature.report import environment
from flashbob import explain
from flashbob.geometry import Geometry
from tests.attention_cases import OUTPUTS, Case, Inputs, attend, errors, inputs, outputs
from tests.gpu_accuracy import DTYPES

HEADS = 8


def cases(seq: int, dim: int) -> list[Case]:
    """One case per option, and all of them together; the first is the plain one."""

    def case(name: str, *, heads: int = HEADS, bias: tuple[int, int] | None = None, **options: Any) -> Case:
        return Case(name, (HEADS, heads), (seq, seq), (dim, dim), 1, options, bias)

    return [
        case("causal", is_causal=True),
        case("full"),
        case("grouped heads, 4 to 1", heads=HEADS // 4, is_causal=True),
        case("window of 1,024", window_size=1024),
        case("half of the keys padded", is_causal=True, key_starts=(0,), key_lengths=(seq // 2,)),
        case("soft-cap", is_causal=True, softcap=30.0),
        case("dropout", is_causal=True, dropout_p=0.1, seed=1),
        case("bias", is_causal=True, bias=(1, 1)),
        case("soft-cap, dropout, bias", is_causal=True, bias=(1, 1), softcap=30.0, dropout_p=0.1, seed=1),
    ]


def visible_pairs(case: Case) -> int:
    """Pairs of a query and a key that a case's mask leaves, in one head."""
    (queries, keys), options = case.tokens, case.options
    geometry = Geometry.build(
        queries,
        keys,
        is_causal=options.get("is_causal", False),
        window_size=options.get("window_size", 0),
        q_offset=None,
        k_offset=0,
    )
    bounds = None
    if "key_lengths" in options:
        bounds = torch.tensor([[options["key_starts"][0], options["key_lengths"][0]]])
    hidden = geometry.hidden(0, queries, 0, keys, bounds, "cpu")
    return queries * keys if hidden is None else int((~hidden).sum())


def double_backward_time(case: Case, x: Inputs) -> Quantiles:
    """Milliseconds of one double backward."""
    leaves = Inputs(*(t.detach().requires_grad_() for t in (x.q, x.k, x.v, x.do)), x.uq, x.uk, x.uv, x.bias)
    qkv = (leaves.q, leaves.k, leaves.v)
    first = torch.autograd.grad(attend(case, leaves, "auto"), qkv, leaves.do, create_graph=True)

    def second() -> object:
        return torch.autograd.grad(first, (*qkv, leaves.do), (x.uq, x.uk, x.uv), retain_graph=True)

    return timed(second, torch.device("cuda"), reps=10, warmup=2)


def measure(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """The row of one case."""
    x = inputs(case, dtype, "cuda")
    spent = double_backward_time(case, x)
    found = outputs(case, x, "auto")
    collect(x.q.device)
    worst = errors(found, outputs(case, x.to(torch.float64), "reference"))
    options = case.options
    backends = explain(
        x.q, x.k, x.v, is_causal=options.get("is_causal", False), window_size=options.get("window_size", 0),
        padded="key_lengths" in options, softcap=options.get("softcap"), attn_bias=x.bias,
        dropout_p=options.get("dropout_p", 0.0),
    )  # fmt: skip
    flop = 18 * 2 * case.sizes[0] * case.heads[0] * visible_pairs(case)
    return {
        "case": case.name, "backend": backends[1], "N": case.tokens[0], "D": case.sizes[0], "H_Q": case.heads[0],
        "H_KV": case.heads[1], "B": case.batch, "dtype": str(dtype).removeprefix("torch."), **spent.as_row(),
        "tflops": flop / spent.p50 / 1e9, "error": max(worst[label] for label in OUTPUTS[4:]),
    }  # fmt: skip


def main() -> int:
    """Measure every case, print, write."""
    parser = argparse.ArgumentParser(prog="python3 -m tests.gpu_features", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seq", type=int, default=8192)
    parser.add_argument("--dims", default="64,128")
    parser.add_argument("--dtype", default="bf16", choices=DTYPES)
    settings = parser.parse_args()
    device = torch.device("cuda")
    record: dict[str, Any] = {"environment": environment(device), "cublas_tflops": matmul_rate(device), "rows": []}
    print(f"cuBLAS {record['cublas_tflops']:.0f} TFLOP/s")
    print(f"{'case':<26}{'d':>4}{'ms':>9}{'TFLOP/s':>9}{'of causal':>11}{'error':>10}")
    for dim in map(int, settings.dims.split(",")):
        plain = 0.0
        for case in cases(settings.seq, dim):
            collect(device)
            row = measure(case, DTYPES[settings.dtype])
            plain = plain or row["tflops"]
            row["of_plain"] = row["tflops"] / plain
            record["rows"].append(row)
            line = f"{case.name:<26}{dim:>4}{row['ms_p50']:>9.3f}{row['tflops']:>9.0f}"
            print(f"{line}{row['of_plain']:>11.2f}{row['error']:>10.1e}", flush=True)
            settings.out.parent.mkdir(parents=True, exist_ok=True)
            settings.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
