"""Tile shapes found on this machine by `flashbob-curv bench attention --tune`, which win over the table of `launch`.

One JSON file per compute capability in the user's cache folder, made with one release of Triton and read only by it:
another one compiles other code.
"""

from __future__ import annotations

import functools
import json
import os
import warnings
from pathlib import Path

import triton

Key = tuple[str, int, int]
"""Pass, padded head size (64 at least), bytes of an entry."""
Shape = tuple[int, int, int, int]
"""Queries and keys per tile, stages, warps."""


def table_path(capability: tuple[int, int]) -> Path:
    """Where the table of this compute capability lies; `XDG_CACHE_HOME` moves it."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache, "flashbob-curv", f"tiles_sm{capability[0]}{capability[1]}.json")


def entry(which: str, block_d: int, itemsize: int, capability: tuple[int, int]) -> Shape | None:
    """The tuned shape of a pass, or None."""
    return _table(capability).get((which, block_d, itemsize))


@functools.cache
def _table(capability: tuple[int, int]) -> dict[Key, Shape]:
    """The file's entries; none where there is no file.

    Raises:
        ValueError: If the file is no such table.
    """
    path = table_path(capability)
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        found = {
            (str(e["pass"]), int(e["head_size"]), int(e["itemsize"])): _shape(e["tiles"]) for e in content["tiles"]
        }
        release = content["triton"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is no table of tile shapes ({error}); remove it, or make it anew with "
            "`flashbob-curv bench attention --tune`"
        ) from error
    if release != triton.__version__:
        warnings.warn(
            f"flashbob: {path} was tuned with Triton {release}, this is {triton.__version__}; it is not used (make it "
            "anew with `flashbob-curv bench attention --tune`, or remove it)",
            RuntimeWarning,
            stacklevel=2,
        )
        return {}
    return found


def _shape(numbers: list[int]) -> Shape:
    bm, bn, stages, warps = numbers
    powers = (bm, bn, warps)
    if any(n < 1 or n & (n - 1) for n in powers) or min(bm, bn) < 16 or max(bm, bn) > 128 or not 1 <= stages <= 8:
        raise ValueError(f"{numbers} is no (queries, keys, stages, warps) with tiles from 16 to 128")
    return bm, bn, stages, warps


def table(capability: tuple[int, int], device: str, found: dict[Key, Shape]) -> tuple[Path, str]:
    """Path and text of the file with these entries and those that it has already, for the caller to write.

    Raises:
        ValueError: If the file that is there is no such table.
    """
    _table.cache_clear()
    path = table_path(capability)
    if path.exists() and json.loads(path.read_text(encoding="utf-8")).get("triton") == triton.__version__:
        found = {**_table(capability), **found}
    entries = [
        {"pass": which, "head_size": size, "itemsize": itemsize, "tiles": list(shape)}
        for (which, size, itemsize), shape in sorted(found.items())
    ]
    _table.cache_clear()
    content = {"capability": list(capability), "device": device, "triton": triton.__version__, "tiles": entries}
    return path, json.dumps(content, indent=1) + "\n"
