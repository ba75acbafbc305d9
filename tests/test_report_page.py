"""The HTML page in a real browser: sorted by keyboard, read by a screen reader, on a phone, light and dark."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from browser import Browser, chromium, started
from curvature_oracles import MatrixOperator, with_spectrum

from curvature import spectral_density
from curvature.page import PageFigure, PageTable, report_html
from curvature.plots import figure_png, spectrum_figure

ROWS = [("layer 2", 1.5e-3, None), ("layer 10", -2.0, 0.5), ("layer 1", 1.49e-3, 2.0)]
ALT = "Spectral density on a logarithmic scale, with Ritz values below it"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    matrix, _ = with_spectrum([50.0, 20, -5, *np.linspace(-1, 1, 30)])
    density = spectral_density(MatrixOperator(matrix), probes=2, steps=8)
    picture = figure_png(spectrum_figure(density, [50.0], [0.1], title="A spectrum"))
    path = tmp_path_factory.mktemp("page") / "report.html"
    columns = ("name", "trace", "standard error", *(f"a further column {i}" for i in range(8)))
    path.write_text(
        report_html(
            "Hessian trace", lead="tiny on sample, in a sentence of ordinary length that has to wrap on a phone.",
            figures=[PageFigure(picture, ALT, "A caption")],
            tables=[PageTable("Trace by layer", columns, [[*row, *range(8)] for row in ROWS])],
            facts={"Settings": {"seq": 64, "sha256": "0123456789abcdef" * 8, "out": "/a/long/path" * 12}},
            notices=["a notice with a_very_long_name_" + "without_a_break_" * 8],
        )
    )  # fmt: skip
    return path


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    path = chromium()
    if path is None:
        pytest.skip("needs Chromium or Chrome on the PATH (Debian: apt-get install chromium)")
    with started(path, tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture
def browser(running: Browser, page: Path) -> Browser:
    running.show(width=1000, scheme="light")
    running.open(page)
    return running


NAMES = "[...document.querySelectorAll('table.sortable tbody tr')].map(row => row.cells[0].textContent).join()"
SORTED = "[...document.querySelectorAll('table.sortable th')].map(head => head.getAttribute('aria-sort'))"


def focus(browser: Browser, text: str) -> None:
    """Go from the beginning of the page to the control with this text, by the Tab key alone."""
    browser.evaluate("document.activeElement.blur()")
    for _ in range(40):
        browser.press("Tab")
        if browser.evaluate("document.activeElement.textContent") == text:
            return
    pytest.fail(f"the Tab key does not reach {text!r}")


@pytest.mark.parametrize("key", ["Enter", " "], ids=["enter", "space"])
def test_tables_are_sorted_by_keyboard(browser: Browser, key: str) -> None:
    assert browser.evaluate(NAMES) == "layer 2,layer 10,layer 1"
    focus(browser, "trace")
    browser.press(key)
    assert browser.evaluate(NAMES) == "layer 10,layer 1,layer 2", "as numbers, by more digits than are shown"
    assert browser.evaluate(SORTED)[:3] == [None, "ascending", None]
    browser.press(key)
    assert browser.evaluate(NAMES) == "layer 2,layer 1,layer 10"
    assert browser.evaluate(SORTED)[:3] == [None, "descending", None]
    assert browser.evaluate("document.activeElement.textContent") == "trace", "the focus stays"
    assert browser.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid", "and shows"


def test_names_are_sorted_as_a_reader_counts_and_gaps_come_last(browser: Browser) -> None:
    focus(browser, "name")
    browser.press("Enter")
    assert browser.evaluate(NAMES) == "layer 1,layer 2,layer 10"
    focus(browser, "standard error")
    for _ in range(2):
        browser.press("Enter")
        assert browser.evaluate(NAMES).endswith("layer 2"), "it has none"


def test_a_screen_reader_finds_text_for_every_picture_and_table(browser: Browser) -> None:
    nodes = browser.call("Accessibility.getFullAXTree")["nodes"]
    named = [(node["role"]["value"], node.get("name", {}).get("value", "")) for node in nodes if "role" in node]
    images = [name for role, name in named if role in ("image", "img")]
    assert images == [ALT]
    assert ("heading", "Hessian trace") in named
    assert ("table", "Trace by layer") in named
    assert [name for role, name in named if role == "button"][:2] == ["name", "trace"]
    regions = [name for role, name in named if role == "region"]
    assert regions == ["Trace by layer", "Settings"]
    loaded = browser.evaluate("[...document.images].every(image => image.complete && image.naturalWidth > 100)")
    assert loaded, "the policy lets the embedded picture through"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_nothing_scrolls_sideways_but_tables(browser: Browser, page: Path, width: int, scheme: str) -> None:
    browser.show(width=width, scheme=scheme)
    browser.open(page)
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.evaluate("document.querySelector('main').getBoundingClientRect().right") <= width
    wide = browser.evaluate("(t => t.scrollWidth > t.clientWidth)(document.querySelector('.scroll'))")
    assert wide == (width == 360), "the wide table scrolls in itself"


def luminance(color: str) -> float:
    channels = [int(part) / 255 for part in color.removeprefix("rgb(").removesuffix(")").split(",")]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_the_page(browser: Browser, page: Path, scheme: str) -> None:
    browser.show(width=1000, scheme=scheme)
    browser.open(page)
    paper = luminance(browser.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert paper > 0.5 if scheme == "light" else paper < 0.1
    for selector in ("body", ".lead", ".notice", "caption", "th button", "td"):
        ink = luminance(browser.evaluate(f"getComputedStyle(document.querySelector('{selector}')).color"))
        contrast = (max(ink, paper) + 0.05) / (min(ink, paper) + 0.05)
        assert contrast >= 4.5, f"{selector}: {contrast:.2f}, below what WCAG 2.2 asks for"


def test_the_console_is_silent_and_nothing_is_fetched(browser: Browser, page: Path) -> None:
    focus(browser, "trace")
    browser.press("Enter")
    assert browser.complaints() == []
    assert browser.requests() == [page.as_uri()]


def test_a_complaint_would_be_noticed(browser: Browser) -> None:
    browser.evaluate("console.error('seen')")
    browser.evaluate("setTimeout(() => { throw new Error('thrown') }), 1")
    browser.evaluate("document.body.append(Object.assign(new Image(), {src: 'https://example.org/a.png'})), 1")
    told = " ".join(browser.complaints() + browser.complaints())
    assert all(word in told for word in ("seen", "thrown", "Content Security Policy"))
