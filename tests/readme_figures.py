"""The README's figures, written from the records: `python3 -m tests.readme_figures` brings it up to date.

A block between `<!-- figures: NAME -->` and `<!-- end -->` is what the function NAME here makes of the records in
`notebooks/records/`; a test compares the two. So is `curvature/dtype_errors.yaml`, the table that runs quote.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import yaml

from curvature import spectra_distances
from curvature.dtype_policy import OFFERED, condensed
from curvature.estimate import with_error

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "notebooks" / "records"
BLOCK = re.compile(r"(<!-- figures: ([a-z-]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
Row = dict[str, Any]

CASES = (  # N, head size, query heads, key/value heads, batch
    (1024, 64, 12, 12, 4),
    (8192, 64, 12, 12, 4),
    (8192, 128, 12, 12, 4),
    (8192, 64, 32, 8, 1),
    (8192, 128, 12, 2, 1),
    (32768, 64, 12, 12, 1),
    (131072, 64, 12, 12, 1),
    (131072, 128, 12, 12, 1),
    (262144, 64, 12, 12, 1),
)
OURS = ("ours", "triton hopper")
RIVALS = ("three-pass", "closed-form", "math")


def record(name: str) -> dict[str, Any]:
    """A committed record."""
    content: dict[str, Any] = json.loads((RECORDS / f"{name}.json").read_text(encoding="utf-8"))
    return content


def attention() -> str:
    """Ours and its rivals in bfloat16 under the causal mask; the cuBLAS rates of the whole record below."""
    rows = [row for row in record("attention_h200")["rows"] if row["op"] == "double_backward"]
    rows = [r for r in rows if r["dtype"] == "bfloat16" and r["causal"] and not r["window"] and not r.get("padded")]
    rivals = [way for way in RIVALS if any(row["backend"] == way for row in rows)]
    # A record of `bench attention` states the peak beyond the inputs, that of an earlier script all that was allocated.
    peaks = ["peak"] if "command" in record("attention_h200") else []
    head = ["N", "head size", "heads", "batch", "ours", "TFLOP/s", "of cuBLAS", *peaks, *rivals]
    lines = []
    for case in CASES:
        found = {r["backend"]: r for r in rows if tuple(r[k] for k in ("N", "D", "H_Q", "H_KV", "B")) == case}
        mine = next((found[way] for way in OURS if way in found), None)
        if mine is None:
            continue
        n, d, heads, kv_heads, batch = case
        names = [f"{n:,}", str(d), str(heads) if heads == kv_heads else f"{heads}/{kv_heads}", str(batch)]
        figures = [milliseconds(mine), f"{mine['tflops']:.0f}", f"{mine['cublas_fraction']:.0%}"]
        figures += [gibibytes(mine) for _ in peaks]
        lines.append([*names, *figures, *(cell(found.get(way), milliseconds) for way in rivals)])
    rates = [row["cublas_tflops"] for row in rows]
    note = f"\ncuBLAS made between {min(rates):.0f} and {max(rates):.0f} TFLOP/s over the run."
    if peaks:
        note += " The peak is what the call takes beyond its inputs, all sequences and heads together."
    return table(head, lines) + note + "\n"


def models() -> str:
    """One product of each model at the shortest length of the record, by method and attention."""
    rows = [row for row in record("models_h200")["rows"] if row["op"].startswith("hvp")]
    seq = min(row["N"] for row in rows)
    rows = sorted((row for row in rows if row["N"] == seq), key=lambda row: row["parameters"])
    kinds = {
        "streamed, first": ("flashbob", "hvp_streamed_first"),
        "further": ("flashbob", "hvp_streamed_further"),
        "next batch": ("flashbob", "hvp_streamed_next"),
        "whole graph": ("flashbob", "hvp_whole"),
        "whole, sdpa (math)": ("sdpa", "hvp_whole"),
        "whole, eager": ("eager", "hvp_whole"),
    }
    lines = []
    for model in dict.fromkeys(row["model"] for row in rows):
        found = {(r["backend"], r["op"]): r for r in rows if r["model"] == model}
        lines.append([model, *(cell(found.get(kind), seconds_and_peak) for kind in kinds.values())])
    return table([f"{seq:,} tokens", *kinds], lines)


def streamed() -> str:
    """GPT-2 small, streamed."""
    content = record("streamed_gpt2_h200")
    lines = []
    for r in content["rows"]:
        further = "-" if r["further_s"] is None else f"{r['further_s']:.3g} s"
        following = f"{r['first_recorded_s']:.3g} s" if "first_recorded_s" in r else "-"
        names = [f"{r['N']:,}", str(r["batch"]), str(r.get("layers", 12)), r["setting"]]
        lines.append([*names, f"{r['first_s']:.2f} s", following, further, f"{r['first_peak_GiB']:.1f} GiB"])
    head = ["N", "batch", "layers", "activations", "first direction", "of a next batch", "further directions", "peak"]
    errors = [(a["bfloat16_streamed_error"], a["bfloat16_whole_error"]) for a in content["agreement"]]
    text = " and ".join(f"{ours:.1%} instead of {whole:.1%}" for ours, whole in errors)
    return (
        table(head, lines)
        + f"\nError of a bfloat16 product against float32, streamed instead of whole graph: {text} (3 layers of GPT-2, "
        "of a Llama).\n"
    )


def processes() -> str:
    """The trace of GPT-2 by one process and by two."""
    rows = record("processes_h200")["rows"]
    text = "GPT-2 small, once the first probes are through"
    for n in sorted({row["N"] for row in rows}):
        one, two = sorted((row for row in rows if row["N"] == n), key=lambda row: row["processes"])
        each = [f"{1e3 * row['seconds'] / row['probes']:.0f} ms" for row in (one, two)]
        ratio = one["seconds"] / two["seconds"]
        text += f";\nat {n:,} tokens {each[0]} a probe on one H200, {each[1]} on two, {ratio:.2f} times as many"
    return f"{text}\n([record](notebooks/records/processes_h200.json), `python3 -m tests.gpu_processes`).\n"


def trace_run() -> str:
    """A trace to two per cent on a real model."""
    run = record("trace_smollm2_h200")
    total, settings = run["total"], run["settings"]
    return (
        f"The trace of SmolLM2-135M over {settings['batches']} windows of {settings['seq']:,} tokens of War and Peace, "
        f"with those of all layers, kinds and heads:\n{total['value']:.0f} ± {total['stderr']:.0f} from "
        f"{run['products']} products in {run['seconds']:.0f} s on one H200 "
        "([record](notebooks/records/trace_smollm2_h200.json)).\n"
    )


def layers() -> str:
    """Spectra of single transformer blocks, and what these differ by."""
    run = record("spectrum_layers_smollm2_h200")
    settings, apart = run["settings"], run["heterogeneity"]
    rows = [row for row in run["layers"] if row["name"] in apart["names"]]

    def ends(place: int) -> str:
        found = sorted(
            (row["eigenvalues"][place] | {"name": row["name"]} for row in rows), key=lambda end: end["value"]
        )
        outer = (found[0], found[-1])
        return " to ".join(f"{end['value']:.3g} ({end['name']}, residual {end['residual']:.1g})" for end in outer)

    quadratures = {
        row["name"]: SimpleNamespace(
            probes=settings["probes"],
            steps=settings["steps"],
            nodes=[np.array(q["nodes"]) for q in row["quadratures"]],
            weights=[np.array(q["weights"]) for q in row["quadratures"]],
        )
        for row in rows
    }
    finer = spectra_distances(quadratures, scaling=apart["scaling"], sigma=apart["sigma"] / 5)  # type: ignore[arg-type]
    return (
        f"The diagonal blocks of SmolLM2-135M's {len(rows)} layers, each on its own, over {settings['seq']:,} tokens "
        f"of War and Peace, {settings['steps']} steps and {settings['probes']} probes each,\nin {settings['dtype']}, "
        f"the whole command {run['seconds']:.0f} s on one H200 "
        "([record](notebooks/records/spectrum_layers_smollm2_h200.json)):\n"
        f"largest eigenvalues from {ends(0)},\nsmallest from {ends(-1)}.\n"
        f"Divided by their root mean squares and smoothed by {apart['sigma']:g} of these, spectra of two layers are "
        f"apart by {with_error(apart['mean'], apart['mean_stderr'])} more than two probes of one layer\n"
        f"(mean squared Jensen-Shannon distances; those two by {apart['floor']:.2g}; p = {apart['p_value']:.2g} for "
        f"equal layers); smoothed by a fifth of that, {with_error(finer.mean, finer.mean_stderr)} "
        f"(p = {finer.p_value:.2g}).\n"
    )


def accuracy() -> str:
    """How many measurements there are, the worst error in float32, and which ones were not within their bounds."""
    rows = record("accuracy_h200")["rows"]
    good = [row for row in rows if row["status"] == "ok"]
    sizes = sorted({row["D"] for row in rows})
    worst = max(row["error"] for row in good if row["dtype"] == "float32")
    text = (
        f"Accuracy: in {len(good)} of {len(rows)} combinations of head size ({sizes[0]} to {sizes[-1]}), mask and "
        "dtype every output stays within twice the error of PyTorch's own\nmaterializing path in bfloat16 and float16 "
        f"and within {worst:.1e} in float32 ([record](notebooks/records/accuracy_h200.json), "
        "`python3 -m tests.gpu_accuracy`).\n"
    )
    if bad := [f"{row['mask']} at {row['D']} in {row['dtype']}" for row in rows if row["status"] != "ok"]:
        text += f"Not so in the record: {', '.join(bad)}; see `flashbob/README.md`.\n"
    return text


def spectrum() -> str:
    """The headline: both ends of a real model's spectrum."""
    run = record("spectrum_smollm2_h200")
    tokens, products, peak = run["settings"]["seq"], run["products"], run["peak_memory_bytes"] / 2**30
    return (
        f"**Both ends of the Hessian spectrum of SmolLM2-135M over {tokens:,} tokens, {products} exact products, in "
        f"{run['seconds']:.0f} seconds and {peak:.1f} GiB on one H200 "
        "([record](notebooks/records/spectrum_smollm2_h200.json)).**\n"
    )


