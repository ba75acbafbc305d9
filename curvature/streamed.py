"""Exact second derivatives of one batch, one segment of the model at a time.

Reverse over reverse through the whole model keeps the graphs of both passes; nothing in the mathematics needs them at
once. With the model as a chain of segments x_{l+1} = f_l(x_l; theta_l) (`curvature.chain`), loss L and direction z:

    sweep 1, l = 1..n   x_{l+1} = f_l(x_l)                                  no graph
    sweep 2, l = n..1   lambda_l = dL/dx_l                                  first-order graph of one segment
    sweep 3, l = 1..n   (lambda_l, g_l) = pull-back of f_l at lambda_{l+1}  second-order graph of one segment
                        phi_l = <lambda_l, xdot_l> + <g_l, z_l>
                        s_l = dphi_l/dx_l,   hz_l += dphi_l/dtheta_l,   xdot_{l+1} = dphi_l/dlambda_{l+1}
    sweep 4, l = n..1   (r, q) = pull-back of f_l at lambdadot_{l+1}        first-order graph of one segment
                        lambdadot_l = s_l + r,   hz_l += q

xdot is the derivative of the activations along z, lambdadot that of their adjoints. phi_l is linear in lambda_{l+1},
and its derivative there is the forward-mode derivative of f_l: one double backward per segment yields all three.

A segment combine(x, a) with a = attend(x) is differentiated part by part, `combine` in stretches of tokens. With
alpha = dL/da, sweep 3 takes `attend` at alpha along xdot, which gives adot, then `combine` at lambda_{l+1} along
(xdot, adot); the derivative of that by a, s_a, waits for sweep 4, where it joins what `combine` pulls back onto a. The
head, too, runs in stretches, so that the logits are never whole.

Memory: three activations [B, N, width] per segment (x, lambda and alpha, of which sweep 3 replaces the last two by s
and s_a), and the graph of one part. Sweeps 1 and 2 do not depend on z: kept, they serve further directions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TypeAlias

import torch
from torch import Tensor, nn

from curvature.chain import Chain, Segment, cut, cut_any, paste, spans
from curvature.directions import Directions, pull
from curvature.head import Add, make_head
from curvature.layers.unread import unread_gradients
from curvature.storage import Allowance, Shelf, Stretches, bytes_of, default_stretches, spare_bytes
from flashbob.recall import Recall

__all__ = ["Streamed"]

_Tensors: TypeAlias = list[Tensor | None]

_TOGETHER = 16


class Streamed:
    """Second derivatives of one batch's mean loss, segment by segment: a `curvature.whole_graph.BatchDerivatives`.

    Exact: equal to the whole-graph product up to the order of summation. Cost of construction: one forward and one
    backward pass. Of a product: one double backward and one backward pass, with the forward passes that they need.
    Results of attention that runs through `flashbob` are recalled instead of computed again, as far as the allowance
    goes: with all of them a further product costs one double and one first backward per attention.

    Args:
        chain: The batch's segments.
        parameters: The parameters to differentiate, each once. Those that no segment reads have zero products. Only
            they should require a gradient: autograd then records nothing for the others.
        stretches: Sizes of the pieces that token-wise parts run in. None: see `curvature.storage.default_stretches`.
        allowance: Memory for x, lambda and what spares computation (alpha, attention results). The first two are
            counted, but kept in any case. None: no limit.
        offload: Whether activations wait in pinned host memory between their uses (CUDA only), and those of attention's
            first backwards that the allowance has no room for; these take at most half of the host's free memory.
        timer: A context that the sweeps "forward", "backward", "tangent" and "adjoint" run in, and within them their
            parts "attend", "combine", "attend back" and "head"; for measurements.
        read: Whether the loss is read by the host at once. Otherwise `read_loss` does it, whenever it is called.
        products: Whether products are to follow. Otherwise sweep 2 takes the gradients by the parameters as it goes,
            which saves `gradient` a pass forward and one backward, and activations are dropped behind it.

    Attributes:
        tokens: Number of counted tokens.
        allowance: What is left of the allowance.
        loss: The batch's mean loss, once it has been read.

    Raises:
        FloatingPointError: If the loss that is read is not finite.
    """

    def __init__(
        self,
        chain: Chain,
        parameters: Sequence[nn.Parameter],
        *,
        stretches: Stretches | None = None,
        allowance: Allowance | None = None,
        offload: bool = False,
        timer: Callable[[str], AbstractContextManager[object]] = lambda _: nullcontext(),
        read: bool = True,
        products: bool = True,
    ) -> None:
        self.tokens, self.loss = chain.tokens, 0.0
        self._chain, self._parameters = chain, list(parameters)
        self._stretches, self.allowance = stretches or default_stretches(chain), allowance or Allowance()
        self._timer, self._released, self._offload = timer, not products, offload
        self._gradient: _Tensors | None = None if products else [None] * len(self._parameters)
        number = {p: i for i, p in enumerate(self._parameters)}
        self._inner = [sorted({number[p] for p in s.parameters if p in number}) for s in chain.segments]
        self._outer = sorted({number[p] for p in chain.outer if p in number})
        n = len(chain.segments)
        self._x: _Tensors = [None] * (n + 1)
        self._lambda: _Tensors = [None] * (n + 1)
        self._alpha: _Tensors = [None] * n
        self._shelf = Shelf(self._parameters[0].device, offload)
        host = Allowance(spare_bytes(torch.device("cpu")) // 2) if self._shelf.offloads else None
        spill = None if host is None else (self._shelf, host.take)
        self._recalls = [Recall(self.allowance.take, spill) for _ in range(n)]
        self._first = n
        if self.tokens:
            with self._timer("forward"), torch.no_grad():
                self._first = self._run_forward(offload)
            self._head = make_head(
                chain, self._parameters, self._outer, self._stretches.head, self._first < n, self.allowance, timer
            )
            with self._timer("backward"), torch.enable_grad():
                self._total, adjoint = self._head.loss(_there(self._x[-1]))
                if read:
                    self.read_loss()
                if self._gradient is None:
                    self._run_backward(adjoint)
                else:
                    self._run_gradient(adjoint, self._gradient)

    def read_loss(self) -> None:
        """Fetch the loss, and refuse one that is not finite."""
        self.loss = _finite(self._total)

    def left(self) -> list[Tensor]:
        """All that sweeps 1 and 2 have left for products; the values of another batch of the same kind may replace it.

        What a product has added since is dropped: the first backward of an attention with no parameters ahead of it.
        """
        if 0 <= self._first < len(self._recalls):
            self._recalls[self._first].forget_gradients()
        tensors = [*self._x, *self._lambda, *self._alpha, *self._head.kept()]
        return [*(t for t in tensors if t is not None), *(t for recall in self._recalls for t in recall.tensors())]

    def product(self, direction: Sequence[Tensor], *, keep: bool = True) -> list[Tensor | None]:
        """Hessian of the batch's mean loss times one direction; see `BatchDerivatives.product`."""
        return self._together([direction], keep)[0]

    def products(self, directions: Sequence[Sequence[Tensor]], *, keep: bool = True) -> Iterator[list[Tensor | None]]:
        """Products with several directions; see `BatchDerivatives.products`.

        Directions that are processed together share every forward pass and every graph. Each beyond the first takes two
        activations per segment; as many are taken together as the allowance has room for, at most 16.
        """
        each = 2 * bytes_of(self._x)
        size = int(max(1, min(_TOGETHER, 1 + self.allowance.left / max(each, 1))))
        for start, stop in spans(len(directions), size):
            yield from self._together(directions[start:stop], keep or stop < len(directions))

    def gradient(self) -> list[Tensor | None]:
        """Gradient of the batch's mean loss: one tensor per parameter, or None where it is zero.

        Cost: one forward and one backward pass beyond construction; nothing where no products are to follow.
        """
        if self._gradient is not None:
            return self._gradient
        sums: _Tensors = [None] * len(self._parameters)
        add = _adding(sums)
        self._check_present()
        with torch.enable_grad():
            if self.tokens:
                self._head.gradient(_there(self._x[-1]), add)
            for i in range(max(self._first, 0), len(self._inner)):
                self._pull_back(i, [self._shelf.get(self._lambda[i + 1])], [None], [None], add)
            if self._first < 0:
                self._embed_adjoint([self._shelf.get(self._lambda[0])], add)
        return sums

    def _together(self, directions: Sequence[Sequence[Tensor]], keep: bool) -> list[_Tensors]:
        z = self.directions(directions)
        self.sweep(z, keep=keep)
        return z.sums

    def directions(self, directions: Sequence[Sequence[Tensor]], present: list[list[bool]] | None = None) -> Directions:
        """Directions for `sweep`; see `curvature.directions.Directions`."""
        return Directions(directions, self._parameters, present)

    def sweep(self, z: Directions, *, keep: bool = True) -> None:
        """Sweeps 3 and 4: add the products with directions that are taken together to `z.sums`.

        Args:
            z: The directions.
            keep: See `product`.
        """
        self._check_present()
        self._released, n = not keep, len(self._chain.segments)
        if not self.tokens:
            return
        s: list[_Tensors] = [[None] * z.count for _ in range(n)]
        s_a: list[_Tensors] = [[None] * z.count for _ in range(n)]
        with torch.enable_grad(), self._timer("tangent"):
            xdot, start = self._embed_tangent(z)
            for i in range(start, n):
                ahead = [*self._x[i + 1 : i + 2], *self._alpha[i + 1 : i + 2], *self._lambda[i + 2 : i + 3]]
                self._shelf.fetch_ahead([*ahead, *(t for r in self._recalls[i + 1 : i + 2] for t in r.gradients())])
                xdot, s[i], s_a[i] = self._tangent(i, xdot, z)
                if not keep:
                    self._lambda[i + 1] = self._alpha[i] = None
                    self._recalls[i].forget_gradients()
            adjoints = self._head.second(_there(self._x[-1]), xdot, z)
            if not keep:
                self._head.release()
            del xdot
        with torch.enable_grad(), self._timer("adjoint"):
            for i in reversed(range(max(self._first, 0), n)):
                if i > max(self._first, 0):
                    self._shelf.fetch_ahead([self._x[i - 1], *s[i - 1], *s_a[i - 1]])
                adjoints, _ = self._pull_back(i, adjoints, s.pop(), s_a.pop(), z.add)
                if not keep:
                    self._x[i], self._recalls[i] = None, Recall()
            if self._first < 0:
                self._embed_adjoint(adjoints, z.add)

    def _check_present(self) -> None:
        if self._released:
            raise RuntimeError("these derivatives were released by a product with keep=False; make new ones")

    # Sweeps 1 and 2.

    def _run_forward(self, offload: bool) -> int:
        """Fill x. Returns the first segment that reads a selected parameter (the embedding is -1, the head n)."""
        chain = self._chain
        with torch.enable_grad():
            x = chain.embed()
        reading = [i for i, numbers in enumerate(self._inner) if numbers]
        first = -1 if x.requires_grad else min(reading, default=len(chain.segments))
        x = x.detach()
        for i, segment in enumerate(chain.segments):
            if i >= first:
                self.allowance.spend(0 if offload else 2 * bytes_of([x]))  # and as much for lambda
                self._x[i] = self._shelf.put(x)
            else:
                self._recalls[i] = Recall(lambda _: False)  # this segment is not run again
            a = self._attend(i, x)
            following = None
            for span in self._spans(segment, x):
                piece = segment.combine(cut(x, *span), None if a is None else cut(a, *span))
                following = paste(following, piece, span, x.shape)
            x = _there(following)
        self._x[-1] = x
        return first

    def _run_backward(self, adjoint: Tensor | None) -> None:
        """Fill lambda and, as far as the allowance goes, alpha, from dL/dx_n."""
        for i in reversed(range(self._first + 1, len(self._chain.segments))):
            self._shelf.fetch_ahead(self._x[max(i - 1, 0) : i])
            [pulled], [alpha] = self._pull_back(i, [adjoint], [None], [None], None)
            self._lambda[i + 1], adjoint = self._shelf.put(adjoint), pulled
            if self._offload or self.allowance.take(bytes_of([alpha])):
                self._alpha[i] = self._shelf.put(alpha)
        if self._first < len(self._chain.segments):
            self._lambda[self._first + 1] = self._shelf.put(adjoint)

    def _run_gradient(self, adjoint: Tensor | None, sums: _Tensors) -> None:
        """Sweep 2 with the gradients by the parameters, in place of what products need."""
        add = _adding(sums)
        self._head.gradient(_there(self._x[-1]), add)
        self._head.release()
        for i in reversed(range(max(self._first, 0), len(self._chain.segments))):
            self._shelf.fetch_ahead(self._x[max(i - 1, 0) : i])
            [adjoint], _ = self._pull_back(i, [adjoint], [None], [None], add)
            self._x[i + 1], self._recalls[i] = None, Recall()
        if self._first < 0:
            self._embed_adjoint([adjoint], add)
        self._x = []

    # Parts of sweeps 3 and 4.

    def _embed_tangent(self, z: Directions) -> tuple[_Tensors, int]:
        """xdot_1 for each direction, and the first segment that a direction reaches."""
        xdot: _Tensors = [None] * z.count
        start = min((i for i, numbers in enumerate(self._inner) if z.any(numbers)), default=len(self._inner))
        if self._first >= 0 or not z.any(self._outer):
            return xdot, start
        adjoint, parameters = _leaf(self._shelf.get(self._lambda[0])), self._select(self._outer)
        first = pull([self._chain.embed()], parameters, [adjoint], create_graph=True)
        for k in range(z.count):
            xdot[k], *pieces = pull(first, [adjoint, *parameters], z.tangents(k, self._outer), retain=k + 1 < z.count)
            z.add(k, self._outer, pieces)
        return xdot, start if all(t is None for t in xdot) else 0

    def _tangent(self, i: int, xdot: _Tensors, z: Directions) -> tuple[_Tensors, _Tensors, _Tensors]:
        """Sweep 3 through segment i. Returns the next xdot, and s and s_a, laid aside, for each direction."""
        segment, numbers = self._chain.segments[i], self._inner[i]
        parameters, tangents = self._select(numbers), [z.tangents(k, numbers) for k in range(z.count)]
        x, adjoint = _leaf(self._shelf.get(self._x[i]), i > self._first), _there(self._shelf.get(self._lambda[i + 1]))
        following: _Tensors = [None] * z.count
        s, s_a, adot = following.copy(), following.copy(), following.copy()
        with self._timer("attend"):
            with unread_gradients():
                a = self._attend(i, x, gradients=True)
            if a is not None and a.requires_grad:
                alpha = _leaf(self._alpha_of(i, x, a, adjoint))
                first = pull([a], [x, *parameters], [alpha], create_graph=True)
                for k, tangent in enumerate(tangents):
                    along, into = [xdot[k], *tangent], [x, alpha, *parameters]
                    s[k], adot[k], *pieces = pull(first, into, along, retain=k + 1 < z.count)
                    s[k] = paste(None, s[k], (0, x.shape[1]), x.shape)
                    z.add(k, numbers, pieces)
                a = a.detach().requires_grad_()
                del first, alpha, into, pieces
        for span in self._spans(segment, x):
            with self._timer("combine"):
                leaves, outer = _leaves(x, a, span), _leaf(cut(adjoint, *span))
                with unread_gradients():
                    y = segment.combine(*leaves) if a is not None else segment.combine(leaves[0], None)
                first = pull([y], [*leaves, *parameters], [outer], create_graph=True)
                for k, tangent in enumerate(tangents):
                    along = [cut_any(t, span) for t in (xdot[k], adot[k])][: len(leaves)]
                    found = pull(first, [outer, *leaves, *parameters], [*along, *tangent], retain=k + 1 < z.count)
                    following[k] = paste(following[k], found[0], span, x.shape)
                    s[k] = paste(s[k], found[1], span, x.shape)
                    if a is not None:
                        s_a[k] = paste(s_a[k], found[2], span, a.shape)
                    z.add(k, numbers, found[1 + len(leaves) :])
                del leaves, outer, y, first, found, along
        return following, [self._shelf.put(t) for t in s], [self._shelf.put(t) for t in s_a]

    def _pull_back(
        self, i: int, adjoints: _Tensors, s: _Tensors, s_a: _Tensors, add: Add | None
    ) -> tuple[_Tensors, _Tensors]:
        """Pull adjoints of x_{i+1} back through segment i, on top of s and s_a: the adjoints of x_i and of a.

        With `add` (sweep 4), it receives the gradients of the parameters, with the number of the adjoint. Without it
        (sweep 2) there is one adjoint, lambda, and attention's first backward is the one to be recalled.
        """
        segment, numbers = self._chain.segments[i], self._inner[i] if add is not None else []
        parameters, x = self._select(numbers), _leaf(self._shelf.get(self._x[i]), i > self._first)
        into, into_a = [self._shelf.get(t) for t in s], [self._shelf.get(t) for t in s_a]
        with self._timer("attend"):
            a = self._attend(i, x, gradients=add is None)
        for span in self._spans(segment, x):
            with self._timer("combine"):
                leaves = _leaves(x, a, span)
                y = segment.combine(*leaves) if a is not None else segment.combine(leaves[0], None)
                for k, adjoint in enumerate(adjoints):
                    found = pull([y], [*leaves, *parameters], [cut_any(adjoint, span)], retain=k + 1 < len(adjoints))
                    into[k] = paste(into[k], found[0], span, x.shape)
                    if a is not None:
                        into_a[k] = paste(into_a[k], found[1], span, a.shape)
                    if add is not None:
                        add(k, numbers, found[len(leaves) :])
                del leaves, y, found
        if a is not None:
            with self._timer("attend back"):
                for k in range(len(adjoints)):
                    found = pull([a], [x, *parameters], [into_a[k]], retain=k + 1 < len(adjoints))
                    into[k] = paste(into[k], found[0], (0, x.shape[1]), x.shape)
                    if add is not None:
                        add(k, numbers, found[1:])
        return into, into_a

    def _embed_adjoint(self, adjoints: _Tensors, add: Add) -> None:
        x, parameters = self._chain.embed(), self._select(self._outer)
        for k, adjoint in enumerate(adjoints):
            add(k, self._outer, pull([x], parameters, [adjoint], retain=k + 1 < len(adjoints)))

    # Access to the pieces.

    def _attend(self, i: int, x: Tensor, *, gradients: bool = False) -> Tensor | None:
        attend = self._chain.segments[i].attend
        if attend is None:
            return None
        with self._recalls[i].calls(gradients=gradients):
            return attend(x)

    def _alpha_of(self, i: int, x: Tensor, a: Tensor, adjoint: Tensor) -> Tensor | None:
        """dL/da in segment i: kept from sweep 2, or computed again."""
        alpha, segment = self._shelf.get(self._alpha[i]), self._chain.segments[i]
        if alpha is not None:
            return alpha
        for span in self._spans(segment, x):
            leaf = _leaf(cut(a, *span))
            y = segment.combine(cut(x.detach(), *span), leaf)
            alpha = paste(alpha, pull([y], [leaf], [cut(adjoint, *span)])[0], span, a.shape)
            del leaf, y
        return alpha

    def _spans(self, segment: Segment, x: Tensor) -> list[tuple[int, int]]:
        return spans(x.shape[1], max(1, self._stretches.tokenwise // x.shape[0]) if segment.tokenwise else x.shape[1])

    def _select(self, numbers: Sequence[int]) -> list[nn.Parameter]:
        return [self._parameters[i] for i in numbers]


def _adding(sums: _Tensors) -> Add:
    def add(_: int, numbers: Sequence[int], pieces: Sequence[Tensor | None]) -> None:
        for i, piece in zip(numbers, pieces, strict=True):
            present = sums[i]
            sums[i] = piece if present is None else present if piece is None else present + piece

    return add


def _leaves(x: Tensor, a: Tensor | None, span: tuple[int, int]) -> list[Tensor]:
    return [_leaf(cut(t, *span), t.requires_grad) for t in (x, a) if t is not None]


def _leaf(t: Tensor | None, wanted: bool = True) -> Tensor:
    return _there(t).detach().requires_grad_(wanted)


def _there(t: Tensor | None) -> Tensor:
    if t is None:
        raise RuntimeError("an activation is missing: a fault of the sweeps, not of the model")
    return t


def _finite(total: Tensor) -> float:
    loss = float(total)
    if not math.isfinite(loss):
        raise FloatingPointError(f"the loss of a batch is {loss}; check the weights and the dtype")
    return loss
