"""`flashbob-curv bench attention --tune`: tile shapes of the general kernels, tried on this GPU and kept where best."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from cli.bench_attention import Case, spot_reason
from cli.console import show_table, show_written
from cli.timing import timed
from curvature.report import write_text
from flashbob.rivals import ours
from flashbob.spot_check import spot_errors

__all__ = ["CANDIDATES", "fastest", "tune"]

Shape = tuple[int, int, int, int]

CANDIDATES: dict[int, dict[str, tuple[Shape, ...]]] = {
    2: {
        "row": (
            (128, 64, 3, 8), (128, 32, 2, 8), (128, 16, 3, 8), (64, 64, 2, 4), (64, 32, 3, 4), (64, 32, 2, 4),
            (64, 16, 3, 4), (64, 16, 2, 8), (64, 32, 2, 8),
        ),
        "column": (
            (64, 128, 3, 8), (64, 128, 2, 8), (32, 128, 2, 8), (32, 128, 3, 8), (64, 64, 3, 4), (64, 64, 2, 4),
            (32, 64, 2, 4), (32, 64, 1, 8),
        ),
    },
    4: {
        "row": ((64, 32, 1, 4), (64, 16, 1, 8), (64, 32, 1, 8), (32, 32, 1, 4), (32, 16, 1, 4), (32, 16, 1, 8)),
        "column": ((32, 64, 1, 4), (16, 64, 1, 8), (32, 64, 1, 8), (32, 32, 1, 4), (16, 32, 1, 4), (16, 16, 1, 4)),
    },
}  # fmt: skip
"""(queries, keys, stages, warps) that are tried, by bytes of an entry and pass."""


def fastest(shapes: Sequence[Shape], trial: Callable[[Shape], float]) -> tuple[Shape | None, dict[Shape, float | str]]:
    """The shape with the smallest figure, and what each gave: a figure, or why it has none.

    Args:
        shapes: Candidates.
        trial: Milliseconds of a candidate; raises where it does not run or is wrong.
    """
    outcomes: dict[Shape, float | str] = {}
    for shape in shapes:
        try:
            outcomes[shape] = trial(shape)
        except Exception as error:  # a tile that does not fit or compile is one of the answers
            outcomes[shape] = " ".join(f"{type(error).__name__}: {error}".split())[:100]
    times = {shape: outcome for shape, outcome in outcomes.items() if isinstance(outcome, float)}
    return min(times, key=lambda shape: times[shape], default=None), outcomes


def tune(cases: Sequence[Case], *, reps: int) -> None:
    """Try tile shapes for the head sizes of a sweep, at each one's longest case, and write the launch table.

    The general Triton kernels are tuned, also where other ones are the faster choice. Each candidate is compared with
    float64 in sampled rows before it counts. Cost: a compilation and a few double backwards per candidate.

    Raises:
        ValueError: If there is no GPU, or no candidate works.
    """
    device = cases[0].device
    if device.type != "cuda":
        raise ValueError("--tune needs a CUDA GPU, whose tile shapes it finds; choose --device cuda")
    from flashbob.kernels import tuned

    capability = torch.cuda.get_device_capability(device)
    found: dict[tuple[str, int, int], Shape] = {}
    longest = {case.dim: case for case in sorted(cases, key=lambda case: case.seq)}
    for case, which in itertools.product(longest.values(), ("row", "column")):
        size, itemsize = max(64, 1 << (case.dim - 1).bit_length()), case.dtype.itemsize
        if itemsize not in CANDIDATES:
            raise ValueError("--tune: the kernels take float32, bfloat16 and float16; choose one with --dtype")
        trial = _Trial(case, which, found.get(("row", size, itemsize)), reps)
        shape, outcomes = fastest(CANDIDATES[itemsize][which], trial)
        cells = [(str(s), f"{o:.3f}" if isinstance(o, float) else o) for s, o in outcomes.items()]
        show_table(cells, head=("queries, keys, stages, warps", "ms"), title=f"{which} pass, head size {case.dim}")
        if shape is None:
            raise ValueError(f"--tune: no candidate works for the {which} pass at head size {case.dim}")
        found[which, size, itemsize] = shape
    path, text = tuned.table(capability, torch.cuda.get_device_name(device), found)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, text)
    show_written([path])


class _Trial:
    """Milliseconds of the double backward with one pass's tiles replaced; the other pass stays as it is."""

    def __init__(self, case: Case, which: str, row: Shape | None, reps: int) -> None:
        self._case, self._which, self._row, self._reps = case, which, row, reps
        self._problem = case.draw()

    def __call__(self, shape: Shape) -> float:
        chosen = {self._which: shape} if self._row is None else {"row": self._row, self._which: shape}
        with general_kernels(chosen) as asked:
            second = ours(self._problem)
            answer = second()
            if self._which not in asked:
                raise RuntimeError("the launcher has not asked for the tiles of this pass")
            if reason := spot_reason(self._case.dtype, spot_errors(self._problem, answer)):
                raise ArithmeticError(reason)
            return timed(second, self._case.device, reps=self._reps).p50


@contextmanager
def general_kernels(shapes: dict[str, Shape]) -> Iterator[set[str]]:
    """The general kernels compute every call, with these tiles; yields the passes that the launcher asks for."""
    from flashbob.kernels import launch

    before, asked = (launch.tiles_for, launch.hopper_kernels), set[str]()

    def tiles_for(which: Any, *arguments: Any, **options: Any) -> Any:
        asked.add(which)
        return launch.Tiles(*shapes[which]) if which in shapes else before[0](which, *arguments, **options)

    launch.tiles_for, launch.hopper_kernels = tiles_for, lambda device: None  # type: ignore[assignment]
    launch.compiled_kernels.clear()  # its keys do not name the tiles
    try:
        yield asked
    finally:
        launch.tiles_for, launch.hopper_kernels = before
        launch.compiled_kernels.clear()