def training() -> str:
    """Times of a step and of a Hessian estimate, and how far apart loss curves are."""
    content = record("train_h200")
    rows = {row["name"]: row for row in content["rows"]}

    def times(name: str, label: str) -> list[str]:
        row = rows[name]
        every = [row["seconds_per_step"], row["seconds_per_estimate"], row["seconds_per_step_in_loop"]]
        spent = ["-" if seconds is None else f"{1e3 * seconds:.0f} ms" for seconds in every]
        return [label, *spent, f"{row['tokens_per_second']:,.0f}", f"{row['peak_bytes'] / 2**30:.1f} GiB"]

    head = ["", "ordinary step", "Hessian estimate", "step, all in", "tokens per second", "peak"]
    lines = [
        times("flashbob", "Sophia-H, `--attention flashbob`"),
        times("hybrid-short", "Sophia-H, `--attention hybrid`"),
        times("math-short", "Sophia-H, `--attention math`"),
        times("adamw", "AdamW, `--attention flashbob`"),
    ]
    ours, math, hybrid = rows["flashbob"], rows["math-short"], rows["hybrid-short"]

    def over(other: Row, key: str) -> str:
        return f"{other[key] / ours[key]:.1f}"

    def gaps(one: str, other: str, together: int) -> list[float]:
        single = [a - b for a, b in zip(rows[one]["losses"], rows[other]["losses"], strict=True)]
        return [abs(statistics.mean(single[i - together : i])) for i in range(together, len(single) + 1)]

    event, loop, again, whole = (
        "seconds_per_estimate",
        "seconds_per_step_in_loop",
        *(gaps("flashbob", other, 20) for other in ("again", "math")),
    )
    last = {name: f"{row['loss_last_20']:.3f}" for name, row in rows.items()}
    rate = rows["two"]["tokens_per_second"] / rows["one"]["tokens_per_second"]
    return (
        f"GPT-2 small from random weights, {ours['N']:,} tokens, {ours['B']} windows a step, bfloat16 autocast, a "
        f"Hessian estimate every {ours['hessian_every']} steps, one H200\n"
        "([record](notebooks/records/train_h200.json) with every command, `python3 -m tests.gpu_training`):\n\n"
        f"{table(head, lines)}\n"
        f"Against PyTorch's math path an estimate is {over(math, event)} times and the loop {over(math, loop)} times "
        f"as fast, in 1/{over(math, 'peak_bytes')} of the memory;\nagainst hybrid {over(hybrid, event)} and "
        f"{over(hybrid, loop)} times. Two GPUs at the same global batch: {rate:.2f} times the tokens per second, "
        f"losses of\n{rows['one']['steps']} steps within {max(gaps('one', 'two', 1)):.4f}.\n\n"
        "![loss curves](notebooks/records/train_h200.png)\n\n"
        f"After {ours['steps']} steps with the same settings and seed, mean loss of the last 20: {last['flashbob']} "
        f"with flashbob, {last['again']} with flashbob once more,\n{last['math']} with math, {last['adamw']} with "
        "AdamW. Between the first two, whose sums differ in their order alone, means of 20 steps are\n"
        f"up to {max(again):.3f} apart on the way and {again[-1]:.3f} at the end; between flashbob and math up to "
        f"{max(whole):.3f} and {whole[-1]:.3f}.\n"
        + (f"\nOf this record: {content['notice']}.\n" if "notice" in content else "")
    )


