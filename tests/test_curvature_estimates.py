"""Probes, traces and spectral densities on matrices of known spectrum."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from curvature_oracles import MatrixOperator, tiny_gpt2, token_batch, with_spectrum

from curvature import HessianOperator, lanczos, spectral_density, trace
from curvature.estimate import confidence_interval, mean_and_stderr, with_error
from curvature.probes import device_words, host_words, normal, rademacher
from curvature.vectors import Block, ParameterSpace

INDEFINITE = [100.0, 50.0, 20.0, 10.0, 5.0, *np.linspace(-3, 3, 35)]


def space(sizes: dict[str, tuple[int, ...]], dtype: torch.dtype = torch.float32) -> ParameterSpace:
    return ParameterSpace(tuple(Block(n, s) for n, s in sizes.items()), dtype, torch.device("cpu"))


# Probes


@pytest.mark.parametrize(("seed", "index"), [(0, 0), (2**64 - 1, 3), (17, 2**63 + 5)])
def test_a_device_draws_the_words_of_numpy(seed: int, index: int) -> None:
    names, groups = ["transformer.wte.weight", "a", "b"], [300, 1, 17]
    drawn = [draw(names, groups, seed, index, torch.device("cpu")) for draw in (host_words, device_words)]
    assert drawn[0].shape == (4 * 318,)
    assert torch.equal(*drawn)


@pytest.mark.parametrize("draw", [rademacher, normal])
def test_a_tensors_probe_depends_on_seed_index_and_name_alone(draw: object) -> None:
    small, large = space({"b": (5, 7)}), space({"a": (64,), "b": (5, 7), "c": (3,)}, torch.float64)
    alone = draw(small, seed=3, index=2)  # type: ignore[operator]
    among = large.named(draw(large, seed=3, index=2))["b"]  # type: ignore[operator]
    assert torch.equal(alone.view(5, 7), among.float())
    for seed, index in ((4, 2), (3, 1), (2, 3)):
        assert not torch.equal(alone, draw(small, seed=seed, index=index))  # type: ignore[operator]
    assert not torch.equal(alone, draw(space({"other": (5, 7)}), seed=3, index=2))  # type: ignore[operator]


def test_probes_are_fixed_for_good() -> None:
    """A change here changes every published estimate of a given seed."""
    signs = rademacher(space({"w": (16,)}), seed=0, index=0)
    assert "".join("+" if s > 0 else "-" for s in signs) == "--+-+-+-+++--+-+"
    assert normal(space({"w": (3,)}, torch.float64), seed=0, index=0).tolist() == pytest.approx(
        [-0.127739852408, 1.476885584445, 0.298183349448], abs=1e-12
    )


def test_signs_are_signs_and_normals_normal() -> None:
    many = space({"w": (200_001,)}, torch.float64)
    signs, normals = rademacher(many, seed=1, index=0), normal(many, seed=1, index=0)
    assert set(signs.tolist()) == {-1.0, 1.0}
    for probe in (signs, normals):
        assert abs(float(probe.mean())) < 4 / math.sqrt(len(probe))
        assert abs(float((probe**2).mean()) - 1) < 4 * math.sqrt(2 / len(probe))
        assert abs(float((probe[1:] * probe[:-1]).mean())) < 4 / math.sqrt(len(probe))
    assert float((normals**4).mean()) == pytest.approx(3, abs=0.1)


@pytest.mark.parametrize(("seed", "index"), [(-1, 0), (2**64, 0), (0, -1)])
def test_seeds_out_of_range_are_refused(seed: int, index: int) -> None:
    with pytest.raises(ValueError, match=r"must be in \[0, 2\*\*64\)"):
        rademacher(space({"w": (3,)}), seed=seed, index=index)


# Trace


def test_trace_of_a_diagonal_matrix_is_exact() -> None:
    op = MatrixOperator(torch.diag(torch.arange(1.0, 7.0, dtype=torch.float64)), [2, 4])
    result = trace(op, probes=2)
    assert (result.value, result.stderr) == (21.0, 0.0)
    assert result.per_block == {"block0": (3.0, 0.0), "block1": (18.0, 0.0)}
    assert result.converged
    assert result.products == op.applied == 2


def test_trace_is_unbiased_and_its_error_honest() -> None:
    """Over many seeds: z-scores of total and blocks have mean zero and spread one."""
    # No eigenvalue dominates here: one that did would make the samples as skewed as a single chi-square.
    matrix, _ = with_spectrum(np.linspace(-3, 10, 40))
    op, true = MatrixOperator(matrix, [10, 30]), float(matrix.diagonal().sum())
    blocks = {"block0": float(matrix.diagonal()[:10].sum()), "block1": float(matrix.diagonal()[10:].sum())}
    scores: dict[str, list[float]] = {"total": [], "block0": [], "block1": []}
    for seed in range(150):
        result = trace(op, probes=30, seed=seed)
        scores["total"].append((result.value - true) / result.stderr)
        for name, (value, stderr) in result.per_block.items():
            scores[name].append((value - blocks[name]) / stderr)
    for values in scores.values():
        assert abs(np.mean(values)) < 4 / math.sqrt(150)
        assert 0.85 < np.std(values) < 1.2
        assert 0.90 < np.mean(np.abs(values) < 2.045) < 0.99  # the 95 % interval of Student's t at 29 degrees


def test_trace_stops_on_the_standard_error() -> None:
    matrix, _ = with_spectrum(INDEFINITE)
    seen: list[tuple[int, int, str]] = []
    result = trace(MatrixOperator(matrix), tol=0.04, max_products=5000, progress=lambda *a: seen.append(a))
    assert result.converged
    assert result.stderr <= 0.04 * abs(result.value)
    assert 10 < result.products < 5000
    assert [done for done, _, _ in seen] == list(range(1, result.products + 1))
    before = trace(MatrixOperator(matrix), tol=0.04, probes=result.products - 1)
    assert not before.converged
    assert abs(result.value - sum(INDEFINITE)) < 4 * result.stderr


def test_trace_runs_out_of_products_and_says_so() -> None:
    matrix, _ = with_spectrum(np.linspace(-1, 1, 30))
    result = trace(MatrixOperator(matrix), tol=0.01, max_products=12)
    assert not result.converged
    assert result.products == 12


def test_trace_does_not_stop_before_the_least_number() -> None:
    op = MatrixOperator(torch.eye(4, dtype=torch.float64))
    assert trace(op, min_products=7).products == 7
    assert trace(op).products == 10


def test_grouped_traces_have_the_error_of_the_sum() -> None:
    matrix, _ = with_spectrum(INDEFINITE)
    fine = trace(MatrixOperator(matrix, [10, 10, 20]), probes=12)
    coarse = trace(MatrixOperator(matrix, [10, 10, 20]), probes=12).grouped(lambda name: name != "block2")
    assert list(coarse) == [True, False]
    assert coarse[True] == pytest.approx(mean_and_stderr(fine.samples[:, :2].sum(axis=1)))
    assert coarse[False] == pytest.approx(fine.per_block["block2"])
    total = fine.grouped(lambda name: "all")["all"]
    assert total == pytest.approx((fine.value, fine.stderr))


def test_trace_of_a_models_blocks() -> None:
    model, batches = tiny_gpt2(layers=1), [token_batch(7, (2, 8))]
    op = HessianOperator(model, batches, method="whole")
    diagonal = (op @ torch.eye(op.shape[0], dtype=torch.float64)).diagonal()
    result = trace(op, probes=60, seed=1)
    assert abs(result.value - float(diagonal.sum())) < 4 * result.stderr
    scores = []
    for name, (value, stderr) in result.per_block.items():
        true = float(diagonal[op.space.slices()[name]].sum())
        scores.append(abs(value - true) / max(stderr, 1e-12))
    assert max(scores) < 4.5, dict(zip(result.per_block, scores, strict=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"probes": 1}, "probes must be at least 2"),
        ({"max_products": 5}, "2 <= min_products <= max_products"),
        ({"tol": 0.0}, "tol must be positive"),
        ({"tol": math.nan}, "tol must be positive"),
    ],
    ids=["one probe", "fewer than the least", "zero", "nan"],
)
def test_bad_trace_settings_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trace(MatrixOperator(torch.eye(3)), **options)  # type: ignore[arg-type]


# Confidence intervals

SPECTRA = {
    "flat": np.linspace(-3, 10, 40),
    "outliers": np.array(INDEFINITE),
    "one dominates": np.array([100.0, *np.linspace(-1, 1, 59)]),
    "nearly rank one": np.array([100.0, *[0.1] * 40]),
    "negative one dominates": np.array([-100.0, *np.linspace(0, 1, 40)]),
}


def trace_samples(spectrum: np.ndarray, runs: int, probes: int) -> np.ndarray:
    """Hutchinson samples z.Hz of many runs, [runs, probes]: all at once what `trace` takes one product each for."""
    matrix = with_spectrum(spectrum)[0].numpy()
    signs = np.random.default_rng(3).choice([-1.0, 1.0], size=(runs * probes, len(spectrum)))
    return np.einsum("ij,jk,ik->i", signs, matrix, signs, optimize=True).reshape(runs, probes)


@pytest.mark.parametrize("probes", [10, 25, 80])
@pytest.mark.parametrize("spectrum", SPECTRA.values(), ids=SPECTRA.keys())
def test_the_interval_holds_the_trace_as_often_as_it_says(spectrum: np.ndarray, probes: int) -> None:
    inside = [
        low <= spectrum.sum() <= high for low, high in map(confidence_interval, trace_samples(spectrum, 1500, probes))
    ]
    assert 0.92 <= np.mean(inside) <= 0.98


def test_the_symmetric_interval_would_not() -> None:
    """What the interval is for: with one dominant eigenvalue mean ± 1.96 standard errors is wrong twice as often."""
    samples = trace_samples(SPECTRA["one dominates"], 1500, 10)
    scores = [(x.mean() - SPECTRA["one dominates"].sum()) / mean_and_stderr(x)[1] for x in samples]
    assert np.mean(np.abs(scores) < 1.96) < 0.88


def test_the_interval_after_a_stopping_rule() -> None:
    """The rule stops a little early where the spread happens to look small; the interval stays within 4 % of 95."""
    matrix, _ = with_spectrum(INDEFINITE)
    inside = []
    for seed in range(250):
        low, high = trace(MatrixOperator(matrix), tol=0.1, max_products=3000, seed=seed).interval()
        inside.append(low <= sum(INDEFINITE) <= high)
    assert 0.91 <= np.mean(inside) <= 0.98


def test_the_interval_is_students_for_symmetric_samples_and_follows_scale_and_shift() -> None:
    samples = np.array([-2.0, -1.0, 0.0, 1.0, 2.0])
    half = 2.7764451 * samples.std(ddof=1) / math.sqrt(5)
    assert confidence_interval(samples) == pytest.approx((-half, half))
    skewed = np.array([0.1, 0.2, 0.2, 0.5, 3.0])
    low, high = confidence_interval(skewed)
    assert high - skewed.mean() > skewed.mean() - low > 0
    assert confidence_interval(7 - 2 * skewed) == pytest.approx((7 - 2 * high, 7 - 2 * low))
    wider = confidence_interval(skewed, 0.99)
    assert wider[0] < low < high < wider[1]


def test_an_interval_needs_three_samples_and_a_level() -> None:
    assert all(map(math.isnan, confidence_interval(np.array([1.0, 2.0]))))
    assert confidence_interval(np.full(4, 2.5)) == (2.5, 2.5)
    with pytest.raises(ValueError, match="level must be between 0 and 1, got 95"):
        confidence_interval(np.arange(5.0), 95)


# Density


def test_quadrature_is_exact_for_the_moments_of_its_start_vector() -> None:
    matrix, _ = with_spectrum(INDEFINITE)
    matrix /= 100
    run = lanczos(MatrixOperator(matrix), steps=6, seed=2)
    nodes, weights = run.quadrature()
    assert weights.sum() == pytest.approx(1, abs=1e-14)
    z = rademacher(MatrixOperator(matrix).space, seed=2, index=0)
    z /= z.norm()
    power = z.clone()
    for degree in range(12):
        assert float(z @ power) == pytest.approx(float(weights @ nodes**degree), abs=1e-13), degree
        power = matrix @ power
    assert float(z @ power) != pytest.approx(float(weights @ nodes**12), abs=1e-13)


def test_density_moments_are_those_of_the_spectrum() -> None:
    matrix, _ = with_spectrum(INDEFINITE)
    result = spectral_density(MatrixOperator(matrix), probes=60, steps=25, sigma=2.0, grid=4000, seed=1)
    values = np.array(INDEFINITE)
    assert np.trapezoid(result.values, result.grid) == pytest.approx(1, abs=1e-5)
    first = np.array([w @ n for n, w in zip(result.nodes, result.weights, strict=True)])
    second = np.array([w @ n**2 for n, w in zip(result.nodes, result.weights, strict=True)])
    for samples, true in ((first, values.mean()), (second, (values**2).mean())):
        mean, stderr = mean_and_stderr(samples)
        assert abs(mean - true) < 4 * stderr
    on_grid = np.trapezoid(result.values * result.grid**2, result.grid)
    assert on_grid == pytest.approx(second.mean() + result.sigma**2, rel=1e-4)
    assert result.trace == pytest.approx(40 * first.mean())
    assert result.trace_stderr is not None
    assert abs(result.trace - values.sum()) < 4 * result.trace_stderr


def test_density_lies_within_its_stated_error_of_the_exact_one() -> None:
    matrix, _ = with_spectrum(INDEFINITE)
    result = spectral_density(MatrixOperator(matrix), probes=40, steps=40, sigma=3.0, grid=60, seed=5)
    kernel = np.exp(-0.5 * ((result.grid[:, None] - np.array(INDEFINITE)) / 3.0) ** 2) / (3.0 * math.sqrt(2 * math.pi))
    exact = kernel.mean(axis=1)
    assert result.stderr is not None
    scores = np.abs(result.values - exact) / (result.stderr + 1e-9)
    assert scores.max() < 4.5
    assert 0.4 < np.mean(scores < 1) < 0.95


def test_density_and_extremes_read_the_same_runs() -> None:
    matrix, _ = with_spectrum(INDEFINITE)
    op = MatrixOperator(matrix)
    result = spectral_density(op, probes=3, steps=12, seed=4)
    assert result.products == op.applied == 36
    values, residuals = result.extremes(2)
    assert op.applied == 36
    assert len(values) == 4
    assert list(values) == sorted(values, reverse=True)
    assert values[0] == pytest.approx(100, abs=residuals[0] + 1e-9)
    assert result.converged == all(r.converged for r in result.runs)
    assert spectral_density(op, probes=1, steps=39).converged
    alone = lanczos(op, steps=12, seed=4)
    np.testing.assert_allclose(alone.eigenvalues, result.runs[0].eigenvalues, rtol=0, atol=1e-12)
    np.testing.assert_allclose(sum(r.alphas[0] for r in result.runs) / 3 * 40, result.trace, rtol=1e-12)


@pytest.mark.parametrize("grid", [1, np.int64(1), [], [0.0, math.nan], [[0.0, 1.0]]])
def test_a_grid_without_points_is_refused(grid: Any) -> None:
    with pytest.raises(ValueError, match="grid must"):
        spectral_density(MatrixOperator(torch.eye(3)), probes=2, steps=2, grid=grid)
    assert len(spectral_density(MatrixOperator(torch.eye(3)), probes=2, steps=2, grid=np.int64(9)).grid) == 9


def test_density_of_one_probe_states_no_error() -> None:
    result = spectral_density(MatrixOperator(torch.eye(5, dtype=torch.float64)), probes=1, steps=4)
    assert result.stderr is None
    assert result.trace_stderr is None
    assert result.trace == pytest.approx(5)
    assert result.products == 1, "the identity ends the run after one step"
    assert np.trapezoid(result.values, result.grid) == pytest.approx(1, abs=1e-4)


def test_density_on_a_given_grid_and_progress() -> None:
    seen: list[int] = []
    result = spectral_density(
        MatrixOperator(torch.diag(torch.arange(8.0))), probes=2, steps=3, grid=[-1.0, 0.0, 4.0], sigma=1.0,
        progress=lambda done, total, status: seen.append(done),
    )  # fmt: skip
    assert result.grid.tolist() == [-1.0, 0.0, 4.0]
    assert seen == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"probes": 0}, "probes must be at least 1"),
        ({"steps": 0}, "steps must be at least 1"),
        ({"sigma": -1.0}, "sigma must be positive"),
        ({"grid": 1}, "grid must have at least 2 points"),
    ],
    ids=["probes", "steps", "sigma", "grid"],
)
def test_bad_density_settings_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        spectral_density(MatrixOperator(torch.eye(3)), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "stderr", "text"),
    [
        (2015.08, 302.9, "2015 ± 303"),
        (0.041234, 0.00312, "0.0412 ± 0.0031"),
        (-3.2, 0.4, "-3.20 ± 0.40"),
        (1.5e9, 2e7, "1.5e+09 ± 2e+07"),
        (2e-7, 1e-8, "2e-07 ± 1e-08"),
        (21.0, 0.0, "21 ± 0"),
        (21.0, None, "21"),
        (21.0, math.nan, "21"),
    ],
)
def test_a_value_is_written_to_the_second_digit_of_its_error(value: float, stderr: float | None, text: str) -> None:
    assert with_error(value, stderr) == text
