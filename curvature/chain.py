"""A model as a chain of segments, to be differentiated one at a time.

    x_0 = embed(),   x_{l+1} = combine_l(x_l, attend_l(x_l)),   total = sum over stretches of head(x_n[:, a:b], a, b)

`attend` is what mixes tokens in a segment, `combine` is the rest, which may then run on any stretch of tokens.
`curvature.segments.find_segments` makes the chain of a transformers model; for other models it is written by hand:

    def segments(batch):
        ids, targets = batch["input_ids"], loss.targets(batch)
        return Chain(
            embed=lambda: model.embedding(ids),
            segments=[Segment("layer", list(m.parameters()), lambda x, _, m=m: m(x)) for m in model.layers],
            head=lambda x, a, b: loss.token_sum(model.head(x), targets[:, a:b]),
            outer=[*model.embedding.parameters(), *model.head.parameters()],
            length=ids.shape[1],
            tokens=int((targets != loss.ignore_index).sum()),
        )
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor, nn

from curvature.loss import Batch
from curvature.readout import Readout

__all__ = ["Chain", "Segment", "Segments", "cut", "cut_any", "paste", "spans"]


@dataclass(frozen=True)
class Segment:
    """One link x -> combine(x, attend(x)) between activations [B, N, width]; both parts twice differentiable.

    Attributes:
        name: For messages.
        parameters: Every parameter that either part reads.
        combine: (x, a) -> the next x; a is None without `attend`.
        attend: x -> a, of shape [B, N, any width]; None where there is no such part.
        tokenwise: Whether `combine` at one position reads x and a at this position only, and may be run on contiguous
            copies of x[:, i:j] and a[:, i:j]. `attend` is of use only where it is so.
    """

    name: str
    parameters: Sequence[nn.Parameter]
    combine: Callable[[Tensor, Tensor | None], Tensor]
    attend: Callable[[Tensor], Tensor] | None = None
    tokenwise: bool = False


@dataclass(frozen=True)
class Chain:
    """The chain of one batch.

    Attributes:
        embed: () -> x_0 [B, N, width].
        segments: The links in order.
        head: (x_n[:, a:b], a, b) -> the loss summed over the counted tokens of positions a..b, a scalar.
        outer: Parameters that `embed` or `head` reads; those that both read (tied weights) are differentiated in both.
        length: N.
        tokens: Number of counted tokens.
        vocabulary: Width of the logits, for the choice of the head's stretches; 0: the length of the longest matrix in
            `outer`.
        readout: The head as a linear map and the cross-entropy of its result, where it is one: much cheaper.
    """

    embed: Callable[[], Tensor]
    segments: Sequence[Segment]
    head: Callable[[Tensor, int, int], Tensor]
    outer: Sequence[nn.Parameter]
    length: int
    tokens: int
    vocabulary: int = 0
    readout: Readout | None = None


Segments: TypeAlias = Callable[[Batch], Chain]
"""A model's decomposition: the chain of any batch."""


def spans(length: int, size: int) -> list[tuple[int, int]]:
    """[0, length) cut into stretches of `size`, the last one shorter."""
    return [(start, min(start + size, length)) for start in range(0, length, size)]


def cut(x: Tensor, start: int, stop: int) -> Tensor:
    """The positions start..stop of an activation [B, N, width], contiguous as whole activations are."""
    return x[:, start:stop].contiguous()


def cut_any(x: Tensor | None, span: tuple[int, int]) -> Tensor | None:
    """`cut` of an activation that may be missing, which stands for zeros."""
    return None if x is None else cut(x, *span)


def paste(canvas: Tensor | None, piece: Tensor | None, span: tuple[int, int], shape: Sequence[int]) -> Tensor | None:
    """Add a piece at its stretch of a canvas [B, N, width]; the first piece makes the canvas, on memory of its own.

    A missing piece stands for zeros; the canvas stays missing until there is a piece.
    """
    if piece is None:
        return canvas
    if canvas is None:
        if span == (0, shape[1]):
            return piece.detach().clone()
        canvas = piece.new_zeros(shape)
    canvas[:, slice(*span)] += piece
    return canvas
