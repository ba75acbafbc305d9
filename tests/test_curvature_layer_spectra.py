"""Spectra of diagonal blocks, and Jensen-Shannon distances between them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
from curvature_oracles import MatrixOperator, dense_hessian, tiny_gpt2, token_batch, with_spectrum
from readme_figures import record
from scipy.spatial.distance import jensenshannon

from curvature import (
    HessianOperator,
    RunState,
    SpectraDistances,
    SpectralDensity,
    layer_groups,
    layer_spectra,
    spectra_distances,
    spectral_density,
)
from curvature.groups import Group, Part
from curvature.layer_spectra import Scaling
from curvature.plots import spectra_figure


def test_each_layer_has_the_eigenvalues_of_its_block() -> None:
    model, batches = tiny_gpt2(), [token_batch(7, (2, 6))]
    op = HessianOperator(model, batches)
    dense, places = dense_hessian(model, batches), op.space.slices()
    found = layer_spectra(op, probes=1, steps=10_000)
    assert list(found) == ["embedding", "position", "layer 0", "layer 1", "norm"]
    for group in layer_groups(op.space):
        rows = torch.cat([torch.arange(op.space.size)[places[part.parameter]] for part in group.parts])
        exact = torch.linalg.eigvalsh(dense[rows][:, rows])
        values, residuals = found[group.name].extremes(1)
        np.testing.assert_allclose(values, [exact[-1], exact[0]], rtol=1e-8, atol=1e-10)
        assert (residuals < 1e-8).all()


def test_parts_of_parameters_have_spectra_too() -> None:
    matrix, _ = with_spectrum(np.linspace(-3, 9, 12))
    halves = [Group(f"half {i}", (Part("block0", 0, 6 * i, 6 * i + 6),)) for i in range(2)]
    found = layer_spectra(MatrixOperator(matrix), halves, probes=1, steps=6)
    for i, density in enumerate(found.values()):
        exact = torch.linalg.eigvalsh(matrix[6 * i : 6 * i + 6, 6 * i : 6 * i + 6])
        np.testing.assert_allclose(density.extremes(3)[0], exact.flip(0), rtol=1e-9)


def test_progress_counts_the_products_of_all_blocks() -> None:
    told: list[tuple[int, int, str]] = []
    op = MatrixOperator(torch.diag(torch.arange(1.0, 13.0, dtype=torch.float64)), [6, 6])
    groups = [Group("one", (Part("block0"),)), Group("two", (Part("block1"),))]
    layer_spectra(op, groups, probes=2, steps=3, progress=lambda *report: told.append(report))
    assert [done for done, _, _ in told] == list(range(1, 13))
    assert {total for _, total, _ in told} == {12}


def test_an_interrupted_run_goes_on_in_the_block_where_it_was(tmp_path: Path) -> None:
    class Fragile(MatrixOperator):
        left = 7

        def _apply(self, rows: torch.Tensor) -> torch.Tensor:
            if self.left == 0:
                raise KeyboardInterrupt
            self.left -= 1
            return super()._apply(rows)

    matrix, _ = with_spectrum(np.linspace(-3, 9, 12))
    groups = [Group("one", (Part("block0"),)), Group("two", (Part("block1"),))]
    expected = layer_spectra(MatrixOperator(matrix, [6, 6]), groups, probes=2, steps=3)
    state = RunState.open(tmp_path / "state", {})
    with pytest.raises(KeyboardInterrupt):
        layer_spectra(Fragile(matrix, [6, 6]), groups, probes=2, steps=3, state=state)
    state.close()
    rest = MatrixOperator(matrix, [6, 6])
    again = RunState.open(tmp_path / "state", {}, resume=True)
    found = layer_spectra(rest, groups, probes=2, steps=3, state=again)
    assert rest.applied == 12 - 7
    for name in expected:
        np.testing.assert_array_equal(found[name].values, expected[name].values)


# Distances


def spectra(**values: list[float]) -> dict[str, object]:
    return {
        name: spectral_density(MatrixOperator(with_spectrum(v, seed=len(name))[0]), probes=3, steps=8)
        for name, v in values.items()
    }


FLAT, SPIKED = [1.0, 2, 3, 4, 5, 6, 7, 8], [8.0, 0.1, 0.1, 0, 0, -0.1, -0.1, 0]


def test_distances_are_those_between_probes_less_those_within_a_spectrum() -> None:
    found = spectra(flat=FLAT, spiked=SPIKED, third=[5.0, 5, 5, 1, 1, -3, -3, 2])
    distances = spectra_distances(found, scaling="none", sigma=0.05)  # type: ignore[arg-type]
    scale = max(abs(n).max() for d in found.values() for n in d.nodes)  # type: ignore[attr-defined]
    grid = np.linspace(-1.5, 2, 6001)
    curves = [
        [np.exp(-0.5 * ((grid[:, None] - n / scale) / 0.05) ** 2) @ w for n, w in zip(d.nodes, d.weights)]  # type: ignore[attr-defined]  # noqa: B905
        for d in found.values()
    ]

    def apart(i: int, j: int) -> float:
        return float(
            np.mean([jensenshannon(curves[i][a], curves[j][b], base=2) ** 2 for a, b in permutations(range(3), 2)])
        )

    expected = [[apart(i, j) - apart(i, i) / 2 - apart(j, j) / 2 for j in range(3)] for i in range(3)]
    np.testing.assert_allclose(distances.values, expected, rtol=1e-4, atol=1e-7)
    assert distances.floor == pytest.approx(np.mean([apart(i, i) for i in range(3)]), rel=1e-4)
    assert distances.mean == pytest.approx(np.mean([expected[0][1], expected[0][2], expected[1][2]]), rel=1e-4)


STEEP, SHALLOW = ([float((-1) ** i / (i + 1) ** power) for i in range(40)] for power in (1.2, 0.3))


def weighed(values: Sequence[float], probes: int, generator: np.random.Generator) -> SpectralDensity:
    """All steps of Lanczos from random starts: the nodes are the eigenvalues, the weights the squares of the starts."""
    starts = generator.standard_normal((probes, len(values))) ** 2
    found = SimpleNamespace(
        probes=probes,
        steps=len(values),
        nodes=[np.array(values)] * probes,
        weights=list(starts / starts.sum(1, keepdims=True)),
    )
    return cast(SpectralDensity, found)


def in_runs(spectra: Sequence[Sequence[float]], runs: int, probes: int) -> list[SpectraDistances]:
    """What repeated runs find for these spectra."""
    generator = np.random.default_rng(probes)
    return [
        spectra_distances(
            {str(i): weighed(values, probes, generator) for i, values in enumerate(spectra)},
            scaling="spread",
            sigma=0.1,
        )
        for _ in range(runs)
    ]


@pytest.mark.parametrize("probes", [2, 4])
def test_equal_spectra_differ_by_nothing_on_average(probes: int) -> None:
    """Distances between averages over these probes are not zero: the noise that is left in them is a distance."""
    found = []
    for run in range(30):
        same = [
            spectral_density(
                MatrixOperator(with_spectrum(STEEP, seed=100 * run + i)[0]), probes=probes, steps=5, seed=100 * run + i
            )
            for i in range(4)
        ]
        found.append(spectra_distances(dict(zip("abcd", same, strict=True)), scaling="spread", sigma=0.1))
    means = np.array([distances.mean for distances in found])
    error = means.std(ddof=1) / math.sqrt(len(means))
    assert abs(means.mean()) < 3 * error
    assert error < np.mean([distances.floor for distances in found]) / 20, "or this would say little"


def test_different_spectra_differ_by_the_same_whatever_the_number_of_probes() -> None:
    few, more = (
        np.mean([each.values for each in in_runs([STEEP, STEEP, SHALLOW], runs, probes)], axis=0)
        for runs, probes in ((120, 2), (40, 6))
    )
    np.testing.assert_allclose(few, more, atol=0.02)
    assert abs(few[0, 1]) < 0.02
    assert few[0, 2] > 0.1


def test_without_noise_distances_are_those_of_the_densities() -> None:
    """All sign vectors weigh the eigenvalues of a diagonal matrix alike, so that probes agree."""
    values = [torch.linspace(-1, 3, 16, dtype=torch.float64), torch.linspace(0.2, 1, 16, dtype=torch.float64) ** 3]
    found = {
        str(i): spectral_density(MatrixOperator(torch.diag(v)), probes=2, steps=16, seed=i)
        for i, v in enumerate(values)
    }
    distances = spectra_distances(found, scaling="largest", sigma=0.1)
    grid = np.linspace(-2, 2, 4001)
    p, q = (np.exp(-0.5 * ((grid[:, None] - (v / v.abs().max()).numpy()) / 0.1) ** 2).sum(1) for v in values)
    assert distances.mean == pytest.approx(jensenshannon(p, q, base=2) ** 2, rel=1e-3)
    assert distances.floor == pytest.approx(0, abs=1e-9)


def test_the_p_value_of_equal_spectra_is_uniform_and_that_of_different_ones_small() -> None:
    equal = [found.p_value for found in in_runs([STEEP] * 5, 200, 3)]
    for level in (0.05, 0.2, 0.5):
        expected = math.sqrt(level * (1 - level) / len(equal))
        assert abs(np.mean(np.array(equal) <= level) - level) < 3.5 * expected
    different = [found.p_value for found in in_runs([STEEP, STEEP, SHALLOW, SHALLOW, STEEP], 20, 3)]
    assert np.median(different) < 0.01


def test_the_p_value_holds_where_probes_of_one_number_are_one_vector() -> None:
    generator, found = np.random.default_rng(5), []
    for _ in range(200):
        common = weighed(STEEP, 3, generator)
        each = [weighed(STEEP, 3, generator) for _ in range(4)]
        for one in each:  # nine tenths of every probe's weights are those of the others
            one.weights[:] = [0.9 * c + 0.1 * w for c, w in zip(common.weights, one.weights, strict=True)]
        found.append(spectra_distances(dict(zip("abcd", each, strict=True)), scaling="spread", sigma=0.1).p_value)
    assert abs(np.mean(np.array(found) <= 0.1) - 0.1) < 3.5 * math.sqrt(0.09 / len(found))


@pytest.mark.parametrize("probes", [2, 3, 5])
def test_the_error_told_is_that_of_repeated_runs(probes: int) -> None:
    found = in_runs([STEEP, STEEP, SHALLOW, SHALLOW, STEEP], 60, probes)
    spread = np.std([distances.mean for distances in found], ddof=1)
    told = math.sqrt(np.mean([distances.mean_stderr**2 for distances in found]))  # type: ignore[operator]
    if probes == 2:  # from the differences between pairs of spectra
        assert spread / 2 < told < 10 * spread
    else:
        assert spread / 2 < told < 2 * spread
        pairs = np.std([distances.values for distances in found], axis=0, ddof=1)
        of_pairs = np.sqrt(np.mean([distances.stderr**2 for distances in found], axis=0))  # type: ignore[operator]
        assert (of_pairs[0, 1:] > pairs[0, 1:] / 2).all()
        assert (of_pairs[0, 1:] < 3 * pairs[0, 1:]).all()


def test_two_probes_of_two_spectra_have_no_error() -> None:
    (distances,) = in_runs([STEEP, SHALLOW], 1, 2)
    assert distances.stderr is None
    assert distances.mean_stderr is None


def test_equal_spectra_are_closer_than_different_ones_by_more_than_the_error() -> None:
    found = spectra(flat=FLAT, again=FLAT, spiked=SPIKED)
    distances = spectra_distances(found)  # type: ignore[arg-type]
    assert distances.stderr is not None
    near, far = distances.values[0, 1], distances.values[0, 2]
    assert near + 2 * distances.stderr[0, 1] < far - 2 * distances.stderr[0, 2]
    assert 0 < distances.floor < far < 1


def test_the_record_of_a_model_states_what_its_quadratures_give() -> None:
    run = record("spectrum_layers_smollm2_h200")
    blocks: dict[str, object] = {
        layer["name"]: SimpleNamespace(
            probes=run["settings"]["probes"],
            steps=run["settings"]["steps"],
            nodes=[np.array(q["nodes"]) for q in layer["quadratures"]],
            weights=[np.array(q["weights"]) for q in layer["quadratures"]],
        )
        for layer in run["layers"]
        if layer["name"].startswith("layer ")
    }
    stated = run["heterogeneity"]
    again = spectra_distances(blocks, scaling=stated["scaling"], sigma=stated["sigma"])  # type: ignore[arg-type]
    for name in ("mean", "mean_stderr", "p_value", "floor"):
        assert stated[name] == pytest.approx(getattr(again, name), rel=1e-4)
    np.testing.assert_allclose(stated["values"], again.values, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(("scaling", "equal"), [("largest", True), ("spread", True), ("none", False)])
def test_scaling_decides_whether_size_counts(scaling: Scaling, equal: bool) -> None:
    matrix, _ = with_spectrum(FLAT)
    found = {name: spectral_density(MatrixOperator(f * matrix), probes=2, steps=8) for name, f in (("a", 1), ("b", 9))}
    distance = spectra_distances(found, scaling=scaling).values[0, 1]
    assert abs(distance) < 1e-12 if equal else distance > 0.25


def test_bad_distances_are_refused() -> None:
    found = spectra(flat=FLAT, spiked=SPIKED)
    with pytest.raises(ValueError, match="scaling must be one of none, largest, spread"):
        spectra_distances(found, scaling="tenth")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="sigma must be between 0 and 1, got 2"):
        spectra_distances(found, sigma=2)  # type: ignore[arg-type]
    of_steps = {str(n): spectral_density(MatrixOperator(torch.eye(30)), probes=2, steps=n) for n in (4, 20)}
    with pytest.raises(ValueError, match=r"one number of steps, on which their width depends; got \[4, 20\]"):
        spectra_distances(of_steps)
    with pytest.raises(ValueError, match="at least two"):
        spectra_distances({"flat": found["flat"]})  # type: ignore[dict-item]
    zero = spectral_density(MatrixOperator(torch.zeros(4, 4, dtype=torch.float64)), probes=3, steps=8)
    with pytest.raises(ValueError, match="all eigenvalues of 'zero' are zero"):
        spectra_distances({**found, "zero": zero})  # type: ignore[dict-item]


@pytest.mark.parametrize("scaling", ["largest", "spread"])
def test_a_start_in_the_null_space_has_its_one_node_at_zero(scaling: Scaling) -> None:
    edge = MatrixOperator(torch.tensor([[1.0, -1], [-1, 1]], dtype=torch.float64))
    found = {str(seed): spectral_density(edge, probes=4, steps=2, seed=seed) for seed in range(2)}
    assert any(not nodes.any() for density in found.values() for nodes in density.nodes)
    assert any(nodes.any() for density in found.values() for nodes in density.nodes)
    distances = spectra_distances(found, scaling=scaling)
    assert np.isfinite(distances.values).all()
    assert distances.floor > 0.1


def test_figure_has_a_panel_with_error_band_and_residuals_for_each_block() -> None:
    figure = spectra_figure(spectra(a=FLAT, b=SPIKED, c=FLAT, d=SPIKED), title="By layer")  # type: ignore[arg-type]
    panels = [axes for axes in figure.axes if axes.get_visible()]
    assert [axes.get_title(loc="left") for axes in panels] == list("abcd")
    assert all(axes.containers[0].has_xerr for axes in panels)
    assert all(axes.get_yscale() == "log" for axes in panels)
    assert all(len(axes.collections) >= 2 for axes in panels), "the bars of the residuals, and the band of the error"


def test_disjoint_spectra_have_distance_one() -> None:
    """Densities far apart underflow to zero and to the smallest numbers, which must not become infinite distances."""
    apart = [spectral_density(MatrixOperator(torch.diag(torch.full((4,), v))), probes=2, steps=2) for v in (-1.0, 1.0)]
    distances = spectra_distances({"low": apart[0], "high": apart[1]}, scaling="none", sigma=0.026)
    assert distances.values[0, 1] == pytest.approx(1)
