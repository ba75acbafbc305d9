"""Forecast of the peak memory of second derivatives, before any of it is taken.

What is kept between steps is counted: which tensors, of which size, how many of them (`Forecast.items`). What one step
holds while it runs comes from `curvature.costs`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from curvature.costs import Costs, Line
from curvature.storage import Stretches
from curvature.streaming import Streaming

__all__ = ["Forecast", "Suggestion", "forecast", "suggest"]


@dataclass(frozen=True)
class Forecast:
    """A forecast of peak memory.

    Attributes:
        peak_bytes: The forecast.
        items: What is in it, by name, in bytes.
        step: The step that reaches the peak.
        method: "streamed" or "whole".
        tokens: Tokens per batch, batch size times sequence.
        stretches: Tokens processed at once; None for the whole-graph method.
    """

    peak_bytes: int
    items: Mapping[str, int]
    step: str
    method: str
    tokens: int
    stretches: Stretches | None = field(default=None)

    def fits(self, available: int) -> bool:
        """Whether this many bytes are enough."""
        return self.peak_bytes <= available


def forecast(
    costs: Costs,
    *,
    seq: int,
    batch: int = 1,
    method: Literal["streamed", "whole"] = "streamed",
    stretches: Stretches | None = None,
    directions: int = 1,
    keep: bool = True,
    reuse_bytes: int | None = None,
    offload: bool = False,
) -> Forecast:
    """Peak memory of products of the Hessian with directions, from measured costs.

    Counted are weights, two vectors per direction (the direction and its product) and the batch's share of the product
    as far as it has come, the activations that wait (x, lambda; s and s_a per direction), and what the allowance keeps.
    For Krylov methods add their basis.

    Args:
        costs: From `measure_costs`.
        seq: Tokens per sequence.
        batch: Sequences per batch.
        method: "streamed" or "whole".
        stretches: Tokens processed at once.
        directions: Directions processed together.
        keep: Whether derivatives are kept for further products.
        reuse_bytes: Memory for what is kept. None: all that can be used.
        offload: Whether activations wait in host memory.

    Returns:
        The forecast. It leaves out what the device's libraries hold for themselves and what an allocator loses to
        fragmentation.
    """
    n = batch * seq
    fixed = {"weights": costs.weights, "vectors": 2 * directions * costs.parameters * costs.vector}
    if method == "whole":
        # Each further layer's parameters add their gradient and their product.
        further = (costs.layers - 1) / costs.layers * (costs.parameters - costs.outer_parameters)
        graph = costs.whole[0](n) + (costs.layers - 1) * costs.whole[1](n) + 2 * further * costs.element
        items = {key: int(value) for key, value in (fixed | {"graph": graph}).items()}
        return Forecast(sum(items.values()), items, "graph of all layers", "whole", n)
    stretches = stretches or costs.stretches
    peaks = []
    for step, states, working in _steps(costs, n, stretches, directions, keep, reuse_bytes, offload):
        items = {key: int(value) for key, value in (fixed | states | {"working": working}).items()}
        peaks.append(Forecast(sum(items.values()), items, step, "streamed", n, stretches))
    return max(peaks, key=lambda f: f.peak_bytes)


def _steps(
    costs: Costs, n: int, stretches: Stretches, k: int, keep: bool, reuse_bytes: int | None, offload: bool
) -> Iterator[tuple[str, dict[str, float], float]]:
    """The steps that can reach the peak: name, what waits meanwhile, what the step itself holds."""
    depth, h, a = costs.layers, costs.hidden * n, costs.mixed * n
    outputs, gradients = costs.outputs * n, costs.gradients * n
    there = 2 if offload else depth  # segments whose activations are on the device: all, or this one and the next
    left = math.inf if reuse_bytes is None else max(0.0, reuse_bytes - (0 if offload else 2 * depth * h))
    kept_outputs = min(depth * outputs, left)
    features = min(h, left - kept_outputs)
    pulled_back = gradients + (0 if offload else a)  # of a segment, where it stays on the device
    kept_gradients = min(depth * pulled_back, left - kept_outputs - features)
    again = outputs * (kept_outputs < depth * outputs) + (gradients + a) * (kept_gradients < depth * pulled_back)
    token, head = min(stretches.tokenwise, n), min(stretches.head, n)

    def rise(sweep: str, part: str, tokens: float) -> float:
        return costs.rises.get((sweep, part), Line())(tokens)

    def stay(sweep: str, part: str, tokens: float) -> float:
        return costs.stays.get((sweep, part), Line())(tokens)

    inner, outer = costs.parameters - costs.outer_parameters, costs.outer_parameters
    cast = 0 if costs.element == costs.vector else k * costs.element  # a direction in the parameters' dtype

    def waiting(lambdas: float, tangents: float, recalled: float, summed: float = 0) -> dict[str, float]:
        return {
            "sums": k * costs.vector * summed,
            "activations": (there + 1) * h,
            "adjoints": min(lambdas, there) * h,
            "tangents and their adjoints": k * min(tangents, there) * (h + a),
            "recalled": recalled,
        }

    everything = kept_outputs + features + kept_gradients
    # What a stretch adds to is whole from the first one on; a rise holds the share of it that was measured.
    part, head_part = token / n, head / n
    yield "backward, head", waiting(0, 0, kept_outputs), h * (1 - head_part) + rise("backward", "head", head)
    pulled = again + stay("backward", "attend", n)
    yield (
        "backward, combine",
        waiting(depth, 0, everything),
        (pulled + (h + a) * (1 - part) + rise("backward", "combine", token)),
    )
    yield "backward, attend", waiting(depth, 0, everything), pulled + h + a + rise("backward", "attend back", n)
    local = inner / depth * (cast + (k - 1) * costs.vector)
    attend = local + k * h + again + rise("tangent", "attend", n) + (k - 1) * (h + a)
    combine = local + k * h + (k - part) * (h + a) + stay("tangent", "attend", n) + rise("tangent", "combine", token)
    last = everything if keep else kept_outputs + features
    for place, waits in (
        ("first segment", waiting(depth, 0, everything)),
        ("last segment", waiting(depth if keep else 1, depth - 1, last, inner / depth * (depth - 1))),
    ):
        yield f"tangent, attend, {place}", waits, attend
        yield f"tangent, combine, {place}", waits, combine
    end = waiting(depth if keep else 0, depth, last, inner + outer * (k - 1) / k)
    yield "tangent, head", end, cast * outer + k * h + (k - head_part) * h + rise("tangent", "head", head)
    end = waiting(depth if keep else 0, depth, last, inner + outer)
    pulled = k * h + again + stay("adjoint", "attend", n)
    yield "adjoint, combine", end, pulled + rise("adjoint", "combine", token)
    yield "adjoint, attend", end, pulled + rise("adjoint", "attend back", n)


@dataclass(frozen=True)
class Suggestion:
    """Settings whose forecast fits.

    Attributes:
        change: What differs from what was asked for, in words; empty if nothing does.
        seq: Tokens per sequence.
        streaming: Settings for `HessianOperator`.
        forecast: The forecast for them.
    """

    change: str
    seq: int
    streaming: Streaming
    forecast: Forecast


def suggest(costs: Costs, available: int, *, seq: int, batch: int = 1, offload: bool = True) -> Suggestion | None:
    """The fastest settings of the streamed method that fit into memory.

    Tried in this order: everything kept; less kept; nothing kept; shorter stretches; activations in host memory, if
    `offload` allows it; shorter sequences, of half the length at each step.

    Returns:
        The first that fits, or None if not even 128 tokens per sequence would.
    """
    usual = costs.stretches
    short = Stretches(max(1, usual.tokenwise // 8), max(1, usual.head // 8))
    frugal = forecast(costs, seq=seq, batch=batch, reuse_bytes=0).peak_bytes
    partial = int(max(0, available - frugal + 2 * costs.layers * costs.hidden * seq * batch))
    nothing = "keep nothing between products"
    tried = [
        ("", seq, Streaming(stretches=usual)),
        ("keep less between products", seq, Streaming(stretches=usual, reuse_bytes=partial)),
        (nothing, seq, Streaming(stretches=usual, keep=False, reuse_bytes=0)),
        (f"{nothing}, in shorter stretches", seq, Streaming(stretches=short, keep=False, reuse_bytes=0)),
    ]
    last = Streaming(stretches=short, keep=False, reuse_bytes=0, offload=offload)
    if offload:
        tried.append((f"{nothing}, in shorter stretches, activations in host memory", seq, last))
    shorter = (seq >> halvings for halvings in range(1, seq.bit_length()))
    tried += [(f"a sequence of {n} tokens", n, last) for n in shorter if n >= 128]
    for change, n, streaming in tried:
        found = forecast(
            costs,
            seq=n,
            batch=batch,
            stretches=streaming.stretches,
            keep=streaming.keep,
            reuse_bytes=streaming.reuse_bytes,
            offload=streaming.offload,
        )
        if found.fits(available):
            return Suggestion(change, n, streaming, found)
    return None
