"""What is read out of a run of tests.gpu_quantization: predictions for single weights, and plans set side by side.

`measured` changes one weight at a time and holds the measured changes of the loss against what every metric predicted;
`summary` sets the rises of whole plans, from the rows written so far, against each other. Both add rows to the record
of the Bench that they are given.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from scipy.stats import spearmanr

from curvature.blocks import layer_of
from quant.sensitivity import Metric

if TYPE_CHECKING:
    from tests.gpu_quantization import Bench

RIVALS: tuple[Metric, ...] = ("fisher", "first_order", "weight_error")


class Suffix:
    """Losses of a batch from a layer onwards, its inputs kept: what a change in that layer does, at half the cost."""

    def __init__(self, model: Any, batch: dict[str, torch.Tensor]) -> None:
        self.model, self.layers = model, model.model.layers
        self.inputs: list[torch.Tensor] = []
        device = next(model.parameters()).device
        self.ids = batch["input_ids"].to(device)
        hooks = [
            layer.register_forward_pre_hook(lambda _, args, kwargs: self.inputs.append((*args, *kwargs.values())[0]),
                                            with_kwargs=True)
            for layer in self.layers
        ]  # fmt: skip
        try:
            with torch.no_grad():
                model(input_ids=self.ids, use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()

    def losses(self, first: int) -> np.ndarray[Any, Any]:
        """Mean loss of every window, with the layers ahead of `first` as they were."""
        self.model.model.layers = self.layers[first:]
        try:
            with torch.no_grad():
                logits = self.model(inputs_embeds=self.inputs[first], use_cache=False).logits
        finally:
            self.model.model.layers = self.layers
        targets = torch.nn.functional.pad(self.ids[:, 1:], (0, 1), value=-100)
        each = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        return each.double().view(self.ids.shape).sum(1).div(self.ids.shape[1] - 1).cpu().numpy()


def measured(bench: Bench) -> None:
    """Single weights at single options: predictions against measured changes on three texts."""
    few = dict.fromkeys(("calibration", "evaluation", "other"), bench.args.measured)
    started = time.perf_counter()
    torch.set_float32_matmul_precision("highest")
    sources = {"calibration": bench.scored, "evaluation": bench.evaluation, "other": bench.other}
    ids = [torch.cat([b["input_ids"] for b in sources[name]])[:count] for name, count in few.items()]
    ends = np.cumsum([len(rows) for rows in ids])
    suffix = Suffix(bench.model, {"input_ids": torch.cat(ids)})
    before = suffix.losses(0)
    if not np.allclose(suffix.losses(len(suffix.layers) - 1), before, rtol=0, atol=1e-4):
        raise RuntimeError("the loss from the last layer's inputs is not that of the model")
    whole = bench.loss([{"input_ids": suffix.ids}]).loss
    if abs(whole - before.mean()) > 1e-4:
        raise RuntimeError(f"the mean of the windows' losses is {before.mean()}, and the model's loss {whole}")
    bits = [o.bits for o in bench.candidates.options]
    places = [
        (t, option)
        for t in range(0, len(bench.candidates.weights), bench.args.every)
        for option in bench.candidates.available(t)
        if bits[option] in bench.args.measured_bits
    ]
    table: dict[str, list[float]] = {name: [] for name in few}
    for t, b in places:
        with bench.candidates.single(t, b):
            changes = suffix.losses(layer_of(bench.candidates.weights[t].name) or 0) - before
        for name, part in zip(few, np.split(changes, ends[:-1]), strict=True):
            table[name].append(float(part.mean()))
    torch.set_float32_matmul_precision("high" if bench.args.matmul == "tf32" else "highest")
    seconds = time.perf_counter() - started
    rows, columns = np.array(places).T
    for metric, found in bench.scores.items():
        values = found.values[rows, columns]
        row: dict[str, Any] = {"what": "measured", "metric": metric, "places": len(places), "seconds": seconds}
        row |= {"spearman": {}, "ratio": {}}
        for name, changes in table.items():
            row["spearman"][name] = float(spearmanr(values, changes).statistic)
            if found.predicts:
                of_bits = {
                    str(b): np.array([bits[c] == b for c in columns]) for b in sorted({bits[c] for c in columns})
                }
                of_bits["all"] = np.ones(len(columns), dtype=bool)
                row["ratio"][name] = {
                    b: float(values[kept].sum() / np.array(changes)[kept].sum()) for b, kept in of_bits.items()
                }
        bench.note(row)
    errors = bench.scores["quadratic"].stderr
    if errors is None:
        raise RuntimeError("quadratic scores have a standard error")
    bench.note(
        {
            "what": "single weights",
            "names": [bench.candidates.weights[t].name for t, _ in places],
            "bits": [bits[b] for _, b in places],
            "predicted": [float(v) for v in bench.scores["quadratic"].values[rows, columns]],
            "stderr": [float(v) for v in errors[rows, columns]],
            "changes": [[table[name][i] for name in table] for i in range(len(places))],
            "texts": list(table),
        }
    )


def summary(bench: Bench) -> None:
    """Rises of the re-linearized plans over those of uniform bits and of the best rival, at equal budgets."""
    plans = [row for row in bench.rows if row["what"] == "plan" and "shared_formats" not in row]
    for bits in dict.fromkeys(row["target"] for row in plans):
        rows = {row["metric"]: row for row in plans if row["target"] == bits}
        if "relinearized" not in rows:
            continue
        own = rows["relinearized"]
        row = {"what": "ratios", "bits": bits, "bytes": own["bytes"]}
        row["fewest_bytes_of_the_others"] = min(r["bytes"] for name, r in rows.items() if name != "relinearized")
        for text in ("evaluation", "other"):
            rival = min((rows[name][text], name) for name in RIVALS if name in rows)
            row[f"{text}_over_uniform"] = own[text] / rows["uniform"][text] if "uniform" in rows else None
            row[f"{text}_over_best_rival"], row[f"{text}_best_rival"] = own[text] / rival[0], rival[1]
        bench.note(row)
    # Separable predictions against the rise on new text; whole plans also against that on the text of the expansion.
    small = [row for row in plans if row["predicted"] is not None and row["evaluation"] < 0.1]
    whole = [row for row in plans if "whole_plan" in row and row["evaluation"] < 0.1]
    bench.note(
        {
            "what": "whole plans below 0.1 nats",
            "predicted_over_measured": [[r["metric"], r["budget"], r["predicted"] / r["evaluation"]] for r in small],
            "expanded_over_measured": [
                [
                    r["metric"],
                    r["budget"],
                    *(r["whole_plan"]["change"] / r[text] for text in ("evaluation", "held_out")),
                ]
                for r in whole
            ],
        }
    )
