"""The ways that ours is measured against compute the same thing, and so does the float64 check of a few rows."""

from __future__ import annotations

import math

import pytest
import torch

from flashbob import spot_check
from flashbob.rivals import OUTPUTS, RIVALS, Problem, draw, reference
from flashbob.spot_check import relative_error, spot_errors

MASKS = {"causal": {"causal": True}, "full": {"causal": False}, "window": {"causal": True, "window": 9}}


def problem(mask: str, heads: tuple[int, int] = (2, 1), seq: int = 37, dtype: torch.dtype = torch.float64) -> Problem:
    return draw(batch=2, heads=heads, seq=seq, dim=16, dtype=dtype, seed=3, **MASKS[mask])


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (3, 1)], ids=["mha", "gqa", "mqa"])
@pytest.mark.parametrize("way", ["ours", "math", "closed-form"])
def test_equals_the_oracle_in_float64(way: str, heads: tuple[int, int], mask: str) -> None:
    asked = problem(mask, heads)
    for name, found, exact in zip(OUTPUTS, RIVALS[way](asked)(), reference(asked), strict=True):
        assert found.shape == exact.shape
        assert relative_error(found, exact) < 1e-12, name


@pytest.mark.parametrize("seq", [16, 35, 48])
@pytest.mark.parametrize("mask", ["causal", "full"])
def test_three_passes_equal_the_oracle_in_the_interpreter(mask: str, seq: int) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    asked = draw(batch=1, heads=(2, 1), seq=seq, dim=16, dtype=torch.float32, device=device, **MASKS[mask])
    for name, found, exact in zip(OUTPUTS, RIVALS["three-pass"](asked)(), reference(asked), strict=True):
        assert relative_error(found, exact) < 1e-5, name


def test_three_passes_refuse_what_they_cannot_do() -> None:
    with pytest.raises(NotImplementedError, match="window"):
        RIVALS["three-pass"](problem("window", dtype=torch.float32))
    with pytest.raises(NotImplementedError, match="float64"):
        RIVALS["three-pass"](problem("causal"))
    with pytest.raises(NotImplementedError, match="24"):
        RIVALS["three-pass"](draw(batch=1, heads=(1, 1), seq=16, dim=24, causal=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_closed_form_in_16_bits_rounds_no_more_than_pytorch(dtype: torch.dtype) -> None:
    asked = draw(batch=1, heads=(2, 2), seq=64, dim=32, causal=True, dtype=dtype)
    exact = reference(asked)
    theirs, found = RIVALS["math"](asked)(), RIVALS["closed-form"](asked)()
    for name, t, f, e in zip(OUTPUTS, theirs, found, exact, strict=True):
        assert relative_error(f, e) < 2 * relative_error(t, e) + torch.finfo(dtype).eps / 8, name


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("heads", [(2, 2), (4, 2)], ids=["mha", "gqa"])
def test_sampled_rows_are_the_oracles(heads: tuple[int, int], mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Small limits, so that the key rows are a part of all and their queries come in several pieces.
    monkeypatch.setattr(spot_check, "REACH", 20)
    monkeypatch.setattr(spot_check, "CHUNK_ENTRIES", 500)
    asked = problem(mask, heads, seq=60)
    assert max(spot_errors(asked, reference(asked)).values()) < 1e-13


@pytest.mark.parametrize("output", OUTPUTS)
def test_sampled_rows_show_a_wrong_output(output: str) -> None:
    asked = problem("causal", seq=24)
    answer = list(reference(asked))
    answer[OUTPUTS.index(output)] = 1.01 * answer[OUTPUTS.index(output)]
    errors = spot_errors(asked, tuple(answer))
    assert errors.pop(output) == pytest.approx(0.01)
    assert max(errors.values()) < 1e-12


def test_error_is_relative_and_keeps_nan() -> None:
    exact = torch.full((4,), 1e-6)
    assert relative_error(1.5 * exact, exact) == pytest.approx(0.5)
    assert math.isnan(relative_error(torch.tensor([1.0, float("nan")]), torch.ones(2)))
    assert relative_error(torch.tensor([0.3, 0.4]), torch.zeros(2)) == pytest.approx(0.5)


def test_pairs_under_a_window_are_counted_one_by_one() -> None:
    assert problem("window").pairs == sum(min(i + 1, 9) for i in range(37))
    assert problem("causal").pairs == 37 * 37 / 2
    assert problem("full").flops == 18 * 2 * 37 * 37 * 16 * 2 * 2
