"""The study of precisions: what it measures, on the smallest model, and what its committed record says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from command_line import make_model

from curvature import HessianOperator, load_model, token_windows
from tests.dtype_study import PRECISIONS, Work, choice, directions_of, operator, study, symmetry_of

RECORDS = sorted((Path(__file__).resolve().parents[1] / "notebooks" / "records").glob("dtype_*.json"))


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    model = make_model(tmp_path_factory.mktemp("model"))
    return study(Work(model=str(model), seq=16, probes=3, steps=4, directions=2))


def test_errors_grow_as_precision_falls(record: dict[str, object]) -> None:
    rows = {row["precision"]: row for row in record["rows"]}  # type: ignore[attr-defined]
    assert set(rows) == {precision.name for precision in PRECISIONS}
    assert rows["float64"]["product_error"]["max"] == 0
    error = {name: row["product_error"]["mean"] for name, row in rows.items() if row["status"] == "ok"}
    assert 1e-8 < error["float32"] < 1e-4
    assert error["float32"] < error["float32, bfloat16 attention"] < error["bfloat16"] < 0.1
    assert rows["tf32"]["status"] == "unsupported", "a CPU has none"
    for row in rows.values():
        if row["status"] == "ok":
            error, spread = row["trace_error"], rows["float64"]["trace"]["stderr"]
            assert error["of_stderr"] == pytest.approx(error["value"] / spread)
            at_most = (abs(error["value"]) + 2 * error["stderr"]) / spread
            assert error["at_most_of_stderr"] == pytest.approx(at_most)
            assert error["stderr"] < spread, "the same probes in both"
            assert len(row["eigenvalues"]) == 2


def test_only_attention_runs_in_half(tmp_path: Path) -> None:
    seen = set()
    precision = next(p for p in PRECISIONS if p.half_attention and not p.tf32)
    op = operator(precision, Work(model=str(make_model(tmp_path)), seq=16))
    import flashbob.huggingface

    attend = flashbob.huggingface.sdpa_bob

    def noted(q: torch.Tensor, *rest: object, **options: object) -> torch.Tensor:
        seen.add(q.dtype)
        return attend(q, *rest, **options)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flashbob.huggingface, "sdpa_bob", noted)
        op @ torch.ones(op.shape[0])
    assert seen == {torch.bfloat16}
    assert {p.dtype for p in op.parameters} == {torch.float32}


def test_the_symmetry_is_the_operators(tmp_path: Path) -> None:
    work = Work(model=str(make_model(tmp_path)), seq=16, directions=2)
    loaded = load_model(work.model, dtype=torch.float32)
    op = HessianOperator(loaded.model, token_windows(loaded.tokenizer, "sample", 16, 1, 1).batches)
    directions = directions_of(op, work)
    products = [op @ v for v in directions]
    assert symmetry_of(directions, products) == pytest.approx(op.symmetry_error(seed=1), rel=1e-3, abs=1e-9)


def test_the_choice_is_the_fastest_that_is_sound() -> None:
    rows = [
        {"precision": name, "status": "ok", "seconds_per_product": seconds, "trace_error": {"at_most_of_stderr": error}}
        for name, seconds, error in (("exact", 3.0, 0.0), ("good", 2.0, 0.4), ("wrong", 1.0, 1.7))
    ]
    assert choice([*rows, {"precision": "none", "status": "unsupported"}]) == "good"


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_the_committed_records_are_of_this_study(path: Path) -> None:
    record = json.loads(path.read_text())
    known = [precision.name for precision in PRECISIONS]
    assert {row["precision"] for row in record["rows"]} >= set(known) - {"float64"}
    assert record["choice"] == choice(record["rows"])
    first = record["rows"][0]
    assert first["precision"] == record["settings"]["reference"]
    assert first["trace_error"]["at_most_of_stderr"] == 0
