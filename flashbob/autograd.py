"""Attention as a differentiable operator: three first- and second-order Functions and a wall behind them.

    Attention                (q, k, v)              -> o                 vjp, jvp: the next two
    AttentionBackward        (q, k, v, do)          -> dq, dk, dv        vjp: double backward; jvp: that + backward
    AttentionTangent         (q, k, v, q', k', v')  -> o'                vjp: backward + double backward
    AttentionDoubleBackward  (..., uq, uk, uv)      -> gq, gk, gv, gdo   any derivative raises

A part of a direction that autograd leaves out (None) stays None all the way down, and gradients that nobody asks for
are not computed: the implementations skip the products.

o and lse are cached functions of (q, k, v): they enter the later Functions detached, and the rules there are the
complete derivatives with respect to (q, k, v). Left attached, autograd would run the whole first backward once more on
a zero gradient.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor
from torch.autograd import Function, forward_ad

from flashbob import kernels
from flashbob.autocast import suspended
from flashbob.plan import Plan, SecondGradients, Wanted

_THIRD = (
    "the third derivative of attention is not implemented: sdpa_bob supports value, gradient and second derivative "
    "(backward, double backward, jvp, and one of each); use backend='reference' for higher orders"
)


class _Batch(NamedTuple):
    """The part of torch.func's `info` that the folding below reads."""

    batch_size: int


