"""Exact sizes of what a plan will write: every tensor of the file, and the file itself."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import ClassVar, Protocol

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from quant.scheme import Scheme
from quant.weights import WeightMatrix

__all__ = ["GgufStorage", "PackedStorage", "Storage", "StoredTensor", "safetensors_bytes"]

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
# The order in which the format lays tensors out: widest entries first, then by name.
_ALIGNMENT = (
    "U64",
    "I64",
    "F64",
    "F32",
    "U32",
    "I32",
    "BF16",
    "F16",
    "U16",
    "I16",
    "F8_E4M3",
    "F8_E5M2",
    "I8",
    "U8",
    "BOOL",
)

GGUF_BLOCK = 32
_GGUF_BLOCK_BYTES = {4: 18, 5: 22, 8: 34}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a file: name, dtype and shape."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its entries."""
        return prod(self.shape) * self.dtype.itemsize


class Storage(Protocol):
    """How many bytes a plan takes."""

    def weight_bytes(self, weight: WeightMatrix, scheme: Scheme) -> int:
        """Bytes of one weight's tensors in a format."""
        ...

    def file_bytes(self, plan: Sequence[Scheme]) -> int:
        """Bytes of all that is written for a plan, one format per weight."""
        ...

    def rest_bytes(self, options: Sequence[Sequence[Scheme]]) -> int:
        """Most bytes that a file takes beside the weights' tensors, in any plan of these options of each weight."""
        ...


def safetensors_bytes(tensors: Sequence[StoredTensor], metadata: Mapping[str, str] | None = None) -> int:
    """Exact size of a .safetensors file: 8 bytes, the JSON header padded to a multiple of 8, and the entries."""
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    start = 0
    for tensor in sorted(tensors, key=lambda t: (_ALIGNMENT.index(_NAMES[t.dtype]), t.name)):
        end = start + tensor.nbytes
        header[tensor.name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    return 8 + -(-len(text) // 8) * 8 + start


class PackedStorage:
    """A pack-quantized .safetensors file with everything in it: quantized weights, their scales, and all the rest.

    Args:
        model: The model; what is not among the weights is stored in `dtype` as it is, tied tensors once.
        weights: The weights to be quantized.
        dtype: Dtype of scales and of unquantized floating-point tensors.
    """

    METADATA: ClassVar[dict[str, str]] = {"format": "pt"}

    def __init__(self, model: nn.Module, weights: Sequence[WeightMatrix], dtype: torch.dtype) -> None:
        self.weights, self.dtype = list(weights), dtype
        self.others = other_tensors(model, weights, dtype)

    def weight_bytes(self, weight: WeightMatrix, scheme: Scheme) -> int:
        """Codes with their padding, scales, zero points and the shape; see `Scheme.packed_bytes`."""
        return scheme.packed_bytes(weight.rows, weight.columns, self.dtype.itemsize)

    def file_bytes(self, plan: Sequence[Scheme]) -> int:
        """Exact size of the file, header included."""
        packed = [t for w, s in zip(self.weights, plan, strict=True) for t in packed_tensors(w, s, self.dtype)]
        return safetensors_bytes([*self.others, *packed], self.METADATA)

    def rest_bytes(self, options: Sequence[Sequence[Scheme]]) -> int:
        """The unquantized tensors, and a header as long as if every tensor had its largest size."""
        largest: dict[str, StoredTensor] = {}
        for weight, schemes in zip(self.weights, options, strict=True):
            for tensor in (t for scheme in schemes for t in packed_tensors(weight, scheme, self.dtype)):
                known = largest.get(tensor.name, tensor)
                shape = tuple(max(sizes) for sizes in zip(known.shape, tensor.shape, strict=True))
                largest[tensor.name] = StoredTensor(tensor.name, tensor.dtype, shape)
        size = safetensors_bytes([*self.others, *largest.values()], self.METADATA)
        return size - sum(tensor.nbytes for tensor in largest.values())


class GgufStorage:
    """A GGUF file: blocks of 32 codes with a float16 scale, the rest in float32 and float16, and the header.

    Args:
        model: The model.
        weights: The weights to be quantized.
        tokenizer: Its vocabulary is part of the header; None: a file without one.
    """

    ALIGNMENT = 32

    def __init__(
        self, model: PreTrainedModel, weights: Sequence[WeightMatrix], tokenizer: PreTrainedTokenizerBase | None = None
    ) -> None:
        self.model, self.weights, self.tokenizer = model, list(weights), tokenizer
        # One-dimensional tensors stay in float32, matrices become float16, as llama.cpp expects them.
        self._others = sum(
            self._padded(prod(t.shape) * (2 if len(t.shape) > 1 else 4))
            for t in other_tensors(model, weights, torch.float16)
        )

    def weight_bytes(self, weight: WeightMatrix, scheme: Scheme) -> int:
        """Bytes of the blocks.

        Raises:
            ValueError: If the format has no GGUF type.
        """
        if scheme.bits not in _GGUF_BLOCK_BYTES or scheme.group_size != GGUF_BLOCK or not scheme.symmetric:
            raise ValueError(
                f"{weight.name}: {scheme.label} has no GGUF type; Q4_0, Q5_0 and Q8_0 are 4, 5 and 8 bits in symmetric "
                f"groups of {GGUF_BLOCK} (--choices 4,5,8 --group-size {GGUF_BLOCK})"
            )
        return self._padded(weight.numel // GGUF_BLOCK * _GGUF_BLOCK_BYTES[scheme.bits])

    def file_bytes(self, plan: Sequence[Scheme]) -> int:
        """Exact size of the file, header included."""
        return self._rest + sum(self.weight_bytes(w, s) for w, s in zip(self.weights, plan, strict=True))

    def rest_bytes(self, options: Sequence[Sequence[Scheme]]) -> int:
        """The unquantized tensors and the header, which are the same in every plan."""
        return self._rest

    @cached_property
    def _rest(self) -> int:
        from quant.gguf_file import header_bytes  # here, since it writes by the sizes of this module

        return self._others + header_bytes(self.model, self.weights, self.tokenizer)

    def _padded(self, count: int) -> int:
        return -(-count // self.ALIGNMENT) * self.ALIGNMENT


def other_tensors(model: nn.Module, weights: Sequence[WeightMatrix], dtype: torch.dtype) -> list[StoredTensor]:
    """Everything of the model's state that is not quantized, tied tensors once, floating point in `dtype`."""
    quantized = {name for weight in weights for name in weight.names}
    seen: set[int] = set()
    found = []
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name in quantized or id(tensor) in seen:
            continue
        seen.add(id(tensor))
        kind = dtype if tensor.is_floating_point() else tensor.dtype
        found.append(StoredTensor(name, kind, tuple(tensor.shape)))
    return found


def packed_tensors(weight: WeightMatrix, scheme: Scheme, dtype: torch.dtype) -> list[StoredTensor]:
    """The tensors of one weight in a pack-quantized file."""
    base = weight.name.removesuffix(".weight")
    groups = scheme.groups(weight.columns)
    tensors = [
        StoredTensor(f"{base}.weight_packed", torch.int32, (weight.rows, -(-weight.columns * scheme.bits // 32))),
        StoredTensor(f"{base}.weight_scale", dtype, (weight.rows, groups)),
        StoredTensor(f"{base}.weight_shape", torch.int64, (2,)),
    ]
    if not scheme.symmetric:
        zeros = (-(-weight.rows * scheme.bits // 32), groups)
        tensors.append(StoredTensor(f"{base}.weight_zero_point", torch.int32, zeros))
    return tensors
