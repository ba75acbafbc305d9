"""The last step of a causal language model: a linear map to logits and the cross-entropy of their softmax.

With features h [n, width], weight W [V, width] and bias b, per counted token and with c = 1 / tokens:

    z = h W^T + b,   p = softmax(z),   L = c sum (log sum exp z - z[y]),   dz = c (p - onehot y)

Along (hdot, Wdot, bdot) the derivative of the gradient (dh, dW, db) = (dz W, dz^T h, sum dz) is

    zdot = hdot W^T + h Wdot^T + bdot,   dzdot = c (p zdot - p <p, zdot>)
    (dzdot W + dz Wdot,   dzdot^T h + dz^T hdot,   sum dzdot)

Seven products of 2 n width V FLOP, where reverse over reverse makes nine; and two arrays [n, V] in the logits' dtype,
which are worked on in place. On a GPU the vocabulary is padded to a multiple of 64: products with odd numbers of
columns run several times slower.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from curvature.precision import one_pass, raised

__all__ = ["Along", "Readout", "TokenLoss", "aligned_logits"]

_ALIGNMENT = 64

Along: TypeAlias = tuple[Tensor | None, Tensor | None]
"""(Wdot, bdot) of a direction, or what belongs to (W, b) in a result; None stands for zero."""


def aligned_logits(h: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """H W^T + b [..., V] by a product with a multiple of 64 columns, the last ones left out; see the module.

    Args:
        h: [..., width].
        weight: W [V, width].
        bias: b [V] or None.
    """
    padding = -len(weight) % _ALIGNMENT
    if not padding:
        return F.linear(h, weight, bias)
    padded = F.linear(h, F.pad(weight, (0, 0, 0, padding)), None if bias is None else F.pad(bias, (0, padding)))
    return padded[..., : len(weight)]


@dataclass(frozen=True)
class Readout:
    """The head of a `curvature.chain.Chain` as total = cross-entropy of linear(features(x)).

    Attributes:
        features: x_n[:, a:b] -> h [B, b - a, width], position by position, twice differentiable.
        weight: W [V, width].
        bias: b [V] or None.
        targets: int64 [B, N].
        ignore_index: The target that is not counted.
    """

    features: Callable[[Tensor], Tensor]
    weight: Tensor
    bias: Tensor | None
    targets: Tensor
    ignore_index: int


class TokenLoss:
    """Mean loss of one stretch of positions after another, with first and second derivatives.

    Args:
        readout: The head.
        tokens: The number of counted tokens of the whole batch, by which sums are divided.
        along: (Wdot, bdot) of each direction that `second` takes derivatives along.
    """

    def __init__(self, readout: Readout, tokens: int, along: Sequence[Along] = ()) -> None:
        self._readout, self._scale, self._size = readout, 1.0 / tokens, readout.weight.shape[0]
        self._padding = -self._size % _ALIGNMENT if one_pass(readout.weight) else 0
        self._weight, self._bias = self._padded(readout.weight.detach()), None
        if readout.bias is not None:
            self._bias = self._padded(readout.bias.detach())
        self._along = [tuple(None if t is None else self._padded(t) for t in pair) for pair in along]

    def first(self, h: Tensor, span: tuple[int, int], *, parameters: bool = False) -> tuple[Tensor, Tensor, Along]:
        """The stretch's share of the mean loss, and its gradient by h and, if asked for, by (W, b).

        Args:
            h: Features [B, n, width] of the positions `span`.
            span: The positions.
            parameters: Whether the gradient by the parameters is wanted.
        """
        rows = h.flatten(0, 1)
        z = F.linear(rows, self._weight, self._bias)
        losses = _gradient_(z, self._targets(span), self._size, self._scale)
        by_parameters = self._by_parameters(z, rows) if parameters else (None, None)
        return losses.sum() * self._scale, (z @ self._weight).view_as(h), by_parameters

    def second(
        self, h: Tensor, span: tuple[int, int], hdots: Sequence[Tensor | None], *, parameters: bool
    ) -> list[tuple[Tensor | None, list[Along]]]:
        """Derivatives of the gradient along each direction.

        Args:
            h: Features [B, n, width] of the positions `span`.
            span: The positions.
            hdots: For each direction its derivative of h, [B, n, width].
            parameters: Whether the derivative of the gradient by (W, b) is wanted.

        Returns:
            For each direction the derivative of dh, and what is to be added for that of (dW, db).
        """
        rows, targets = h.flatten(0, 1), self._targets(span)
        z = F.linear(rows, self._weight, self._bias)
        flat = [None if hdot is None else hdot.flatten(0, 1) for hdot in hdots]
        found: list[tuple[Tensor | None, list[Along]]] = []
        for hdot, (wdot, bdot) in zip(flat, self._along, strict=True):
            zdot = _sum_of_products(hdot, self._weight, rows, wdot, bdot)
            if zdot is None:
                found.append((None, []))
                continue
            _derivative_(z, targets, zdot, self._size, self._scale)
            found.append((zdot @ self._weight, [self._by_parameters(zdot, rows)] if parameters else []))
            del zdot
        _gradient_(z, targets, self._size, self._scale)
        for k, (hdot, (wdot, _)) in enumerate(zip(flat, self._along, strict=True)):
            by_h, by_parameters = found[k]
            if wdot is not None and by_h is not None:
                by_h = torch.addmm(by_h, z, wdot)
            if hdot is not None and parameters:
                by_parameters.append(((z.T @ hdot)[: self._size], None))
            found[k] = None if by_h is None else by_h.view_as(h), by_parameters
        return found

    def _by_parameters(self, z: Tensor, rows: Tensor) -> Along:
        return (z.T @ rows)[: self._size], None if self._bias is None else z.sum(0)[: self._size]

    def _padded(self, t: Tensor) -> Tensor:
        return F.pad(t, (0, 0) * (t.ndim - 1) + (0, self._padding)) if self._padding else t

    def _targets(self, span: tuple[int, int]) -> Tensor:
        """The targets of a stretch in one row, -1 where nothing is counted."""
        targets = self._readout.targets[:, slice(*span)].flatten()
        return targets.masked_fill(targets == self._readout.ignore_index, -1)


def _sum_of_products(
    hdot: Tensor | None, weight: Tensor, rows: Tensor, wdot: Tensor | None, bdot: Tensor | None
) -> Tensor | None:
    """Hdot W^T + rows Wdot^T + bdot in new memory, of what there is."""
    if wdot is not None:
        z = F.linear(rows, wdot, bdot)
        return z if hdot is None else torch.addmm(z, hdot, weight.T)
    if hdot is not None:
        return F.linear(hdot, weight, bdot)
    return None if bdot is None else bdot.repeat(len(rows), 1)


def _gradient_(z: Tensor, targets: Tensor, vocabulary: int, scale: float) -> Tensor:
    """Token losses [n] of logits z [n, V]; z becomes scale (softmax(z) - onehot), zero where the target is negative."""
    if one_pass(z):
        from curvature.layers import kernels

        return kernels.token_loss(z, targets, vocabulary, scale)
    counted, index = targets >= 0, targets.clamp_min(0)[:, None]
    logs = torch.log_softmax(raised(z), -1)
    losses = -logs.gather(-1, index)[:, 0] * counted
    p = logs.exp_()
    p.scatter_add_(-1, index, p.new_full((), -1.0).expand(index.shape))
    z.copy_(p.mul_((counted.to(p.dtype) * scale)[:, None]))
    return losses


def _derivative_(z: Tensor, targets: Tensor, u: Tensor, vocabulary: int, scale: float) -> None:
    """U becomes the derivative of scale (softmax(z) - onehot) along u, zero where the target is negative."""
    if one_pass(z):
        from curvature.layers import kernels

        kernels.token_second(z, targets, u, vocabulary, scale)
        return
    p, along = torch.softmax(raised(z), -1), raised(u)
    mean = (p * along).sum(-1, keepdim=True)
    u.copy_(p.mul_(along - mean).mul_(((targets >= 0).to(p.dtype) * scale)[:, None]))