def quantization() -> str:
    """Rise of the loss at equal bytes: uniform bits, the best rival score and the re-linearized plan."""
    text = ""
    for quantizer in ("rtn", "gptq"):
        if not (RECORDS / f"quantization_{quantizer}_h200.json").is_file():
            continue
        content = record(f"quantization_{quantizer}_h200")
        rows, before = content["rows"], content["loss"]
        plans = [row for row in rows if row["what"] == "plan" and not row.get("shared_formats")]
        head = ["average bits", "uniform", "best rival", "re-linearized", "of uniform", "of the best rival"]
        head.append("of the best rival on War and Peace")
        lines = []
        for bits in sorted({row["target"] for row in plans}):
            rises = {row["metric"]: row["evaluation"] for row in plans if row["target"] == bits}
            rival = min((rises[name], name) for name in ("fisher", "first_order", "weight_error"))
            own, uniform = rises["relinearized"], rises.get("uniform")
            shares = ["-" if uniform is None else f"{own / uniform:.2f}", f"{own / rival[0]:.2f}"]
            (elsewhere,) = [r["other_over_best_rival"] for r in rows if r["what"] == "ratios" and r["bits"] == bits]
            shares.append(f"{elsewhere:.2f}")
            first = "-" if uniform is None else f"{uniform:.3f}"
            lines.append([f"{bits:g}", first, f"{rival[0]:.3f} ({rival[1].replace('_', ' ')})", f"{own:.3f}", *shares])
        loss, tokens = (before["evaluation"][key] for key in ("loss", "tokens"))
        source = f"[record](notebooks/records/quantization_{quantizer}_h200.json), `python3 -m tests.gpu_quantization`"
        text += "\n" if text else ""
        text += (
            f"SmolLM2-135M, {quantizer.upper()}, symmetric, group 64, at equal bytes: rise of the loss ({loss:.3f}) "
            f"on {tokens:,} tokens of wikitext-2\nthat calibration did not see ({source}):\n\n"
            f"{table(head, lines)}"
        )
        text += "".join(f"\nOf this record: {notice}.\n" for notice in content["notices"])
    return f"{text}\n{single_weights()}\n{times_of_scores()}\n"


