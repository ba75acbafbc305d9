"""What the steps of a model's second derivatives hold in memory, measured on a few tokens.

What one step holds while it runs (the graph of one part of a segment, or of one stretch of the head) depends on how the
model is written: the derivatives are run on a few tokens of the model at hand, with the bytes of all live tensors
counted, and are taken to grow in proportion to the number of tokens. `curvature.memory` forecasts peaks from it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from curvature.chain import Chain, Segments
from curvature.layers.substitutes import own_code
from curvature.loss import CausalLMLoss
from curvature.precision import raised, vector_dtype
from curvature.segments import ChainedLoss, find_segments
from curvature.storage import Allowance, LiveBytes, Stretches, bytes_of, default_stretches
from curvature.streamed import Streamed
from flashbob import blocked

__all__ = ["Costs", "Line", "measure_costs"]

_SWEEPS = ("forward", "backward", "tangent", "adjoint")


@dataclass(frozen=True)
class Line:
    """Bytes as a function of tokens: fixed + each * tokens."""

    fixed: float = 0.0
    each: float = 0.0

    @classmethod
    def through(cls, points: Mapping[int, float]) -> Line:
        """The line through two points {tokens: bytes}; one that falls is taken as constant."""
        (n, low), (m, high) = sorted(points.items())
        each = max(0.0, (high - low) / (m - n))
        return cls(max(0.0, high - each * m), each)

    def __call__(self, tokens: float) -> float:
        """The bytes for this many tokens."""
        return self.fixed + self.each * tokens


@dataclass(frozen=True)
class Costs:
    """What the steps of a model's second derivatives hold, measured on a few tokens.

    Attributes:
        layers: Segments of the model.
        weights: Bytes of all weights and buffers.
        parameters: Number of parameters that are differentiated.
        outer_parameters: Those of them outside the segments.
        element: Bytes per entry of these parameters.
        vector: Bytes per entry of a direction.
        hidden: Bytes per token of a hidden state.
        mixed: Bytes per token of what `attend` hands to `combine`.
        outputs: Bytes per token and segment of attention results that are recalled in every sweep (o, log-sum-exp).
        gradients: The same of attention's first backward (dq, dk, dv).
        rises: By sweep and part, the bytes that the part takes at its peak beyond those that it finds.
        stays: The same, of those that are left when it ends and that are not among the counted ones.
        whole: Peak of the whole-graph product beyond weights and vectors, for one segment and for each further one.
        stretches: The default stretches.
    """

    layers: int
    weights: int
    parameters: int
    outer_parameters: int
    element: int
    vector: int
    hidden: float
    mixed: float
    outputs: float
    gradients: float
    rises: Mapping[tuple[str, str], Line]
    stays: Mapping[tuple[str, str], Line]
    whole: tuple[Line, Line]
    stretches: Stretches


class _PartMeter:
    """A `timer` for `Streamed` that measures memory: rise and remainder of every part of every sweep."""

    def __init__(self, live: LiveBytes) -> None:
        self.rises: dict[tuple[str, str], int] = {}
        self.stays: dict[tuple[str, str], int] = {}
        self._live, self._sweep = live, ""

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        if name in _SWEEPS:
            self._sweep = name
            yield
            return
        live, key = self._live, (self._sweep, name)
        found, before = live.now, live.peak
        live.peak = live.now
        yield
        self.rises[key] = max(self.rises.get(key, 0), live.peak - found)
        self.stays[key] = max(self.stays.get(key, 0), live.now - found)
        live.peak = max(before, live.peak)


def measure_costs(
    model: nn.Module,
    *,
    loss: ChainedLoss | None = None,
    segments: Segments | None = None,
    layers: int | None = None,
    tokens: tuple[int, int] | None = None,
) -> Costs:
    """Run second derivatives on a few tokens of a model and measure what each step holds.

    Segments of equal structure cost the same, so one of each structure is run. A model with a single layer of each
    structure therefore does for a deep one; `layers` then says how deep.

    Args:
        model: The model on the device and in the dtype that the forecast is for, in evaluation mode.
        loss: The loss.
        segments: The model's decomposition. None: it is found.
        layers: Number of layers to forecast for. None: the model's own. Weights are extended in proportion.
        tokens: The two lengths to measure at. None: 256 and 512, more on a CPU with few attention heads.

    Raises:
        SegmentationError: If the model does not decompose.
        NotImplementedError: If the model attends eagerly or by PyTorch's SDPA, whose second derivatives are N x N.
    """
    attention = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if attention in ("eager", "sdpa"):
        raise NotImplementedError(
            f"attn_implementation={attention!r} holds N x N arrays in its second derivatives, which a forecast in "
            "proportion to the tokens would miss; load the model with attn_implementation='flashbob'"
        )
    device = next(model.parameters()).device
    short, long = tokens or _lengths(model, device)
    embedding = model.get_input_embeddings() if isinstance(model, PreTrainedModel) else None
    vocabulary = getattr(embedding, "num_embeddings", 2)
    ids = torch.randint(0, vocabulary, (1, long), generator=torch.Generator().manual_seed(0)).to(device)
    segments = segments or find_segments(model, loss or CausalLMLoss(), {"input_ids": ids})
    parameters = [p for p in model.parameters() if p.requires_grad]
    runs = {n: _measure(segments({"input_ids": ids[:, :n]}), parameters, model) for n in (short, long)}
    graphs = {
        batch.numel(): _whole_peaks(segments({"input_ids": batch}), parameters, model)
        for batch in _whole_batches(ids, short)
    }
    chain, one = segments({"input_ids": ids[:, :short]}), runs[long]
    depth = len(chain.segments) if layers is None else layers
    inner = {p for segment in chain.segments for p in segment.parameters}
    deeper = depth / max(1, len(chain.segments))
    return Costs(
        layers=depth,
        weights=int(
            sum(bytes_of([p]) * (deeper if p in inner else 1) for p in model.parameters())
            + bytes_of([*model.buffers()])
        ),
        parameters=int(sum(p.numel() * (deeper if p in inner else 1) for p in parameters)),
        outer_parameters=sum(p.numel() for p in parameters if p not in inner),
        element=max(p.element_size() for p in parameters),
        vector=torch.finfo(vector_dtype(parameters)).bits // 8,
        hidden=one.hidden / long,
        mixed=one.mixed / long,
        outputs=one.outputs / long,
        gradients=one.gradients / long,
        rises={key: Line.through({n: run.rises.get(key, 0) for n, run in runs.items()}) for key in one.rises},
        stays={key: Line.through({n: run.stays.get(key, 0) for n, run in runs.items()}) for key in one.stays},
        whole=(
            Line.through({n: one for n, (one, _) in graphs.items()}),
            Line.through({n: two - one for n, (one, two) in graphs.items()}),
        ),
        stretches=default_stretches(chain),
    )


def _lengths(model: nn.Module, device: torch.device) -> tuple[int, int]:
    """Lengths from which memory grows in proportion: on a CPU, where attention works in tiles, those of full tiles."""
    config = getattr(model, "config", None)
    heads = getattr(config, "num_attention_heads", 1)
    tile = min(blocked.MAX_TILE, math.isqrt(blocked.TILE_ELEMENTS // heads))
    short = 256 if device.type != "cpu" else max(256, 1 << tile.bit_length() - 1)
    long = min(2 * short, getattr(config, "max_position_embeddings", 2 * short))
    return long // 2, long


@dataclass(frozen=True)
class _Run:
    hidden: int
    mixed: int
    outputs: int
    gradients: int
    rises: Mapping[tuple[str, str], int]
    stays: Mapping[tuple[str, str], int]


def _measure(chain: Chain, parameters: list[nn.Parameter], model: nn.Module) -> _Run:
    """One product on a chain with one segment of each structure."""
    kinds = {
        (tuple(p.shape for p in segment.parameters), segment.attend is None, segment.tokenwise): segment
        for segment in reversed(chain.segments)
    }
    chain = dataclasses.replace(chain, segments=list(kinds.values()))
    ones = _ones(parameters)
    known = [*parameters, *ones, *model.parameters(), *model.buffers()]
    with LiveBytes() as live:
        live.ignore(known)
        meter = _PartMeter(live)
        derivatives = Streamed(
            chain, parameters, stretches=Stretches(chain.length, chain.length), timer=meter, allowance=Allowance()
        )
        recalled = max((r.bytes() for r in derivatives._recalls), key=sum)
        hidden, mixed = (max(bytes_of([t]) for t in ts) for ts in (derivatives._x, derivatives._alpha))
        derivatives.product(ones)
        del derivatives
    return _Run(hidden, mixed, *recalled, meter.rises, meter.stays)


def _ones(parameters: list[nn.Parameter]) -> list[Tensor]:
    return [torch.ones_like(p, dtype=vector_dtype(parameters)) for p in parameters]


def _whole_batches(ids: Tensor, short: int) -> tuple[Tensor, Tensor]:
    """Two batches of tokens to measure whole graphs on.

    Their peak is where the most tensors of parameters' size are alive while tokens are few, and elsewhere when they are
    many. A GPU can afford many.
    """
    return (ids.expand(4, -1), ids.expand(8, -1)) if ids.is_cuda else (ids[:, :short], ids)


def _whole_peaks(chain: Chain, parameters: list[nn.Parameter], model: nn.Module) -> tuple[int, int]:
    """Peaks of reverse over reverse through the graph of the costliest segment, and through that of two."""
    ones = _ones(parameters)
    known = [*parameters, *ones, *model.parameters(), *model.buffers()]
    chain = dataclasses.replace(chain, head=_plain_head(chain))
    one, two = (_whole_peak(chain, parameters, ones, known, depth) for depth in (1, 2))
    return one, two


def _plain_head(chain: Chain) -> Callable[[Tensor, int, int], Tensor]:
    """The head with PyTorch's cross-entropy, as whole graphs have it: it holds more arrays of the logits' size."""
    readout = chain.readout
    if readout is None:
        return chain.head

    def head(x: Tensor, start: int, stop: int) -> Tensor:
        logits = raised(F.linear(readout.features(x), readout.weight, readout.bias))
        targets = readout.targets[:, start:stop]
        return F.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=readout.ignore_index, reduction="sum"
        )

    return head


def _whole_peak(
    chain: Chain, parameters: list[nn.Parameter], ones: list[Tensor], known: list[Tensor], depth: int
) -> int:
    """Peak of reverse over reverse through one graph of the chain's costliest segment, `depth` times over."""
    segment = max(chain.segments, key=lambda s: sum(p.numel() for p in s.parameters))
    with LiveBytes() as live, torch.enable_grad(), own_code():
        live.ignore(known)
        x = chain.embed()
        for _ in range(depth):
            x = segment.combine(x, None if segment.attend is None else segment.attend(x))
        total = chain.head(x, 0, chain.length) / chain.tokens
        del x
        first = torch.autograd.grad(total, parameters, create_graph=True, allow_unused=True)
        pairs = [(g, z.to(g.dtype)) for g, z in zip(first, ones, strict=True) if g is not None and g.requires_grad]
        torch.autograd.grad([g for g, _ in pairs], parameters, [z for _, z in pairs], allow_unused=True)
    return int(live.peak)
