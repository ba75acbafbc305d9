"""Self-checks of an operator: is it symmetric, is it the same twice, is it the derivative of the gradient."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from curvature.linear_operator import LinearOperator
from curvature.operators import HessianOperator
from curvature.precision import roundoff
from curvature.probes import normal
from curvature.vectors import norm

__all__ = ["CheckError", "Checks", "check_operator", "finite_difference_error", "symmetry_limit"]


class CheckError(ValueError):
    """An operator's products cannot be trusted; the message is the reason and what to do."""


@dataclass(frozen=True)
class Checks:
    """Errors that were found, each relative to a product, and the limits that they stayed below.

    Attributes:
        symmetry: `LinearOperator.symmetry_error`.
        symmetry_limit: What rounding explains.
        repeatability: `LinearOperator.repeatability_error`.
        repeatability_limit: What sums in no fixed order explain.
        finite_difference: `finite_difference_error`, or None where it was not asked for.
        finite_difference_limit: What rounding and the third derivative explain, or None.
    """

    symmetry: float
    symmetry_limit: float
    repeatability: float
    repeatability_limit: float
    finite_difference: float | None
    finite_difference_limit: float | None


def check_operator(op: LinearOperator, dtype: torch.dtype, *, finite_difference: bool = False, seed: int = 0) -> Checks:
    """Check an operator before its products are used.

    Cost: four products; the finite difference one product and four gradients more.

    Args:
        op: The operator.
        dtype: What its products are computed in: the model's dtype.
        finite_difference: Whether a Hessian is compared with differences of gradients.
        seed: Seed of the vectors.

    Returns:
        The errors.

    Raises:
        CheckError: If one is above its limit.
        TypeError: If a finite difference is asked for and the operator is no Hessian.
        NotImplementedError: If it is asked for in 16 bits or TF32.
    """
    rounding, limit_of_symmetry = _rounding(dtype, op.device), symmetry_limit(dtype, op.space.size, op.device)
    repeatability = op.repeatability_error(seed)
    if not repeatability <= rounding:
        raise CheckError(
            f"two computations of one product differ by {repeatability:.1e} of it, where sums in no fixed order "
            f"explain {rounding:.0e}: the loss is random. Look for a dropout that model.eval() does not reach "
            "(F.dropout without training=self.training), for sampling, or for noise in a router"
        )
    symmetry = op.symmetry_error(seed)
    if not symmetry <= limit_of_symmetry:
        raise CheckError(
            f"the product is not symmetric: error {symmetry:.1e}, where rounding stays below {limit_of_symmetry:.0e}. "
            "An operation of the model has a wrong second derivative; compare method='whole' with attention 'eager', "
            "in float64"
        )
    difference = limit = None
    if finite_difference:
        if not isinstance(op, HessianOperator):
            raise TypeError(f"finite_difference: only a Hessian is a derivative of a gradient, got {type(op).__name__}")
        difference, limit = finite_difference_error(op, seed=seed), 30 * float(torch.finfo(dtype).eps) ** 0.5
        if not difference <= limit:
            raise CheckError(
                f"the product is {difference:.1e} off the differences of gradients, where their rounding and third "
                f"derivatives explain {limit:.0e}: an operation of the model has a wrong second derivative, or none at "
                "this point"
            )
    return Checks(symmetry, limit_of_symmetry, repeatability, rounding, difference, limit)


def symmetry_limit(dtype: torch.dtype, size: int, device: torch.device | str = "cpu") -> float:
    """Symmetry error above which a product is wrong and not only rounded.

    The error reads as the relative error of a product. Measured on trained models (704 to 134 million parameters, all
    dtypes, 8,192 tokens at most) it stays below 45 eps, in bfloat16 below 15 eps, in float64 below 0.4 eps sqrt(P),
    where the two inner products themselves round. A second derivative wrong by 1e-3 shows in float32 and float64.

    Args:
        dtype: What products are computed in: the model's dtype.
        size: Number of parameters P.
        device: Where: on a GPU, float32 may be TF32 (see `curvature.precision.roundoff`).
    """
    return _rounding(dtype, device) + 4 * torch.finfo(torch.float64).eps * math.sqrt(size)


def _rounding(dtype: torch.dtype, device: torch.device | str) -> float:
    """What rounding does to a product at most, relative to it."""
    eps = roundoff([torch.empty(0, dtype=dtype, device=device)])
    return (30 if eps > 1e-4 else 300) * eps


def finite_difference_error(op: HessianOperator, *, seed: int = 0, step: float | None = None) -> float:
    """How far a product is from a difference of gradients of fourth order: |Hv - d| / |Hv|.

        d = (8 (g(h) - g(-h)) - (g(2h) - g(-2h))) / 12 h,   g(h) the gradient at theta + h v,  |v| = |theta|

    The weights are moved and put back, to the bit. Cost: one product and four gradients.

    Args:
        op: A Hessian in float64 or float32; it is exclusively used here meanwhile.
        seed: Seed of the normal direction.
        step: h. None: eps^(1/5), where rounding (eps / h) and truncation (h^4) are about equal, over 10.

    Raises:
        NotImplementedError: If the model has parameters in 16 bits, or products in TF32: gradients are then too coarse
            for differences.
        ValueError: If the step is not positive.
    """
    parameters = op.parameters
    eps = roundoff(parameters)
    if eps > 1e-4:
        raise NotImplementedError(
            "a finite-difference check in 16 bits or in TF32: differences of gradients are lost in rounding there; "
            "check the model in float32 (torch.set_float32_matmul_precision('highest')) or float64"
        )
    h = 0.1 * eps**0.2 if step is None else step
    if not (h > 0 and math.isfinite(h)):
        raise ValueError(f"step must be positive and finite, got {h}")
    with torch.no_grad():
        kept = [p.detach().clone() for p in parameters]
        size = math.sqrt(sum(norm(p) ** 2 for p in kept))
        v = normal(op.space, seed=seed, index=0)
        v *= (size or 1.0) / norm(v)
        product = op @ v
        slope = torch.zeros_like(v)
        try:
            for factor, weight in ((1, 8), (-1, -8), (2, -1), (-2, 1)):
                for p, start, piece in zip(parameters, kept, op.space.split(v), strict=True):
                    p.copy_(start.to(piece.dtype) + factor * h * piece)
                slope.add_(op.gradient(), alpha=weight / (12 * h))
        finally:
            for p, start in zip(parameters, kept, strict=True):
                p.copy_(start)
    return norm(product - slope) / (norm(product) or 1.0)
