"""Tuning of tile shapes: the choice, the file that keeps it, and the reading of profiler counters."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import gpu_traffic
import pytest

from cli.tuning import CANDIDATES, Shape, fastest, general_kernels
from flashbob.kernels import launch, tuned

HOPPER = (9, 0)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tuned._table.cache_clear()
    yield tmp_path
    tuned._table.cache_clear()


def store(found: dict[tuple[str, int, int], Shape]) -> Path:
    path, text = tuned.table(HOPPER, "a GPU", found)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_the_fastest_that_works_is_chosen() -> None:
    times = {(64, 32, 2, 4): 2.0, (64, 64, 2, 4): 1.0}

    def trial(shape: Shape) -> float:
        if shape not in times:
            raise ArithmeticError("gk is wrong")
        return times[shape]

    best, outcomes = fastest([(16, 16, 1, 4), *times], trial)
    assert best == (64, 64, 2, 4)
    assert outcomes == {(16, 16, 1, 4): "ArithmeticError: gk is wrong", **times}
    assert fastest([(16, 16, 1, 4)], trial)[0] is None


def test_an_empty_cache_changes_nothing(cache: Path) -> None:
    assert tuned.entry("row", 64, 2, HOPPER) is None


def test_what_was_found_is_read_and_kept_beside_what_is_found_later(cache: Path) -> None:
    path = store({("row", 64, 2): (128, 32, 2, 8)})
    assert path == cache / "flashbob-curv" / "tiles_sm90.json"
    store({("column", 64, 2): (64, 64, 3, 4), ("row", 128, 2): (64, 16, 3, 4)})
    assert tuned.entry("row", 64, 2, HOPPER) == (128, 32, 2, 8)
    assert tuned.entry("column", 64, 2, HOPPER) == (64, 64, 3, 4)
    assert tuned.entry("row", 64, 4, HOPPER) is tuned.entry("row", 64, 2, (8, 0)) is None
    store({("row", 64, 2): (64, 64, 2, 4)})
    assert tuned.entry("row", 64, 2, HOPPER) == (64, 64, 2, 4)


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"triton": "3"}', '{"triton": "3", "tiles": [{"pass": "row"}]}'],
    ids=["empty", "list", "no-tiles", "no-fields"],
)
def test_a_file_that_is_no_table_is_told(text: str, cache: Path) -> None:
    store({}).write_text(text)
    with pytest.raises(ValueError, match=r"tiles_sm90.json is no table .*--tune"):
        tuned.entry("row", 64, 2, HOPPER)


@pytest.mark.parametrize("tiles", [[48, 64, 2, 4], [8, 64, 2, 4], [64, 256, 2, 4], [64, 64, 0, 4], [64, 64, 2]])
def test_a_shape_that_no_kernel_has_is_told(tiles: list[int], cache: Path) -> None:
    path = store({("row", 64, 2): (128, 32, 2, 8)})
    content = json.loads(path.read_text())
    content["tiles"][0]["tiles"] = tiles
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="is no table"):
        tuned.entry("row", 64, 2, HOPPER)


def test_another_release_of_triton_is_told_and_not_used(cache: Path) -> None:
    path = store({("row", 64, 2): (128, 32, 2, 8)})
    path.write_text(path.read_text().replace('"triton": "', '"triton": "0.'))
    with pytest.warns(RuntimeWarning, match="tuned with Triton 0"):
        assert tuned.entry("row", 64, 2, HOPPER) is None
    store({("column", 64, 2): (64, 64, 3, 4)})
    assert tuned.entry("row", 64, 2, HOPPER) is None  # the other release's entry is gone


def test_candidates_are_shapes_that_the_table_takes() -> None:
    for shapes in (shapes for passes in CANDIDATES.values() for shapes in passes.values()):
        assert len(set(shapes)) == len(shapes)
        assert [tuned._shape(list(shape)) for shape in shapes] == list(shapes)


def test_trial_tiles_hold_for_a_while_and_for_their_pass() -> None:
    usual = launch.tiles_for("column", 64, 2, HOPPER)
    with general_kernels({"row": (64, 16, 3, 4)}) as asked:
        assert launch.tiles_for("row", 64, 2, HOPPER) == launch.Tiles(64, 16, 3, 4)
        assert launch.tiles_for("column", 64, 2, HOPPER) == usual
        assert asked == {"row", "column"}
    assert launch.tiles_for("row", 64, 2, HOPPER) != launch.Tiles(64, 16, 3, 4)


def test_profiler_counters_are_read_by_kernel() -> None:
    head = '"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"'
    lines = [
        f'"{i}","7","{kernel}(args)","{metric}","byte","{value}"'
        for i, kernel in enumerate(["row_kernel", "column_kernel"])
        for metric, value in (("dram__bytes_read.sum", "1,234"), ("dram__bytes_write.sum", "56"))
    ]
    found = gpu_traffic.parse("\n".join(["==PROF== Connected", head, *lines]))
    assert [k["kernel"] for k in found] == ["row_kernel(args)", "column_kernel(args)"]
    assert found[0]["dram__bytes_read.sum"] == 1234.0
