"""Training GPT-2 (random weights, N=2048, 8 windows a step, bfloat16 autocast) on a GPU by `flashbob-curv train`.

    python3 -m tests.gpu_training --data TEXT --out FOLDER [--runs flashbob,again,...] [--steps 300] [--short 41]
    python3 -m torch.distributed.run --nproc-per-node=2 -m tests.gpu_training --runs two --data TEXT --out FOLDER

Runs: Sophia-H with each way to differentiate attention, `again` the first one repeated (its sums are added up in another
order each time: the floor under differences between curves), `adamw`, and `one` and `two`: one process and two at the
same global batch. `NAME-short` are the first --short steps. Writes FOLDER/train_h200.json after every run, with those of
earlier calls, and FOLDER/train_h200.png.
"""  # noqa: E501

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import shutil
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch

from cli.main import app
from curvature import training_text
from curvature.distributed import launched
from curvature.report import write_json

mpl.use("Agg")
import matplotlib.pyplot as plt

COMMON = "--model gpt2 --random-init --seq 2048 --dtype bfloat16 --eval-batches 2 --save-every 100000 --seed 17"
SOPHIA = "--optimizer sophia --lr 2e-3 --gamma 0.013 --curvature row-norm --beta1 0.9 --beta2 0.9"
RUNS = {
    "flashbob": SOPHIA,
    "again": SOPHIA,
    "math": f"{SOPHIA} --attention math",
    "hybrid": f"{SOPHIA} --attention hybrid",
    "adamw": "--optimizer adamw --lr 1e-3",
    "one": f"{SOPHIA} --batches 8 --hessian-batches 2",
    "two": f"{SOPHIA} --batches 4 --hessian-batches 2",
}
LABELS = {
    "flashbob": "Sophia-H, flashbob",
    "again": "the same again",
    "math": "Sophia-H, math",
    "adamw": "AdamW, flashbob",
}


def settings(name: str, options: argparse.Namespace) -> str:
    """The arguments of one run, apart from where it reads and writes."""
    kind, _, short = name.partition("-")
    steps = options.short if short or kind in ("one", "two") else options.steps
    return f"{COMMON} {RUNS[kind]} --batch 8 --max-steps {steps} --warmup {max(1, min(30, steps // 10))}"


def trained(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """The row of one run; its model and state are not kept."""
    rank = launched()[0]
    arguments, folder = settings(name, options), options.out / name
    row: dict[str, Any] = {"op": "train", "name": name, "command": f"flashbob-curv train {arguments}"}
    code: object = 0
    options.out.mkdir(parents=True, exist_ok=True)
    with (
        (options.out / f"{name}.{rank}.txt").open("w") as log,
        contextlib.redirect_stdout(log),
        contextlib.redirect_stderr(log),
    ):
        try:
            app(["train", *arguments.split(), "--data", options.data, "--out", str(folder)], prog_name="flashbob-curv")
        except SystemExit as end:
            code = end.code
    if rank:
        return row
    for part in ("model", "state"):
        shutil.rmtree(folder / part, ignore_errors=True)
    gc.collect()
    torch.cuda.empty_cache()
    if code:
        return row | {"status": (options.out / f"{name}.{rank}.txt").read_text()[-300:]}
    return row | measured(json.loads((folder / "train.json").read_text())) | {"status": "ok"}


def measured(found: dict[str, Any]) -> dict[str, Any]:
    """What is kept of a run's train.json."""
    used, step, event = found["settings"], found["seconds_per_step"], found["seconds_per_estimate"]
    loop = step + (event or 0.0) / used["hessian_every"]
    return {
        "model": found["model"]["name"], "optimizer": used["optimizer"], "attention": used["attention"],
        "N": used["seq"],
        "B": used["batch"], "accumulate": used["batches"], "processes": found["environment"]["processes"],
        "dtype": used["dtype"], "steps": used["max_steps"], "hessian_every": used["hessian_every"],
        "seconds_per_step": step, "seconds_per_estimate": event, "seconds_per_step_in_loop": loop,
        "tokens_per_second": found["history"][0]["tokens"] / loop, "peak_bytes": found["peak_memory_bytes"],
        "loss_held_out": found["evaluation"][-1]["loss"],
        "loss_last_20": statistics.mean(e["loss"] for e in found["history"][-20:]),
        "losses": [round(e["loss"], 6) for e in found["history"]],
        "seconds": [round(e["seconds"], 3) for e in found["history"]],
        "data": {k: v for k, v in found["data"].items() if k != "source"}, "notices": found["notices"],
        "environment": found["environment"],
    }  # fmt: skip


def told(row: dict[str, Any]) -> str:
    """One line."""
    if row["status"] != "ok":
        return f"{row['name']:15} {row['status']}"
    event = f"{1e3 * row['seconds_per_estimate']:6.1f}" if row["seconds_per_estimate"] else "     -"
    return (
        f"{row['name']:15} step {1e3 * row['seconds_per_step']:6.1f} ms  estimate {event} ms  loop "
        f"{1e3 * row['seconds_per_step_in_loop']:6.1f} ms  {row['tokens_per_second']:9,.0f} tok/s  "
        f"{row['peak_bytes'] / 2**30:6.2f} GiB  loss {row['loss_last_20']:.4f}, held out {row['loss_held_out']:.4f}"
    )


def picture(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Loss by step and by seconds."""
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), dpi=150, layout="constrained", sharey=True)
    for row in rows:
        if row["name"] in LABELS and row["status"] == "ok":
            smooth = [statistics.mean(row["losses"][max(0, i - 9) : i + 1]) for i in range(len(row["losses"]))]
            axes[0].plot(range(1, len(smooth) + 1), smooth, lw=1.2, label=LABELS[row["name"]])
            axes[1].plot(row["seconds"], smooth, lw=1.2)
    axes[0].set(xlabel="step", ylabel="loss, mean of 10 steps, nats per token")
    axes[1].set(xlabel="seconds")
    axes[0].legend(frameon=False)
    figure.savefig(path)
    plt.close(figure)


def main() -> None:
    """Make the runs, and bring the record up to date."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", required=True, help="the text to train on")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--runs", default="flashbob,again,math,adamw,math-short,hybrid-short,one")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--short", type=int, default=41)
    options = parser.parse_args()
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    tokenize, known = training_text._first_ids, dict[str, Any]()

    def once(tokenizer: Any, source: str, needed: int | None) -> Any:
        if source not in known:  # one tokenizer for all runs
            known[source] = tokenize(tokenizer, source, None)
        return known[source][:needed]

    training_text._first_ids = once
    path = options.out / "train_h200.json"
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    for name in options.runs.split(","):
        row = trained(name, options)
        if launched()[0]:
            continue
        print(told(row), flush=True)
        rows = [r for r in rows if r["name"] != name] + [row]
        write_json(path, {"command": "python3 -m tests.gpu_training", "rows": rows})
    if not launched()[0] and any(len(r.get("losses", ())) > options.short for r in rows):
        picture(rows, options.out / "train_h200.png")


if __name__ == "__main__":
    main()
