"""Running a notebook without a notebook server: `python3 -m tests.notebook notebooks/attention.ipynb` stores outputs.

Cells run in one namespace, in the folder of the notebook. Printed text and shown figures become outputs as a notebook
server would store them.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def executed(path: Path) -> dict[str, Any]:
    """The notebook with the outputs that its cells give now; what a cell raises is raised."""
    notebook: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    names: dict[str, Any] = {}
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    with contextlib.chdir(path.parent), matplotlib.rc_context():
        for number, cell in enumerate(cells, start=1):
            cell["execution_count"] = number
            cell["outputs"] = outputs("".join(cell["source"]), f"{path.name}, code cell {number}", names)
    return notebook


def outputs(source: str, name: str, names: dict[str, Any]) -> list[dict[str, Any]]:
    """Outputs of one cell: its text, then its figures."""
    text, figures = io.StringIO(), []

    def show() -> None:
        for number in plt.get_fignums():
            picture = io.BytesIO()
            # No date or release inside, so that equal figures are equal files.
            plt.figure(number).savefig(picture, format="png", metadata={"Software": None})
            figures.append(base64.b64encode(picture.getvalue()).decode())
        plt.close("all")

    with contextlib.redirect_stdout(text), mock.patch.object(plt, "show", show):
        exec(compile(source, name, "exec"), names)
    show()
    found: list[dict[str, Any]] = []
    if text.getvalue():
        found.append({"name": "stdout", "output_type": "stream", "text": text.getvalue().splitlines(keepends=True)})
    return found + [
        {"data": {"image/png": figure, "text/plain": ["<Figure>"]}, "metadata": {}, "output_type": "display_data"}
        for figure in figures
    ]


def texts(notebook: dict[str, Any]) -> list[str]:
    """What the code cells print, cell by cell."""
    return [
        "".join(line for output in cell["outputs"] for line in output.get("text", []))
        for cell in notebook["cells"]
        if cell["cell_type"] == "code"
    ]


def pictures(notebook: dict[str, Any]) -> list[str]:
    """The figures of all cells."""
    return [
        output["data"]["image/png"]
        for cell in notebook["cells"]
        if cell["cell_type"] == "code"
        for output in cell["outputs"]
        if "data" in output
    ]


if __name__ == "__main__":
    os.environ.setdefault("MPLBACKEND", "Agg")
    for file in map(Path, sys.argv[1:]):
        file.write_text(json.dumps(executed(file.resolve()), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(f"wrote {file}")
