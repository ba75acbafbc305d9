"""The notebook on spectra: it runs, on fewer products than it shows, and its stored outputs are whole."""

from __future__ import annotations

import json
from pathlib import Path

from notebook import executed, pictures, texts

PATH = Path(__file__).resolve().parents[1] / "notebooks" / "spectra.ipynb"
SMALLER = {"seq=64": "seq=16", "probes=16": "probes=3", "steps=8": "steps=3"}


def test_the_stored_outputs_are_whole() -> None:
    notebook = json.loads(PATH.read_text(encoding="utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert len(pictures(notebook)) == 3
    shown = "".join(texts(notebook))
    assert "trace 2621 ± 162" in shown
    assert shown.count("floor") == 4
    assert "nan" not in shown
    assert "inf" not in shown.replace("infinite", "")


def test_it_runs(tmp_path: Path) -> None:
    notebook = json.loads(PATH.read_text(encoding="utf-8"))
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        for shown, smaller in SMALLER.items():
            source = source.replace(shown, smaller)
        cell["source"] = [source]
    assert all(smaller in json.dumps(notebook) for smaller in SMALLER.values())
    path = tmp_path / "spectra.ipynb"
    path.write_text(json.dumps(notebook))
    now = executed(path)
    assert len(pictures(now)) == 3
    found = texts(now)
    assert [line.split()[0] for line in found[1].splitlines()[3:]] == ["embedding", "position", *["layer"] * 4, "norm"]
    assert len(found[3].splitlines()) == 1 + 16, "a row for each of four matrices in four layers"
