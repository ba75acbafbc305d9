"""Keeping float64 models in float64 all the way through.

Many published model implementations raise their operands to float32 before a normalisation, a rotary table or a softmax
(`x.to(torch.float32)`, `softmax(..., dtype=torch.float32)`). In bf16 that raises the precision; in float64 it lowers
it, and a product whose every other step is exact to 1e-15 comes out right to 1e-7 only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

__all__ = ["keep_double", "one_pass", "precision_of", "raised", "roundoff", "vector_dtype"]


_PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm)
"""Operations that take no operands of two dtypes, where a model may have brought a float32 one (rotary positions)."""


class _KeepDouble(TorchFunctionMode):
    """Inside this mode no float64 operand is converted to float32, and a product with one is in float64."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if func is Tensor.float:
                return args[0]
            args = tuple(torch.float64 if a is torch.float32 else a for a in args)
            kwargs = {k: torch.float64 if a is torch.float32 else a for k, a in kwargs.items()}
        if func in _PRODUCTS and any(a.dtype == torch.float64 for a in args):
            args = tuple(a.double() for a in args)
        return func(*args, **kwargs)


def keep_double(model: nn.Module) -> AbstractContextManager[object]:
    """Context in which a model with float64 parameters computes in float64 throughout.

    Conversions of a float64 tensor to float32 (`.float()`, `.to(torch.float32)`, `dtype=torch.float32`) keep float64,
    and matrix products of a float64 and a float32 tensor are taken in float64.
    For a model without float64 parameters the context does nothing.

    Args:
        model: The model whose forward pass runs inside the context.
    """
    return precision_of(model)()


def precision_of(model: nn.Module) -> Callable[[], AbstractContextManager[object]]:
    """Makes the context `keep_double(model)` again and again, for a model whose dtype stays what it is."""
    return _KeepDouble if any(p.dtype == torch.float64 for p in model.parameters()) else nullcontext


def vector_dtype(parameters: list[nn.Parameter]) -> torch.dtype:
    """The dtype of vectors that belong to these parameters: float64 if any of them is float64, otherwise float32.

    A Krylov basis or a sum over batches kept in bf16 would lose more than the products themselves do.
    """
    return torch.float64 if any(p.dtype == torch.float64 for p in parameters) else torch.float32


def raised(x: Tensor) -> Tensor:
    """X in the dtype that its arithmetic is done in: float32 for half precision, otherwise its own."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def roundoff(tensors: Iterable[Tensor]) -> float:
    """Spacing of numbers near one in the coarsest arithmetic that products of these tensors are taken in.

    That of the dtype, and of TF32 (2^-10) for float32 on a GPU where `torch.set_float32_matmul_precision` allows it.
    """
    tf32 = torch.get_float32_matmul_precision() != "highest"
    return max(
        2.0**-10 if tf32 and t.is_cuda and t.dtype == torch.float32 else float(torch.finfo(t.dtype).eps)
        for t in tensors
    )


def one_pass(x: Tensor) -> bool:
    """Whether the kernels of `curvature.layers.kernels`, which use float32, do for x: on a GPU, and not in float64."""
    return x.is_cuda and x.dtype != torch.float64
