"""The Lanczos process with full re-orthogonalisation, step by step: it can be saved, continued and restarted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from curvature.basis import Basis, has_room
from curvature.operators import LinearOperator
from curvature.state import Part, Saved
from curvature.vectors import norm

__all__ = ["Krylov"]

_Floats: TypeAlias = npt.NDArray[np.float64]


class Krylov:
    """An orthonormal basis Q of a Krylov space of H, with the matrix of H in it.

        H Q = Q M + beta q e_m^T

    q is the vector that the next step starts from. M [m, m] holds everything that the products were found to be made
    of: a symmetric operator in exact arithmetic would make it tridiagonal (after a restart: bordered diagonal), and
    what lies above that is what re-orthogonalisation had to remove.

    Args:
        op: The operator H.
        start: Start vector [P], not zero.
        capacity: Most steps between restarts.
        last: Whether q is kept after step number `capacity`, for a restart.
        offload: Whether the basis waits in host memory. None: where half of the free device memory is too small for it.
        part: Saved state to continue, and to save to.

    Attributes:
        steps: Columns of M that are known.
        beta: Norm of what the last step left.
        breakdown: Whether the space is invariant: that norm is rounding noise, or the space is the whole one.
        restarts: Restarts so far.
        products: Products used.
    """

    def __init__(
        self,
        op: LinearOperator,
        start: Tensor,
        capacity: int,
        *,
        last: bool = False,
        offload: bool | None = None,
        part: Part | None = None,
    ) -> None:
        self._op, self._part, self._last, self._capacity = op, part, last, capacity
        self._matrix = np.zeros((capacity + 1, capacity))
        self._largest = 0.0
        self.steps, self.beta, self.breakdown = 0, 0.0, False
        self.restarts = self.products = 0
        progress = part.progress if part is not None else None
        # How the basis is kept decides how its products are rounded, so a saved run goes on as it began.
        if progress is not None:
            offload = bool(progress["offload"])
        elif offload is None:
            offload = not has_room(capacity + last, op.space.size, op.dtype, op.device)
        self.offload = offload
        self.basis = Basis(capacity + last, op.space.size, op.dtype, op.device, offload=offload)
        if progress is not None and part is not None:
            self._continue(progress, part)
        else:
            self.basis.append(start / norm(start))

    @property
    def full(self) -> bool:
        """Whether there is no further step: the space is invariant, or has its largest dimension."""
        return self.breakdown or self.steps == self._capacity

    @property
    def matrix(self) -> _Floats:
        """M [steps, steps]."""
        return self._matrix[: self.steps, : self.steps]

    def step(self) -> None:
        """One product, orthogonalised twice against all vectors."""
        j = self.steps
        vector: Tensor = self._op @ self.basis[j]
        length = norm(vector)
        column = np.zeros(j + 1)
        for _ in range(2):
            column += self.basis.remove_from(vector)
        beta = norm(vector)
        largest = max(self._largest, float(np.abs(column).max()))
        # What is left of the product after projection is rounding noise: of the product itself, or of the largest part
        # of the operator. To go on from there would be to start anew in a random direction.
        noise = torch.finfo(self._op.dtype).eps * max(10 * length, largest)
        breakdown = beta <= noise or j + 1 == self._op.space.size
        if not breakdown and (self._last or j + 1 < self._capacity):
            self.basis.append(vector.div_(beta))
        self._matrix[: j + 1, j] = column
        self._matrix[j + 1, j] = 0.0 if breakdown else beta
        # From here on the step counts; an interruption ahead of it leaves the state of the step before.
        self._largest, self.beta, self.breakdown = largest, beta, breakdown
        self.products += 1
        self.steps = j + 1

    def ritz(self) -> tuple[_Floats, _Floats, _Floats]:
        """Ritz values, descending, their vectors' coefficients in the basis (columns), and their residuals.

        The values are those of the symmetric matrix that M's lower triangle makes. With an orthonormal basis the
        residual `sqrt((beta s_m)^2 + ||(M - T) s||^2)` is ||H v - lambda v|| of the products as computed.
        """
        symmetric = np.tril(self.matrix) + np.tril(self.matrix, -1).T
        values, vectors = np.linalg.eigh(symmetric)
        values, vectors = values[::-1].copy(), np.ascontiguousarray(vectors[:, ::-1])
        removed = np.linalg.norm((self.matrix - symmetric) @ vectors, axis=0)
        return values, vectors, np.hypot(self.beta * np.abs(vectors[-1]), removed)

    def restart(self, vectors: _Floats) -> None:
        """Go on from the Ritz vectors with these coefficients [steps, K] in place of the basis, and from q.

        The relation H Q = Q M + beta q e_m^T then holds with Q the Ritz vectors and a matrix that is diagonal up to
        what re-orthogonalisation removed, bordered below by beta times the coefficients' last row.

        Source: Wu and Simon, Thick-restart Lanczos method for large symmetric eigenvalue problems (2000).
        """
        if self._part is not None:
            self._part.flush()  # the vectors are about to be overwritten; what comes after is saved anew
        kept = vectors.shape[1]
        following = self.basis[self.steps].clone()
        border, mixed = self.beta * vectors[-1], vectors.T @ self.matrix @ vectors
        self.basis.count = self.steps
        self.basis.replace(vectors)
        self.basis.append(following)
        self._matrix[:] = 0.0
        self._matrix[:kept, :kept], self._matrix[kept, :kept] = mixed, border
        self.steps, self.restarts = kept, self.restarts + 1

    def basis_of(self, coefficients: _Floats) -> Tensor:
        """The vectors [P, K] with coefficients [steps, K]."""
        self.basis.count = self.steps
        return self.basis.combine(coefficients)

    def save(self, *, vectors: bool = True) -> None:
        """Offer the state to be saved. Without vectors: that of a run that is over, of which only M is of use."""
        if self._part is not None:
            self._part.offer(self._snapshot if vectors else self._closing)

    def _snapshot(self) -> Saved:
        saved = (self._part.progress if self._part is not None else None) or {}
        append = saved.get("restarts") == self.restarts and bool(saved.get("vectors"))
        column, row = (int(saved["steps"]), int(saved["vectors"])) if append else (0, 0)
        rows = min(self.basis.count, self.steps + 1)
        tensors = {"columns": torch.from_numpy(self._matrix[:, column : self.steps].T.copy())}
        if rows > row:
            tensors["vectors"] = self.basis.rows(row, rows)
        return Saved(self._progress(rows), tensors, append)

    def _closing(self) -> Saved:
        return Saved(self._progress(0), {"columns": torch.from_numpy(self._matrix[:, : self.steps].T.copy())})

    def _progress(self, rows: int) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "vectors": rows,
            "beta": self.beta,
            "largest": self._largest,
            "breakdown": self.breakdown,
            "restarts": self.restarts,
            "products": self.products,
            "offload": self.offload,
        }

    def _continue(self, progress: Mapping[str, Any], part: Part) -> None:
        for piece in part.pieces:
            columns = piece["columns"].numpy()
            self._matrix[:, self.steps : self.steps + len(columns)] = columns.T
            self.steps += len(columns)
            for vector in piece.get("vectors", ()):
                self.basis.append(vector)
        self.beta, self._largest = float(progress["beta"]), float(progress["largest"])
        self.breakdown, self.restarts = bool(progress["breakdown"]), int(progress["restarts"])
        self.products = int(progress["products"])
