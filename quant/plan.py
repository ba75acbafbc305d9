"""What was decided: a format for every weight, with its predicted cost and its exact size."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from curvature.report import write_json
from quant.candidates import Candidates
from quant.scheme import Scheme

__all__ = ["Plan", "fixed_formats", "uniform_plan"]


@dataclass(frozen=True, eq=False)
class Plan:
    """A format for every weight.

    Attributes:
        weights: The weights' names.
        choices: For each, the index of its option among the candidates' options.
        schemes: For each, its format.
        metric: What the decision rests on.
        budget: What was asked for, such as {"bits": 4.0}.
        average_bits: Bits per code, averaged over the weights' entries.
        average_stored_bits: The same with scales and zero points.
        bytes: Exact size of what is written, all other tensors and the file's header included; of the packed file where
            weights are written dense.
        predicted: Per weight the predicted change of the loss in nats per token, or None where the metric only ranks.
        predicted_stderr: Standard errors of these, or None.
        facts: Further results of the allocation: objectives, iterations, stability.
    """

    weights: tuple[str, ...]
    choices: tuple[int, ...]
    schemes: tuple[Scheme, ...]
    metric: str
    budget: dict[str, float]
    average_bits: float
    average_stored_bits: float
    bytes: int
    predicted: tuple[float, ...] | None = None
    predicted_stderr: tuple[float, ...] | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def predicted_loss_change(self) -> float | None:
        """Sum of the weights' predictions, plus the cross terms where the metric has them."""
        if self.predicted is None:
            return None
        total = self.facts.get("predicted_with_interaction")
        return float(sum(self.predicted)) if total is None else float(total)

    def as_record(self) -> dict[str, Any]:
        """The fields of plan.json."""
        predicted = self.predicted or (None,) * len(self.weights)
        stderr = self.predicted_stderr or (None,) * len(self.weights)
        return {
            "budget": self.budget,
            "metric": self.metric,
            "weights": [
                {
                    "name": name,
                    "bits": scheme.bits,
                    "group_size": scheme.group_size,
                    "symmetric": scheme.symmetric,
                    "predicted_loss_change": change,
                    "predicted_stderr": error,
                }
                for name, scheme, change, error in zip(self.weights, self.schemes, predicted, stderr, strict=True)
            ],
            "average_bits": self.average_bits,
            "average_stored_bits": self.average_stored_bits,
            "bytes": self.bytes,
            "predicted_loss_change": self.predicted_loss_change,
            **self.facts,
        }

    def save(self, path: str | Path) -> None:
        """Write plan.json, whole or not at all."""
        write_json(path, self.as_record())

    @staticmethod
    def schemes_in(path: str | Path) -> dict[str, Scheme]:
        """{name: format} of a plan.json.

        Raises:
            ValueError: If the file is not one.
        """
        try:
            entries = json.loads(Path(path).read_text(encoding="utf-8"))["weights"]
            return {e["name"]: Scheme(e["bits"], e["group_size"], e["symmetric"]) for e in entries}
        except (OSError, KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"plan {str(path)!r} cannot be read: {error}") from error


def averages(candidates: Candidates, choices: Sequence[int]) -> tuple[float, float]:
    """Bits per code, and bits with scales and zero points, averaged over the entries of all weights."""
    entries = sum(w.numel for w in candidates.weights)
    chosen = [(w, candidates.options[c]) for w, c in zip(candidates.weights, choices, strict=True)]
    codes = sum(w.numel * s.bits for w, s in chosen)
    stored = sum(s.stored_bits(w.rows, w.columns, scale_bits(candidates)) for w, s in chosen)
    return codes / entries, stored / entries


def scale_bits(candidates: Candidates) -> int:
    """Bits of one stored scale."""
    return 8 * next(iter(candidates.rounded[0].values())).scale.dtype.itemsize


def uniform_plan(candidates: Candidates, bits: int, group_size: int | None = None) -> list[int]:
    """The option of so many bits for every weight: the baseline of any allocation.

    Args:
        candidates: The weights at all options.
        bits: Bits of all weights that can take them; a weight with a fixed format keeps it.
        group_size: Among several, which; None: the first that fits.

    Raises:
        ValueError: If a weight with several options has none of so many bits.
    """
    plan = []
    for t, weight in enumerate(candidates.weights):
        kept = candidates.available(t)
        fits = [b for b in kept if candidates.options[b].bits == bits]
        wanted = [b for b in fits if group_size in (None, candidates.options[b].group_size)] or fits
        if len(kept) == 1:
            plan.append(kept[0])
        elif wanted:
            plan.append(wanted[0])
        else:
            offered = sorted({candidates.options[b].bits for b in kept})
            raise ValueError(f"bits: {weight.name} has no option of {bits} bits, only of {offered}")
    return plan


def fixed_formats(names: Sequence[str], rules: Mapping[str, Scheme]) -> dict[str, Scheme]:
    """Formats of the weights whose names match a rule; the first rule that matches counts.

    Args:
        names: The weights' names.
        rules: {regular expression, searched for in the names: format}.

    Raises:
        ValueError: If an expression is invalid or matches no weight.
    """
    found: dict[str, Scheme] = {}
    for expression, scheme in rules.items():
        try:
            matching = [name for name in names if re.search(expression, name)]
        except re.error as error:
            raise ValueError(f"fixed: {expression!r} is not a regular expression ({error})") from error
        if not matching:
            raise ValueError(f"fixed: {expression!r} matches no weight; the names are like {list(names)[:3]}")
        for name in matching:
            found.setdefault(name, scheme)
    return found


def changes(a: Sequence[int], b: Sequence[int]) -> int:
    """In how many weights two plans differ."""
    return int(np.count_nonzero(np.asarray(a) != np.asarray(b)))
