"""Rate of Hutchinson probes of GPT-2 (random weights, bfloat16) on one GPU or several, after the first ones.

    python3 -m tests.gpu_processes --out notebooks/records/processes_h200.json
    python3 -m torch.distributed.run --nproc-per-node=2 -m tests.gpu_processes --out notebooks/records/processes_h200.json

Each run adds its row to the record. Ten probes go ahead, which compile, differentiate the batch, and record the launches.
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch

from curvature import HessianOperator, load_model, token_windows, trace
from curvature.distributed import join, launched, leave
from curvature.report import environment


def main() -> None:
    """Time the probes, and add the row."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seq", type=int, default=8192)
    parser.add_argument("--probes", type=int, default=120)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    _, _, local = launched()
    device = torch.device("cuda", local)
    torch.cuda.set_device(device)
    processes = join()
    loaded = load_model("gpt2", dtype=torch.bfloat16, device=device, random_init=True, seq=options.seq)
    windows = token_windows(loaded.tokenizer, "sample", seq=options.seq, batch=1, batches=1)
    operator = HessianOperator(loaded.model, windows.batches)
    trace(operator, probes=10, processes=processes)
    torch.cuda.synchronize()
    start = time.perf_counter()
    found = trace(operator, probes=options.probes, seed=1, processes=processes)
    seconds = time.perf_counter() - start
    if processes.leads:
        content = json.loads(options.out.read_text()) if options.out.exists() else {"rows": []}
        row = {
            "model": "gpt2", "N": options.seq, "B": 1, "dtype": "bfloat16", "processes": processes.count,
            "probes": options.probes, "seconds": seconds, "trace": found.value, "stderr": found.stderr,
            "environment": environment(device),
        }  # fmt: skip
        content["rows"].append(row)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        print(f"{processes.count} processes: {seconds / options.probes:.4f} s a probe, {found.value} ± {found.stderr}")
    leave()


if __name__ == "__main__":
    main()
