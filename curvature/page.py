"""The HTML report: one self-contained page that needs no network, and no script but for sorting its tables."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from numbers import Real
from typing import Any

__all__ = ["PageFigure", "PageTable", "report_html"]


@dataclass(frozen=True)
class PageFigure:
    """A picture on the page.

    Attributes:
        png: The PNG file's bytes; embedded, so that the page is one file.
        alt: What the picture shows, in words.
        caption: What a reader should know to read it.
    """

    png: bytes
    alt: str
    caption: str


@dataclass(frozen=True)
class PageTable:
    """A table on the page.

    Attributes:
        caption: What the rows are, with units.
        columns: Column names.
        rows: One sequence of cells per row; numbers are aligned to the right and shown with four digits. The reader can
            sort them by any column, by the numbers in full precision.
    """

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]


_STYLE = """
:root { color-scheme: light dark; --ink: #1c2127; --paper: #ffffff; --soft: #5b6570; --line: #d5dae0; --warn: #8a5300;
        --focus: #1f5fa8; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ed; --paper: #14181d; --soft: #a3adb8; --line: #343c46; --warn: #f0b35a;
          --focus: #8ab8f0; }
}
body { margin: 0 auto; max-width: 62rem; padding: 1.5rem; background: var(--paper); color: var(--ink);
       font: 1rem/1.55 system-ui, sans-serif; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
.lead { color: var(--soft); } .notice { color: var(--warn); }
figure { margin: 1.5rem 0; }
/* The pictures are drawn on white; the padding keeps that from looking like a mistake in dark mode. */
img { max-width: 100%; height: auto; background: #ffffff; border-radius: 6px; }
figcaption, caption { color: var(--soft); text-align: left; font-size: .92rem; padding: .3rem 0; }
.scroll { overflow-x: auto; max-width: 100%; }
:focus-visible { outline: 2px solid var(--focus); outline-offset: 2px; }
h1, .lead, .notice, figcaption, .facts td { overflow-wrap: anywhere; }
.facts table { width: 100%; }
.facts td:first-child { overflow-wrap: normal; }
th button { all: unset; cursor: pointer; font-weight: inherit; }
th button:focus-visible { outline: 2px solid var(--focus); outline-offset: 2px; }
/* The arrow is for the eye; a screen reader has aria-sort. */
th button::after { content: " ↕" / ""; color: var(--soft); }
th[aria-sort="ascending"] button::after { content: " ↑" / ""; color: var(--ink); }
th[aria-sort="descending"] button::after { content: " ↓" / ""; color: var(--ink); }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .92rem; }
th, td { padding: .28rem .9rem .28rem 0; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }
td.number, th.number { text-align: right; }
""".strip()


_SCRIPT = """
// Without this script the tables stand in the order in which they were written.
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0], written = [...body.rows];
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = head.textContent;
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const up = head.getAttribute("aria-sort") !== "ascending";
      const key = row => row.cells[column].dataset.value ?? "";
      const numeric = head.classList.contains("number");
      const order = (a, b) => {
        if (key(a) === "" || key(b) === "") return (key(a) === "") - (key(b) === "");  // what is missing comes last
        const less = numeric ? key(a) - key(b) : key(a).localeCompare(key(b), "en", { numeric: true });
        return up ? less : -less;
      };
      heads.forEach(other => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      body.append(...[...written].sort(order));
    });
  });
}
""".strip()

_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
"""The browser itself then sees to it that nothing is fetched."""


def report_html(
    title: str,
    *,
    lead: str,
    remarks: Sequence[str] = (),
    figures: Sequence[PageFigure] = (),
    tables: Sequence[PageTable] = (),
    facts: Mapping[str, Mapping[str, Any]] | None = None,
    notices: Sequence[str] = (),
) -> str:
    """One self-contained page: pictures, tables, every setting, and what the user should know.

    Light and dark follow the reader's system. All text is escaped.

    Args:
        title: Heading and title of the page.
        lead: One paragraph: what was computed, on what, with which result.
        remarks: Further paragraphs below it.
        figures: Pictures, in order.
        tables: Tables of results, in order.
        facts: Sections of names and values, such as {"Settings": ..., "Model": ...}.
        notices: Remarks that the reader should not miss.

    Returns:
        The page as HTML text.
    """
    parts = [f"<h1>{escape(title)}</h1>", f'<p class="lead">{escape(lead)}</p>']
    parts += [f'<p class="lead">{escape(remark)}</p>' for remark in remarks]
    if notices:
        items = "".join(f"<li>{escape(n)}</li>" for n in notices)
        parts.append(f'<h2>Notices</h2><ul class="notice">{items}</ul>')
    parts += [_figure(f) for f in figures]
    parts += [_table(t, sortable=True) for t in tables]
    for heading, entries in (facts or {}).items():
        rows = [(name, "none" if value is None else value) for name, value in _flat(entries)]
        table = _table(PageTable("", ("name", "value"), rows), label=heading)
        parts.append(f'<h2>{escape(heading)}</h2><div class="facts">{table}</div>')
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f"<title>{escape(title)}</title>\n<style>\n{_STYLE}\n</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(parts)
        + f"\n</main>\n<script>\n{_SCRIPT}\n</script>\n</body>\n</html>\n"
    )


def _figure(figure: PageFigure) -> str:
    source = "data:image/png;base64," + base64.b64encode(figure.png).decode("ascii")
    return (
        f'<figure><img src="{source}" alt="{escape(figure.alt)}">'
        f"<figcaption>{escape(figure.caption)}</figcaption></figure>"
    )


def _table(table: PageTable, *, sortable: bool = False, label: str = "") -> str:
    numeric = [bool(table.rows) and all(_is_number(row[i]) for row in table.rows) for i in range(len(table.columns))]
    head = "".join(_cell("th", name, right) for name, right in zip(table.columns, numeric, strict=True))
    body = "".join(
        "<tr>" + "".join(_cell("td", _shown(c), right, c) for c, right in zip(row, numeric, strict=True)) + "</tr>"
        for row in table.rows
    )
    caption = f"<caption>{escape(table.caption)}</caption>" if table.caption else ""
    css = ' class="sortable"' if sortable else ""
    # It can take the focus, so that a wide table can be scrolled by keyboard.
    region = f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(table.caption or label)}">'
    return f"{region}<table{css}>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def _cell(tag: str, text: str, right: bool, value: Any = None) -> str:
    scope = ' scope="col"' if tag == "th" else ""
    css = ' class="number"' if right else ""
    key = "" if value is None or tag == "th" else f' data-value="{escape(repr(value) if right else str(value))}"'
    return f"<{tag}{scope}{css}{key}>{escape(text)}</{tag}>"


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, Real) and not isinstance(value, bool))


def _shown(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


def _flat(entries: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Nested mappings as dotted names."""
    rows: list[tuple[str, Any]] = []
    for name, value in entries.items():
        if isinstance(value, Mapping):
            rows += _flat(value, f"{prefix}{name}.")
        else:
            rows.append((f"{prefix}{name}", value))
    return rows
