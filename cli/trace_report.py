"""The page of `flashbob-curv trace`: bars, heat maps and tables, each number with its standard error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cli.console import estimate
from curvature.breakdown import KINDS, Breakdown
from curvature.estimate import with_error
from curvature.heat_map import heat_map
from curvature.page import PageFigure, PageTable, report_html
from curvature.plots import UNIT, figure_png, trace_figure

if TYPE_CHECKING:
    from cli.session import Session

__all__ = ["pictures", "report"]

HATCHED = "Hatched: within two standard errors of zero, so that the sign is not known."


def pictures(session: Session, breakdown: Breakdown, content: Mapping[str, Any]) -> dict[str, bytes]:
    """The page's pictures as PNG: "trace", "kinds", and with --per-head "heads"."""
    title = session.matrix.words
    total = with_error(content["total"]["value"], content["total"]["stderr"])
    heading = f"{title} trace of {session.label}: {total} from {content['products']} products, ± 1 s.e."
    drawn = {"trace": figure_png(trace_figure(breakdown, title=heading))}
    cells = {
        ("outside" if row["layer"] is None else str(row["layer"]), row["kind"]): (
            row["mean_eigenvalue"],
            row["mean_stderr"],
        )
        for row in content["layers_and_kinds"]
    }
    drawn["kinds"] = _map(cells, list(KINDS), f"{title}: mean eigenvalue by layer and kind")
    if content["heads"]:
        cells = {
            (str(row["layer"]), row["head"]): (row["mean_eigenvalue"], row["stderr"] / row["numel"])
            for row in content["heads"]
        }
        columns = list(dict.fromkeys(row["head"] for row in content["heads"]))
        drawn["heads"] = _map(cells, columns, f"{title}: mean eigenvalue by layer and attention head")
    return drawn


def _map(cells: dict[tuple[str, str], tuple[float, float]], columns: list[str], title: str) -> bytes:
    rows = list(dict.fromkeys(row for row, _ in cells))
    # What lies outside the layers comes last, however the model orders it.
    rows = [row for row in rows if row != "outside"] + [row for row in rows if row == "outside"]
    there = [column for column in columns if any(column == place[1] for place in cells)]
    return figure_png(heat_map(cells, rows, there, title=title))


def report(session: Session, content: Mapping[str, Any], drawn: Mapping[str, bytes]) -> str:
    """The page.

    Args:
        session: The run.
        content: Its record.
        drawn: Its pictures; see `pictures`.
    """
    total, matrix = content["total"], session.matrix.words
    return report_html(
        f"{matrix} trace",
        lead=f"{session.subject}. Trace {estimate(total['value'], total['stderr'])} from {content['products']} "
        "products.",
        remarks=[content["precision"]["text"]],
        figures=_figures(content, drawn, matrix),
        tables=_tables(content),
        facts={name: content[name] for name in ("settings", "model", "data", "environment")},
        notices=session.notices,
    )


def _figures(content: Mapping[str, Any], drawn: Mapping[str, bytes], matrix: str) -> list[PageFigure]:
    layers, kinds = content["layers"], content["kinds"]
    most, steepest = max(layers, key=lambda row: row["trace"]), max(kinds, key=lambda row: row["mean_eigenvalue"])
    figures = [
        PageFigure(
            drawn["trace"],
            alt=f"Bars with standard errors: trace of the {matrix}'s diagonal block by layer, most in {most['name']}; "
            f"mean eigenvalue by kind of parameter, largest in {steepest['kind']}",
            caption="Left: trace by layer. Right: trace divided by the number of parameters, by kind. Bars show one "
            "standard error.",
        ),
        PageFigure(
            drawn["kinds"],
            alt="Heat map: mean eigenvalue with its standard error by layer (rows) and kind of parameter (columns); "
            "the table by layer and kind holds the same numbers",
            caption=f"Mean eigenvalue, the trace divided by the number of parameters. {HATCHED}",
        ),
    ]
    if "heads" in drawn:
        figures.append(
            PageFigure(
                drawn["heads"],
                alt="Heat map: mean eigenvalue with its standard error by layer (rows) and attention head (columns); "
                "the table by attention head holds the same numbers",
                caption="Mean eigenvalue over the query, key, value and output entries of each head; keys and values "
                f"that several query heads share are a column of their own. {HATCHED}",
            )
        )
    return figures


def _tables(content: Mapping[str, Any]) -> list[PageTable]:
    sums = ("numel", "trace", "stderr", "mean_eigenvalue", "mean_stderr")
    heads = ("name", "layer", "head", "numel", "trace", "stderr", "mean_eigenvalue")
    blocks = ("name", "layer", "kind", "shape", "numel", "trace", "stderr", "mean_eigenvalue")

    def table(caption: str, columns: tuple[str, ...], rows: list[dict[str, Any]]) -> PageTable:
        head = [
            {"stderr": "standard error", "mean_stderr": "its standard error"}.get(c, c.replace("_", " "))
            for c in columns
        ]
        return PageTable(f"{caption}, in {UNIT}", head, [[row[column] for column in columns] for row in rows])

    tables = [
        table("Trace by layer", ("name", *sums), content["layers"]),
        table("Trace by kind of parameter", ("kind", *sums), content["kinds"]),
        table("Trace by layer and kind", ("layer", "kind", *sums), content["layers_and_kinds"]),
    ]
    if content["heads"]:
        tables.append(table("Trace by attention head", heads, content["heads"]))
    return [*tables, table("Trace by parameter", blocks, content["blocks"])]
