"""The notebook on differentiating through updates runs, and its own assertions hold."""

from __future__ import annotations

from pathlib import Path

import pytest
from notebook import executed, pictures

NOTEBOOK = Path(__file__).resolve().parents[1] / "notebooks" / "differentiate_through_updates.ipynb"


@pytest.mark.slow
def test_the_notebook_runs_from_top_to_bottom() -> None:
    """Both kinds train, agree with eager attention in float64 to 1e-10, and take less memory than it."""
    assert len(pictures(executed(NOTEBOOK))) == 3
