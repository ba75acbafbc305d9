"""Spectra of diagonal blocks, and Jensen-Shannon distances between them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from curvature_oracles import MatrixOperator, dense_hessian, tiny_gpt2, token_batch, with_spectrum
from scipy.spatial.distance import jensenshannon

from curvature import HessianOperator, RunState, layer_groups, layer_spectra, spectra_distances, spectral_density
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


def test_distances_are_those_of_the_smoothed_densities() -> None:
    found = spectra(flat=FLAT, spiked=SPIKED)
    distances = spectra_distances(found, scaling="none", sigma=0.05)  # type: ignore[arg-type]
    scale = max(abs(n).max() for d in found.values() for n in d.nodes)  # type: ignore[attr-defined]
    grid = np.linspace(-1.5, 2, 6001)
    curves = [
        np.mean([np.exp(-0.5 * ((grid[:, None] - n / scale) / 0.05) ** 2) @ w for n, w in zip(d.nodes, d.weights)], 0)  # type: ignore[attr-defined]  # noqa: B905
        for d in found.values()
    ]
    assert distances.values[0, 1] == pytest.approx(jensenshannon(*curves, base=2), rel=1e-4)
    assert distances.mean == distances.values[0, 1] == distances.values[1, 0]
    assert distances.values[0, 0] == 0


def test_equal_spectra_are_closer_than_different_ones_by_more_than_the_error() -> None:
    found = spectra(flat=FLAT, again=FLAT, spiked=SPIKED)
    distances = spectra_distances(found)  # type: ignore[arg-type]
    near, far = distances.values[0, 1], distances.values[0, 2]
    assert near + 2 * distances.stderr[0, 1] < far - 2 * distances.stderr[0, 2]
    assert 0 < distances.floor < far < 1
    assert distances.mean_stderr > 0


@pytest.mark.parametrize(("scaling", "equal"), [("largest", True), ("spread", True), ("none", False)])
def test_scaling_decides_whether_size_counts(scaling: Scaling, equal: bool) -> None:
    matrix, _ = with_spectrum(FLAT)
    found = {name: spectral_density(MatrixOperator(f * matrix), probes=2, steps=8) for name, f in (("a", 1), ("b", 9))}
    distance = spectra_distances(found, scaling=scaling).values[0, 1]
    assert distance < 1e-6 if equal else distance > 0.5


def test_bad_distances_are_refused() -> None:
    found = spectra(flat=FLAT, spiked=SPIKED)
    with pytest.raises(ValueError, match="scaling must be one of none, largest, spread"):
        spectra_distances(found, scaling="tenth")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="sigma must be between 0 and 1, got 2"):
        spectra_distances(found, sigma=2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least two"):
        spectra_distances({"flat": found["flat"]})  # type: ignore[dict-item]
    zero = spectral_density(MatrixOperator(torch.zeros(4, 4, dtype=torch.float64)), probes=3, steps=2)
    with pytest.raises(ValueError, match="all eigenvalues of 'zero' are zero"):
        spectra_distances({**found, "zero": zero})  # type: ignore[dict-item]


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
    assert np.isfinite(distances.stderr).all()
