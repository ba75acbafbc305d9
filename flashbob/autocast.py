"""Attention inside a torch.autocast block: its operands are cast once and openly, what follows has their dtype.

Left on, autocast would cast the products of a backend one by one, and those of a backward pass that merely runs inside
a block, whatever the dtype of its operands.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def lowered(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v in the dtype of the active autocast block, as PyTorch's own attention takes them; float64 stays."""
    kind = q.device.type
    if not _is_active(kind):
        return q, k, v
    dtype = torch.get_autocast_dtype(kind)
    q, k, v = (x if x.dtype == torch.float64 else x.to(dtype) for x in (q, k, v))
    return q, k, v


def suspended(device: torch.device) -> AbstractContextManager[object]:
    """A context in which autocast is off on a device."""
    return torch.autocast(device.type, enabled=False) if _is_active(device.type) else nullcontext()


def _is_active(kind: str) -> bool:
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
