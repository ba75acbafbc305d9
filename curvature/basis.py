"""Orthonormal vectors of a Krylov space: on the device, or in host memory where the device has no room."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from curvature.storage import Shelf, spare_bytes

__all__ = ["Basis", "has_room"]

_Floats = npt.NDArray[np.float64]

_ROWS = 8
"""Vectors that are brought to the device at once from host memory."""

_CHUNK = 1 << 22
"""Columns that are combined at once, where vectors are replaced in place."""

_KEPT_FREE = 0.5
"""Share of the free device memory that a basis may take; products need the rest."""


def has_room(count: int, size: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether `count` vectors [size] fit on the device and leave half of its free memory to the products."""
    if device.type != "cuda":
        return True
    return count * size * dtype.itemsize <= _KEPT_FREE * spare_bytes(device)


class Basis:
    """Up to `capacity` orthonormal vectors [P].

    On the device they are the rows of one tensor. In host memory they lie in blocks of pinned memory, which visit the
    device one after the other whenever the whole basis is needed: each pass over it costs one transfer of all of it.

    Args:
        capacity: Most vectors.
        size: Dimension P.
        dtype: Of the vectors.
        device: Where vectors are used.
        offload: Whether they wait in host memory.
    """

    def __init__(self, capacity: int, size: int, dtype: torch.dtype, device: torch.device, *, offload: bool) -> None:
        self._capacity, self._size, self._dtype, self._device = capacity, size, dtype, device
        self._offload, self.count = offload, 0
        self._shelf = Shelf(device, offload)
        self._blocks: list[Tensor] = []
        if not offload:
            self._blocks.append(torch.empty(capacity, size, dtype=dtype, device=device))

    def append(self, vector: Tensor) -> None:
        """Add a vector [P], which must be orthonormal to the others."""
        place = self.count
        if self._offload and place % _ROWS == 0 and place // _ROWS == len(self._blocks):
            rows = min(_ROWS, self._capacity - place)
            pinned = self._device.type == "cuda"
            self._blocks.append(torch.empty(rows, self._size, dtype=self._dtype, pin_memory=pinned))
        self._row(place).copy_(vector)
        self.count += 1

    def __getitem__(self, index: int) -> Tensor:
        """Vector number `index`, on the device."""
        return self._row(index).to(self._device)

    def rows(self, start: int, stop: int) -> Tensor:
        """Vectors start to stop, as a new tensor [stop - start, P] on the CPU."""
        return torch.stack([self._row(i).cpu() for i in range(start, stop)])

    def remove_from(self, vector: Tensor) -> _Floats:
        """Take the projections on all vectors off `vector` [P], in place, and return their coefficients [count].

        With the basis on the device, all at once (classical Gram-Schmidt); else block after block.
        """
        coefficients = []
        for block in self._visits():
            overlap = block @ vector
            vector -= block.T @ overlap
            coefficients.append(overlap.double().cpu().numpy())
        return np.concatenate(coefficients)

    def combine(self, weights: _Floats) -> Tensor:
        """Linear combinations: weights [count, K] give the columns of a new tensor [P, K] on the device."""
        if not self._offload:
            return self._blocks[0][: self.count].T @ self._as_tensor(weights)
        result = torch.zeros(self._size, weights.shape[1], dtype=self._dtype, device=self._device)
        start = 0
        for block in self._visits():
            result += block.T @ self._as_tensor(weights[start : start + len(block)])
            start += len(block)
        return result

    def replace(self, weights: _Floats) -> None:
        """Put the combinations with weights [count, K], K <= count, in the place of the vectors, in little memory."""
        count, kept = weights.shape
        mixing = self._as_tensor(np.ascontiguousarray(weights.T))
        for start in range(0, self._size, _CHUNK):
            columns = slice(start, start + _CHUNK)
            if self._offload:
                stretch = torch.cat([b[:, columns] for b in self._blocks])[:count].to(self._device)
                mixed = (mixing @ stretch).cpu()
                for i in range(kept):
                    self._row(i)[columns] = mixed[i]
            else:
                self._blocks[0][:kept, columns] = mixing @ self._blocks[0][:count, columns]
        self.count = kept

    def _row(self, index: int) -> Tensor:
        return self._blocks[index // _ROWS][index % _ROWS] if self._offload else self._blocks[0][index]

    def _visits(self) -> Iterator[Tensor]:
        """All vectors, on the device, in blocks of rows; the next block is on its way while one is used."""
        if not self._offload:
            yield self._blocks[0][: self.count]
            return
        there = self._blocks[: -(-self.count // _ROWS)]
        for number, block in enumerate(there):
            self._shelf.fetch_ahead(there[number : number + 2])
            here = self._shelf.get(block)
            if here is not None:
                yield here[: self.count - number * _ROWS]

    def _as_tensor(self, weights: _Floats) -> Tensor:
        return torch.as_tensor(np.ascontiguousarray(weights), dtype=self._dtype, device=self._device)
