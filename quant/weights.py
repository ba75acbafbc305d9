"""Which parameters of a model are quantized, how each reads as a matrix, and which must share a format."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from curvature.blocks import kind_of, layer_of

__all__ = ["Layout", "WeightMatrix", "find_weights", "sharing_groups"]

Layout: TypeAlias = Literal["linear", "conv1d", "embedding", "experts"]

DEFAULT = r"^(?!.*\.(router|gate)\.)"
"""Everything inside the transformer blocks except routers, which choose experts and are tiny."""

_OUTPUTS_FIRST = r"^InklingSharedExperts$|ParallelExperts$"
"""Classes of transformers whose stacks are [experts, outputs, inputs], though no attribute says so."""

_SHARED_KINDS = (("q", "k", "v"), ("mlp gate", "mlp in"))


@dataclass(frozen=True, eq=False)
class WeightMatrix:
    """One parameter as a matrix [rows, columns] that maps columns (inputs) to rows (outputs).

    Attributes:
        name: The parameter's name, the first of them where it is tied.
        names: All its names.
        modules: The modules that hold it, by their paths.
        parameter: The parameter.
        layout: "linear" [rows, columns]; "conv1d" [columns, rows], as GPT-2 stores it; "embedding" [vocabulary,
            width]; "experts" [experts, rows, columns], the experts' rows stacked.
        rows: Output features; of experts, all of them together.
        columns: Input features.
    """

    name: str
    names: tuple[str, ...]
    modules: tuple[str, ...]
    parameter: nn.Parameter = field(repr=False)
    layout: Layout
    rows: int
    columns: int

    @property
    def numel(self) -> int:
        """Number of entries."""
        return self.rows * self.columns

    @property
    def tied(self) -> bool:
        """Whether several modules hold it."""
        return len(self.names) > 1

    def matrix(self, tensor: Tensor | None = None) -> Tensor:
        """The parameter, or a tensor of its shape, as [rows, columns]."""
        tensor = self.parameter.detach() if tensor is None else tensor
        return tensor.T if self.layout == "conv1d" else tensor.reshape(self.rows, self.columns)

    def tensor(self, matrix: Tensor) -> Tensor:
        """A matrix [rows, columns] in the parameter's own shape."""
        return matrix.T if self.layout == "conv1d" else matrix.reshape(self.parameter.shape)

    def write(self, matrix: Tensor) -> None:
        """Set the parameter to a matrix [rows, columns], rounded to its dtype."""
        with torch.no_grad():
            self.parameter.copy_(self.tensor(matrix))


def find_weights(model: nn.Module, include: str | None = None) -> list[WeightMatrix]:
    """The weights to quantize, in the order of `model.named_parameters()`.

    Args:
        model: A causal language model, not yet quantized.
        include: Regular expression, searched for in the parameters' names. None: every weight inside the transformer
            blocks except routers; embeddings and the head stay as they are.

    Returns:
        Weights of Linear, Conv1D and Embedding modules, and stacks of experts, each once.

    Raises:
        ValueError: If the model is already quantized, or nothing is found.
        NotImplementedError: If the experts are stored transposed, or nothing says that they are not.
    """
    _refuse_quantized(model)
    try:
        pattern = re.compile(DEFAULT if include is None else include)
    except re.error as error:
        raise ValueError(f"include: {include!r} is not a regular expression ({error})") from error
    aliases: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(parameter, []).append(name)
    modules = dict(model.named_modules(remove_duplicate=False))
    found = []
    for parameter, names in aliases.items():
        if not any(pattern.search(n) for n in names) or (include is None and layer_of(names[0]) is None):
            continue
        holders = [(n.rpartition(".")[0], modules[n.rpartition(".")[0]]) for n in names]
        # A tied weight is contracted by the head, whose layout counts; the embedding only looks rows up.
        layouts = [_layout(module, name, parameter) for name, (_, module) in zip(names, holders, strict=True)]
        layout = next((kind for kind in layouts if kind not in (None, "embedding")), layouts[0])
        if layout is None:
            continue
        shape = tuple(parameter.shape)
        columns = shape[0] if layout == "conv1d" else shape[-1]
        rows = prod(shape) // columns
        paths = tuple(path for path, _ in holders)
        found.append(WeightMatrix(names[0], tuple(names), paths, parameter, layout, rows, columns))
    if not found:
        what = "no weight inside transformer blocks" if include is None else f"nothing that {include!r} matches"
        raise ValueError(
            f"include: the model has {what} in a Linear, Conv1D or Embedding module or a stack of experts; its "
            f"parameters are like {[names[0] for names in aliases.values()][:3]}"
        )
    return found


