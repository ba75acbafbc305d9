"""Files that come with the project: the embedded model, the sample text, configurations."""

from __future__ import annotations

from pathlib import Path

__all__ = ["shipped_path"]


def shipped_path(relative: str) -> Path:
    """Path of a shipped file or folder.

    In an installed wheel `configs` lies inside this package; in a checkout or an editable install beside it.

    Args:
        relative: Path below `configs`, such as "models/tiny-gpt2".

    Raises:
        FileNotFoundError: If it is in neither place.
    """
    here = Path(__file__).resolve().parent
    places = [root / "configs" / relative for root in (here, here.parent)]
    for place in places:
        if place.exists():
            return place
    raise FileNotFoundError(
        f"configs/{relative} is neither in the installed package nor beside it ({places[0]}, {places[1]}); "
        "install from a complete checkout"
    )