def times_of_scores() -> str:
    """How long scores, and a round of the search, take."""
    rows = {row["metric"]: row for row in record("quantization_rtn_h200")["rows"] if row["what"] == "timing"}
    trace, quadratic, turn = (rows[name] for name in ("trace", "quadratic", "round"))
    return (
        f"What {quadratic['options']} options of each of {quadratic['weights']} weights cost, from {turn['tokens']:,} "
        f"calibration tokens on one H200: {trace['seconds']:.1f} s by `trace`, {quadratic['seconds']:.1f} s by "
        f"`quadratic`; one round of `relinearized`: {turn['seconds']:.1f} s."
    )


def single_weights() -> str:
    """How well scores order what single weights do to the loss."""
    rows = [row for row in record("quantization_rtn_taylor_h200")["rows"] if row["what"] == "measured"]
    found = {row["metric"]: row["spearman"] for row in rows}
    lines = [
        [metric, *(f"{found[metric][text]:.2f}" for text in ("calibration", "evaluation", "other"))]
        for metric in ("quadratic", "trace", "taylor", "fisher")
    ]
    return (
        f"Rank correlation of predicted with measured changes of the loss, {rows[0]['places']} changes of single "
        "weights' bits, RTN\n([record](notebooks/records/quantization_rtn_taylor_h200.json)):\n\n"
        + table(["metric", "calibration text", "same source, unseen", "another text"], lines)
    )


def device_type(content: Row) -> str:
    """The kind of device that a record is from: cpu or cuda."""
    return str(content["environment"]["device"]).split(":")[0]


def dtype_records() -> list[dict[str, Any]]:
    """Records of `tests.dtype_study`; of one kind of device the largest model last."""
    found = [record(path.stem) | {"file": path.name} for path in RECORDS.glob("dtype_*.json")]
    return sorted(found, key=lambda each: (device_type(each), each["parameters"], each["file"]))