def sharing_groups(weights: Sequence[WeightMatrix]) -> list[tuple[int, ...]]:
    """Weights that inference engines fuse into one matrix and that must therefore share a format.

    q, k and v of one attention; gate and up of one MLP; all experts of one layer. A tied weight is one already.

    Returns:
        A partition of the indices of `weights`, in order of first members.
    """
    groups: dict[tuple[str, str], list[int]] = {}
    for index, weight in enumerate(weights):
        kind = kind_of(weight.name)
        parent = weight.modules[0].rpartition(".")[0]
        if weight.layout == "experts" or ".experts." in weight.name:
            key = (re.split(r"\.experts\b", weight.name)[0], "experts")
        else:
            shared = next((kinds for kinds in _SHARED_KINDS if kind in kinds), None)
            key = (parent, shared[0]) if shared else (weight.name, "")
        groups.setdefault(key, []).append(index)
    return [tuple(members) for members in groups.values()]


def _layout(module: nn.Module, name: str, parameter: nn.Parameter) -> Layout | None:
    leaf = name.rpartition(".")[2]
    if leaf == "weight" and isinstance(module, nn.Linear):
        return "linear"
    if leaf == "weight" and isinstance(module, Conv1D):
        return "conv1d"
    if leaf == "weight" and isinstance(module, nn.Embedding):
        return "embedding"
    if parameter.ndim == 3 and "expert" in type(module).__name__.lower():
        if not _outputs_first(module, leaf):
            raise NotImplementedError(
                f"{name}: experts that are, or may be, stored as [experts, inputs, outputs] are not supported; leave "
                f"them out with include"
            )
        return "experts"
    return None


def _outputs_first(module: nn.Module, leaf: str) -> bool:
    """Whether a stack of experts is certain to be [experts, outputs, inputs]."""
    transposed = getattr(module, "is_transposed", None)  # set by use_experts_implementation of transformers
    if transposed is not None:
        return not transposed
    if re.search(_OUTPUTS_FIRST, type(module).__name__):
        return True
    first, second = getattr(module, "gate_up_proj", None), getattr(module, "down_proj", None)
    if leaf not in ("gate_up_proj", "down_proj") or not isinstance(first, Tensor) or not isinstance(second, Tensor):
        return False
    # Gate and up, twice as many rows as down has columns: no shapes fit this and also its transpose.
    return first.ndim == second.ndim == 3 and first.shape[1:] == (2 * second.shape[2], second.shape[1])


def _refuse_quantized(model: nn.Module) -> None:
    """A model on integer codes, or one that a quantizer loaded, has no weights to round."""
    config = getattr(model, "config", None)
    if getattr(config, "quantization_config", None) is not None or getattr(model, "hf_quantizer", None) is not None:
        raise ValueError("model: it is already quantized (its configuration says how); give the unquantized model")
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if re.search(r"(weight_packed|qweight|weight_scale|\.SCB)$", name) or (
            isinstance(tensor, nn.Parameter) and not tensor.is_floating_point()
        ):
            raise ValueError(f"model: it is already quantized (it holds {name!r}); give the unquantized model")
