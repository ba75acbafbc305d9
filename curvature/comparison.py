"""Several runs beside each other: their records, what differs in their settings, and pictures of them together."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from curvature.plots import UNIT, tidy

__all__ = ["ComparedRun", "differences", "read_runs", "spectra_figure", "traces_figure"]

COMMANDS = ("trace", "spectrum")

_APART = ("settings.out", "settings.config", "settings.origins", "model.weights")
"""What says where things are and not what was computed; a digest of the weights, which differs with their dtype."""

_COLORS = ("#1f5fa8", "#c8551b", "#2c8a5b", "#8c4a9e", "#b8901f", "#4aa3c7", "#a03048", "#5d6671")
_DASHES = ("-", "--", "-.", ":")


@dataclass(frozen=True)
class ComparedRun:
    """The records of one run's folder.

    Attributes:
        label: A name that tells it from the other runs.
        path: The folder or file.
        records: {"trace" or "spectrum": the record}.
    """

    label: str
    path: Path
    records: Mapping[str, Mapping[str, Any]]

    def of(self, command: str) -> Mapping[str, Any] | None:
        """The record of a command, or None."""
        return self.records.get(command)


def read_runs(paths: Sequence[Path]) -> list[ComparedRun]:
    """The records in folders that `trace` and `spectrum` have written.

    Args:
        paths: Folders, or single record files.

    Returns:
        The runs in the order given, with labels made of as much of their paths as tells them apart.

    Raises:
        ValueError: If a path is given twice, holds no record, or one that is not readable or of an earlier version.
    """
    resolved = [path.resolve() for path in paths]
    for path, real in zip(paths, resolved, strict=True):
        if resolved.count(real) > 1:
            raise ValueError(f"runs: {path} is given twice; give each run once")
    return [ComparedRun(label, path, _records(path)) for label, path in zip(_labels(resolved), paths, strict=True)]


def _labels(paths: Sequence[Path]) -> list[str]:
    """The last names of the paths, as many as it takes."""
    for count in range(1, max(len(path.parts) for path in paths) + 1):
        labels = ["/".join(path.parts[-count:]) for path in paths]
        if len(set(labels)) == len(labels):
            break
    return labels


def _records(path: Path) -> dict[str, Mapping[str, Any]]:
    files = [path] if path.is_file() else [path / f"{command}.json" for command in COMMANDS]
    found: dict[str, Mapping[str, Any]] = {}
    for file in files:
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            raise ValueError(f"runs: {file} cannot be read as a record ({error})") from error
        command = content.get("command") if isinstance(content, dict) else None
        if command not in COMMANDS:
            raise ValueError(f"runs: {file} is no record of trace or spectrum but of {command!r}")
        if command == "trace" and "layers" not in content:
            raise ValueError(f"runs: {file} was written by an earlier version, without sums by layer; run trace again")
        found[command] = content
    if not found:
        raise ValueError(f"runs: {path} holds no trace.json and no spectrum.json; give the --out folder of such a run")
    return found


def differences(runs: Sequence[ComparedRun]) -> list[tuple[str, list[str | None]]]:
    """What the runs had otherwise: settings, model, data, environment and version.

    A setting that differs in the runs' traces otherwise than in their spectra is named after the command.

    Returns:
        (dotted name, one text per run; None where the run has no such setting), for names whose values are not all the
        same.
    """
    found: dict[str, dict[str, list[str | None]]] = {}
    commands = [command for command in COMMANDS if any(run.of(command) for run in runs)]
    for command in commands:
        facts = [dict(_flat(run.records[command])) if run.of(command) else None for run in runs]
        for name in dict.fromkeys(name for each in facts for name in each or ()):
            values = [None if each is None else each.get(name) for each in facts]
            if len({value for value, each in zip(values, facts, strict=True) if each is not None}) > 1:
                found.setdefault(name, {})[command] = values
    rows: list[tuple[str, list[str | None]]] = []
    for name, by_command in found.items():
        first = next(iter(by_command.values()))
        if len(by_command) == len(commands) and all(values == first for values in by_command.values()):
            rows.append((name, first))
        else:
            rows += [(f"{command}: {name}", values) for command, values in by_command.items()]
    return rows


def _flat(record: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    def walk(name: str, value: Any) -> Iterator[tuple[str, str]]:
        if name in _APART:
            return
        if isinstance(value, Mapping):
            for key, inner in value.items():
                yield from walk(f"{name}.{key}", inner)
        else:
            yield name, "none" if value is None else str(value)

    for section in ("version", "settings", "model", "data", "environment"):
        yield from walk(section, record[section])


def traces_figure(runs: Sequence[ComparedRun], *, title: str) -> Figure:
    """Trace by layer, the runs side by side, and mean eigenvalue by kind, each with one standard error as bars.

    Args:
        runs: Runs that have a trace.
        title: Title of the picture.
    """
    figure = Figure(figsize=(10.4, 4.8), dpi=150, layout="constrained")
    left, right = figure.subplots(1, 2)
    panels = [(left, "layers", "name", "trace", "stderr"), (right, "kinds", "kind", "mean_eigenvalue", "mean_stderr")]
    for axes, rows, key, value, error in panels:
        names = list(dict.fromkeys(row[key] for run in runs for row in run.records["trace"][rows]))
        for number, run in enumerate(runs):
            given = {row[key]: row for row in run.records["trace"][rows]}
            there = [i for i, name in enumerate(names) if name in given]
            places = np.array(there) + 0.8 * ((number + 0.5) / len(runs) - 0.5)
            estimates = np.array([(given[names[i]][value], given[names[i]][error]) for i in there])
            look = {"color": _COLORS[number % len(_COLORS)], "label": run.label}
            if axes is left:
                axes.bar(places, estimates[:, 0], width=0.8 / len(runs), alpha=0.85, **look)
                axes.errorbar(places, *estimates.T, fmt="none", ecolor="#1c2127", capsize=2, lw=1)
            else:
                axes.errorbar(places, *estimates.T, fmt="osD^v<>p"[number % 8], ms=4, capsize=2, lw=1, **look)
        axes.set_xticks(range(len(names)), [name.removeprefix("layer ") for name in names], rotation=60, ha="right")
        axes.tick_params(labelsize=8)
        axes.axhline(0, color="#6b7480", lw=0.8)
    sizes = [abs(row["mean_eigenvalue"]) for run in runs for row in run.records["trace"]["kinds"]]
    if max(sizes) > 0:
        right.set_yscale("symlog", linthresh=max(min(size for size in sizes if size > 0), 1e-4 * max(sizes)))
    left.set_xlabel("layer")
    left.set_ylabel(f"trace of the diagonal block\n({UNIT})", fontsize=9)
    right.set_xlabel("kind of parameter")
    right.set_ylabel("mean eigenvalue\n(trace / number of parameters)", fontsize=9)
    left.legend(frameon=False, fontsize=8)
    figure.suptitle(f"{title}, ± 1 s.e.", fontsize=11, x=0.01, ha="left")
    tidy(left, right)
    return figure


def spectra_figure(runs: Sequence[ComparedRun], *, title: str) -> Figure:
    """Spectral densities over each other with their standard errors, and each run's Ritz values with residuals below.

    Args:
        runs: Runs that have a spectrum.
        title: Title of the picture.
    """
    figure = Figure(figsize=(9.0, 4.6 + 0.28 * len(runs)), dpi=150, layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(12, 1.1 + len(runs)))
    highest = 0.0
    for number, run in enumerate(runs):
        record, color = run.records["spectrum"], _COLORS[number % len(_COLORS)]
        curve = record["density"]
        grid, values = np.array(curve["grid"]), np.array(curve["values"])
        floor, highest = values.max() * 1e-7, max(highest, float(values.max()))
        dashes = _DASHES[number % len(_DASHES)]
        upper.semilogy(grid, np.maximum(values, floor), dashes, color=color, lw=1.4, label=run.label)
        if curve["stderr"] is not None:
            error = np.array(curve["stderr"])
            low, high = np.maximum(values - error, floor), np.maximum(values + error, floor)
            upper.fill_between(grid, low, high, color=color, alpha=0.18, lw=0)
        pairs = np.array([(entry["value"], entry["residual"]) for entry in record["eigenvalues"]])
        level = np.full(len(pairs), -number)
        lower.errorbar(pairs[:, 0], level, xerr=pairs[:, 1], fmt="|", ms=9, color=color, capsize=2, lw=1)
    upper.set_ylim(highest * 1e-7, highest * 4)
    upper.set_ylabel("share of eigenvalues per unit")
    upper.legend(frameon=False, fontsize=8)
    upper.set_title(f"{title} (bands: ± 1 s.e.)", loc="left", fontsize=11)
    lower.set_yticks([-i for i in range(len(runs))], [run.label for run in runs], fontsize=7)
    lower.set_ylim(0.6 - len(runs), 0.6)
    lower.set_xlabel(f"eigenvalue λ ({UNIT})")
    tidy(upper, lower)
    return figure
