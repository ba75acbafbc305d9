"""What one attention call has settled on: its masking, its scalars, and who computes each derivative."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from flashbob.dropout import Dropout
from flashbob.geometry import Geometry

SecondGradients = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


@dataclass(frozen=True)
class Plan:
    """Everything about a call that is not a tensor. Tensors travel as arguments, so that torch.func can batch them."""

    geometry: Geometry
    scale: float
    softcap: float | None
    first: FirstOrder
    second: SecondOrder
    dropout: Dropout | None = None


@dataclass(frozen=True)
class Wanted:
    """Which gradients of the double backward somebody reads; the others are not computed."""

    q: bool = True
    k: bool = True
    v: bool = True
    do: bool = True

    def __iter__(self) -> Iterator[bool]:
        return iter((self.q, self.k, self.v, self.do))


class FirstOrder(Protocol):
    """Forward and first backward. Shapes as in `flashbob.api.sdpa_bob`.

    `lse` is float [B, H_Q, N_Q], natural log. An implementation that computes both orders may keep it in a form that
    it alone reads.
    """

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
    """The second derivative in its two guises; both come from the same two passes (see flashbob/README.md).

    A direction (uq, uk, uv) may have parts that are None, which stands for zeros; what they multiply is not computed.
    At least one part is a tensor.
    """

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
        uq: Tensor | None,
        uk: Tensor | None,
        uv: Tensor | None,
        bounds: Tensor | None,
        bias: Tensor | None,
        plan: Plan,
        wanted: Wanted,
    ) -> SecondGradients:
        """Gradients of <dq, uq> + <dk, uk> + <dv, uv> with respect to (q, k, v, do); None where not wanted."""
        ...

    def tangent(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        uq: Tensor | None,
        uk: Tensor | None,
        uv: Tensor | None,
        bounds: Tensor | None,
        bias: Tensor | None,
        plan: Plan,
    ) -> Tensor:
        """Directional derivative of o along (uq, uk, uv)."""
        ...