class _BatchedByFolding(Function):
    """vmap by folding the mapped dimension into the batch dimension, which every tensor argument carries in front.

    The first argument are the queries. Mapped calls are folded as far as batch times heads fit a kernel's grid.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # Function.apply asks for the signature of `forward` in every call, and takes a prepared one where there is one.
        cls.forward.__signature__ = inspect.signature(cls.forward)  # type: ignore[attr-defined]

    @classmethod
    def apply(cls, *args: Any) -> Any:
        # Gradients from torch.autograd.grad(..., is_grads_batched=True) come in wrappers that torch.func knows nothing
        # of, and that no kernel can read: unwrap, fold, wrap again.
        wrapped = [x for x in args if isinstance(x, Tensor) and is_legacy_batchedtensor(x)]
        if not wrapped:
            with suspended(args[0].device):
                return super().apply(*args)
        level = next(
            n for n in range(1, 65) if not is_legacy_batchedtensor(torch._remove_batch_dim(wrapped[0], n, 1, 0))
        )
        size = torch._remove_batch_dim(wrapped[0], level, 1, 0).shape[0]
        args = tuple(torch._remove_batch_dim(x, level, size, 0) if isinstance(x, Tensor) else x for x in args)
        outputs, _ = cls.vmap(_Batch(size), (0,) * len(args), *args)
        if isinstance(outputs, Tensor):
            return torch._add_batch_dim(outputs, 0, level)
        return tuple(None if x is None else torch._add_batch_dim(x, 0, level) for x in outputs)

    @classmethod
    def vmap(cls, info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        size = info.batch_size
        moved = [
            x if not isinstance(x, Tensor) else x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
            for x, dim in zip(args, in_dims, strict=True)
        ]
        _, batch, heads = moved[0].shape[:3]
        step = max(1, kernels.MAX_GRID // max(1, batch * heads))
        parts = [
            cls._folded(*(x[i : i + step] if isinstance(x, Tensor) else x for x in moved))
            for i in range(0, max(1, size), step)
        ]
        if isinstance(parts[0], Tensor):
            return _joined(parts), 0
        mapped = tuple(map(_joined, zip(*parts, strict=True)))
        return mapped, tuple(None if x is None else 0 for x in mapped)

    @classmethod
    def _folded(cls, *args: Any) -> Any:
        """The outputs [size, B, ...] of tensor arguments [size, B, ...]."""
        size, batch = args[0].shape[:2]

        def fold(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            folded = x.flatten(0, 1)
            # An empty batch is more than an implementation has to know: it gets a call of zeros, which is cut off.
            return folded if size else torch.cat((folded, x.new_zeros(x.shape[1:])))

        def unfold(x: Tensor | None) -> Tensor | None:
            return None if x is None else (x if size else x[:0]).unflatten(0, (size, batch))

        outputs = cls.apply(*map(fold, args))
        return unfold(outputs) if isinstance(outputs, Tensor) else tuple(map(unfold, outputs))


def _joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    """One output from those of consecutive mapped calls; all are None, or none is."""
    present = [x for x in parts if x is not None]
    return None if not present else present[0] if len(present) == 1 else torch.cat(present)


def _is_last(upstream: tuple[Tensor | None, ...]) -> bool:
    """Whether nobody can ask for a derivative of what is computed from these, or map over it.

    A Function would then only cost its own overhead: a fifth of the time of a short double backward.
    """
    return not (
        torch.is_grad_enabled()
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or any(u is not None and is_legacy_batchedtensor(u) for u in upstream)
    )


class Attention(_BatchedByFolding):
    """(q, k, v, bounds, bias, plan) -> (o, lse)."""

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, bounds: Tensor | None, bias: Tensor | None, plan: Plan
    ) -> tuple[Tensor, Tensor]:
        return plan.first.forward(q, k, v, bounds, bias, plan)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        q, k, v, bounds, bias, plan = inputs
        o, lse = output
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, bounds, bias, o, lse)
        ctx.save_for_forward(q, k, v, bounds, bias, o, lse)
        ctx.plan = plan

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, _dlse: Tensor | None = None) -> tuple[Tensor | None, ...]:
        if do is None:
            return (None,) * 6
        q, k, v, bounds, bias, o, lse = ctx.saved_tensors
        dq, dk, dv = AttentionBackward.apply(q, k, v, o.detach(), lse.detach(), do, bounds, bias, ctx.plan)
        return dq, dk, dv, None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, None]:
        q, k, v, bounds, bias, o, lse = ctx.saved_tensors
        if tangents[4] is not None:
            raise NotImplementedError(
                "forward mode over attn_bias: its derivative is not implemented; pass a bias without a tangent"
            )
        if all(t is None for t in tangents[:3]):
            return None, None
        direction = tangents[:3]
        return AttentionTangent.apply(q, k, v, o.detach(), lse.detach(), *direction, bounds, bias, ctx.plan), None


class AttentionBackward(_BatchedByFolding):
    """(q, k, v, o, lse, do, bounds, bias, plan) -> (dq, dk, dv)."""

    @staticmethod
    def forward(
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
        return plan.first.backward(q, k, v, o, lse, do, bounds, bias, plan)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, plan = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, output[0])
        ctx.save_for_forward(*tensors, output[0])
        ctx.plan = plan

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        if all(u is None for u in upstream):
            return (None,) * 9
        q, k, v, o, lse, do, bounds, bias, dq = ctx.saved_tensors
        needs, plan = ctx.needs_input_grad, ctx.plan
        wanted = Wanted(needs[0], needs[1], needs[2], needs[5])
        arguments = (q, k, v, o, lse, do, dq.detach(), *upstream, bounds, bias, plan, wanted)
        if _is_last(upstream):
            with suspended(q.device):
                gq, gk, gv, gdo = plan.second.double_backward(*arguments)
        else:
            gq, gk, gv, gdo = AttentionDoubleBackward.apply(*arguments)
        return gq, gk, gv, None, None, gdo, None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, o, lse, do, bounds, bias, dq = ctx.saved_tensors
        result: list[Tensor | None] = [None, None, None]
        if any(t is not None for t in tangents[:3]):
            # The Hessian of <do, attention> is symmetric: its product with the tangents is the double backward.
            direction, wanted = tangents[:3], Wanted(do=False)
            second = AttentionDoubleBackward.apply(
                q, k, v, o, lse, do, dq.detach(), *direction, bounds, bias, ctx.plan, wanted
            )
            result = list(second[:3])
        if tangents[5] is not None:
            linear = AttentionBackward.apply(q, k, v, o, lse, tangents[5], bounds, bias, ctx.plan)
            result = [b if a is None else a + b for a, b in zip(result, linear, strict=True)]
        return tuple(result)


class AttentionTangent(_BatchedByFolding):
    """(q, k, v, o, lse, uq, uk, uv, bounds, bias, plan) -> derivative of o along (uq, uk, uv)."""

    @staticmethod
    def forward(
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
        return plan.second.tangent(q, k, v, o, lse, uq, uk, uv, bounds, bias, plan)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, plan = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        ctx.plan = plan

    @staticmethod
    def backward(ctx: Any, do: Tensor | None) -> tuple[Tensor | None, ...]:
        if do is None:
            return (None,) * 11
        q, k, v, o, lse, uq, uk, uv, bounds, bias = ctx.saved_tensors
        needs = ctx.needs_input_grad
        du = AttentionBackward.apply(q, k, v, o, lse, do, bounds, bias, ctx.plan)
        second: SecondGradients = (None,) * 4
        if any(needs[:3]):
            wanted = Wanted(needs[0], needs[1], needs[2], do=False)
            second = AttentionDoubleBackward.apply(
                q, k, v, o, lse, do, du[0].detach(), uq, uk, uv, bounds, bias, ctx.plan, wanted
            )
        of_direction = (x if needed else None for x, needed in zip(du, needs[5:8], strict=True))
        return *second[:3], None, None, *of_direction, None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:
        raise NotImplementedError(
            "forward mode over forward mode through attention is not implemented: nest reverse mode "
            "(torch.func.jacrev / grad) inside jvp, or use backend='reference'"
        )


class AttentionDoubleBackward(_BatchedByFolding):
    """(q, k, v, o, lse, do, dq, uq, uk, uv, bounds, bias, plan, wanted) -> (gq, gk, gv, gdo), None where not wanted."""

    @staticmethod
    def forward(
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
        return plan.second.double_backward(q, k, v, o, lse, do, dq, uq, uk, uv, bounds, bias, plan, wanted)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        if all(u is None for u in upstream):
            return (None,) * 14
        raise NotImplementedError(_THIRD)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor, ...]:
        raise NotImplementedError(_THIRD)
