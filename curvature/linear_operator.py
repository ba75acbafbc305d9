"""Symmetric matrices that are known by their products with vectors: their arithmetic and their self-checks."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator as ScipyLinearOperator
from torch import Tensor

from curvature.probes import normal
from curvature.vectors import ParameterSpace, inner, norm

__all__ = ["LinearOperator"]


class LinearOperator(ABC):
    """A real symmetric matrix that is known by its products with vectors.

    Operators over one space add up and scale: `H + G`, `H - G`, `0.5 * H`, `H.shifted(1e-3)`; a sum costs the products
    of its terms. Algorithms of scipy take `to_scipy()`; those of curvlinops and skerch, which ask for `A @ X`, `X @ A`,
    `adjoint()`, `shape`, `dtype` and `device`, take the operator itself.

    Args:
        space: The space that the vectors live in; its blocks name the diagonal blocks of the matrix.
    """

    __array_ufunc__ = None  # `array @ operator` is then refused by numpy and not taken entry by entry

    def __init__(self, space: ParameterSpace) -> None:
        self.space = space

    @property
    def shape(self) -> tuple[int, int]:
        """(P, P) for P parameters."""
        return (self.space.size, self.space.size)

    @property
    def dtype(self) -> torch.dtype:
        """The vectors' dtype: float64 for float64 models, float32 for all others."""
        return self.space.dtype

    @property
    def device(self) -> torch.device:
        """Where vectors live."""
        return self.space.device

    def identity(self) -> dict[str, Any]:
        """What tells its kind from others in a saved state, as JSON values."""
        return {"class": type(self).__name__}

    @abstractmethod
    def _apply(self, rows: Tensor) -> Tensor:
        """The products with each row of a contiguous [K, P] tensor, as a new [K, P] tensor."""

    def __matmul__(self, v: Any) -> Any:
        """The product with a vector, in the vector's own form.

        Args:
            v: A flat tensor [P], columns [P, K], a list of tensors, or {name: tensor}; see `curvature.vectors.Vector`.

        Returns:
            The product in the same form, in the operator's dtype.

        Raises:
            TypeError: If v is none of these forms or not real floating point.
            ValueError: If its shape, names or device do not fit.
            FloatingPointError: If the product is not finite; the message names the first such parameter.
        """
        rows, restore = self.space.rows(v)
        product = self._apply(rows)
        self._check_finite(product)
        return restore(product)

    def __rmatmul__(self, v: Tensor) -> Tensor:
        """The product from the left with a flat tensor [P] or rows [K, P]: the matrix is symmetric."""
        product: Tensor = self @ v.T if v.ndim == 2 else self @ v
        return product.T if v.ndim == 2 else product

    def adjoint(self) -> LinearOperator:
        """The transposed operator: this one."""
        return self

    def _check_finite(self, rows: Tensor) -> None:
        if bool(torch.isfinite(rows).all()):
            return
        for row in rows:
            for name, piece in self.space.named(row).items():
                if not bool(torch.isfinite(piece).all()):
                    raise FloatingPointError(
                        f"the product is not finite, first in parameter {name!r}; check the direction, the weights and "
                        "the dtype (bfloat16 and float32 have the range that float16 lacks)"
                    )

    def __add__(self, other: LinearOperator) -> LinearOperator:
        """The sum with another operator over the same space."""
        return _Combination([(1.0, self), (1.0, other)]) if isinstance(other, LinearOperator) else NotImplemented

    def __sub__(self, other: LinearOperator) -> LinearOperator:
        """The difference to another operator over the same space."""
        return _Combination([(1.0, self), (-1.0, other)]) if isinstance(other, LinearOperator) else NotImplemented

    def __mul__(self, factor: float) -> LinearOperator:
        """The operator times a number."""
        return _Combination([(float(factor), self)]) if isinstance(factor, int | float) else NotImplemented

    __rmul__ = __mul__

    def __neg__(self) -> LinearOperator:
        return self * -1.0

    def shifted(self, shift: float) -> LinearOperator:
        """H + shift * I: the spectrum moved by `shift`, at the cost of H's own products.

        Args:
            shift: A finite number, in the operator's units.
        """
        return _Combination([(1.0, self)], shift)

    def to_scipy(self) -> ScipyLinearOperator:
        """This operator for scipy: float64 arrays in and out, computed in the operator's own dtype and device.

        Of a complex array the real and the imaginary part are multiplied one after the other.
        """

        def product(array: np.ndarray[Any, np.dtype[Any]]) -> np.ndarray[Any, np.dtype[Any]]:
            if np.iscomplexobj(array):
                return product(array.real) + 1j * product(array.imag)
            v = torch.as_tensor(np.ascontiguousarray(array, dtype=np.float64)).to(self.device, self.dtype)
            result: Tensor = self @ v
            return result.cpu().double().numpy()

        def vector_product(array: np.ndarray[Any, np.dtype[Any]]) -> np.ndarray[Any, np.dtype[Any]]:
            return product(array.reshape(-1))

        return ScipyLinearOperator(
            shape=self.shape,
            matvec=vector_product,
            rmatvec=vector_product,
            matmat=product,
            rmatmat=product,
            dtype=np.float64,
        )

    def symmetry_error(self, seed: int = 0) -> float:
        """How far the operator is from symmetric, on one random pair: sqrt(P) |u.Hv - v.Hu| / (|u| |Hv|).

        Random u and e have |u.e| near |u| |e| / sqrt(P), so with that factor the figure reads as the relative error of
        a product, whatever the number of parameters: of the order of the rounding of the model's dtype where the
        product is exact. A wrong second derivative usually breaks the symmetry, which no check of repeatability sees.
        Cost: two products.

        Args:
            seed: Seed of the pair of normal vectors.

        Returns:
            The error, or 0 where Hv is zero.
        """
        u, v = (normal(self.space, seed=seed, index=index) for index in range(2))
        hu, hv = (self @ torch.stack([u, v], dim=1)).T
        scale = norm(u) * norm(hv) / self.space.size**0.5
        return abs(float(inner(u, hv) - inner(v, hu))) / scale if scale else 0.0

    def repeatability_error(self, seed: int = 0) -> float:
        """How much two computations of one product differ: |a - b| / |a|.

        Zero where every operation is deterministic; of the order of the rounding of the model's dtype where sums are
        taken in no fixed order (atomic additions of GPU kernels); large where the loss itself is random, as with a
        dropout that evaluation mode does not reach. Cost: two products.

        Args:
            seed: Seed of the normal vector.

        Returns:
            The difference, or 0 where both products are zero.
        """
        v = normal(self.space, seed=seed, index=0)
        first, second = self @ v, self @ v
        return norm(first - second) / (norm(first) or norm(second) or 1.0)


class _Combination(LinearOperator):
    """sum_i factor_i A_i + shift * I."""

    def __init__(self, terms: list[tuple[float, LinearOperator]], shift: float = 0.0) -> None:
        for value in (shift, *(factor for factor, _ in terms)):
            if not math.isfinite(value):
                raise ValueError(f"factors and shifts of operators must be finite, got {value}")
        space = terms[0][1].space
        for _, other in terms[1:]:
            if other.space != space:
                raise ValueError(
                    f"operators that are added must have the same parameters, dtype and device; got {space.size:,} and "
                    f"{other.space.size:,} parameters, {space.dtype} and {other.space.dtype}, {space.device} and "
                    f"{other.space.device}"
                )
        super().__init__(space)
        self._terms, self._shift = terms, shift

    def _apply(self, rows: Tensor) -> Tensor:
        result = self._shift * rows
        for factor, operator in self._terms:
            result.add_(operator._apply(rows), alpha=factor)
        return result