def moved(rows: list[Row]) -> str:
    """What bfloat16 does to a trace, relative to it."""
    (row,) = [row for row in rows if row["precision"] == "bfloat16"]
    error, value = row["trace_error"], row["trace"]["value"]
    return f"{abs(error['value'] / value):.1%} ± {error['stderr'] / abs(value):.1%}"


def dtype() -> str:
    """What each precision changes, one table for each record."""
    head = ["precision", "seconds", "product", "trace, at most", "largest eigenvalue", "smallest"]
    text = ""
    for content in dtype_records():
        settings, rows = content["settings"], [row for row in content["rows"] if row["status"] == "ok"]
        lines = []
        for row in rows:
            figures = [f"{row['product_error']['mean']:.0e}", f"{row['trace_error']['at_most_of_stderr']:.0e}"]
            figures += [f"{abs(end['error']):.0e}" for end in row["eigenvalues"]]
            reference = row["precision"] == settings["reference"]
            lines.append(
                [row["precision"], f"{row['seconds_per_product']:.2g}", *(["reference"] * 4 if reference else figures)]
            )
        offered = [row for row in rows if row["precision"] in OFFERED and row["trace_error"]["at_most_of_stderr"] < 1]
        fastest = min(offered, key=lambda row: row["seconds_per_product"])["precision"]
        text += (
            f"{'' if not text else chr(10)}{content['model']}, {settings['seq']:,} tokens, "
            f"{content['environment']['device']}, {settings['probes']} probes "
            f"([record](notebooks/records/{content['file']})):\n\n{table(head, lines)}\n"
            f"Fastest of those that `--dtype` offers, with an error below the trace's own: {fastest}. bfloat16 moves "
            f"the trace by {moved(rows)}.\n"
        )
    return text


def dtype_errors() -> str:
    """The content of `curvature/dtype_errors.yaml`: of each kind of device the record of the largest model."""
    rows = {device_type(each): condensed(each) for each in dtype_records()}
    head = "# What rounding changes, by kind of device and dtype; see dtype_policy.py. Written by\n"
    head += "# `python3 -m tests.readme_figures` from notebooks/records/dtype_*.json.\n"
    return head + str(yaml.safe_dump(rows, sort_keys=False))


BLOCKS: dict[str, Callable[[], str]] = {
    "attention": attention,
    "models": models,
    "streamed": streamed,
    "processes": processes,
    "trace-run": trace_run,
    "layers": layers,
    "training": training,
    "accuracy": accuracy,
    "spectrum": spectrum,
    "dtype": dtype,
    "quantization": quantization,
}


def cell(row: Row | None, text: Callable[[Row], str]) -> str:
    """A figure, why there is none, or a dash where nothing was measured."""
    if row is None:
        return "-"
    return text(row) if row["status"] == "ok" else {"oom": "out of memory"}.get(row["status"], row["status"])


def milliseconds(row: Row) -> str:
    """The median, in three digits."""
    return (
        f"{row['ms_p50']:.2f} ms" if row["ms_p50"] < 10 else f"{row['ms_p50']:,.{1 if row['ms_p50'] < 100 else 0}f} ms"
    )


def gibibytes(row: Row) -> str:
    """Peak memory."""
    return f"{row['peak_bytes'] / 2**30:.2f} GiB"


def seconds_and_peak(row: Row) -> str:
    """Median and peak memory."""
    return f"{row['ms_p50'] / 1e3:.2f} s, {row['peak_bytes'] / 2**30:.1f} GiB"


def table(head: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    """A Markdown table."""
    head = list(head)
    return "".join(f"| {' | '.join(cells)} |\n" for cells in [head, ["---"] * len(head), *lines])


def blocks(text: str) -> dict[str, str]:
    """The marked blocks of a README by name."""
    return {name: body for _, name, body, _ in BLOCK.findall(text)}


def renewed(text: str) -> str:
    """The README with every marked block made anew."""
    return BLOCK.sub(lambda found: found[1] + BLOCKS[found[2]]() + found[4], text)


if __name__ == "__main__":
    path = ROOT / "README.md"
    path.write_text(renewed(path.read_text(encoding="utf-8")), encoding="utf-8")
    (ROOT / "curvature" / "dtype_errors.yaml").write_text(dtype_errors(), encoding="utf-8")
    print(f"wrote {path.name}, curvature/dtype_errors.yaml")
