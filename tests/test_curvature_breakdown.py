"""Where a trace lies: groups from the same products, fused projections shared out, sums with errors of the sums."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from curvature_oracles import MatrixOperator, tiny_gpt2, tiny_llama, token_batch, with_spectrum
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from curvature import HessianOperator, fused_groups, head_groups, trace
from curvature.breakdown import KINDS, Breakdown
from curvature.estimate import mean_and_stderr
from curvature.groups import Group, Part
from curvature.heat_map import heat_map


def tiny_neox() -> GPTNeoXForCausalLM:
    torch.manual_seed(0)
    config = GPTNeoXConfig(
        vocab_size=7, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=16, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPTNeoXForCausalLM(config).double().eval()


# Shares of fused projections


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_thirds_of_gpt2_projections_are_told_apart(attention: str) -> None:
    model = tiny_gpt2(width=4, layers=2)
    model.set_attn_implementation(attention)
    groups = fused_groups(model)
    assert [group.name for group in groups] == [f"layer {layer} {kind}" for layer in range(2) for kind in "qkv"]
    prefix = "transformer.h.1.attn.c_attn"
    for number, group in enumerate(groups[3:]):
        expected = Part(f"{prefix}.weight", 1, 4 * number, 4 * number + 4)
        assert group.parts == (expected, Part(f"{prefix}.bias", 0, 4 * number, 4 * number + 4))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_interleaved_projections_are_told_apart(dtype: torch.dtype) -> None:
    groups = {group.name: group for group in fused_groups(tiny_neox().to(dtype))}
    # By head: four query features, four of keys, four of values.
    for number, kind in enumerate("qkv"):
        parts = [part for part in groups[f"layer 0 {kind}"].parts if part.parameter.endswith("weight")]
        rows = [(part.start, part.stop) for part in parts]
        assert rows == [(4 * number, 4 * number + 4), (12 + 4 * number, 16 + 4 * number)]


def test_separate_projections_have_no_shares() -> None:
    assert fused_groups(tiny_llama()) == []


def test_shares_of_selected_parameters_only() -> None:
    groups = fused_groups(tiny_gpt2(), ["transformer.h.0.attn.c_attn.bias"])
    assert [group.name for group in groups] == ["layer 0 q", "layer 0 k", "layer 0 v"]
    assert {part.parameter for group in groups for part in group.parts} == {"transformer.h.0.attn.c_attn.bias"}


# Groups of a trace


def test_groups_come_from_the_same_products() -> None:
    matrix, _ = with_spectrum(np.linspace(-1, 5, 12))
    op, plain = (MatrixOperator(matrix, [4, 8]) for _ in range(2))
    groups = [Group("tail", (Part("block1", 0, 4, 8),)), Group("rest", (Part("block0"), Part("block1", 0, 0, 4)))]
    found, without = trace(op, probes=6, groups=groups), trace(plain, probes=6)
    assert op.applied == plain.applied == 6
    np.testing.assert_array_equal(found.samples, without.samples)
    np.testing.assert_allclose(sum(found.group_samples.values()), found.samples.sum(axis=1), rtol=1e-12)
    many = trace(op, probes=4000, groups=groups)
    for group, entries in zip(groups, (slice(8, 12), slice(0, 8)), strict=True):
        value, stderr = many.per_group[group.name]
        assert value == pytest.approx(float(matrix[entries, entries].trace()), abs=4 * stderr)
        assert stderr < 0.1


@pytest.mark.parametrize(
    ("groups", "told"),
    [
        ([Group("a", (Part("block0"),)), Group("a", (Part("block1"),))], "same name"),
        ([Group("a", (Part("block2"),))], "not among the parameters"),
        ([Group("a", (Part("block0", 0, 2, 9),))], "reaches outside"),
    ],
    ids=["name", "parameter", "range"],
)
def test_bad_groups_of_a_trace_are_refused(groups: list[Group], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        trace(MatrixOperator(torch.eye(8, dtype=torch.float64), [4, 4]), probes=2, groups=groups)


# Sums


@pytest.fixture(scope="module")
def estimated() -> tuple[Any, ...]:
    model = tiny_gpt2(width=4, layers=2)
    op = HessianOperator(model, [token_batch(7, (2, 6))])
    fused, heads = fused_groups(model), head_groups(model)
    return op, trace(op, probes=5, groups=[*fused, *heads]), fused, heads


@pytest.mark.parametrize("key", ["kind", "place", "layer"])
def test_sums_add_up_and_have_errors_of_sums(key: str, estimated: tuple[Any, ...]) -> None:
    op, estimate, fused, _ = estimated
    breakdown = Breakdown.of(estimate, op.space, fused)
    shares = breakdown.by(lambda piece: getattr(piece, key))
    assert sum(share.trace for share in shares.values()) == pytest.approx(estimate.value, rel=1e-12)
    assert sum(share.numel for share in shares.values()) == op.space.size
    for group, share in shares.items():
        samples = sum(piece.samples for piece in breakdown.pieces if getattr(piece, key) == group)
        assert (share.trace, share.stderr) == pytest.approx(mean_and_stderr(samples))
        assert share.mean_stderr == share.stderr / share.numel
    if key == "place":
        assert list(shares) == ["embedding", "position", "layer 0", "layer 1", "norm"]
    if key == "kind":
        assert set(shares) == {"embedding", "position", "norm", "q", "k", "v", "o", "mlp in", "mlp out"} < set(KINDS)


def test_without_shares_a_fused_projection_is_one_kind(estimated: tuple[Any, ...]) -> None:
    op, estimate, fused, _ = estimated
    whole = Breakdown.of(estimate, op.space).by(lambda piece: piece.kind)
    parts = Breakdown.of(estimate, op.space, fused).by(lambda piece: piece.kind)
    assert whole["qkv"].trace == pytest.approx(sum(parts[kind].trace for kind in "qkv"))


def test_heads_are_the_attention_weights_in_other_pieces(estimated: tuple[Any, ...]) -> None:
    op, estimate, _, heads = estimated
    assert [group.name for group in heads] == [f"layer {layer} head {head}" for layer in range(2) for head in range(2)]
    attention = [i for i, n in enumerate(op.space.names) if "attn" in n and not n.endswith("c_proj.bias")]
    by_head = sum(estimate.group_samples[group.name] for group in heads)
    np.testing.assert_allclose(by_head, estimate.samples[:, attention].sum(axis=1), rtol=1e-10)


def test_shares_with_a_rest_are_refused(estimated: tuple[Any, ...]) -> None:
    op, estimate, fused, _ = estimated
    with pytest.raises(ValueError, match="without a rest"):
        Breakdown.of(estimate, op.space, fused[:-1])


# The heat map


def test_heat_map_marks_what_is_not_beyond_its_error() -> None:
    cells = {("0", "q"): (1e-3, 1e-4), ("0", "k"): (-1e-5, 1e-4), ("1", "q"): (-2e-2, 1e-3)}
    figure = heat_map(cells, ["0", "1"], ["q", "k"], title="Mean eigenvalue")
    axes = figure.axes[0]
    (image,) = axes.images
    shown = image.get_array()
    assert shown is not None
    assert shown.mask.tolist() == [[False, False], [False, True]], "a cell that does not exist has no colour"
    assert len([mark for mark in axes.collections if mark.get_hatch()]) == 1
    assert [text.get_text() for text in axes.texts] == ["1.0e-03\n± 1e-04", "-1.0e-05\n± 1e-04", "-2.0e-02\n± 1e-03"]
    red, _, blue, _ = image.cmap(float(image.norm(np.array([1e-3]))[0]))
    assert red > blue, "red is positive"


def test_heat_map_of_many_rows_has_no_figures_in_its_cells() -> None:
    rows = [str(i) for i in range(30)]
    assert not heat_map({(row, "q"): (1.0, 0.1) for row in rows}, rows, ["q"], title="").axes[0].texts


@pytest.mark.parametrize(("cells", "told"), [({}, "there is none"), ({("9", "q"): (1.0, 0.1)}, "outside")])
def test_a_bad_heat_map_is_refused(cells: dict[tuple[str, str], tuple[float, float]], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        heat_map(cells, ["0"], ["q"], title="")
