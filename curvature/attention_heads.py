"""Which rows and columns of attention projections belong to which head, or to queries, keys or values.

The projections are found by name (`curvature.blocks.kind_of`); their layout is not known by name but measured. The
output projection reads the heads one after the other. Whatever entry of a query, key or value projection's answer
changes what it reads of head h belongs to head h: the derivatives tell, and they are exact zeros for all other heads.
That covers separate and fused projections, heads side by side or interleaved, and grouped keys and values, which
several query heads share.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from curvature.blocks import kind_of, layer_of
from curvature.groups import Group, Part
from curvature.model_operator import evaluation
from curvature.vectors import select_parameters

__all__ = ["fused_groups", "head_groups"]

_PROBE_TOKENS = 6


@dataclass
class _Attention:
    """The projections of one layer: module names, and what passed through them in a forward pass."""

    inputs: dict[str, nn.Module] = field(default_factory=dict)
    answers: dict[str, Tensor] = field(default_factory=dict)
    output: tuple[str, nn.Module] | None = None
    read: Tensor | None = None


def head_groups(model: nn.Module, names: Sequence[str] | None = None) -> list[Group]:
    """The entries of the query, key, value and output projections that belong to each attention head.

    Of a query, key or value projection those are rows of the weight (output features, whichever way the weight is
    stored) and entries of the bias, of an output projection columns (input features). Keys and values that several
    query heads share are a group of their own, so that no entry is in two groups. Traces of the groups' diagonal blocks
    come with those of the parameters, as slices of the same products (`curvature.groups.group_inner`).

    Cost: one forward pass over a few tokens, and one backward pass through attention per layer and head.

    Args:
        model: A transformers causal language model.
        names: Only entries of these parameters (such as an operator's `space.names`). None: all that require a
            gradient.

    Returns:
        Groups named "layer 3 head 5", and "layer 3 heads 4-7 shared" for shared keys and values, by layer and head.

    Raises:
        ValueError: If no attention projection is found, or the number of heads does not fit its width.
        NotImplementedError: If a projection is no linear map with its weight in two dimensions.
    """
    config: Any = getattr(model, "config", None)
    heads = getattr(config.get_text_config(), "num_attention_heads", None) if config is not None else None
    if heads is None:
        raise ValueError("model: its configuration has no num_attention_heads, so that its heads cannot be told apart")
    wanted = set(select_parameters(model) if names is None else names)
    parameters = dict(model.named_parameters())
    layers = _projections(model)
    groups: list[Group] = []
    with evaluation(model, list(parameters.values())), torch.enable_grad():
        _run(model, layers)
        for layer, attention in layers.items():
            parts = _parts(layer, attention, int(heads))
            for name, found in parts.items():
                kept = tuple(part for part in found if part.parameter in wanted)
                if kept:
                    groups.append(Group(name, kept))
    return groups


def fused_groups(model: nn.Module, names: Sequence[str] | None = None) -> list[Group]:
    """The query, key and value shares of projections that make all three at once, such as GPT-2's `c_attn`.

    Which feature is which is measured, as for heads: no other position reads a query; what attention answers at the
    first position, which has one key only, is that position's value, with derivative one.

    Cost: one forward pass over a few tokens, and two backward passes through attention per layer.

    Args:
        model: A transformers causal language model.
        names: Only entries of these parameters. None: all that require a gradient.

    Returns:
        Groups named "layer 3 q", "layer 3 k" and "layer 3 v"; none where queries, keys and values have projections of
        their own, or where the features of a projection do not fall into these three.

    Raises:
        ValueError: If no attention projection is found.
        NotImplementedError: If a projection is no linear map with its weight in two dimensions.
    """
    wanted = set(select_parameters(model) if names is None else names)
    layers = _projections(model)
    found: dict[str, list[Part]] = {}
    with evaluation(model, list(model.parameters())), torch.enable_grad():
        _run(model, layers)
        for layer, attention in layers.items():
            for name, module in attention.inputs.items():
                owner = _purposes(attention, name) if kind_of(f"{name}.weight") == "qkv" else None
                for (member,), start, stop in _runs(owner) if owner is not None else ():
                    parts = _of_projection(name, module, start, stop, outputs=True)
                    found.setdefault(f"layer {layer} {'qkv'[member]}", []).extend(parts)
    kept = {name: tuple(part for part in parts if part.parameter in wanted) for name, parts in found.items()}
    return [Group(name, parts) for name, parts in kept.items() if parts]


def _purposes(attention: _Attention, name: str) -> Tensor | None:
    """Which features of a fused projection are queries, keys and values: bool [features, 3]; None: it is not clear."""
    if attention.read is None or name not in attention.answers:
        return None
    answer = attention.answers[name]
    (last,) = torch.autograd.grad(attention.read[:, -1].sum(), answer, retain_graph=True)
    (first,) = torch.autograd.grad(attention.read[:, 0].sum(), answer, retain_graph=True)
    query = (last[:, :-1] == 0).flatten(0, 1).all(0)
    value = first[:, 0].abs().amax(0) > 0.5  # one for a value, rounding for all else
    owner = torch.stack([query & ~value, ~query & ~value, value & ~query], 1).cpu()
    return owner if bool(owner.any(1).all()) and bool(owner.any(0).all()) else None


def _projections(model: nn.Module) -> dict[int, _Attention]:
    found: dict[int, _Attention] = {}
    for name, module in model.named_modules():
        layer, kind = layer_of(name), kind_of(f"{name}.weight")
        if layer is None or kind not in ("q", "k", "v", "qkv", "o") or not hasattr(module, "weight"):
            continue
        attention = found.setdefault(layer, _Attention())
        if kind == "o":
            attention.output = name, module
        else:
            attention.inputs[name] = module
    complete = {layer: a for layer, a in found.items() if a.inputs and a.output is not None}
    if not complete:
        raise ValueError("model: no attention projections are found by their names (q, k, v or qkv, and o)")
    return complete


def _run(model: nn.Module, layers: Mapping[int, _Attention]) -> None:
    """Note what passes through the projections."""
    with ExitStack() as stack:
        for attention in layers.values():
            for name, module in attention.inputs.items():

                def answered(
                    _: nn.Module, __: Any, output: Tensor, name: str = name, at: _Attention = attention
                ) -> None:
                    at.answers[name] = output

                stack.callback(module.register_forward_hook(answered).remove)
            if attention.output is not None:

                def asked(_: nn.Module, args: tuple[Tensor, ...], at: _Attention = attention) -> None:
                    at.read = args[0]

                stack.callback(attention.output[1].register_forward_pre_hook(asked).remove)
        find: Any = getattr(model, "get_input_embeddings", lambda: None)
        embedding = find()
        device = next(model.parameters()).device
        ids = torch.arange(1, 1 + _PROBE_TOKENS, device=device) % (embedding.num_embeddings if embedding else 2)
        model(input_ids=ids[None], use_cache=False)


def _parts(layer: int, attention: _Attention, heads: int) -> dict[str, list[Part]]:
    """Each group's parts, groups of single heads first."""
    if attention.output is None or attention.read is None or len(attention.answers) != len(attention.inputs):
        raise ValueError(f"model: the attention projections of layer {layer} do not take part in a forward pass")
    width = attention.read.shape[-1]
    if width % heads:
        raise ValueError(
            f"model: {heads} heads do not divide the {width} features of layer {layer}'s output projection"
        )
    owners = {name: torch.zeros(a.shape[-1], heads, dtype=torch.bool) for name, a in attention.answers.items()}
    weights = torch.linspace(1, 2, width // heads, dtype=attention.read.dtype, device=attention.read.device)
    for head, piece in enumerate(attention.read.split(width // heads, dim=-1)):
        slopes = torch.autograd.grad((piece * weights).sum(), list(attention.answers.values()), retain_graph=True)
        for owner, slope in zip(owners.values(), slopes, strict=True):
            owner[:, head] = (slope.flatten(0, -2) != 0).any(0).cpu()
    for name, owner in owners.items():
        if not bool(owner.any(1).all()):
            raise ValueError(f"model: some features of {name} change no head's result, so that their head is unknown")
    parts: dict[str, list[Part]] = {_group_name(layer, [head]): [] for head in range(heads)}
    for name, owner in owners.items():
        for members, start, stop in _runs(owner):
            found = parts.setdefault(_group_name(layer, members), [])
            found.extend(_of_projection(name, attention.inputs[name], start, stop, outputs=True))
    name, module = attention.output
    for head in range(heads):
        start, stop = head * width // heads, (head + 1) * width // heads
        parts[_group_name(layer, [head])].extend(_of_projection(name, module, start, stop, outputs=False))
    return parts


def _runs(owner: Tensor) -> Iterator[tuple[list[int], int, int]]:
    """Stretches of features with the same heads: (heads, start, stop)."""
    rows = [tuple(row.nonzero()[:, 0].tolist()) for row in owner]
    position = 0
    for members, run in itertools.groupby(rows):
        length = len(list(run))
        if members:
            yield list(members), position, position + length
        position += length


def _of_projection(name: str, module: nn.Module, start: int, stop: int, *, outputs: bool) -> list[Part]:
    """The weight's rows or columns of these features, and the bias's entries where they are output features."""
    if isinstance(module, nn.Linear):
        dim = 0 if outputs else 1
    elif isinstance(module, Conv1D):
        dim = 1 if outputs else 0
    else:
        raise NotImplementedError(f"heads of {name}, a {type(module).__name__}; nn.Linear and Conv1D are supported")
    parts = [Part(f"{name}.weight", dim, start, stop)]
    if outputs and getattr(module, "bias", None) is not None:
        parts.append(Part(f"{name}.bias", 0, start, stop))
    return parts


def _group_name(layer: int, heads: Sequence[int]) -> str:
    if len(heads) == 1:
        return f"layer {layer} head {heads[0]}"
    contiguous = list(heads) == list(range(heads[0], heads[-1] + 1))
    members = f"{heads[0]}-{heads[-1]}" if contiguous else ",".join(map(str, heads))
    return f"layer {layer} heads {members} shared"
