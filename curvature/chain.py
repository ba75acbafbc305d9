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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from curvature.loss import Batch
from curvature.readout import Readout

__all__ = ["Chain", "Reads", "Segment", "Segments", "cut", "cut_any", "paste", "spans"]


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
class Reads:
    """What a batch's chain has been made of, beside its model: two chains that agree in it are the same.

    Attributes:
        tokens: Tensors of the chain's own that its functions read whenever they run. With the values of another chain's
            copied into them, this chain becomes the other, if both are of one kind.
        settled: Everything else, in dataclasses, sequences and mappings: positions, masks, flags.
    """

    tokens: Sequence[Tensor]
    settled: Any

    def same_kind(self, other: Reads) -> bool:
        """Whether the tokens have the same shapes, and everything else is equal. Cost: a read of `settled`."""
        shapes = [[(t.shape, t.dtype, t.device) for t in reads.tokens] for reads in (self, other)]
        return shapes[0] == shapes[1] and _equal(self.settled, other.settled, set())


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
        reads: What the chain has been made of, where that is known: its launches then serve other batches as well.
    """

    embed: Callable[[], Tensor]
    segments: Sequence[Segment]
    head: Callable[[Tensor, int, int], Tensor]
    outer: Sequence[nn.Parameter]
    length: int
    tokens: int
    vocabulary: int = 0
    readout: Readout | None = None
    reads: Reads | None = None


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


def _equal(a: Any, b: Any, known: set[tuple[int, int]]) -> bool:
    """Whether two trees are equal; what is not known to be equal is different. Pairs are looked at once."""
    if a is b or (id(a), id(b)) in known:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        equal = (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device) and torch.equal(a, b)
    elif is_dataclass(a):
        equal = all(_equal(getattr(a, f.name), getattr(b, f.name), known) for f in fields(a))
    elif isinstance(a, Mapping):
        equal = a.keys() == b.keys() and all(_equal(a[key], b[key], known) for key in a)
    elif isinstance(a, list | tuple):
        equal = len(a) == len(b) and all(_equal(x, y, known) for x, y in zip(a, b, strict=True))
    else:
        equal = isinstance(a, bool | int | float | str) and a == b
    if equal:
        known.add((id(a), id(b)))
    return equal
