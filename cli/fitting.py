"""Settings of the streamed product that fit into memory, before any work."""

from __future__ import annotations

import torch

from cli.console import memory
from curvature import LoadedModel
from curvature.costs import Costs, measure_costs
from curvature.layer_parts import SegmentationError
from curvature.memory import forecast, suggest
from curvature.storage import spare_bytes
from curvature.streaming import Streaming

__all__ = ["fitting_streaming"]

_SPARE = 0.05
"""Share of the free memory that forecasts do not see: libraries' own, and what an allocator loses to fragments."""


def fitting_streaming(
    loaded: LoadedModel, *, seq: int, batch: int, method: str, device: torch.device
) -> tuple[Streaming | None, str | None]:
    """Settings for products of the whole Hessian, and a remark where they differ from the usual ones.

    On a GPU, costs a product on a few hundred tokens. On a CPU, where that takes long, only what can never fit is
    refused; where no forecast can be made, nothing is settled.

    Args:
        loaded: The model.
        seq: Tokens per sequence.
        batch: Sequences per batch.
        method: "auto", "streamed" or "whole".
        device: Where the model is.

    Raises:
        ValueError: If it will not fit; the message says what would.
    """
    if device.type != "cuda":
        _check_host(loaded, seq, batch, device)
        return None, None
    try:
        costs = measure_costs(loaded.model)
    except (SegmentationError, NotImplementedError):
        return None, None
    free = int((1 - _SPARE) * spare_bytes(device))
    asked = f"{batch} x {seq:,} tokens of {loaded.info.name} in {loaded.info.dtype}"
    if method == "whole":
        _check_whole(costs, free, seq, batch, asked)
        return None, None
    found = suggest(costs, free, seq=seq, batch=batch)
    least = forecast(costs, seq=seq, batch=batch, keep=False, reuse_bytes=0, offload=True).peak_bytes
    if found is None:
        raise ValueError(
            f"{asked} do not fit: {memory(least)} at least, {memory(free)} free on {device}, and not even 128 tokens "
            "would; choose --dtype bfloat16, or restrict --params"
        )
    if found.seq != seq:
        raise ValueError(
            f"{asked} do not fit: {memory(least)} at least, {memory(free)} free on {device}; --seq {found.seq} would "
            f"({memory(found.forecast.peak_bytes)}), or a smaller --batch, or restrict --params"
        )
    if not found.change:
        return None, None
    peak = memory(found.forecast.peak_bytes)
    return found.streaming, f"to fit into the {memory(free)} free on {device}: {found.change} (forecast {peak})"


def _check_host(loaded: LoadedModel, seq: int, batch: int, device: torch.device) -> None:
    """Refuse what needs more than there is for the activations of all layers and their adjoints alone."""
    config, element = loaded.model.config, next(loaded.model.parameters()).element_size()
    layers, width = (getattr(config, name, 0) or 0 for name in ("num_hidden_layers", "hidden_size"))
    free, least = spare_bytes(device), 2 * layers * width * element * seq * batch
    if least > free:
        shorter = free * seq // least // 2 // 128 * 128
        remedy = f"--seq {shorter} may, or a smaller --batch" if shorter else "choose a smaller --batch or model"
        raise ValueError(
            f"{batch} x {seq:,} tokens of {loaded.info.name} in {loaded.info.dtype} do not fit: the activations of its "
            f"{layers} layers alone take {memory(least)}, {memory(free)} free on this host; {remedy}"
        )


def _check_whole(costs: Costs, free: int, seq: int, batch: int, asked: str) -> None:
    whole = forecast(costs, seq=seq, batch=batch, method="whole").peak_bytes
    if whole > free:
        streamed = forecast(costs, seq=seq, batch=batch, keep=False, reuse_bytes=0).peak_bytes
        raise ValueError(
            f"{asked} do not fit with --method whole: {memory(whole)}, {memory(free)} free; --method streamed takes "
            f"{memory(streamed)}"
        )
