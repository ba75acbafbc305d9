"""What one attention call has settled on: its masking, its scalars, and who computes each derivative."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from flashbob.geometry import Geometry


@dataclass(frozen=True)
class Plan:
    """Everything about a call that is not a tensor. Tensors travel as arguments, so that torch.func can batch them."""

    geometry: Geometry
    scale: float
    softcap: float | None
    first: FirstOrder
    second: SecondOrder


class FirstOrder(Protocol):
    """Forward and first backward. Shapes as in `flashbob.api.sdpa_bob`; `lse` is float [B, H_Q, N_Q], natural log."""

    name: str

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, bounds: Tensor | None, bias: Tensor | None, plan: Plan
    ) -> tuple[Tensor, Tensor]:
        """(o, lse); lse of a row that sees no key is +inf."""
        ...

    def backward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        do: Tensor,
        bounds: Tensor | None,
        bias: Tensor | None,
        plan: Plan,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv) = gradients of <do, o>."""
        ...


class SecondOrder(Protocol):
    """The second derivative in its two guises; both come from the same two passes (see flashbob/README.md)."""

    name: str

    def double_backward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        do: Tensor,
        dq: Tensor,
        uq: Tensor,
        uk: Tensor,
        uv: Tensor,
        bounds: Tensor | None,
        bias: Tensor | None,
        plan: Plan,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Gradients of <dq, uq> + <dk, uk> + <dv, uv> with respect to (q, k, v, do)."""
        ...

    def tangent(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        uq: Tensor,
        uk: Tensor,
        uv: Tensor,
        bounds: Tensor | None,
        bias: Tensor | None,
        plan: Plan,
    ) -> Tensor:
        """Directional derivative of o along (uq, uk, uv)."""
        ...
