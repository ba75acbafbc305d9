"""Launching a compiled kernel directly: the same arguments as through Triton, and never for what was not compiled."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from flashbob import kernels
from flashbob.dropout import Dropout
from flashbob.geometry import Geometry
from flashbob.kernels import launch
from flashbob.plan import FirstOrder, Plan, SecondOrder, Wanted

PLAN = Plan(Geometry(16, 16, 0, None, 0), 0.25, None, cast(FirstOrder, kernels), cast(SecondOrder, kernels))


class Kernel:
    """Stands for a Triton kernel: `kernel[grid](...)` records its arguments and gives a compiled stand-in."""

    def __init__(self, function: Any, record: list[tuple[str, Any, tuple[Any, ...]]]) -> None:
        self.arg_names, self.record = function.arg_names, record

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def run(*args: Any, num_warps: int, **constants: Any) -> Any:
            assert num_warps in (4, 8)
            names = self.arg_names[len(args) :]
            assert set(names) == set(constants)
            self.record.append(("jit", grid, (*args, *(constants[name] for name in names))))
            return Compiled(self.record)

        return run


class Compiled:
    """What Triton gives for a compiled kernel, launched with all arguments in the order of its signature."""

    def __init__(self, record: list[tuple[str, Any, tuple[Any, ...]]]) -> None:
        self.record = record

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args: self.record.append(("direct", grid, args))


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any, tuple[Any, ...]]]:
    launched: list[tuple[str, Any, tuple[Any, ...]]] = []
    monkeypatch.setattr(launch, "KERNELS", {name: Kernel(f, launched) for name, f in launch.KERNELS.items()})
    monkeypatch.setattr(launch, "compiled_kernels", {})
    monkeypatch.setattr(launch.triton, "__version__", "3.6.0")
    return launched


def tensors(count: int, *, n: int = 16, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(2, 2, n, 16, dtype=dtype) for _ in range(count)]


def call(x: list[Tensor], plan: Plan = PLAN, bounds: Tensor | None = None, bias: Tensor | None = None) -> None:
    """The row pass and the column pass of a direction without uv."""
    q, k, v, o, do, dq, uq, uk = x
    lse = torch.zeros(q.shape[:3])
    launch.double_backward(q, k, v, o, lse, do, dq, uq, uk, None, bounds, bias, plan, Wanted())


def test_a_repeated_launch_is_direct_and_passes_the_same_on(record: list[tuple[str, Any, tuple[Any, ...]]]) -> None:
    x = tensors(8)
    call(x)
    call(x)
    assert [(how, grid) for how, grid, _ in record] == [
        ("jit", (1, 4, 1)),
        ("jit", (1, 4, 1)),
        ("direct", (1, 4, 1)),
        ("direct", (1, 4, 1)),
    ]
    for through_jit, direct in ((record[0], record[2]), (record[1], record[3])):
        assert len(through_jit[2]) == len(direct[2])
        for a, b in zip(through_jit[2], direct[2], strict=True):
            assert _comparable(a) == _comparable(b)


def _comparable(x: Any) -> Any:
    """Tensors by shape, since outputs are new ones in every call."""
    if isinstance(x, tuple):
        return tuple(map(_comparable, x))
    return (tuple(x.shape), x.stride(), x.dtype) if isinstance(x, Tensor) else x


def _changes() -> dict[str, Callable[[], None]]:
    x = tensors(8)
    strided = [torch.randn(2, 16, 2, 16).transpose(1, 2) if i == 6 else t for i, t in enumerate(x)]
    unaligned = [torch.randn(2 * 2 * 16 * 16 + 1)[1:].view(2, 2, 16, 16) if i == 2 else t for i, t in enumerate(x)]
    band = replace(PLAN, geometry=Geometry(16, 16, 0, 5, 0))
    return {
        "length": lambda: call(tensors(8, n=32), replace(PLAN, geometry=Geometry(32, 32, 0, None, 0))),
        "dtype": lambda: call(tensors(8, dtype=torch.bfloat16)),
        "strides": lambda: call(strided),
        "alignment": lambda: call(unaligned),
        "window": lambda: call(x, band),
        "another-window": lambda: call(x, replace(PLAN, geometry=Geometry(16, 16, 0, 6, 0))),
        "far-away": lambda: call(x, replace(PLAN, geometry=Geometry(16, 16, 2**40, None, 0))),
        "padding": lambda: call(x, bounds=torch.zeros(2, 2, dtype=torch.int32)),
        "softcap": lambda: call(x, replace(PLAN, softcap=1.0)),
        "dropout": lambda: call(x, replace(PLAN, dropout=Dropout(0.1, 1, 2))),
        "bias": lambda: call(x, bias=torch.zeros(2, 2, 16, 16)),
        "bias-strides": lambda: call(x, bias=torch.zeros(1, 1, 16, 16).expand(2, 2, 16, 16)),
        "bias-dtype": lambda: call(x, bias=torch.zeros(2, 2, 16, 16, dtype=torch.float64)),
        "parts": lambda: launch.double_backward(
            *x[:4], torch.zeros(2, 2, 16), *x[4:6], None, x[7], None, None, None, PLAN, Wanted()
        ),
        "wanted": lambda: launch.double_backward(
            *x[:4], torch.zeros(2, 2, 16), *x[4:8], None, None, None, PLAN, Wanted(do=False, v=False)
        ),
    }


@pytest.mark.parametrize("change", _changes().keys())
def test_whatever_the_compiler_specializes_on_goes_through_it_again(
    change: str, record: list[tuple[str, Any, tuple[Any, ...]]]
) -> None:
    call(tensors(8))
    record.clear()
    changed = _changes()[change]
    changed()
    assert [how for how, _, _ in record] == ["jit", "jit"]
    changed()
    assert [how for how, _, _ in record[2:]] == ["direct", "direct"]


@pytest.mark.parametrize(
    "same",
    [replace(PLAN, scale=0.7), replace(PLAN, dropout=Dropout(0.1, 2**64 - 1, 2))],
    ids=["scale", "seed"],
)
def test_what_it_does_not_specialize_on_stays_direct(
    same: Plan, record: list[tuple[str, Any, tuple[Any, ...]]]
) -> None:
    x = tensors(8)
    before = replace(same, scale=0.3) if same.dropout is None else replace(same, dropout=Dropout(0.9, 0, 2))
    call(x, before)
    record.clear()
    call(x, same)
    assert [how for how, _, _ in record] == ["direct", "direct"]
    assert same.scale in [x for x in record[0][2] if isinstance(x, float)]


def test_another_release_of_triton_is_left_to_itself(
    record: list[tuple[str, Any, tuple[Any, ...]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch.triton, "__version__", "4.0.0")
    x = tensors(8)
    call(x)
    call(x)
    assert {how for how, _, _ in record} == {"jit"}


def test_the_record_of_compiled_kernels_is_bounded(
    record: list[tuple[str, Any, tuple[Any, ...]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "MAX_COMPILED", 4)
    for n in range(16, 26):
        call(tensors(8, n=n), replace(PLAN, geometry=Geometry(n, n, 0, None, 0)))
        assert 0 < len(launch.compiled_kernels) <= 4
