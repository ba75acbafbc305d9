"""Bit allocation on a real model: every metric at equal bytes, predictions against measurements, times, a checkpoint.

    python3 -m tests.gpu_quantization --model FOLDER --text CALIBRATION.txt --other OTHER.txt --out FOLDER
        [--quantizer rtn|gptq] [--budgets 3,4,5,3.5,4.25] [--parts scores,measured,budgets,timing,checkpoint]
        [--scores FOLDER] [--name SUFFIX] [--seconds LIMIT]

Calibration are the first windows of the text, evaluation later ones of the same text (never seen in calibration) and
the first ones of the other text; GPTQ rounds by windows behind those. The rivals see the gradients' windows and those
that decide about steps; what the search begins with and moves by does not see the latter. Writes
quantization_QUANTIZER.json after every row, so that a stopped run keeps its rows; --scores keeps the score tables, so
that a second run with other budgets starts from them. Weights: all inside the transformer blocks, none sharing a format
unless a row says so; symmetric, group 64.

Matrix products run in TF32 where --matmul says so (the default on a GPU), except for single-weight measurements, whose
changes are as small as 1e-5 nats. Those measurements and the last rows, which set the re-linearized plans against
uniform bits and the best rival, are in tests/quantization_study.py.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from curvature import load_model, token_windows
from curvature.report import environment, write_json
from quant import (
    Plan,
    Problem,
    Relinearization,
    Sensitivity,
    Settings,
    allocate,
    evaluate_perplexity,
    find_weights,
    relinearize,
    round_all,
    schemes,
    sensitivity,
    sharing_groups,
    uniform_plan,
    write_checkpoint,
)
from quant.allocation import make_plan
from quant.expansion import expand
from quant.perplexity import Perplexity, rise
from quant.pipeline import make_problem
from quant.sensitivity import Metric, with_linear
from tests.quantization_study import measured, summary

METRICS: tuple[Metric, ...] = ("quadratic", "trace", "fisher", "first_order", "weight_error")
EXPANDED = ("uniform", "quadratic", "taylor", "relinearized")
PARTS = "scores,measured,budgets,timing,checkpoint"


class Bench:
    """The model, its text and the record."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.started = args, time.perf_counter()
        self.device = torch.device(args.device)
        loaded = load_model(args.model, dtype=getattr(torch, args.dtype), device=self.device)
        self.model, self.tokenizer = loaded.model, loaded.tokenizer
        torch.set_float32_matmul_precision("high" if args.matmul == "tf32" else "highest")
        behind = args.skip + args.evaluate
        further = 0 if args.quantizer == "rtn" else args.rounding
        windows = token_windows(self.tokenizer, args.text, args.seq, 1, behind + further).batches
        last = args.gradient + args.held_out
        if not args.scored <= args.gradient <= last <= args.skip:
            raise SystemExit("scored <= gradient and gradient + held-out <= skip must hold, or texts would overlap")
        self.scored = joined(windows[: args.scored], 4)
        self.calibration = joined(windows[: args.gradient], args.together)
        self.held_out = joined(windows[args.gradient : last], 4)
        self.every = joined(windows[:last], 4)
        self.evaluation = joined(windows[args.skip : behind], 8)
        self.rounding = joined(windows[behind:], 12)
        self.other = joined(token_windows(self.tokenizer, args.other, args.seq, 1, args.evaluate // 2).batches, 8)
        self.rows: list[dict[str, Any]] = []
        self.facts: dict[str, Any] = {
            "command": "python3 -m tests.gpu_quantization",
            "model": loaded.info.as_record() | dict.fromkeys(("name", "path", "tokenizer"), Path(args.model).name),
            "arguments": {
                k: v for k, v in vars(args).items() if k not in ("model", "text", "other", "out", "scores", "scratch")
            },
            "environment": environment(self.device),
            "quantizer": args.quantizer,
        }
        settings = Settings(
            bits=4.0,
            quantizer=args.quantizer,
            share=False,
            storage_dtype=torch.bfloat16,
            method=args.method,
            choices=args.choices,
            group_sizes=args.group_sizes,
        )
        self.settings = settings
        (self.problem, notices), seconds = self.timed(lambda: make_problem(self.model, self.rounding, settings))
        self.candidates = self.problem.candidates
        self.facts |= {
            "notices": notices,
            "rounding_seconds": seconds,
            "weights": len(self.candidates.weights),
            "entries": sum(w.numel for w in self.candidates.weights),
        }
        self.before = {name: self.loss(b) for name, b in self.texts().items()}
        self.facts["loss"] = {name: found.as_record() for name, found in self.before.items()}
        self.scores: dict[str, Sensitivity] = {}
        self.note({"what": "start", "seconds": time.perf_counter() - self.started})

    def texts(self) -> dict[str, Sequence[Any]]:
        return {"held_out": self.held_out, "evaluation": self.evaluation, "other": self.other}

    def loss(self, batches: Sequence[Any]) -> Perplexity:
        return evaluate_perplexity(self.model, batches)

    def timed(self, work: Callable[[], Any]) -> tuple[Any, float]:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        started = time.perf_counter()
        result = work()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return result, time.perf_counter() - started

    def note(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        print(json.dumps({k: v for k, v in row.items() if not isinstance(v, list)}, default=float), flush=True)
        path = Path(self.args.out) / f"quantization_{self.args.quantizer}{self.args.name}.json"
        write_json(path, self.facts | {"seconds": time.perf_counter() - self.started, "rows": self.rows})


def scores(bench: Bench) -> None:
    """Every metric's table, with its time; trace and quadratic over 16,384 tokens (at the default lengths).

    The linear term of "taylor" is taken over the windows of the gradient: those that decide about steps would no longer
    be unseen.
    """
    folder = None if bench.args.scores is None else Path(bench.args.scores)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    for metric in METRICS:
        # The trace needs no spread between windows, so that few large batches save time; the rivals, which are cheap,
        # see all the text that the re-linearized search sees.
        batches = {"trace": joined(bench.scored, 4), "quadratic": bench.scored}.get(metric, bench.every)
        found = sensitivity(
            bench.model,
            bench.candidates,
            batches,
            metric,
            draws=bench.args.draws,
            probes=bench.args.probes,
            method=bench.args.method,
            cache=None if folder is None else folder / f"{metric}-{bench.args.quantizer}.safetensors",
        )
        note_scores(bench, found, batches)
    quadratic = bench.scores["quadratic"]
    note_scores(bench, with_linear(quadratic, bench.model, bench.candidates, bench.calibration), bench.calibration)


def note_scores(bench: Bench, found: Sensitivity, batches: Sequence[Any]) -> None:
    """Keep a table, and add its row."""
    bench.scores[found.metric] = found
    errors = None if found.stderr is None else float(np.nanmedian(found.stderr / np.abs(found.values)))
    row: dict[str, Any] = {"what": "scores", "metric": found.metric}
    row |= {"seconds": found.seconds, "products": found.products}
    row |= {"tokens": sum(b["input_ids"].numel() for b in batches), "median_relative_stderr": errors}
    bench.note(row | {"sums_by_option": [float(v) for v in np.nansum(found.values, axis=0)]})


def joined(batches: Sequence[Any], together: int) -> list[dict[str, torch.Tensor]]:
    """Several batches in one."""
    return [
        {"input_ids": torch.cat([b["input_ids"] for b in batches[i : i + together]])}
        for i in range(0, len(batches), together)
    ]


def outcome(bench: Bench, plan: Plan, seconds: float, problem: Problem | None = None) -> dict[str, Any]:
    """One plan's measured rises and, on text that decided nothing but steps, what is expected of the whole plan."""
    row: dict[str, Any] = {
        "what": "plan",
        "metric": plan.metric,
        "budget": plan.budget,
        "average_bits": plan.average_bits,
        "bytes": plan.bytes,
        "predicted": plan.predicted_loss_change,
        "seconds": seconds,
        "bits_count": {str(o.bits): sum(s.bits == o.bits for s in plan.schemes) for o in bench.candidates.options},
    }
    with (problem or bench.problem).candidates.applied(plan.choices):
        for name, batches in bench.texts().items():
            change, stderr = rise(bench.loss(batches), bench.before[name])
            row[name] = change
            row[f"{name}_stderr"] = stderr if np.isfinite(stderr) else None
    if plan.metric in EXPANDED:
        whole = expand(bench.model, bench.candidates, plan.choices, bench.held_out, method=bench.args.method)
        row["whole_plan"] = whole.as_record()
    return row


def budget_of(bench: Bench, bits: float) -> dict[str, Any]:
    """Average bits; with several group sizes the bytes of uniform bits at group 64, in between by proportion."""
    if len(bench.args.group_sizes) == 1:
        return {"bits": bits}
    low, high = max(b for b in bench.args.choices if b <= bits), min(b for b in bench.args.choices if b >= bits)
    sizes = [bench.problem.file_bytes(uniform_plan(bench.candidates, b, 64)) for b in (low, high)]
    return {"bytes": int(sizes[0] + (bits - low) / max(1, high - low) * (sizes[1] - sizes[0]))}


def budgets(bench: Bench) -> dict[float, Plan]:
    """Every metric at every budget; the last of each is the re-linearized plan."""
    found: dict[float, Plan] = {}
    settings = moves(bench.args)
    for bits in bench.args.budgets:
        if time.perf_counter() - bench.started > bench.args.seconds:
            bench.note({"what": "stopped", "before_budget": bits})
            break
        budget, starts = budget_of(bench, bits), []
        if bits in bench.args.choices:
            uniform = make_plan(bench.problem, uniform_plan(bench.candidates, int(bits), 64), "uniform", budget, None)
            bench.note(outcome(bench, uniform, 0.0) | {"target": bits})
            starts += [uniform] if "bits" in budget else []
        for table in bench.scores.values():
            plan, seconds = bench.timed(partial(allocate, table, bench.problem, **budget))
            starts.append(plan)
            bench.note(outcome(bench, plan, seconds) | {"target": bits})
        ends = [time.perf_counter()]

        def told(done: int, total: int, status: str, ends: list[float] = ends) -> None:
            ends.append(time.perf_counter())
            print(f"round {done} of {total}: {status}", flush=True)

        plan, seconds = bench.timed(
            partial(
                relinearize,
                bench.model,
                bench.problem,
                starts,
                bench.calibration,
                bench.held_out,
                settings=settings,
                method=bench.args.method,
                progress=told,
            )
        )
        # The plan itself was judged by its loss; what the static scores say about it is kept beside the measurement.
        plan = make_plan(bench.problem, plan.choices, plan.metric, plan.budget, bench.scores["quadratic"], plan.facts)
        row = outcome(bench, plan, seconds) | {
            "target": bits,
            "steps": plan.facts["steps"],
            "start": plan.facts["start"]["metric"],
            "round_seconds": np.diff(ends).tolist(),
        }
        bench.note(row | {"rounds": len({s["round"] for s in plan.facts["steps"]}), "products": plan.facts["products"]})
        found[bits] = plan
    return found


def timing(bench: Bench) -> None:
    """Over 16,384 tokens: scores of all weights with the tied embedding, and a round of the search.

    The search of a comparison has more text for its gradients; `round_seconds` in its rows are the times of its rounds.
    """
    weights = find_weights(bench.model, r"layers\.|embed_tokens|wte")
    candidates = round_all(weights, schemes(bench.args.choices, bench.args.group_sizes), scale_dtype=torch.bfloat16)
    for metric in ("trace", "quadratic"):
        found, seconds = bench.timed(
            partial(
                sensitivity,
                bench.model,
                candidates,
                joined(bench.scored, 4) if metric == "trace" else bench.scored,
                metric,
                draws=bench.args.draws,
                probes=bench.args.probes,
                method=bench.args.method,
            )
        )
        row = {"what": "timing", "metric": metric, "weights": len(weights), "options": len(candidates.options)}
        bench.note(row | {"seconds": seconds, "products": found.products})
    # The first round inspects the model and records launches; the second one replays them.
    ends: list[float] = []
    start = make_plan(bench.problem, uniform_plan(bench.candidates, 4, 64), "uniform", budget_of(bench, 4.0), None)
    plan = relinearize(
        bench.model,
        bench.problem,
        [start],
        bench.scored,
        bench.held_out,
        settings=replace(moves(bench.args), rounds=2),
        method=bench.args.method,
        progress=lambda *_: ends.append(time.perf_counter()),
    )
    seconds = ends[1] - ends[0] if len(ends) > 1 else None
    bench.note(
        {
            "what": "timing",
            "metric": "round",
            "weights": len(bench.candidates.weights),
            "options": len(bench.candidates.options),
            "tokens": sum(b["input_ids"].numel() for b in bench.scored),
            "seconds": seconds,
            "products": plan.facts["products"] // max(1, len(ends)),
        }
    )


def moves(args: argparse.Namespace) -> Relinearization:
    """Settings of the search."""
    return Relinearization(rounds=args.rounds, draws=args.draws_moves, curvature_batches=args.curvature)


def checkpoint(bench: Bench, plans: dict[float, Plan]) -> None:
    """A packed checkpoint of one plan, its size and its logits read back; and a plan of shared formats."""
    if not plans:
        return
    bits = min(plans, key=lambda b: abs(b - 4.0))
    check = {"input_ids": bench.evaluation[0]["input_ids"][:1, :64]}
    folder = Path(bench.args.scratch or bench.args.out) / "packed"
    written = write_checkpoint(
        bench.model,
        bench.tokenizer,
        bench.candidates,
        plans[bits].choices,
        folder,
        export="compressed-tensors",
        dtype=torch.bfloat16,
        check=check,
    )
    row = {"what": "checkpoint", "bits": bits, "planned_bytes": plans[bits].bytes, "file_bytes": written.bytes}
    bench.note(row | {"largest_difference": written.largest_difference, "writer": written.writer})
    shared = Problem(bench.candidates, bench.problem.storage, tuple(sharing_groups(bench.candidates.weights)))
    plan, seconds = bench.timed(lambda: allocate(bench.scores["quadratic"], shared, bits=bits, redraws=10))
    stability = plan.facts["stability"]
    row = outcome(bench, plan, seconds, shared) | {"shared_formats": True}
    bench.note(row | {"mean_share_changed": stability["mean_share_changed"] if stability else None})


def numbers(kind: type) -> Callable[[str], tuple[Any, ...]]:
    return lambda text: tuple(kind(part) for part in text.split(","))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "text", "other", "out"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--scratch", help="where the checkpoint goes; default: --out")
    parser.add_argument("--scores", help="folder of score tables to reuse")
    parser.add_argument("--name", default="", help="suffix of the record's name")
    parser.add_argument(
        "--seconds", type=float, default=330, help="no further budget is begun after so long (%(default)s)"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float64"])
    parser.add_argument(
        "--matmul", default="tf32" if torch.cuda.is_available() else "fp32", choices=["tf32", "fp32"],
        help="how float32 matrices are multiplied (%(default)s)",
    )  # fmt: skip
    parser.add_argument("--quantizer", default="rtn", choices=["rtn", "gptq"])
    parser.add_argument("--method", default="auto", choices=["auto", "streamed", "whole"])
    parser.add_argument("--parts", default=PARTS, help="some of %(default)s")
    parser.add_argument("--budgets", type=numbers(float), default=(3.0, 4.0, 5.0, 3.5, 4.25))
    parser.add_argument("--choices", type=numbers(int), default=(2, 3, 4, 5, 6, 8))
    parser.add_argument(
        "--group-sizes", type=numbers(int), default=(64,), help="columns per scale to choose from; uniform bits take 64"
    )
    parser.add_argument("--measured-bits", type=numbers(int), default=(2, 3, 4, 5))
    for name, value, what in (
        ("seq", 1024, "tokens per window"),
        ("scored", 16, "windows for the scores"),
        ("draws", 8, "sign vectors per four windows; 8 cancel the cross terms within a layer"),
        ("probes", 24, "probes of the trace"),
        ("gradient", 72, "windows for gradients"),
        ("held-out", 24, "windows that decide about steps"),
        ("skip", 112, "windows before the evaluation"),
        ("evaluate", 64, "windows of evaluation"),
        ("rounding", 48, "windows that GPTQ rounds by"),
        ("together", 4, "windows per batch of gradients and of the curvature of moves"),
        ("measured", 16, "windows of each text per single-weight measurement"),
        ("every", 2, "every how many-th weight is measured"),
        ("rounds", 8, "re-linearizations"),
        ("draws-moves", 4, "sign vectors per batch and direction"),
        ("curvature", 3, "batches for the curvature of moves"),
    ):
        parser.add_argument(f"--{name}", type=int, default=value, help=f"{what} (%(default)s)")
    args = parser.parse_args()
    parts = set(args.parts.split(","))
    if unknown := parts - set(PARTS.split(",")):
        parser.error(f"--parts: unknown {sorted(unknown)}")
    Path(args.out).mkdir(parents=True, exist_ok=True)
    bench = Bench(args)
    scores(bench)
    if "measured" in parts:
        measured(bench)
    plans = budgets(bench) if "budgets" in parts else {}
    summary(bench)
    if "timing" in parts:
        timing(bench)
    if "checkpoint" in parts:
        checkpoint(bench, plans)


if __name__ == "__main__":
    main()
