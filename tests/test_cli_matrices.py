"""Which matrix a command works on, by head, by layer, and checked first: as a user asks for it."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from command_line import Run
from safetensors.torch import load_file

from curvature import (
    FisherOperator,
    GGNOperator,
    HessianOperator,
    LinearOperator,
    head_groups,
    load_model,
    spectra_distances,
    token_windows,
)
from curvature.model_operator import ModelOperator

SMALL = ("--dtype", "float64", "--seq", 16, "--batch", 1, "--batches", 2, "--device", "cpu")
NORM = r"ln_f\."  # 32 parameters: the whole block can be computed


def make(name: str, model: Path, params: str) -> ModelOperator:
    """The operator that the command line should work on."""
    loaded = load_model(str(model), dtype=torch.float64)
    batches = token_windows(loaded.tokenizer, "sample", 16, 1, 2).batches
    if name == "hessian":
        return HessianOperator(loaded.model, batches, params=params)
    if name == "ggn":
        return GGNOperator(loaded.model, batches, params=params)
    if name == "fisher":
        return FisherOperator(loaded.model, batches, params=params, kind="monte-carlo", samples=2, seed=5)
    return FisherOperator(loaded.model, batches, params=params, kind="empirical")


@pytest.mark.parametrize("name", ["hessian", "ggn", "fisher", "empirical-fisher"])
def test_every_command_works_on_the_matrix_asked_for(name: str, run: Run, model: Path, tmp_path: Path) -> None:
    dense = make(name, model, NORM) @ torch.eye(32, dtype=torch.float64)
    common = ("--model", model, *SMALL, "--params", NORM, "--operator", name, "--samples", 2, "--seed", 5)

    outcome = run("spectrum", *common, "--steps", 32, "--probes", 1, "--out", tmp_path / "spectrum", "--json")
    assert outcome.code == 0, outcome.err
    values = [entry["value"] for entry in outcome.json["eigenvalues"]]
    exact = torch.linalg.eigvalsh(dense).flip(0)
    np.testing.assert_allclose(values, torch.cat([exact[:10], exact[-10:]]), rtol=1e-7, atol=1e-10)

    trace = run("trace", *common, "--max-products", 60, "--tol", 0.01, "--out", tmp_path / "trace", "--json").json
    total = trace["total"]
    assert total["value"] == pytest.approx(float(dense.trace()), abs=4 * total["stderr"] + 1e-12)

    diagonal = run("diagonal", *common, "--max-products", 60, "--tol", 0.01, "--out", tmp_path / "diagonal", "--json")
    found = load_file(tmp_path / "diagonal" / "diagonal.safetensors")
    values = torch.cat([found[f"transformer.ln_f.{kind}"] for kind in ("weight", "bias")])
    errors = torch.cat([found[f"transformer.ln_f.{kind}.stderr"] for kind in ("weight", "bias")])
    assert bool(((values - dense.diagonal()).abs() <= 6 * errors + 1e-12).all())

    assert [record["operator"] for record in (outcome.json, trace, diagonal.json)] == [name] * 3
    words = {
        "hessian": "Hessian",
        "ggn": "Gauss-Newton",
        "fisher": "Fisher information",
        "empirical-fisher": "mpirical",
    }
    for command in ("spectrum", "trace"):
        page = (tmp_path / command / "report.html").read_text()
        assert words.get(name, "Hessian") in page
        assert name == "hessian" or "<h1>Hessian" not in page


def test_a_state_is_not_taken_for_that_of_another_matrix(run: Run, model: Path, tmp_path: Path) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    arguments = ("spectrum", "--model", model, *SMALL, "--params", NORM, "--steps", 3, "--out", tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("curvature.plots.figure_png", stop)
        assert run(*arguments, "--operator", "ggn").code == 1
    outcome = run(*arguments, "--resume")
    assert outcome.code == 1
    assert "settings.operator was" in outcome.err
    assert run(*arguments, "--operator", "ggn", "--resume").code == 0


# Heads


def test_heads_are_rows_behind_the_parameters(run: Run, model: Path, tmp_path: Path) -> None:
    arguments = ("--model", model, *SMALL, "--params", r"h\.1\.attn\.c_attn\.bias", "--tol", 0.02, "--max-products", 60)
    outcome = run("trace", *arguments, "--per-head", "--out", tmp_path)
    assert outcome.code == 0, outcome.err
    record = json.loads((tmp_path / "trace.json").read_text())
    operator = make("hessian", model, r"h\.1\.attn\.c_attn\.bias")
    groups = head_groups(operator.model, operator.space.names)
    assert [head["name"] for head in record["heads"]] == ["layer 1 head 0", "layer 1 head 1"]
    for head, group in zip(record["heads"], groups, strict=True):
        chosen = torch.zeros(operator.space.size, dtype=torch.float64)
        for view in group.views(operator.space, chosen):
            view.fill_(1)
        unit = torch.eye(operator.space.size, dtype=torch.float64)[:, chosen.bool()]
        exact = float(torch.trace(unit.T @ (operator @ unit)))
        assert head["trace"] == pytest.approx(exact, abs=4.5 * head["stderr"])
        assert (head["layer"], head["numel"]) == (1, int(chosen.sum()))
        assert head["mean_eigenvalue"] == head["trace"] / head["numel"]
    assert [head["head"] for head in record["heads"]] == ["0", "1"]
    rows = list(csv.DictReader((tmp_path / "trace.csv").read_text().splitlines()))
    assert [row["kind"] for row in rows[-2:]] == ["attention head"] * 2
    assert [float(row["trace"]) for row in rows[-2:]] == [head["trace"] for head in record["heads"]]
    assert sum(float(row["trace"]) for row in rows[:-2]) == pytest.approx(record["total"]["value"])
    page = (tmp_path / "report.html").read_text()
    assert page.count("<img") == 3
    assert "layer 1 head 1" in page


def test_heads_of_parameters_that_belong_to_none_are_refused(run: Run, model: Path, tmp_path: Path) -> None:
    outcome = run("trace", "--model", model, *SMALL, "--params", NORM, "--per-head", "--out", tmp_path)
    assert outcome.code == 1
    assert "--per-head: none of the parameters" in outcome.err


def test_sums_by_layer_and_kind_tell_queries_keys_and_values_apart(run: Run, model: Path, tmp_path: Path) -> None:
    record = run("trace", "--model", model, *SMALL, "--max-products", 3, "--out", tmp_path, "--json").json
    assert record["heads"] is None
    assert [row["name"] for row in record["layers"]] == ["embedding", "position", "layer 0", "layer 1", "norm"]
    for rows in (record["layers"], record["kinds"], record["layers_and_kinds"]):
        assert sum(row["trace"] for row in rows) == pytest.approx(record["total"]["value"])
        assert sum(row["numel"] for row in rows) == record["model"]["parameters"]
        assert all(row["mean_stderr"] == row["stderr"] / row["numel"] > 0 for row in rows)
    in_layer = [row["kind"] for row in record["layers_and_kinds"] if row["layer"] == 1]
    assert in_layer == ["norm", "q", "k", "v", "o", "mlp in", "mlp out"]


# Layers


def test_per_layer_spectra_are_those_of_the_diagonal_blocks(run: Run, model: Path, tmp_path: Path) -> None:
    arguments = ("--params", r"ln_f\.|h\.0\.ln_1\.", "--steps", 32, "--probes", 2, "--top", 3)
    outcome = run("spectrum", "--model", model, *SMALL, *arguments, "--per-layer", "--out", tmp_path)
    assert outcome.code == 0, outcome.err
    assert {"spectrum_layers.png", "spectrum.png"} < {path.name for path in tmp_path.iterdir()}
    record = json.loads((tmp_path / "spectrum.json").read_text())
    assert [layer["name"] for layer in record["layers"]] == ["layer 0", "norm"]
    for layer, params in zip(record["layers"], (r"h\.0\.ln_1\.", NORM), strict=True):
        exact = torch.linalg.eigvalsh(make("hessian", model, params) @ torch.eye(32, dtype=torch.float64)).flip(0)
        values = [entry["value"] for entry in layer["eigenvalues"]]
        np.testing.assert_allclose(values, torch.cat([exact[:3], exact[-3:]]), rtol=1e-7, atol=1e-11)
        assert (layer["numel"], layer["products"], layer["converged"]) == (32, 64, True)
        mass = np.trapezoid(layer["density"]["values"], layer["density"]["grid"])
        assert mass == pytest.approx(1, abs=1e-3)
        assert len(layer["density"]["stderr"]) == len(layer["density"]["grid"])
    assert record["products"] == 2 * 32 + 2 * 64
    assert record["heterogeneity"] is None  # of a single block
    assert "Diagonal block of each layer" in (tmp_path / "report.html").read_text()
    assert run("spectrum", "--model", model, *SMALL, "--params", NORM, "--steps", 2, "--json").json["layers"] is None


def test_how_much_transformer_blocks_differ_is_told_with_its_error(run: Run, model: Path, tmp_path: Path) -> None:
    arguments = ("--params", r"h\.\d\.ln_1\.", "--steps", 6, "--probes", 3, "--per-layer")
    outcome = run("spectrum", "--model", model, *SMALL, *arguments, "--out", tmp_path)
    assert outcome.code == 0, outcome.err
    found = json.loads((tmp_path / "spectrum.json").read_text())
    told = found["heterogeneity"]
    assert told["names"] == ["layer 0", "layer 1"]
    probes = [[np.array(q["nodes"]) for q in layer["quadratures"]] for layer in found["layers"]]
    assert [len(nodes) for nodes in probes] == [3, 3]
    density = [
        SimpleNamespace(probes=3, steps=4, nodes=nodes, weights=[np.array(q["weights"]) for q in layer["quadratures"]])
        for nodes, layer in zip(probes, found["layers"], strict=True)
    ]
    again = spectra_distances({"a": density[0], "b": density[1]}, scaling="spread", sigma=0.1)  # type: ignore[dict-item]
    assert told["mean"] == pytest.approx(again.mean, abs=1e-12)
    assert told["mean_stderr"] == pytest.approx(again.mean_stderr, abs=1e-12)
    assert "blocks differ by" in outcome.out
    assert "Jensen-Shannon" in (tmp_path / "report.html").read_text()
    single = run("spectrum", "--model", model, *SMALL, *arguments[:4], "--probes", 1, "--per-layer", "--json").json
    assert single["heterogeneity"] is None
    pair = run("spectrum", "--model", model, *SMALL, *arguments[:4], "--probes", 2, "--per-layer", "--out", tmp_path)
    assert "(two blocks, two probes: no standard error)" in pair.out
    assert json.loads((tmp_path / "spectrum.json").read_text())["heterogeneity"]["stderr"] is None
    assert (tmp_path / "spectrum_layers.png").exists()
    run("spectrum", "--model", model, *SMALL, *arguments[:4], "--probes", 1, "--out", tmp_path)
    assert not (tmp_path / "spectrum_layers.png").exists()


# Checks


CHECKED = {"spectrum": ("--steps", 2), "trace": ("--max-products", 2), "diagonal": ("--max-products", 4), "hvp": ()}


@pytest.mark.parametrize("command", CHECKED)
def test_checks_are_made_where_they_are_wanted(command: str, run: Run, model: Path) -> None:
    arguments = (command, "--model", model, *SMALL, "--params", NORM, *CHECKED[command], "--json")
    record = run(*arguments, "--check").json
    assert record["symmetry_error"] < 1e-10
    assert record["repeatability_error"] == 0
    assert 0 < record["finite_difference_error"] < 1e-6
    plain = run(*arguments).json
    assert (plain["repeatability_error"], plain["finite_difference_error"]) == (None, None)


@pytest.mark.parametrize("command", CHECKED)
def test_a_failed_check_stops_the_run(
    command: str, run: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LinearOperator, "symmetry_error", lambda *_: 0.5)
    outcome = run(command, "--model", model, *SMALL, "--params", NORM, "--check", "--out", tmp_path / "out")
    assert outcome.code == 1
    assert "not symmetric: error 5.0e-01" in outcome.err
    assert "second derivative" in outcome.err
    assert not list((tmp_path / "out").glob("*.json"))


def test_what_is_not_checked_is_said(run: Run, model: Path, tmp_path: Path) -> None:
    arguments = ("trace", "--model", model, *SMALL[2:], "--params", NORM, "--max-products", 3, "--check", "--json")
    ggn = run(*arguments, "--dtype", "float32", "--operator", "ggn")
    assert ggn.json["finite_difference_error"] is None
    assert "without differences of gradients" in ggn.err
    assert any("of ggn" in notice for notice in ggn.json["notices"])
    assert any("in bfloat16" in notice for notice in run(*arguments, "--dtype", "bfloat16").json["notices"])
