"""The README's Python runs, and what it points to is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest


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
