"""The README's Python runs, what it points to is there, and its performance figures are those of the records."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import readme_figures
from readme_figures import BLOCK, BLOCKS, blocks, record, renewed

from cli.console import memory


@pytest.fixture
def readme(root: Path) -> str:
    return (root / "README.md").read_text(encoding="utf-8")


def test_its_python_runs(readme: str) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", readme, flags=re.DOTALL)
    names: dict[str, object] = {}
    exec(block, names)
    stated = re.search(r"P = ([\d,]+)", block)
    assert stated is not None
    assert names["H"].shape[0] == int(stated[1].replace(",", ""))  # type: ignore[attr-defined]
    values, residuals = names["top"]  # type: ignore[misc]
    assert values[0] > 0 > values[-1]
    assert (residuals >= 0).all()
    assert names["total"].products == 2  # type: ignore[attr-defined]
    assert names["product"].shape == (names["attention"].shape[0],)  # type: ignore[attr-defined]


def test_its_links_lead_somewhere(readme: str, root: Path) -> None:
    links = [link for link in re.findall(r"\]\(([^)]+)\)", readme) if "://" not in link]
    assert links
    assert [link for link in links if not (root / link).exists()] == []


def test_no_placeholder_is_left(readme: str) -> None:
    assert "@@" not in readme


def test_its_figures_are_those_of_the_records(readme: str) -> None:
    found = blocks(readme)
    assert found.keys() >= {"spectrum", "attention", "streamed", "accuracy"}
    for name, body in found.items():
        assert body == BLOCKS[name](), f"block {name}: run `python3 -m tests.readme_figures`"


def test_a_figure_that_is_not_the_records_is_noticed(readme: str) -> None:
    assert renewed(readme) == readme
    changed = re.sub(r"(\| 8,192 \| 64 \| 12 \| 4 \| )(\d)", lambda m: f"{m[1]}{9 - int(m[2])}", readme)
    assert changed != readme
    assert renewed(changed) == readme


def test_its_transcript_shows_the_records_time_and_memory(readme: str) -> None:
    run = record("spectrum_gpt2_32k_h200")
    assert f"time, peak memory  {run['seconds']:.1f} s, {memory(run['peak_memory_bytes'])}\n" in readme


def test_no_performance_figure_stands_outside_the_blocks(readme: str, root: Path) -> None:
    prose = re.sub(r"```.*?```", "", BLOCK.sub("", readme), flags=re.DOTALL)
    stated = re.findall(r"\d[\d,.]*\s?(?:ms|s|seconds|[GMT]iB|TFLOP/s|tokens/s|%)(?![\w])", prose)
    # A bound that a test of the suite holds, no measurement.
    assert stated == ["1.5 GiB"]
    assert 'found["peak_mib"] < 1536' in (root / "tests" / "test_flashbob_memory.py").read_text()


@pytest.mark.parametrize("name", BLOCKS)
def test_every_block_can_be_made(name: str) -> None:
    if name == "models" and not (readme_figures.RECORDS / "models_h200.json").exists():
        pytest.skip("needs notebooks/records/models_h200.json, which `bench model` makes on a GPU")
    assert BLOCKS[name]().endswith("\n")
