"""PyTorch's own fused attention as forward and first backward, for the cases that it covers.

The public `scaled_dot_product_attention` hides the row log-sum-exp that every later pass needs, so the private ATen
operators beneath it are called. Their signatures are compared with the ones this file was written for when it is
imported: an operator that has changed is left unused, with one warning, and the project's own path takes its place.

Covered: no padding, no bias, no soft-cap; the full mask or the ordinary square causal one; D_v = D. On CUDA cuDNN from
compute capability 9.0 on, flash below; both in float16 and bfloat16. On CPU the fused CPU kernel, with as many
key/value heads as query heads. The CUDA backwards add up dq with atomics, so two runs may differ in the last bit;
under `torch.use_deterministic_algorithms(True)` none of them is used.
"""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashbob.geometry import Geometry
from flashbob.plan import FirstOrder, Plan

_QKV = ("query", "key", "value")
_GRAD = ("grad_out", *_QKV, "out", "logsumexp")
_LENGTHS = ("cum_seq_q", "cum_seq_k", "max_q", "max_k")
_PHILOX = ("philox_seed", "philox_offset")
_SIGNATURES: dict[str, tuple[str, ...]] = {
    "_scaled_dot_product_flash_attention": (*_QKV, "dropout_p", "is_causal", "return_debug_mask", "scale"),
    "_scaled_dot_product_flash_attention_backward": (*_GRAD, *_LENGTHS, "dropout_p", "is_causal", *_PHILOX, "scale"),
    "_scaled_dot_product_cudnn_attention": (
        *_QKV,
        "attn_bias",
        "compute_log_sumexp",
        "dropout_p",
        "is_causal",
        "return_debug_mask",
        "scale",
    ),
    "_scaled_dot_product_cudnn_attention_backward": (
        *_GRAD,
        *_PHILOX,
        "attn_bias",
        *_LENGTHS,
        "dropout_p",
        "is_causal",
        "scale",
    ),
    "_scaled_dot_product_flash_attention_for_cpu": (*_QKV, "dropout_p", "is_causal", "attn_mask", "scale"),
    "_scaled_dot_product_flash_attention_for_cpu_backward": (*_GRAD, "dropout_p", "is_causal", "attn_mask", "scale"),
}


def _operator(name: str) -> Any | None:
    """The ATen operator, or None (with a warning) when it is missing or its arguments are not the known ones."""
    packet: Any = getattr(torch.ops.aten, name, None)
    found = None if packet is None else tuple(a.name for a in packet.default._schema.arguments)
    if packet is not None and found == _SIGNATURES[name]:
        return packet.default
    warnings.warn(
        f"flashbob: torch {torch.__version__} has changed aten::{name} (arguments {found}); it is left unused and "
        "flashbob's own forward and backward take its place",
        RuntimeWarning,
        stacklevel=2,
    )
    return None


@dataclass(frozen=True)
class _Flash:
    """aten flash attention on CUDA."""

    name: str
    run: Any
    run_backward: Any

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, bounds: Tensor | None, bias: Tensor | None, plan: Plan
    ) -> tuple[Tensor, Tensor]:
        q, k, v = map(_aligned, (q, k, v))
        o, lse = self.run(q, k, v, 0.0, plan.geometry.is_square_causal, scale=plan.scale)[:2]
        return o, lse

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
        philox = torch.empty(2, dtype=torch.int64, device=q.device)  # read by dropout only
        causal, lengths = plan.geometry.is_square_causal, (None, None, q.shape[2], k.shape[2])
        do, q, k, v, o = map(_aligned, (do, q, k, v, o))
        dq, dk, dv = self.run_backward(
            do, q, k, v, o, lse, *lengths, 0.0, causal, philox[0], philox[1], scale=plan.scale
        )
        return dq, dk, dv


@dataclass(frozen=True)
class _Cudnn:
    """aten cuDNN attention on CUDA."""

    name: str
    run: Any
    run_backward: Any

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, bounds: Tensor | None, bias: Tensor | None, plan: Plan
    ) -> tuple[Tensor, Tensor]:
        q, k, v = map(_aligned, (q, k, v))
        o, lse = self.run(q, k, v, None, True, 0.0, plan.geometry.is_square_causal, scale=plan.scale)[:2]
        return o, lse.reshape(q.shape[:3])

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
        philox = torch.empty(2, dtype=torch.int64, device=q.device)  # read by dropout only
        causal, lengths = plan.geometry.is_square_causal, (None, None, q.shape[2], k.shape[2])
        do, q, k, v, o = map(_aligned, (do, q, k, v, o))
        lse = lse.unsqueeze(-1)
        dq, dk, dv = self.run_backward(
            do, q, k, v, o, lse, philox[0], philox[1], None, *lengths, 0.0, causal, scale=plan.scale
        )
        return dq, dk, dv


@dataclass(frozen=True)
class _Cpu:
    """aten fused attention on the CPU."""

    name: str
    run: Any
    run_backward: Any

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, bounds: Tensor | None, bias: Tensor | None, plan: Plan
    ) -> tuple[Tensor, Tensor]:
        o, lse = self.run(*map(_rows_contiguous, (q, k, v)), 0.0, plan.geometry.is_square_causal, scale=plan.scale)
        return o, lse

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
        tensors = map(_rows_contiguous, (do, q, k, v, o))
        dq, dk, dv = self.run_backward(*tensors, lse, 0.0, plan.geometry.is_square_causal, scale=plan.scale)
        return dq, dk, dv


def _rows_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _aligned(x: Tensor) -> Tensor:
    """x, or a copy of it where a row does not start at a multiple of 16 bytes: cuDNN's execution fails on those."""
    fits = x.stride(-1) == 1 and x.data_ptr() % 16 == 0
    steps = zip(x.shape[:-1], x.stride()[:-1], strict=True)
    fits = fits and all(n == 1 or step * x.element_size() % 16 == 0 for n, step in steps)
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def _load(kind: Any, name: str, operator: str) -> FirstOrder | None:
    run, run_backward = _operator(operator), _operator(f"{operator}_backward")
    return None if run is None or run_backward is None else kind(name, run, run_backward)


FLASH = _load(_Flash, "torch flash", "_scaled_dot_product_flash_attention")
CUDNN = _load(_Cudnn, "torch cuDNN", "_scaled_dot_product_cudnn_attention")
CPU = _load(_Cpu, "torch fused CPU", "_scaled_dot_product_flash_attention_for_cpu")


def find(q: Tensor, k: Tensor, v: Tensor, geometry: Geometry) -> FirstOrder | None:
    """The fused implementation that covers this call, or None. The caller rules out padding, bias and soft-cap."""
    if not (geometry.is_full or geometry.is_square_causal) or q.shape[-1] != v.shape[-1]:
        return None
    if q.device.type == "cpu":
        return CPU if q.shape[1] == k.shape[1] else None
    if not q.is_cuda or q.dtype not in (torch.float16, torch.bfloat16):
        return None
    if torch.are_deterministic_algorithms_enabled() or q.shape[-1] % 8 or q.shape[-1] > 256:
        return None
    causal, grouped = geometry.is_square_causal, q.shape[1] != k.shape[1]
    params = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, causal, grouped)
    if CUDNN is not None and _capability(q.device) >= (9, 0) and torch.backends.cuda.can_use_cudnn_attention(params):
        return CUDNN
    if FLASH is not None and torch.backends.cuda.can_use_flash_attention(params):
        return FLASH
    return None


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
