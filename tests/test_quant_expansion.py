"""The linear term of predictions, and the expansion of a whole plan, against differences of the loss."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from tiny_causal_lms import tiny_lm, tokens

from curvature import CausalLMLoss
from quant import Candidates, expand, find_weights, round_all, schemes, sensitivity, with_linear
from quant.linear import linear_terms, shrunk

BATCHES = [tokens((2, 10), seed=seed) for seed in range(3)]
OPTIONS = schemes((2, 4), (8,))
STEP = 1e-3


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return tiny_lm("llama")


@pytest.fixture(scope="module")
def candidates(model: torch.nn.Module) -> Candidates:
    return round_all(find_weights(model, r"layers\.[01]\.(self_attn\.[qo]|mlp\.down)_proj"), OPTIONS)


def losses(model: torch.nn.Module, candidates: Candidates, choices: Sequence[int | None], size: float) -> np.ndarray:
    """Mean loss of each batch with `size` times the plan's perturbation added."""
    found = []
    with torch.no_grad():
        for sign in (1, -1):
            for t, b in enumerate(choices):
                candidates.weights[t].parameter.add_(sign * size * candidates.delta(t, b))
            if sign == 1:
                found = [float(total) / n for total, n in (CausalLMLoss()(model, batch) for batch in BATCHES)]
    return np.array(found)


def test_the_linear_term_is_the_slope_of_each_batch(model: torch.nn.Module, candidates: Candidates) -> None:
    found = linear_terms(model, candidates, BATCHES, CausalLMLoss())
    for t, b in ((0, 0), (2, 1), (5, 0)):
        alone = [b if u == t else None for u in range(len(candidates.weights))]
        slopes = (losses(model, candidates, alone, STEP) - losses(model, candidates, alone, -STEP)) / (2 * STEP)
        np.testing.assert_allclose(found[:, t, b], slopes, rtol=1e-5, atol=1e-12)
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


def test_noise_is_shrunk_and_signal_is_kept() -> None:
    rng = np.random.default_rng(0)
    noise = rng.normal(size=(12, 20000))
    kept, stderr = shrunk(noise)
    assert np.mean(kept == 0) > 0.6  # |mean| below its standard error in 68 % of normal samples
    assert np.mean(kept**2) < 0.5 * np.mean(noise.mean(0) ** 2)
    assert (stderr <= noise.std(0, ddof=1) / math.sqrt(12)).all()
    many = np.random.default_rng(1).standard_normal((8, 4000))
    left, told = shrunk(many)
    assert math.sqrt((left**2).mean()) < math.sqrt((told**2).mean())  # what is left of noise, and the error told of it
    strong = noise + 10
    np.testing.assert_allclose(shrunk(strong)[0], strong.mean(0), rtol=0.01)
    assert not shrunk(noise[:1])[0].any()
    assert np.isfinite(shrunk(np.zeros((3, 2)))[0]).all()
    assert np.isnan(shrunk(np.full((3, 1), np.nan))[0]).all()


def test_taylor_is_the_quadratic_form_with_the_linear_term(model: torch.nn.Module, candidates: Candidates) -> None:
    quadratic = sensitivity(model, candidates, BATCHES, "quadratic", draws=2, method="whole")
    taylor = sensitivity(model, candidates, BATCHES, "taylor", draws=2, method="whole")
    linear, spread = shrunk(linear_terms(model, candidates, BATCHES, CausalLMLoss()))
    assert np.abs(linear).max() > 0
    np.testing.assert_allclose(taylor.values, quadratic.values + linear, rtol=1e-10)
    assert quadratic.stderr is not None
    assert taylor.stderr is not None
    np.testing.assert_allclose(taylor.stderr, np.hypot(quadratic.stderr, spread), rtol=1e-10)
    assert taylor.predicts
    added = with_linear(quadratic, model, candidates, BATCHES)
    np.testing.assert_allclose(added.values, taylor.values, rtol=1e-12)
    assert (added.metric, added.products) == ("taylor", quadratic.products)
    assert added.fingerprint != quadratic.fingerprint
    for table in (taylor, sensitivity(model, candidates, BATCHES, "fisher")):
        with pytest.raises(ValueError, match=f"curvature alone, got '{table.metric}'"):
            with_linear(table, model, candidates, BATCHES)


@pytest.mark.parametrize("method", ["whole", "streamed"])
def test_the_expansion_of_a_plan_has_its_slope_and_curvature(
    method: str, model: torch.nn.Module, candidates: Candidates
) -> None:
    choices = [0, 1, 0, 1, 0, 0]
    found = expand(model, candidates, choices, BATCHES, method=method)  # type: ignore[arg-type]
    middle, ahead, behind = (losses(model, candidates, choices, s) for s in (0.0, STEP, -STEP))
    assert found.linear == pytest.approx((ahead - behind).mean() / (2 * STEP), rel=1e-5)
    assert found.quadratic == pytest.approx((ahead - 2 * middle + behind).mean() / (2 * STEP**2), rel=1e-4)
    assert found.change == pytest.approx(found.linear + found.quadratic)
    each = [expand(model, candidates, choices, [batch], method=method) for batch in BATCHES]  # type: ignore[arg-type]
    totals = [one.change for one in each]
    assert found.change == pytest.approx(np.mean(totals))
    assert found.stderr == pytest.approx(np.std(totals, ddof=1) / math.sqrt(3))
    assert each[0].stderr is None
    assert dataclasses.asdict(found) == found.as_record()


def test_cross_terms_between_weights_count(model: torch.nn.Module, candidates: Candidates) -> None:
    choices = [0] * len(candidates.weights)
    exact = sensitivity(model, candidates, BATCHES, "interaction", method="whole")
    assert exact.cross is not None
    chosen = [t * len(OPTIONS) for t in range(len(choices))]
    joint = 0.5 * float(exact.cross[np.ix_(chosen, chosen)].sum())
    assert expand(model, candidates, choices, BATCHES).quadratic == pytest.approx(joint, rel=1e-8)
    assert joint != pytest.approx(float(exact.values[:, 0].sum()), rel=0.01)


def test_no_batch_is_refused(model: torch.nn.Module, candidates: Candidates) -> None:
    with pytest.raises(ValueError, match="batches"):
        expand(model, candidates, [None] * len(candidates.weights), [])
