"""The commands and what they write, on a model small enough to know the answer."""

import csv
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from command_line import Outcome, Run

from curvature import HessianOperator, load_model, model_operator, token_windows
from curvature.layer_parts import SegmentationError

COMMON = {"command", "version", "model", "data", "settings", "environment", "seconds", "peak_memory_bytes"}
SMALL = ("--dtype", "float64", "--seq", 16, "--batch", 1, "--batches", 2, "--device", "cpu")
NORM = r"ln_f\."  # 32 parameters: the whole block can be computed


@pytest.fixture(scope="module")
def dense(model: Path) -> torch.Tensor:
    """The Hessian block of the final norm, entry by entry, over the same windows as SMALL."""
    loaded = load_model(str(model), dtype=torch.float64)
    windows = token_windows(loaded.tokenizer, "sample", 16, 1, 2)
    operator = HessianOperator(loaded.model, windows.batches, params=NORM, method="whole")
    return operator @ torch.eye(operator.shape[0], dtype=torch.float64)


def written(folder: Path, outcome: Outcome, *names: str) -> None:
    """The command succeeded, wrote these files and no other, and says so."""
    assert outcome.code == 0, outcome.err
    assert {path.name for path in folder.iterdir()} == set(names)
    assert all(str(folder / name) in outcome.out for name in names)


def test_spectrum_finds_the_eigenvalues(run: Run, model: Path, dense: torch.Tensor, tmp_path: Path) -> None:
    out = tmp_path / "out"
    outcome = run("spectrum", "--model", model, *SMALL, "--params", NORM, "--steps", 32, "--top", 4, "--out", out)
    written(out, outcome, "spectrum.json", "spectrum.png", "report.html")
    record = json.loads((out / "spectrum.json").read_text())
    assert set(record) > COMMON
    values = [entry["value"] for entry in record["eigenvalues"]]
    exact = torch.linalg.eigvalsh(dense).flip(0)
    np.testing.assert_allclose(values, torch.cat([exact[:4], exact[-4:]]), rtol=1e-8, atol=1e-12)
    assert all(entry["residual"] < 1e-8 for entry in record["eigenvalues"])
    assert (record["operator"], record["steps"], record["probes"], record["products"]) == ("hessian", 32, 2, 64)
    assert record["symmetry_error"] < 1e-10
    grid, density = np.array(record["density"]["grid"]), np.array(record["density"]["values"])
    assert np.trapezoid(density, grid) == pytest.approx(1, abs=1e-3)
    assert f"{values[0]:.6g}" in outcome.out


