"""The part of an operator that a few products capture, and what leaving one of them out says about the rest.

From products y_i = H w_i with random signs w_i come an orthonormal basis Q of their span and Z = H Q. With the
projection P = Q Q^T, what P captures of a diagonal block is known exactly, and only the rest is left to estimate:

    H = [P H + H P - P H P] + (1 - P) H (1 - P)

w_i must not be used on the rest that its own y_i helped to define. But the projection on the span of all y_j but y_i is
Q M Q^T, M = 1 - s s^T, with s the unit vector along row i of R^-1 (Y = Q R): each w_i in turn serves as probe of the
rest that the others leave, at the cost of small matrices only. With mu = M Q^T w_i the block's trace by probe i is

    2 tr(M C_t) - tr(M Q^T Z M G_t) + w_t . (y_i - Z mu - Q M (R_i - Q^T Z mu))_t,    C_t = Q_t^T Z_t,  G_t = Q_t^T Q_t

which is unbiased, and whose sum over blocks is the trace. The same with entries in place of blocks gives the diagonal.

Source: Epperly, Tropp and Webber, XTrace: making the most of every sample in stochastic trace estimation (2024). There
the trace of the whole matrix; the blocks, and the projection on both sides in the diagonal, are this project's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy.linalg import solve_triangular
from torch import Tensor

from curvature.linear_operator import LinearOperator
from curvature.probes import rademacher
from curvature.state import Part, Saved
from curvature.vectors import inner, norm

__all__ = ["REST_PROBES", "Deflation", "Small"]

REST_PROBES = 10
"""Probes that confirm that nothing is left: where two entries cancel under half of all signs, one often misses it."""

_Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Small:
    """The small matrices of n vectors, block by block.

    Attributes:
        r: R [n, n].
        gram: Q_t^T Q_t [blocks, n, n].
        core: Q_t^T Z_t [blocks, n, n].
        qw: Q_t^T W_t [blocks, n, n].
        wz: W_t^T Z_t [blocks, n, n].
        wy: w_i . y_i over block t [blocks, n].
    """

    r: _Floats
    gram: _Floats
    core: _Floats
    qw: _Floats
    wz: _Floats
    wy: _Floats

    def captured(self) -> _Floats:
        """Traces of the blocks of P H + H P - P H P, exact: float64 [blocks]."""
        twice = np.einsum("ab,tba->t", self.core.sum(0), self.gram)
        traces: _Floats = 2 * np.trace(self.core, axis1=1, axis2=2) - twice
        return traces

    def traces(self) -> _Floats:
        """One estimate of the traces of all blocks for each vector left out: float64 [n, blocks]."""
        s, mu, c = self.left_out()
        full = self.core.sum(0)

        def quadratic(m: _Floats) -> _Floats:
            """s_i . m_t s_i, float64 [blocks, n]."""
            values: _Floats = ((m @ s) * s).sum(-2)
            return values

        core, gram = self.core, self.gram
        outside = quadratic(gram @ full) + quadratic(full @ gram) - quadratic(gram) * quadratic(full)
        known = self.captured()[:, None] - 2 * quadratic(core) + outside
        rest = self.wy - (self.wz * mu.T).sum(-1) - (self.qw * c).sum(-2)
        found: _Floats = (known + rest).T
        return found

    def left_out(self) -> tuple[_Floats, _Floats, _Floats]:
        """What leaving out each vector comes to: s, mu and c = M (R_i - Q^T Z mu), a column of [n, n] for each."""
        s = solve_triangular(self.r.T, np.eye(len(self.r)), lower=True)
        s /= np.linalg.norm(s, axis=0)

        def without(m: _Floats) -> _Floats:
            kept: _Floats = m - s * (s * m).sum(0)
            return kept

        mu = without(self.qw.sum(0))
        return s, mu, without(self.r - self.core.sum(0) @ mu)


class Deflation:
    """Q, Z = H Q and the small matrices that go with them, grown vector by vector.

    Memory: two vectors [P] in the operator's dtype and one in int8 for each of `capacity` vectors.

    Args:
        op: The operator.
        seed: Seed of the signs; vector i takes probe i.
        capacity: Vectors at most.
        part: Saved state to continue, and to save to after each product.

    Attributes:
        rank: Vectors so far.
        products: Operator products so far: two per vector.
        drawn: Probes so far.
        exhausted: Whether a product brought nothing new beyond rounding: Q then spans the range of the operator.
        begun: Whether a vector has only its first product, as after a continued state; `extend` then ends it, and
            whoever decides when to stop must not before.
    """

    def __init__(self, op: LinearOperator, seed: int, capacity: int, part: Part | None = None) -> None:
        self.rank, self.products, self.drawn, self.exhausted = 0, 0, 0, False
        self._op, self._seed, self._part = op, seed, part
        size, k = op.space.size, min(capacity, op.space.size)
        self._q = torch.empty(k, size, dtype=op.dtype, device=op.device)
        self._z = torch.empty_like(self._q)
        self._w = torch.empty(k, size, dtype=torch.int8, device=op.device)
        blocks = len(op.space.blocks)
        self._r, self._wy = np.zeros((k, k)), np.zeros((blocks, k))
        self._matrices = np.zeros((4, blocks, k, k))  # gram, core, qw and wz
        self.begun = False
        if part is not None and part.progress is not None:
            self._continue(part.progress, part)

    def extend(self) -> None:
        """Add one vector, unless the range of the operator is exhausted."""
        if not self.begun:
            self._begin()
            self._save()
        if not self.exhausted:
            self._end()
            self._save()

    def _begin(self) -> None:
        """The first product: a further vector of Q."""
        k = self.rank
        w = rademacher(self._op.space, seed=self._seed, index=self.drawn)
        y = self._op @ w
        rest, scale, column = y.clone(), norm(y), np.zeros(k)
        for _ in range(2):
            overlap = self._q[:k] @ rest
            rest -= self._q[:k].T @ overlap
            column += overlap.double().cpu().numpy()
        length = norm(rest)
        # What rounding has put into a vector grows as it is divided by a small remainder.
        largest = max(float(np.abs(self._r[:k, :k]).max(initial=0.0)), float(np.abs(column).max(initial=0.0)))
        growth = max(scale, largest) / min([*self._r.diagonal()[:k], scale]) if scale else 1.0
        if length <= 10 * torch.finfo(self._op.dtype).eps * scale * growth:
            self.products, self.drawn, self.exhausted = self.products + 1, self.drawn + 1, True
            return
        self._r[:k, k], self._r[k, k] = column, length
        self._q[k], self._w[k] = rest / length, w
        self._wy[:, k] = [float(inner(w[piece], y[piece])) for piece in self._op.space.slices().values()]
        self.products, self.drawn, self.begun = self.products + 1, self.drawn + 1, True

    def _end(self) -> None:
        """The second product: H times that vector, and the new row and column of the small matrices."""
        k, n = self.rank, self.rank + 1
        self._z[k] = self._op @ self._q[k]
        gram, core, qw, wz = self._matrices
        for t, piece in enumerate(self._op.space.slices().values()):
            q, z, signs = self._q[:n, piece], self._z[:n, piece], self._w[:n, piece].to(self._op.dtype)
            gram[t, :n, k] = gram[t, k, :n] = _numbers(q @ q[k])
            core[t, :n, k], core[t, k, :n] = _numbers(q @ z[k]), _numbers(z @ q[k])
            qw[t, :n, k], qw[t, k, :n] = _numbers(q @ signs[k]), _numbers(signs @ q[k])
            wz[t, :n, k], wz[t, k, :n] = _numbers(signs @ z[k]), _numbers(z @ signs[k])
        self.products, self.rank, self.begun = self.products + 1, n, False

    def _save(self) -> None:
        if self._part is not None:
            self._part.offer(self._snapshot)

    def _snapshot(self) -> Saved:
        """What has come since the last save, to be added to it."""
        saved = (self._part.progress if self._part is not None else None) or {"rank": 0, "begun": False}
        first, second = saved["rank"] + saved["begun"], saved["rank"]
        until, n = self.rank + self.begun, self.rank
        tensors = {
            "q": self._q[first:until],
            "r": torch.from_numpy(self._r[:, first:until].copy()),
            "wy": torch.from_numpy(self._wy[:, first:until].copy()),
            "z": self._z[second:n],
            "columns": torch.from_numpy(self._matrices[:, :, :n, second:n].copy()),
            "rows": torch.from_numpy(self._matrices[:, :, second:n, :n].copy()),
        }
        progress = {name: getattr(self, name) for name in ("rank", "products", "drawn", "exhausted")}
        return Saved({**progress, "begun": self.begun}, tensors, append=True)

    def _continue(self, progress: Mapping[str, Any], part: Part) -> None:
        begun = ended = 0
        for piece in part.pieces:
            first, second = slice(begun, begun + len(piece["q"])), slice(ended, ended + len(piece["z"]))
            begun, ended = first.stop, second.stop
            self._q[first], self._z[second] = piece["q"].to(self._op.device), piece["z"].to(self._op.device)
            self._r[:, first], self._wy[:, first] = piece["r"].numpy(), piece["wy"].numpy()
            self._matrices[:, :, :ended, second] = piece["columns"].numpy()
            self._matrices[:, :, second, :ended] = piece["rows"].numpy()
        for index in range(begun):
            self._w[index] = rademacher(self._op.space, seed=self._seed, index=index)
        self.rank, self.products, self.drawn = progress["rank"], progress["products"], progress["drawn"]
        self.exhausted, self.begun = progress["exhausted"], progress["begun"]

    def small(self) -> Small:
        """The small matrices so far."""
        n = self.rank
        gram, core, qw, wz = self._matrices[:, :, :n, :n]
        return Small(self._r[:n, :n], gram, core, qw, wz, self._wy[:, :n])

    def rest(self, probe: Tensor) -> Tensor:
        """(1 - P) H (1 - P) times a vector. Cost: one product, which `products` does not count."""
        q = self._q[: self.rank]
        inside = self._op @ (probe - q.T @ (q @ probe))
        result: Tensor = inside - q.T @ (q @ inside)
        return result

    def diagonals(self) -> Iterator[Tensor]:
        """One estimate of the diagonal [P] for each vector left out.

        Yields:
            Flat vectors in the operator's dtype.
        """
        n, small = self.rank, self.small()
        q, z, full = self._q[:n], self._z[:n], self._middle()
        both = self.captured_diagonal()
        s, mu, c = small.left_out()
        hs, y_less_c = full @ s, small.r - c
        for i in range(n):
            qs, zs, qhs = self._small(s[:, i]) @ q, self._small(s[:, i]) @ z, self._small(hs[:, i]) @ q
            known = both - 2 * qs * zs + 2 * qs * qhs - float(s[:, i] @ hs[:, i]) * qs**2
            yield known + self._w[i] * (self._small(y_less_c[:, i]) @ q - self._small(mu[:, i]) @ z)

    def captured_diagonal(self) -> Tensor:
        """The diagonal [P] of P H + H P - P H P, exact."""
        q = self._q[: self.rank]
        captured = torch.zeros(self._op.space.size, dtype=self._op.dtype, device=self._op.device)
        for a, b, row in zip(q, self._z, self._small(self._middle()), strict=False):
            captured.addcmul_(a, 2 * b - row @ q)
        return captured

    def _middle(self) -> _Floats:
        """Q^T H Q, symmetric."""
        full = self.small().core.sum(0)
        symmetric: _Floats = (full + full.T) / 2
        return symmetric

    def _small(self, numbers: _Floats) -> Tensor:
        return torch.as_tensor(numbers, dtype=self._op.dtype, device=self._op.device)


def _numbers(t: Tensor) -> _Floats:
    return t.double().cpu().numpy()
