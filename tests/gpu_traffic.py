"""Bytes that the two passes move through a GPU's memory, by Nsight Compute, beside the model of `flashbob.traffic`.

    python3 -m tests.gpu_traffic --out FILE.json [--dims 64,128] [--seqs 2048,8192,32768] [--batch 1] [--heads 12]

starts itself under `ncu` once per case, reads the counters of the two kernels and prints, per pass: what device memory
read and wrote, what the L2 was asked for, the bytes of the model (every load of a tile) and its lower bound (every
tensor once). The model is about tiles, so it stands beside the L2's figure; device memory lies below it by what the L2
keeps.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from flashbob.rivals import draw, ours
from flashbob.traffic import Traffic, column_pass, row_pass

METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum", "lts__t_bytes.sum", "gpu__time_duration.sum")


def shapes(dim: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """(rows owned, rows streamed at a time) by a program of the row and of the column pass on this GPU."""
    if torch.cuda.get_device_capability() == (9, 0):
        from flashbob.kernels import hopper

        return (hopper.OWNED, hopper.ROW[dim].tile), (hopper.OWNED, hopper.COLUMN[dim].tile)
    from flashbob.kernels import launch

    row, column = (launch.tiles_for(p, dim, 2, torch.cuda.get_device_capability()) for p in ("row", "column"))
    return (row.bm, row.bn), (column.bn, column.bm)


def model(dim: int, seq: int, batch: int, heads: int) -> dict[str, Traffic]:
    """The model's bytes of both passes, causal, bfloat16."""
    sizes: dict[str, Any] = {"heads": heads, "kv_heads": heads, "batch": batch, "causal": True, "itemsize": 2}
    (row_block, row_tile), (column_block, column_tile) = shapes(dim)
    return {
        "row": row_pass(seq, dim, block=row_block, tile=row_tile, **sizes),
        "column": column_pass(seq, dim, block=column_block, tile=column_tile, **sizes),
    }


def child(dim: int, seq: int, batch: int, heads: int) -> None:
    """One double backward inside the profiled range, after one outside it that compiles."""
    problem = draw(
        batch=batch, heads=(heads, heads), seq=seq, dim=dim, causal=True, dtype=torch.bfloat16, device="cuda"
    )
    second = ours(problem)
    second()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()
    second()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()


def counters(arguments: list[str]) -> list[dict[str, Any]]:
    """{"kernel", metric: value} of every kernel that a profiled child launched."""
    command = ["ncu", "--csv", "--print-units", "base", "--profile-from-start", "off", "--clock-control", "none"]
    command += ["--metrics", ",".join(METRICS), sys.executable, "-m", "tests.gpu_traffic", "--child", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"ncu ended with {done.returncode}: {done.stdout[-1000:]} {done.stderr[-1000:]}")
    return parse(done.stdout)


def parse(text: str) -> list[dict[str, Any]]:
    """Kernels in order of launch, from ncu's CSV, ahead of which it prints remarks."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    kernels: dict[str, dict[str, Any]] = {}
    for entry in csv.DictReader(io.StringIO("\n".join(lines))):
        kernel = kernels.setdefault(entry["ID"], {"kernel": entry["Kernel Name"]})
        kernel[entry["Metric Name"]] = float(entry["Metric Value"].replace(",", ""))
    return list(kernels.values())


def rows(dim: int, seq: int, batch: int, heads: int) -> list[dict[str, Any]]:
    """One row per pass: measured beside model."""
    arguments = [f"--dims={dim}", f"--seqs={seq}", f"--batch={batch}", f"--heads={heads}"]
    found = counters(arguments)
    expected = model(dim, seq, batch, heads)
    result = []
    for name, traffic in expected.items():
        (kernel,) = [k for k in found if k["kernel"].split("(")[0].startswith((f"{name}_", f"_{name}_"))]
        read, written, asked, nanoseconds = (kernel[metric] for metric in METRICS)
        result.append(
            {
                "op": f"{name}_pass",
                "kernel": kernel["kernel"].split("(")[0],
                "B": batch,
                "H_Q": heads,
                "H_KV": heads,
                "N": seq,
                "D": dim,
                "dtype": "bfloat16",
                "causal": True,
                "dram_read_bytes": read,
                "dram_write_bytes": written,
                "l2_bytes": asked,
                "model_bytes": traffic.total,
                "compulsory_bytes": traffic.compulsory,
                "ms": nanoseconds / 1e6,
                "device": torch.cuda.get_device_name(),
                "torch": torch.__version__,
            }
        )
    return result


def line(row: dict[str, Any]) -> str:
    """A row of the table, in MiB."""
    figures = [row["dram_read_bytes"] + row["dram_write_bytes"], *(row[k] for k in ("compulsory_bytes", "l2_bytes"))]
    text = "".join(f"{figure / 2**20:>12.1f}" for figure in [*figures, row["model_bytes"]])
    return f"{row['N']:>8} {row['D']:>4} {row['op']:<12}{text}{row['ms']:>10.3f}"


def main() -> int:
    """Measure every case, print, write."""
    parser = argparse.ArgumentParser(prog="python3 -m tests.gpu_traffic", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--dims", default="64,128")
    parser.add_argument("--seqs", default="2048,8192,32768")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    settings = parser.parse_args()
    cases = [(int(d), int(n)) for d in settings.dims.split(",") for n in settings.seqs.split(",")]
    if settings.child:
        child(*cases[0], settings.batch, settings.heads)
        return 0
    if shutil.which("ncu") is None or not torch.cuda.is_available():
        print("needs a CUDA device and Nsight Compute (ncu) on the path", file=sys.stderr)
        return 1
    print(f"{'N':>8} {'D':>4} {'pass':<12}{'DRAM MiB':>12}{'at least':>12}{'L2 MiB':>12}{'model':>12}{'ms':>10}")
    found = []
    for dim, seq in cases:
        for row in rows(dim, seq, settings.batch, settings.heads):
            found.append(row)
            print(line(row), flush=True)
            if settings.out is not None:
                settings.out.parent.mkdir(parents=True, exist_ok=True)
                settings.out.write_text(json.dumps({"rows": found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