@pytest.mark.parametrize(
    ("top", "labels"), [(1, ["1", "-1"]), (2, ["1", "2", "-2", "-1"]), (4, ["1", "2", "3", "-3", "-2", "-1"])]
)
def test_eigenvalues_are_numbered_from_either_end(
    top: int, labels: list[str], run: Run, model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    outcome = run("spectrum", "--model", model, *SMALL, "--params", NORM, "--steps", 16, "--top", top, "--out", out)
    assert outcome.code == 0, outcome.err
    shown = re.findall(r"eigenvalue (-?\d+) +(\S+),", outcome.out)
    assert [label for label, _ in shown] == labels
    values = [entry["value"] for entry in json.loads((out / "spectrum.json").read_text())["eigenvalues"]]
    for label, value in shown:
        place = int(label) - 1 if int(label) > 0 else int(label)
        assert float(value) == pytest.approx(values[place], rel=1e-5)


def test_spectrum_trace_is_within_its_error(run: Run, model: Path, dense: torch.Tensor, tmp_path: Path) -> None:
    arguments = ("--model", model, *SMALL, "--params", NORM, "--steps", 4, "--probes", 20, "--out", tmp_path)
    trace = run("spectrum", *arguments, "--json").json["trace"]
    assert trace["value"] == pytest.approx(dense.trace().item(), abs=5 * trace["stderr"])


def test_a_single_probe_has_no_standard_error(run: Run, model: Path) -> None:
    arguments = ("--model", model, *SMALL, "--params", NORM, "--steps", 4, "--probes", 1)
    assert run("spectrum", *arguments, "--json").json["trace"]["stderr"] is None
    assert "no standard error" in run("spectrum", *arguments).out


def test_trace_by_block(run: Run, model: Path, dense: torch.Tensor, tmp_path: Path) -> None:
    out = tmp_path / "out"
    outcome = run(
        "trace", "--model", model, *SMALL, "--params", NORM, "--tol", 0.05, "--max-products", 400, "--out", out
    )
    written(out, outcome, "trace.json", "trace.csv", "trace.png", "report.html")
    record = json.loads((out / "trace.json").read_text())
    assert set(record) > COMMON
    total, blocks = record["total"], record["blocks"]
    assert record["converged"]
    assert total["stderr"] <= 0.05 * abs(total["value"])
    assert total["value"] == pytest.approx(dense.trace().item(), abs=5 * total["stderr"])
    assert sum(block["trace"] for block in blocks) == pytest.approx(total["value"])
    assert [block["name"].split(".")[-2:] for block in blocks] == [["ln_f", "weight"], ["ln_f", "bias"]]
    for block, exact in zip(blocks, (dense[:16, :16], dense[16:, 16:]), strict=True):
        assert block["trace"] == pytest.approx(exact.trace().item(), abs=5 * block["stderr"])
        assert block["mean_eigenvalue"] == pytest.approx(block["trace"] / 16)
        assert (block["kind"], block["layer"], block["shape"], block["numel"]) == ("norm", None, [16], 16)
    rows = list(csv.DictReader((out / "trace.csv").read_text().splitlines()))
    assert [float(row["trace"]) for row in rows] == [block["trace"] for block in blocks]


def test_trace_says_when_it_did_not_reach_the_tolerance(run: Run, model: Path, tmp_path: Path) -> None:
    outcome = run("trace", "--model", model, *SMALL, "--tol", 1e-6, "--max-products", 3, "--out", tmp_path)
    assert outcome.code == 0
    record = json.loads((tmp_path / "trace.json").read_text())
    assert (record["converged"], record["products"]) == (False, 3)
    assert "raise --max-products" in outcome.err
    assert "raise --max-products" in (tmp_path / "report.html").read_text()
    assert {block["layer"] for block in record["blocks"]} == {None, 0, 1}


def test_hvp_times_products(run: Run, model: Path, tmp_path: Path) -> None:
    outcome = run("hvp", "--model", model, *SMALL, "--method", "whole", "--repeat", 3, "--out", tmp_path / "out")
    written(tmp_path / "out", outcome, "hvp.json")
    record = json.loads((tmp_path / "out" / "hvp.json").read_text())
    assert set(record) > COMMON
    assert record["method"] == "whole"
    assert record["symmetry_error"] < 1e-10
    assert len(record["seconds_each"]) == 3
    assert sum(record["seconds_each"]) <= record["seconds"]
    assert record["seconds_per_product"] == sorted(record["seconds_each"])[1]
    assert record["peak_memory_bytes"] > 10**7


@pytest.mark.parametrize("command", ["spectrum", "trace", "hvp"])
def test_json_alone_on_stdout_and_equal_to_the_file(command: str, run: Run, model: Path, tmp_path: Path) -> None:
    quick = {"spectrum": ("--steps", 2), "trace": ("--max-products", 2), "hvp": ("--repeat", 1)}[command]
    outcome = run(command, "--model", model, *SMALL, *quick, "--out", tmp_path, "--json")
    assert outcome.code == 0
    assert outcome.json == json.loads((tmp_path / f"{command}.json").read_text())
    assert outcome.json["command"] == command
    assert outcome.json["data"]["tokens"] == 16 * 2
    assert re.fullmatch("[0-9a-f]{64}", outcome.json["data"]["sha256"])
    assert "it/s" in outcome.err or "product" in outcome.err


def test_results_go_to_a_folder_named_after_the_command_by_default(run: Run, model: Path, tmp_path: Path) -> None:
    assert run("hvp", "--model", model, *SMALL, "--repeat", 1).code == 0
    assert (tmp_path / "runs" / "hvp" / "hvp.json").is_file()


@pytest.mark.parametrize(("command", "picture"), [("spectrum", "spectrum.png"), ("trace", "trace.png")])
def test_report_is_one_self_contained_page(command: str, picture: str, run: Run, model: Path, tmp_path: Path) -> None:
    quick = {"spectrum": ("--steps", 3), "trace": ("--max-products", 3)}[command]
    assert run(command, "--model", model, *SMALL, *quick, "--out", tmp_path).code == 0
    assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG\r\n")
    page = (tmp_path / "report.html").read_text()
    assert not re.search(r'(src|href)="(?!data:)', page)
    assert re.search(r'<img src="data:image/png;base64,[^"]+" alt="[^"]{20,}"', page)
    for setting in ("seq", "dtype", "float64", "origins.seq", "flag"):
        assert setting in page


def test_default_window_is_the_models_own_context_where_that_is_shorter(run: Run, model: Path) -> None:
    outcome = run("hvp", "--model", model, "--device", "cpu", "--repeat", 1, "--json")
    record = outcome.json
    assert (record["settings"]["seq"], record["settings"]["dtype"]) == (64, "float32")
    assert record["settings"]["origins"]["seq"] == "default"
    assert record["model"]["position_extension"] is None


@pytest.mark.parametrize("how", ["interpolate", "tile"])
def test_positions_beyond_the_table_are_announced_and_recorded(how: str, run: Run, model: Path, tmp_path: Path) -> None:
    arguments = ("--model", model, "--seq", 96, "--extend-positions", how, "--steps", 2, "--device", "cpu")
    outcome = run("spectrum", *arguments, "--out", tmp_path, "--json")
    extension = outcome.json["model"]["position_extension"]
    assert (extension["method"], extension["trained"], extension["extended"]) == (how, 64, 96)
    (line,) = [line for line in outcome.err.splitlines() if "96 positions" in line]
    assert line.removeprefix("flashbob-curv: ") in (tmp_path / "report.html").read_text()
    assert outcome.json["notices"] == [line.removeprefix("flashbob-curv: ")]


def test_random_init_is_recorded_and_follows_the_seed(run: Run, model: Path) -> None:
    def loss(seed: int) -> float:
        arguments = ("--model", model, "--random-init", *SMALL, "--seed", seed, "--steps", 1, "--params", NORM)
        record = run("spectrum", *arguments, "--json").json
        assert record["model"]["random_init"] is True
        return record["loss"]

    assert loss(1) == loss(1) != loss(2)


def test_a_text_file_is_read(run: Run, model: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("A short text that the shipped sample does not hold. " * 20)
    record = run("hvp", "--model", model, "--data", text, "--seq", 16, "--repeat", 1, "--device", "cpu", "--json").json
    assert record["data"]["source"] == str(text)
    assert record["data"]["tokens"] == 16


def test_a_model_that_does_not_decompose_says_so(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise SegmentationError("its layers are not a chain")

    monkeypatch.setattr(model_operator, "find_segments", refuse)
    outcome = run("hvp", "--model", "tiny", "--seq", 16, "--repeat", 1, "--device", "cpu", "--json")
    assert outcome.json["settings"]["method"] == "whole"
    assert "through the graph of the whole model, since its layers are not a chain" in outcome.err


def test_doctor_tells_what_runs_where(run: Run) -> None:
    outcome = run("doctor", "--json")
    assert outcome.code == 0
    report = outcome.json
    assert set(report) > COMMON
    assert (report["model"], report["settings"]["seq"]) == (None, 1024)
    assert report["devices"][0]["name"] == "cpu"
    assert report["environment"]["torch"] == torch.__version__
    cases = {(entry["case"], entry["device"], entry["dtype"]): entry["second"] for entry in report["attention"]}
    assert cases["sliding window", "cpu", "float64"] == "blocked"
    table = run("doctor").out
    assert all(f"{entry['case']}" in table for entry in report["attention"])


def test_doctor_refuses_a_device_that_is_not_there(run: Run) -> None:
    outcome = run("doctor", "--device", "cuda:99")
    assert outcome.code == 1
    assert "--device cuda:99" in outcome.err


@pytest.mark.gpu
def test_defaults_on_a_gpu_are_bfloat16_and_the_first_gpu(run: Run) -> None:
    record = run("spectrum", "--steps", 3, "--probes", 1, "--json").json
    assert (record["settings"]["device"], record["settings"]["dtype"]) == ("cuda:0", "bfloat16")
    assert record["environment"]["device"].startswith("cuda")
    assert record["model"]["name"] == "tiny"


def test_the_defaults_are_the_embedded_model_and_text(run: Run) -> None:
    record = run("spectrum", "--seq", 64, "--steps", 2, "--probes", 1, "--device", "cpu", "--json").json
    assert (record["model"]["name"], record["data"]["source"]) == ("tiny", "sample")
    assert record["loss"] < np.log(2048) - 1  # a trained model, not chance
