"""The `triton` backend: forward, first backward, and the two passes of the double backward.

Triton is imported by the first launch, so that `import flashbob` needs none.
"""

from __future__ import annotations

import importlib.util
import os
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from flashbob.plan import Plan, SecondGradients, Wanted

name = "triton"
MAX_HEAD_SIZE = 256
MAX_GRID = 65535


def unsupported(q: Tensor, k: Tensor, v: Tensor, *, bias: Tensor | None) -> str | None:
    """Why the kernels cannot take this call, or None."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if not q.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        return "the tensors are not on a CUDA device (set TRITON_INTERPRET=1 before starting Python to interpret)"
    if q.dtype == torch.float64:
        return "float64 is not supported by the kernels"
    if not q.is_cuda and q.dtype != torch.float32:
        return f"the interpreter computes {q.dtype} products wrongly; use float32"
    if max(q.shape[-1], v.shape[-1]) > MAX_HEAD_SIZE:
        return f"head sizes above {MAX_HEAD_SIZE} are not supported, got {q.shape[-1]} and {v.shape[-1]}"
    if q.shape[0] * q.shape[1] > MAX_GRID:
        return f"batch times heads exceeds {MAX_GRID}, got {q.shape[0] * q.shape[1]}"
    if bias is not None and bias.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        return f"attn_bias must be float64, float32, bfloat16 or float16 there, got {bias.dtype}"
    return None


def _device(x: Tensor) -> AbstractContextManager[object]:
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def forward(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor | None, bias: Tensor | None, plan: Plan
) -> tuple[Tensor, Tensor]:
    from flashbob.kernels import launch

    with _device(q):
        return launch.forward(q, k, v, bounds, bias, plan)


def backward(
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
    from flashbob.kernels import launch

    with _device(q):
        return launch.backward(q, k, v, o, lse, do, bounds, bias, plan)


def double_backward(
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
    from flashbob.kernels import launch

    with _device(q):
        return launch.double_backward(q, k, v, o, lse, do, dq, uq, uk, uv, bounds, bias, plan, wanted)


def tangent(
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
    from flashbob.kernels import launch

    with _device(q):
        return launch.tangent(q, k, v, o, lse, uq, uk, uv, bounds, bias, plan)
