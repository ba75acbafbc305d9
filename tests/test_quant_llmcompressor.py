"""GPTQ against that of llm-compressor on one layer: equal weights on equal scales, no larger loss otherwise."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quant import Scheme, gptq, round_to_nearest

ROWS, COLUMNS, TOKENS = 96, 192, 2048


@pytest.fixture(scope="module")
def outside() -> Any:
    pytest.importorskip("llmcompressor", reason="llmcompressor is not installed")
    from llmcompressor.modifiers.gptq import gptq_quantize

    return gptq_quantize.quantize_weight


@pytest.fixture(scope="module")
def layer() -> tuple[torch.Tensor, torch.Tensor]:
    """A weight with heavy tails and inputs with a few strong directions, as in a transformer layer."""
    generator = torch.Generator().manual_seed(1)
    mixing = torch.randn(COLUMNS, COLUMNS, generator=generator) / COLUMNS**0.5
    strengths = torch.exp(torch.randn(COLUMNS, generator=generator))
    x = torch.randn(TOKENS, COLUMNS, generator=generator) * strengths @ (torch.eye(COLUMNS) + mixing)
    weight = 0.02 * torch.randn(ROWS, COLUMNS, generator=generator) ** 3
    return weight, x.T @ x / TOKENS


def theirs(outside: Any, weight: torch.Tensor, gram: torch.Tensor, scheme: Scheme, scale: torch.Tensor) -> torch.Tensor:
    """Their weights on given scales, columns in order of activity, as ours."""
    from compressed_tensors.quantization import QuantizationArgs

    settings: dict[str, Any] = {"num_bits": scheme.bits, "symmetric": True, "type": "int", "actorder": "weight"}
    if scheme.group_size == -1:
        settings["strategy"] = "channel"
    else:
        settings |= {"strategy": "group", "group_size": scheme.group_size}
    zero = torch.zeros_like(scale, dtype=torch.int8)
    found, _, fell_back = outside(
        weight[None].clone(), gram[None].clone(), scale[None], zero[None], None, QuantizationArgs(**settings)
    )
    assert not bool(fell_back.any())
    values: torch.Tensor = found[0]
    return values


def output_error(weight: torch.Tensor, rounded: torch.Tensor, gram: torch.Tensor) -> float:
    """Mean squared change of the outputs over the inputs that the Gram matrix is of."""
    difference = (rounded - weight).double()
    return float(torch.einsum("ri,ij,rj->", difference, gram.double(), difference)) / ROWS


@pytest.mark.parametrize("group", [64, -1], ids=lambda g: f"group{g}")
@pytest.mark.parametrize("bits", [2, 3, 4, 8], ids=lambda b: f"{b}bit")
def test_on_equal_scales_the_weights_are_equal(
    bits: int, group: int, outside: Any, layer: tuple[torch.Tensor, torch.Tensor]
) -> None:
    weight, gram = layer
    scheme = Scheme(bits, group)
    ours = gptq(weight, gram, scheme, damping=0.01)
    found = ours.weight.dequantize()
    other = theirs(outside, weight, gram, scheme, ours.weight.scale)
    nearest = output_error(weight, round_to_nearest(weight, scheme).dequantize(), gram)
    errors = {"ours": output_error(weight, found, gram), "theirs": output_error(weight, other, gram)}
    differing = float(((found - other).abs() > 1e-6).double().mean())
    print(f"{scheme.label}: {errors}, round to nearest {nearest:.3e}, {differing:.2%} of the entries differ")
    # Both run in float32: an entry half way between two codes can fall either way, and changes what comes after it.
    assert differing < 0.02
    assert errors["ours"] == pytest.approx(errors["theirs"], rel=0.01)
    assert errors["ours"] < 0.8 * nearest


@pytest.mark.parametrize("group", [64, -1], ids=lambda g: f"group{g}")
@pytest.mark.parametrize("bits", [2, 3, 4, 8], ids=lambda b: f"{b}bit")
def test_with_its_own_scales_it_does_no_better(
    bits: int, group: int, outside: Any, layer: tuple[torch.Tensor, torch.Tensor]
) -> None:
    """Their default scale is the largest entry's; ours comes from the search."""
    weight, gram = layer
    scheme = Scheme(bits, group)
    largest = weight.unflatten(-1, (scheme.groups(COLUMNS), -1)).abs().amax(-1)
    other = theirs(outside, weight, gram, scheme, largest / ((2**bits - 1) / 2))
    errors = {
        "ours": output_error(weight, gptq(weight, gram, scheme).weight.dequantize(), gram),
        "theirs": output_error(weight, other, gram),
    }
    print(f"{scheme.label}: {errors}")
    assert errors["ours"] < errors["theirs"] * 1.02
