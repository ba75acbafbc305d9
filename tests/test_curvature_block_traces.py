"""Traces of many blocks: slices of full products against probes of single blocks, and the choice between them."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch
from curvature_oracles import MatrixOperator, tiny_gpt2, token_batch
from torch import Tensor

from curvature import Group, HessianOperator, block_traces, groups_by, layer_groups
from curvature.groups import Part


def coupled() -> MatrixOperator:
    """Three blocks; the last is tiny in itself and strongly coupled to the others, as norms are to projections."""
    matrix = torch.diag(torch.linspace(5, 15, 24, dtype=torch.float64))
    noise = 0.3 * torch.randn(24, 24, dtype=torch.float64)
    matrix += noise + noise.T
    matrix[20:, 20:] = torch.diag(torch.full((4,), 0.5, dtype=torch.float64)) + 0.01
    coupling = 4 * torch.randn(4, 20, dtype=torch.float64)
    matrix[20:, :20], matrix[:20, 20:] = coupling, coupling.T
    return MatrixOperator(matrix, [10, 10, 4])


class Slow(MatrixOperator):
    """A matrix whose products take a known time, whatever they are taken of."""

    def _apply(self, rows: Tensor) -> Tensor:
        time.sleep(0.002)
        return super()._apply(rows)


def exact(op: MatrixOperator) -> list[float]:
    diagonal = op.matrix.diagonal()
    return [float(diagonal[piece].sum()) for piece in op.space.slices().values()]


@pytest.mark.parametrize("probing", ["slices", "restricted"])
def test_estimates_are_unbiased(probing: Any) -> None:
    op = coupled()
    groups = groups_by(op.space, str)
    runs = [
        block_traces(op, groups, tol=1e-9, max_products=36, seed=seed, probing=probing, min_probes=10)
        for seed in range(30)
    ]
    for number, (group, true) in enumerate(zip(groups, exact(op), strict=True)):
        found = [run.groups[group.name] for run in runs]
        z = np.array([(f.value - true) / f.stderr for f in found])
        assert abs(z.mean()) < 5 / len(z) ** 0.5, number
        assert 0.7 < z.std() < 1.5
        assert all(f.method == probing for f in found)
    assert all(run.products == 36 and not run.converged for run in runs)
    assert op.applied == 36 * 30


def test_the_coupled_block_gets_probes_of_its_own() -> None:
    op = Slow(coupled().matrix, [10, 10, 4])
    groups = groups_by(op.space, str)
    found = block_traces(op, groups, tol=0.05, max_products=3000)
    assert found.converged
    assert found.groups["block2"].method == "restricted"
    for group, true in zip(found.groups.values(), exact(op), strict=True):
        assert abs(group.value - true) < 5 * group.stderr
        assert group.stderr <= 0.05 * abs(group.value)
    assert found.products == found.full_products + found.restricted_products < 100
    slices = block_traces(op, groups, tol=0.05, max_products=300, probing="slices")
    assert not slices.converged, "the slices of this matrix should be too noisy for the last block"
    assert set(found.seconds) == {"full", "restricted"}
    assert found.seconds["full"] > 0.002


def test_a_tolerance_of_the_total_is_met_by_slices() -> None:
    op = coupled()
    found = block_traces(op, groups_by(op.space, str), tol=0.2, of_total=True)
    assert found.converged
    assert {g.method for g in found.groups.values()} == {"slices"}


def test_blocks_of_a_model() -> None:
    """Whole parameters are probed through an operator of their own, parts of them through masks."""
    model = tiny_gpt2(layers=1)
    op = HessianOperator(model, [token_batch(7, (1, 5))], method="whole")
    dense = op @ torch.eye(op.shape[0], dtype=torch.float64)
    groups = [*layer_groups(op.space)[:2], Group("rows", (Part("transformer.h.0.mlp.c_fc.weight", 0, 0, 2),))]
    found = block_traces(op, groups, tol=1e-9, max_products=30, min_probes=10, probing="restricted")
    for group in groups:
        index = torch.cat([v.reshape(-1) for v in group.views(op.space, torch.arange(float(op.space.size)))]).long()
        estimate = found.groups[group.name]
        assert abs(estimate.value - float(dense.diagonal()[index].sum())) < 6 * estimate.stderr
        assert estimate.probes == 10


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"probing": "best"}, "probing must be one of measured, slices, restricted, got 'best'"),
        ({"tol": 0}, "tol must be positive"),
        ({"min_probes": 1}, "min_probes must be at least 2"),
        ({"probing": "restricted", "max_products": 20}, "at least 30 for 3 groups"),
    ],
    ids=["probing", "tol", "probes", "products"],
)
def test_bad_settings_are_refused(options: dict[str, Any], message: str) -> None:
    op = coupled()
    with pytest.raises(ValueError, match=message):
        block_traces(op, groups_by(op.space, str), **options)
    with pytest.raises(ValueError, match="there is none"):
        block_traces(op, [])
