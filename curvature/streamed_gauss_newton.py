"""Products J^T Lambda J z of one batch, one segment of the model at a time.

J is the Jacobian of the logits, Lambda the curvature of the token losses in them (`curvature.token_curvature`). With
the model as a chain of segments x_{l+1} = f_l(x_l; theta_l) (`curvature.chain`) and direction z:

    tangent,  l = 1..n   x_{l+1} = f_l(x_l),   xdot_{l+1} = df_l/dx xdot_l + df_l/dtheta z_l
    head                 u = derivative of the logits,   mu_{n+1} = pull-back of the head at Lambda u
    adjoint,  l = n..1   mu_l = pull-back of f_l at mu_{l+1}, which also gives the product in theta_l

No second derivative of a segment enters. The tangent sweep is one forward pass with values and derivatives side by
side, the adjoint sweep one forward and one backward pass; attention outputs of the former are recalled in the latter.
The head runs in stretches of tokens, so that the logits are never whole.

Memory: one activation [B, N, width] per segment, two per direction, and the graph of one part. Nothing is kept between
products: nothing that could be is expensive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn

from curvature.chain import Chain, cut, cut_any, paste, spans
from curvature.directions import Directions, pull
from curvature.storage import Allowance, Shelf, Stretches, bytes_of, default_stretches
from curvature.tangents import Push
from curvature.token_curvature import TokenCurvature
from flashbob.recall import Recall

__all__ = ["StreamedGaussNewton"]

_Tensors: TypeAlias = list[Tensor | None]

_TOGETHER = 16


class StreamedGaussNewton:
    """J^T Lambda J / tokens of one batch, segment by segment: a `curvature.whole_graph.BatchDerivatives`.

    Exact: equal to the whole-graph product up to the order of summation.

    Args:
        chain: The batch's segments; its head must answer with the logits [B, n, vocabulary] of its stretch.
        curvature: Lambda.
        parameters: The parameters to differentiate, each once; only they should require a gradient.
        push: How directions are pushed forward.
        stretches: Sizes of the pieces that token-wise parts run in. None: see `curvature.storage.default_stretches`.
        allowance: Memory for activations (counted, but kept in any case) and attention outputs. None: no limit.
        offload: Whether activations wait in pinned host memory between their uses (CUDA only).

    Attributes:
        tokens: Number of counted tokens.
    """

    def __init__(
        self,
        chain: Chain,
        curvature: TokenCurvature,
        parameters: Sequence[nn.Parameter],
        push: Push,
        *,
        stretches: Stretches | None = None,
        allowance: Allowance | None = None,
        offload: bool = False,
    ) -> None:
        self.tokens = chain.tokens
        self._chain, self._curvature, self._parameters, self._push = chain, curvature, list(parameters), push
        self._stretches, self._allowance = stretches or default_stretches(chain), allowance or Allowance()
        self._offload = offload
        number = {p: i for i, p in enumerate(self._parameters)}
        self._inner = [sorted({number[p] for p in s.parameters if p in number}) for s in chain.segments]
        self._outer = sorted({number[p] for p in chain.outer if p in number})
        with torch.enable_grad():
            reached = chain.embed().requires_grad
        reading = [i for i, numbers in enumerate(self._inner) if numbers]
        self._first = -1 if reached else min(reading, default=len(chain.segments))

    def product(self, direction: Sequence[Tensor], *, keep: bool = True) -> _Tensors:
        """The product with one direction; see `BatchDerivatives.product`."""
        return self._together([direction])[0]

    def products(self, directions: Sequence[Sequence[Tensor]], *, keep: bool = True) -> Iterator[_Tensors]:
        """Products with several directions, up to 16 of them sharing the adjoint sweep's forward passes."""
        for start, stop in spans(len(directions), _TOGETHER):
            yield from self._together(directions[start:stop])

    def _together(self, directions: Sequence[Sequence[Tensor]]) -> list[_Tensors]:
        z = Directions(directions, self._parameters)
        if not self.tokens:
            return z.sums
        recalls = [Recall(self._allowance.take) for _ in self._chain.segments]
        kept, x, xdot, shelf = self._tangent_sweep(z, recalls)
        adjoints = self._head(x, xdot, z)
        del xdot, x
        with torch.enable_grad():
            for i in reversed(range(max(self._first, 0), len(self._inner))):
                shelf.fetch_ahead(kept[max(i - 1, 0) : i])
                adjoints = self._pull_back(i, _leaf(shelf.get(kept.pop()), i > self._first), adjoints, recalls.pop(), z)
            if self._first < 0:
                x, parameters = self._chain.embed(), self._select(self._outer)
                for k, adjoint in enumerate(adjoints):
                    z.add(k, self._outer, pull([x], parameters, [adjoint], retain=k + 1 < z.count))
        return z.sums

    def _tangent_sweep(self, z: Directions, recalls: list[Recall]) -> tuple[_Tensors, Tensor, _Tensors, Shelf]:
        """Activations ahead of each segment (laid aside), behind the last one, and the derivatives of the latter."""
        x, xdot = self._pushed(lambda: self._chain.embed(), [], [[] for _ in range(z.count)], self._outer, z)
        x = x.detach()
        shelf, kept = Shelf(x.device, self._offload), []
        for i, recall in enumerate(recalls):
            needed = i >= self._first
            kept.append(shelf.put(x) if needed else None)
            if needed and not self._offload:
                self._allowance.spend(bytes_of([x]))
            x, xdot = self._push_segment(i, x, xdot, recall if needed else Recall(lambda _: False), z)
        return kept, x, xdot, shelf

    def _push_segment(
        self, i: int, x: Tensor, xdot: _Tensors, recall: Recall, z: Directions
    ) -> tuple[Tensor, _Tensors]:
        segment, numbers = self._chain.segments[i], self._inner[i]
        a: Tensor | None = None
        adot: _Tensors = [None] * z.count
        attend = segment.attend
        if attend is not None:

            def attended(x: Tensor) -> Tensor:
                with recall.calls(gradients=False):
                    return attend(x)

            a, adot = self._pushed(attended, [x], [[t] for t in xdot], numbers, z)
        following: Tensor | None = None
        along: _Tensors = [None] * z.count
        for span in self._spans(i, x):
            pieces = [cut(t, *span) for t in (x, a) if t is not None]
            slopes = [[cut_any(t, span) for t in pair][: len(pieces)] for pair in zip(xdot, adot, strict=True)]
            combine = segment.combine if a is not None else lambda x: segment.combine(x, None)
            piece, found = self._pushed(combine, pieces, slopes, numbers, z)
            following = paste(following, piece, span, x.shape)
            along = [paste(t, f, span, x.shape) for t, f in zip(along, found, strict=True)]
        return _there(following), along

    def _pushed(
        self,
        function: Callable[..., Tensor],
        inputs: Sequence[Tensor],
        along: Sequence[Sequence[Tensor | None]],
        numbers: Sequence[int],
        z: Directions,
    ) -> tuple[Tensor, _Tensors]:
        """The value of a part, and its derivative along each direction."""
        parameters, value = self._select(numbers), None
        found: _Tensors = []
        for k, slopes in enumerate(along):
            tangents = z.tangents(k, numbers)
            if all(t is None for t in (*slopes, *tangents)):
                found.append(None)
            else:
                value, slope = self._push(function, inputs, slopes, parameters, tangents)
                found.append(slope)
        if value is None:
            with torch.no_grad():
                value = function(*inputs)
        return value, found

    def _head(self, x: Tensor, xdot: _Tensors, z: Directions) -> _Tensors:
        """Through the head and back: the adjoint of x_n for each direction."""
        adjoints: _Tensors = [None] * z.count
        parameters = self._select(self._outer)
        for start, stop in spans(x.shape[1], max(1, self._stretches.head // x.shape[0])):
            span = (start, stop)
            leaf = _leaf(cut(x, *span), self._first < len(self._inner))
            run = lambda x, span=span: self._chain.head(x, *span)  # noqa: E731
            logits, u = self._pushed(run, [leaf.detach()], [[cut_any(t, span)] for t in xdot], self._outer, z)
            _check_logits(logits, leaf)
            cotangents: _Tensors = [
                None if t is None else self._curvature.product(logits, t, start).div_(self.tokens) for t in u
            ]
            del logits, u
            with torch.enable_grad():
                output = run(leaf)
                for k, cotangent in enumerate(cotangents):
                    found, *pieces = pull([output], [leaf, *parameters], [cotangent], retain=k + 1 < z.count)
                    adjoints[k] = paste(adjoints[k], found, span, x.shape)
                    z.add(k, self._outer, pieces)
        return adjoints

    def _pull_back(self, i: int, x: Tensor, adjoints: _Tensors, recall: Recall, z: Directions) -> _Tensors:
        """Pull the adjoints of x_{i+1} back through segment i, and add the products in its parameters."""
        segment, numbers = self._chain.segments[i], self._inner[i]
        parameters, a = self._select(numbers), None
        into: _Tensors = [None] * z.count
        into_a: _Tensors = [None] * z.count
        if segment.attend is not None:
            with recall.calls(gradients=False):
                a = segment.attend(x)
        for span in self._spans(i, x):
            leaves = [_leaf(cut(t, *span), t.requires_grad) for t in (x, a) if t is not None]
            y = segment.combine(*leaves) if a is not None else segment.combine(leaves[0], None)
            for k, adjoint in enumerate(adjoints):
                found = pull([y], [*leaves, *parameters], [cut_any(adjoint, span)], retain=k + 1 < z.count)
                into[k] = paste(into[k], found[0], span, x.shape)
                if a is not None:
                    into_a[k] = paste(into_a[k], found[1], span, a.shape)
                z.add(k, numbers, found[len(leaves) :])
            del leaves, y, found
        if a is not None:
            for k in range(z.count):
                found = pull([a], [x, *parameters], [into_a[k]], retain=k + 1 < z.count)
                into[k] = paste(into[k], found[0], (0, x.shape[1]), x.shape)
                z.add(k, numbers, found[1:])
        return into

    def _spans(self, i: int, x: Tensor) -> list[tuple[int, int]]:
        tokenwise = self._chain.segments[i].tokenwise
        return spans(x.shape[1], max(1, self._stretches.tokenwise // x.shape[0]) if tokenwise else x.shape[1])

    def _select(self, numbers: Sequence[int]) -> list[nn.Parameter]:
        return [self._parameters[i] for i in numbers]


def _check_logits(logits: Tensor, x: Tensor) -> None:
    if logits.ndim != 3 or logits.shape[:2] != x.shape[:2]:
        raise ValueError(
            f"the chain's head must answer with logits {[*x.shape[:2], 'vocabulary']}, got {list(logits.shape)}; a "
            "hand-written chain that answers with the loss serves the Hessian only: use method='whole'"
        )


def _leaf(t: Tensor | None, wanted: bool = True) -> Tensor:
    return _there(t).detach().requires_grad_(wanted)


def _there(t: Tensor | None) -> Tensor:
    if t is None:
        raise RuntimeError("an activation is missing: a fault of the sweeps, not of the model")
    return t
