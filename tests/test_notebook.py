"""The notebook runs, draws, and shows what the committed records say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from notebook import executed, pictures, texts

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
# Those that compute instead of drawing records are run in tests/test_{quant,spectra,updates}_notebook.py.
COMPUTING = ("differentiate_through_updates.ipynb", "quantization.ipynb", "spectra.ipynb")
NOTEBOOKS = sorted(path for path in FOLDER.glob("*.ipynb") if path.name not in COMPUTING)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_stored_outputs_are_those_of_the_records(path: Path) -> None:
    stored, now = json.loads(path.read_text(encoding="utf-8")), executed(path)
    assert texts(now) == texts(stored), "run `python3 -m tests.notebook` on the notebook"
    assert len(pictures(now)) == len(pictures(stored)) >= 4


def test_there_is_one() -> None:
    assert [path.name for path in NOTEBOOKS] == ["attention.ipynb"]


def test_a_cell_that_raises_is_told(tmp_path: Path) -> None:
    cell = {"cell_type": "code", "source": ["x = 1\n", "raise ValueError('no rows')"]}
    path = tmp_path / "broken.ipynb"
    path.write_text(json.dumps({"cells": [cell]}))
    with pytest.raises(ValueError, match="no rows"):
        executed(path)
