"""`flashbob-curv report`: several runs on one page, and what differs between them."""

from __future__ import annotations

import json
import re
from math import hypot
from pathlib import Path

import pytest
from browser import chromium, started
from command_line import Run, make_model

from curvature.comparison import differences, read_runs, spectra_figure, traces_figure

SMALL = ("--dtype", "float64", "--seq", 16, "--device", "cpu", "--params", r"ln_")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two runs of both commands; the second on a longer text, with another matrix in its trace."""
    from typer.testing import CliRunner

    from cli.main import app

    model = make_model(tmp_path_factory.mktemp("model"))
    first, second = tmp_path_factory.mktemp("runs") / "one", tmp_path_factory.mktemp("runs") / "two"
    for folder, batches, matrix in ((first, 1, "hessian"), (second, 2, "ggn")):
        for command in (
            ("trace", "--max-products", 3, "--operator", matrix),
            ("spectrum", "--steps", 4, "--top", 2),
        ):
            arguments = (*command, "--model", model, *SMALL, "--batches", batches, "--out", folder)
            assert CliRunner().invoke(app, [str(argument) for argument in arguments]).exit_code == 0
    return first, second


def test_runs_are_compared_on_one_page(run: Run, folders: tuple[Path, Path], tmp_path: Path) -> None:
    outcome = run("report", *folders, "--out", tmp_path / "out")
    assert outcome.code == 0, outcome.err
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"report.html", "report.json"}
    page = (tmp_path / "out" / "report.html").read_text()
    assert not re.search(r'(src|href)="(?!data:)', page)
    assert page.count("<img") == 2
    assert re.search(r'alt="Bars with standard errors: trace by layer of 2 runs side by side', page)
    traces = [json.loads((folder / "trace.json").read_text()) for folder in folders]
    for trace in traces:
        for row in trace["layers"]:
            assert f'data-value="{row["trace"]!r}"' in page
            assert f'data-value="{row["stderr"]!r}"' in page
    a, b = (trace["total"] for trace in traces)
    assert f'data-value="{b["value"] - a["value"]!r}"' in page
    assert f'data-value="{hypot(a["stderr"], b["stderr"])!r}"' in page
    assert all(name in outcome.out for name in ("one", "two", "settings.batches", "ggn"))


def test_what_differs_is_named_and_nothing_else(folders: tuple[Path, Path]) -> None:
    rows = dict(differences(read_runs(folders)))
    assert rows["settings.batches"] == ["1", "2"]
    assert rows["trace: settings.operator"] == ["hessian", "ggn"]
    assert rows["data.tokens"] == ["16", "32"]
    assert set(rows) == {"settings.batches", "trace: settings.operator", "data.tokens", "data.sha256"}


def test_json_alone_on_stdout(run: Run, folders: tuple[Path, Path], tmp_path: Path) -> None:
    outcome = run("report", *folders, "--out", tmp_path / "out", "--json")
    assert outcome.json == json.loads((tmp_path / "out" / "report.json").read_text())
    common = {"command", "version", "model", "data", "settings", "environment", "seconds", "peak_memory_bytes"}
    assert set(outcome.json) == common | {"runs", "differences"}
    assert outcome.json["settings"]["runs"] == [str(folder) for folder in folders]
    assert [entry["label"] for entry in outcome.json["runs"]] == ["one", "two"]
    assert {"name": "settings.batches", "values": ["1", "2"]} in outcome.json["differences"]


def test_a_run_that_has_nothing_beside_it_is_said(run: Run, folders: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run("report", folders[0] / "trace.json", folders[1] / "spectrum.json", "--out", out).code == 0
    assert "there is nothing beside it" in (out / "report.html").read_text()


def test_runs_of_one_name_are_told_apart_by_their_folders(folders: tuple[Path, Path], tmp_path: Path) -> None:
    for name, folder in zip(("a", "b"), folders, strict=True):
        (tmp_path / name / "run").mkdir(parents=True)
        (tmp_path / name / "run" / "trace.json").write_bytes((folder / "trace.json").read_bytes())
    runs = read_runs([tmp_path / "a" / "run", tmp_path / "b" / "run"])
    assert [found.label for found in runs] == ["a/run", "b/run"]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "holds no trace.json and no spectrum.json"),
        ("{", "cannot be read as a record"),
        ('{"command": "hvp"}', "no record of trace or spectrum but of 'hvp'"),
        ('{"command": "trace"}', "written by an earlier version"),
    ],
    ids=["nothing", "broken", "other", "old"],
)
def test_what_is_no_run_is_refused(
    content: str | None, told: str, run: Run, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    (tmp_path / "bad").mkdir()
    if content is not None:
        (tmp_path / "bad" / "trace.json").write_text(content)
    outcome = run("report", folders[0], "bad")
    assert outcome.code == 1
    assert told in outcome.err
    assert not (tmp_path / "runs" / "report").exists()


def test_wrong_numbers_of_runs(run: Run, folders: tuple[Path, Path]) -> None:
    assert run("report").code == 2
    assert "at least two runs, got 1" in run("report", folders[0]).err
    assert "given twice" in run("report", folders[0], folders[0]).err


def test_a_runs_own_page_is_not_replaced(run: Run, folders: tuple[Path, Path]) -> None:
    before = (folders[0] / "report.html").read_bytes()
    outcome = run("report", *folders, "--out", folders[0])
    assert outcome.code == 1
    assert "is one of the runs" in outcome.err
    assert (folders[0] / "report.html").read_bytes() == before


def test_pictures_have_error_bars_for_every_run(folders: tuple[Path, Path]) -> None:
    runs = read_runs(folders)
    left, right = traces_figure(runs, title="Traces").axes
    assert len([c for c in left.containers if getattr(c, "has_yerr", False)]) == 2
    assert len([c for c in right.containers if getattr(c, "has_yerr", False)]) == 2
    legend = left.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["one", "two"]
    upper, lower = spectra_figure(runs, title="Spectra").axes
    assert len(upper.lines) == 2
    assert len(upper.collections) == 2, "the bands of the standard errors"
    assert upper.lines[0].get_linestyle() != upper.lines[1].get_linestyle(), "told apart without colour, too"
    assert [container.has_xerr for container in lower.containers] == [True, True]


def test_the_page_fits_a_phone_and_the_console_is_silent(run: Run, folders: tuple[Path, Path], tmp_path: Path) -> None:
    path = chromium()
    if path is None:
        pytest.skip("needs Chromium or Chrome on the PATH (Debian: apt-get install chromium)")
    assert run("report", *folders, "--out", tmp_path / "out").code == 0
    with started(path, tmp_path / "profile") as browser:
        for page in (tmp_path / "out", *folders):
            browser.show(width=360, scheme="dark")
            browser.open(page / "report.html")
            assert browser.evaluate("document.documentElement.scrollWidth") <= 360
            assert browser.evaluate("[...document.images].every(i => i.naturalWidth > 100 && i.alt.length > 20)")
            assert browser.complaints() == []
            assert browser.requests() == [(page / "report.html").as_uri()]
