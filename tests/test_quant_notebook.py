"""The quantization notebook: it runs, on fewer tokens than it shows, and its stored outputs are whole."""

from __future__ import annotations

import json
from pathlib import Path

from notebook import executed, pictures, texts

PATH = Path(__file__).resolve().parents[1] / "notebooks" / "quantization.ipynb"
SMALLER = {'"sample", 64, 2, 14)': '"sample", 24, 1, 9)', "Relinearization(rounds=3": "Relinearization(rounds=1"}


def test_the_stored_outputs_are_whole() -> None:
    notebook = json.loads(PATH.read_text(encoding="utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert len(pictures(notebook)) == 3
    assert "Spearman" in str(texts(notebook))


def test_it_runs(tmp_path: Path) -> None:
    notebook = json.loads(PATH.read_text(encoding="utf-8"))
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        for shown, smaller in SMALLER.items():
            source = source.replace(shown, smaller)
        cell["source"] = [source]
    assert all(smaller in json.dumps(notebook).replace('\\"', '"') for smaller in SMALLER.values())
    (tmp_path / "records").mkdir()
    path = tmp_path / "quantization.ipynb"
    path.write_text(json.dumps(notebook))
    now = executed(path)
    assert len(pictures(now)) == 3
    assert "no records yet" in str(texts(now))
