"""`flashbob-curv report`: several runs of `trace` and `spectrum` on one page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import hypot
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.console import estimate, show_json, show_table, show_written
from cli.options import Options

if TYPE_CHECKING:
    from curvature.comparison import ComparedRun
    from curvature.page import PageFigure, PageTable

__all__ = ["ReportOptions", "report"]


@dataclass(frozen=True, kw_only=True)
class ReportOptions(Options):
    """Options of `report`."""

    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN1 RUN2 ...", help="Folders that `trace` and `spectrum` have written (their --out)."),
    ]
    out: Annotated[Path, typer.Option(help="Folder for the page.")] = Path("runs/report")


def report(options: ReportOptions) -> None:
    """Runs of trace and spectrum beside each other, with error bars, and what differs in their settings.

    Writes report.html into --out: one self-contained page with the traces by layer side by side, the spectra over each
    other, and every setting, version and fact about model and text that the runs do not share; and report.json with the
    same numbers.
    """
    from cli.session import modelless_record, writable_folder
    from curvature.comparison import differences, read_runs
    from curvature.report import Measurement, to_json, write_json, write_text

    if len(options.runs) < 2:
        raise ValueError(f"report compares at least two runs, got {len(options.runs)}; each has its own report.html")
    runs = read_runs(options.runs)
    folders = [run.path if run.path.is_dir() else run.path.parent for run in runs]
    if options.out.resolve() in [folder.resolve() for folder in folders]:
        raise ValueError(
            f"--out {options.out} is one of the runs, and its own report.html would be replaced; name another"
        )
    writable_folder(options.out)
    paths = [options.out / "report.html", options.out / "report.json"]
    with Measurement() as measurement:
        differ = differences(runs)
        write_text(paths[0], _page(runs, differ))
    results = {
        "runs": [_summary(run) for run in runs],
        "differences": [{"name": name, "values": values} for name, values in differ],
    }
    content = modelless_record(
        "report", settings=options.as_settings(), measurement=measurement, device="cpu", results=results
    )
    write_json(paths[1], content)
    if options.json:
        show_json(to_json(content))
        return
    rows = [(run.label, *_results(run)) for run in runs]
    show_table(rows, head=("run", "trace", "largest eigenvalue"), title=f"{len(runs)} runs")
    lines = [(name, *(value or "-" for value in values)) for name, values in differ]
    show_table(lines or [("nothing",)], title="what differs")
    show_written(paths)


def _summary(run: ComparedRun) -> dict[str, Any]:
    trace, spectrum = run.of("trace"), run.of("spectrum")
    return {
        "label": run.label,
        "path": str(run.path),
        "trace": None if trace is None else trace["total"],
        "layers": None if trace is None else trace["layers"],
        "kinds": None if trace is None else trace["kinds"],
        "eigenvalues": None if spectrum is None else spectrum["eigenvalues"],
        "precision": {command: record.get("precision") for command, record in run.records.items()},
    }


def _results(run: ComparedRun) -> tuple[str, str]:
    trace, spectrum = run.of("trace"), run.of("spectrum")
    total = "-" if trace is None else estimate(trace["total"]["value"], trace["total"]["stderr"])
    if spectrum is None:
        return total, "-"
    first = spectrum["eigenvalues"][0]
    return total, f"{first['value']:.6g}, residual {first['residual']:.1e}"


def _page(runs: Sequence[ComparedRun], differ: list[tuple[str, list[str | None]]]) -> str:
    from curvature.page import PageTable, report_html

    traced = [run for run in runs if run.of("trace")]
    spectra = [run for run in runs if run.of("spectrum")]
    caption = "Settings, model, text and versions that differ" if differ else "Nothing differs but the folders"
    tables = [
        PageTable("Runs", ("run", "folder", "command", "model", "matrix", "products", "seconds"), _overview(runs)),
        PageTable(caption, ("name", *(run.label for run in runs)), [(name, *values) for name, values in differ]),
        *(_trace_tables(traced) if traced else ()),
        *(_spectrum_tables(spectra) if spectra else ()),
    ]
    alone = [
        run.label for run in runs if (len(traced) == 1 and run in traced) or (len(spectra) == 1 and run in spectra)
    ]
    return report_html(
        f"{len(runs)} runs compared",
        lead=", ".join(run.label for run in runs) + f": {len(traced)} with a trace, {len(spectra)} with a spectrum.",
        remarks=[
            f"{run.label}, {command}: {record['precision']['text']}"
            for run in runs
            for command, record in run.records.items()
            if "precision" in record
        ],
        figures=_figures(traced, spectra),
        tables=tables,
        notices=[f"{label} is the only run with a result of its kind: there is nothing beside it" for label in alone],
    )


def _overview(runs: Sequence[ComparedRun]) -> list[list[Any]]:
    return [
        [run.label, str(run.path), command, r["model"]["name"], r["operator"], r["products"], r["seconds"]]
        for run in runs
        for command, r in run.records.items()
    ]


def _figures(traced: Sequence[ComparedRun], spectra: Sequence[ComparedRun]) -> list[PageFigure]:
    from curvature.comparison import spectra_figure, traces_figure
    from curvature.page import PageFigure
    from curvature.plots import figure_png

    found = []
    if traced:
        names = ", ".join(f"{run.label} {_results(run)[0]}" for run in traced)
        found.append(
            PageFigure(
                figure_png(traces_figure(traced, title="Trace by layer, mean eigenvalue by kind")),
                alt=f"Bars with standard errors: trace by layer of {len(traced)} runs side by side, and mean "
                f"eigenvalue by kind of parameter. Totals: {names}",
                caption="Left: trace of each layer's diagonal block. Right: trace divided by the number of parameters, "
                "by kind. Bars show one standard error.",
            )
        )
    if spectra:
        widths = ", ".join(f"{run.label} {run.records['spectrum']['density']['sigma']:.3g}" for run in spectra)
        names = ", ".join(f"{run.label} {_results(run)[1]}" for run in spectra)
        found.append(
            PageFigure(
                figure_png(spectra_figure(spectra, title="Spectral density")),
                alt=f"Spectral densities of {len(spectra)} runs over each other on a logarithmic scale, with their "
                f"Ritz values below. Largest: {names}",
                caption=f"Smoothed by a Gaussian of width {widths}; below, the Ritz values with their residuals.",
            )
        )
    return found


def _trace_tables(runs: Sequence[ComparedRun]) -> list[PageTable]:
    from curvature.page import PageTable
    from curvature.plots import UNIT

    two = len(runs) == 2
    columns = [text for run in runs for text in (run.label, "standard error")]
    columns += ["difference", "its standard error"] if two else []
    note = "; the error of the difference is that of independent runs, too large for runs with one seed" if two else ""

    def rows(of: str, key: str, value: str, error: str) -> list[list[Any]]:
        given = [{row[key]: row for row in run.records["trace"][of]} for run in runs]
        found: list[list[Any]] = []
        for name in dict.fromkeys(name for each in given for name in each):
            pairs: list[tuple[Any, Any]] = [
                (each[name][value], each[name][error]) if name in each else (None, None) for each in given
            ]
            cells = [cell for pair in pairs for cell in pair]
            if two:
                (a, a_error), (b, b_error) = pairs
                missing = a is None or b is None or a_error is None or b_error is None
                cells += [None, None] if missing else [b - a, hypot(a_error, b_error)]
            found.append([name, *cells])
        return found

    totals = [cell for run in runs for cell in (run.records["trace"]["total"][key] for key in ("value", "stderr"))]
    if two:
        totals += [totals[2] - totals[0], hypot(totals[1], totals[3])]
    layers = [["all", *totals], *rows("layers", "name", "trace", "stderr")]
    kinds = rows("kinds", "kind", "mean_eigenvalue", "mean_stderr")
    return [
        PageTable(f"Trace by layer, in {UNIT}{note}", ("layer", *columns), layers),
        PageTable(f"Mean eigenvalue by kind of parameter, in {UNIT}{note}", ("kind", *columns), kinds),
    ]


def _spectrum_tables(runs: Sequence[ComparedRun]) -> list[PageTable]:
    from curvature.page import PageTable
    from curvature.plots import UNIT

    rows = [
        [run.label, number + 1, entry["value"], entry["residual"]]
        for run in runs
        for number, entry in enumerate(run.records["spectrum"]["eigenvalues"])
    ]
    return [PageTable(f"Ritz values from both ends, in {UNIT}", ("run", "number", "eigenvalue", "residual"), rows)]
