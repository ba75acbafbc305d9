"""The study of precisions: what it measures, on the smallest model, and what its committed record says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from command_line import make_model

from tests.dtype_study import PRECISIONS, Work, choice, operator, study


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
            assert row["trace_error"]["of_stderr"] == pytest.approx(
                row["trace_error"]["value"] / rows["float64"]["trace"]["stderr"]
            )
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


def test_the_choice_is_the_fastest_that_is_sound() -> None:
    rows = [
        {"precision": name, "status": "ok", "seconds_per_product": seconds, "trace_error": {"of_stderr": error}}
        for name, seconds, error in (("exact", 3.0, 0.0), ("good", 2.0, -0.4), ("wrong", 1.0, 1.7))
    ]
    assert choice([*rows, {"precision": "none", "status": "unsupported"}]) == "good"


def test_the_committed_record_is_one_of_this_study(root: Path) -> None:
    record = json.loads((root / "notebooks" / "records" / "dtype_tiny_cpu.json").read_text())
    assert record["parameters"] == 2_369_664
    assert [row["precision"] for row in record["rows"]] == [precision.name for precision in PRECISIONS]
    assert record["choice"] == choice(record["rows"])


def test_the_readme_says_what_the_record_says(root: Path) -> None:
    record = json.loads((root / "notebooks" / "records" / "dtype_tiny_cpu.json").read_text())
    readme = (root / "README.md").read_text()
    for row in record["rows"]:
        if row["status"] == "ok" and row["precision"] != "float64":
            errors = [row["product_error"]["mean"], row["trace_error"]["of_stderr"]]
            errors += [end["error"] for end in row["eigenvalues"]]
            assert f"| {row['precision']} | {' | '.join(f'{abs(error):.0e}' for error in errors)} |" in readme
    assert f"the choice is {record['choice']}, which is the default on a CPU" in readme
