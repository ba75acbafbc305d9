"""Second moments of the inputs of every weight over calibration text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from curvature.estimate import Progress
from curvature.loss import Batch, CausalLMLoss
from quant.perplexity import evaluating, on_device
from quant.weights import WeightMatrix

__all__ = ["InputGrams", "input_grams"]


@dataclass(frozen=True, eq=False)
class InputGrams:
    """Gram matrices X X^T of the inputs of every weight, divided by the number of tokens.

    Attributes:
        grams: {weight name: [columns, columns]}, for stacks of experts [experts, columns, columns]; float32 or wider.
        tokens: {weight name: tokens seen}, for stacks of experts one number per expert.
    """

    grams: dict[str, Tensor] = field(repr=False)
    tokens: dict[str, list[int]]


def input_grams(
    model: nn.Module,
    weights: Sequence[WeightMatrix],
    batches: Sequence[Batch],
    *,
    progress: Progress | None = None,
) -> InputGrams:
    """Gram matrices of the inputs of every weight over calibration batches.

    Padding is left out: positions with `attention_mask` zero add nothing, whether a module gets them as
    [batch, length, width] or as [tokens, width]; of a module that gets only some of the positions, all those count.
    Inputs of stacks of experts are those of the tokens that the router sends there, and of the second matrix what the
    experts' own gate makes of them. Cost: one forward pass per batch; memory: a square matrix per weight and expert.

    Raises:
        ValueError: If there is no batch, or an input is not finite; the message names the weight.
        NotImplementedError: For embeddings, whose inputs are indices, and for stacks of experts of which it is not
            known how they compute.
    """
    if not batches:
        raise ValueError("batches: there is none; give at least one calibration batch")
    lookups = [w.name for w in weights if w.layout == "embedding"]
    if lookups:
        raise NotImplementedError(f"{lookups[0]}: an embedding has no inputs to calibrate with; use --quantizer rtn")
    recorder = _Recorder()
    with torch.no_grad(), evaluating(model), recorder.watching(model, weights):
        device = next(model.parameters()).device
        for number, batch in enumerate(batches):
            moved = on_device(batch, device)
            recorder.mask = moved.get("attention_mask")
            model(**CausalLMLoss().model_inputs(model, moved))
            if progress is not None:
                progress(number + 1, len(batches), "inputs")
    return recorder.result(weights)


class _Recorder:
    """Sums of x x^T per weight, as the modules see their inputs."""

    def __init__(self) -> None:
        self.mask: Tensor | None = None
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, list[int]] = {}

    @contextmanager
    def watching(self, model: nn.Module, weights: Sequence[WeightMatrix]) -> Iterator[None]:
        handles = []
        try:
            stacks: dict[str, list[WeightMatrix]] = {}
            for weight in weights:
                if weight.layout == "experts":
                    stacks.setdefault(weight.modules[0], []).append(weight)
                    continue
                for path in weight.modules:
                    module = model.get_submodule(path)
                    if not isinstance(module, nn.Embedding):
                        handles.append(module.register_forward_pre_hook(self._hook(weight)))
            for path, stacked in stacks.items():
                module = model.get_submodule(path)
                handles.append(module.register_forward_pre_hook(self._expert_hook(module, stacked)))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, weight: WeightMatrix) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def hook(_module: nn.Module, inputs: tuple[Any, ...]) -> None:
            x = inputs[0]
            if self.mask is not None and x.shape[:-1] in (self.mask.shape, (self.mask.numel(),)):
                x = x[(self.mask != 0).reshape(x.shape[:-1])]
            self._add(weight.name, 0, 1, x.reshape(-1, x.shape[-1]))

        return hook

    def _expert_hook(
        self, module: nn.Module, stacked: list[WeightMatrix]
    ) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        """Inputs of experts: hidden states by the router's choice; of the second matrix, what the first makes."""
        leaf = _first_leaf(module, stacked)
        up = next((w for w in stacked if w.name.endswith(leaf)), None)
        down = next((w for w in stacked if w is not up), None)

        def hook(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            hidden, chosen = inputs[0].reshape(-1, inputs[0].shape[-1]), inputs[1]
            keep = None if self.mask is None else (self.mask != 0).reshape(-1)
            first, second = _stack(module, leaf), _stack(module, "down_proj")
            for expert in range(len(first)):
                here = (chosen == expert).any(-1)
                if expert >= len(second):  # the identity, which passes tokens on without either matrix
                    here = torch.zeros_like(here)
                x = hidden[here if keep is None or len(keep) != len(here) else here & keep]
                if up is not None:
                    self._add(up.name, expert, len(first), x)
                if down is not None and expert < len(second):
                    made = _gated(module, leaf, nn.functional.linear(x, first[expert])) if len(x) else None
                    self._add(down.name, expert, len(second), x.new_zeros(0, down.columns) if made is None else made)

        return hook

    def _add(self, name: str, place: int, places: int, x: Tensor) -> None:
        if not bool(torch.isfinite(x).all()):
            raise ValueError(f"the inputs of {name!r} hold NaN or infinity; check the weights of the layers before it")
        wide = x if x.dtype == torch.float64 else x.float()
        if name not in self._sums:
            shape = (places, x.shape[-1], x.shape[-1])
            self._sums[name] = torch.zeros(shape, dtype=wide.dtype, device=x.device)
            self._counts[name] = [0] * places
        self._sums[name][place] += wide.T @ wide
        self._counts[name][place] += len(x)

    def result(self, weights: Sequence[WeightMatrix]) -> InputGrams:
        grams = {}
        for weight in weights:
            if weight.name not in self._sums:
                raise ValueError(f"{weight.name}: the model's forward pass does not use its module; leave it out")
            counts = torch.tensor(self._counts[weight.name], device=self._sums[weight.name].device).clamp_min(1)
            mean = self._sums[weight.name] / counts[:, None, None]
            grams[weight.name] = mean if weight.layout == "experts" else mean[0]
        return InputGrams(grams, dict(self._counts))


_PLAIN_GATE = "LongcatFlashExperts"
"""Class of transformers that computes act_fn(gate) * up and has no method for it."""


def _first_leaf(module: nn.Module, stacked: Sequence[WeightMatrix]) -> str:
    """Which parameter of a stack of experts meets the inputs; refused unless it is known how they go on from there."""
    leaf = "gate_up_proj" if getattr(module, "gate_up_proj", None) is not None else "up_proj"
    known = (
        (hasattr(module, "_apply_gate") or type(module).__name__ == _PLAIN_GATE)
        and not getattr(module, "has_bias", False)
        and all(isinstance(getattr(module, name, None), nn.Parameter) for name in (leaf, "down_proj"))
        and len(_stack(module, leaf)) >= len(_stack(module, "down_proj"))
    )
    for weight in stacked:
        if not known or weight.name.rpartition(".")[2] not in (leaf, "down_proj"):
            what = f"what inputs {type(module).__name__} gives it is not known"
            raise NotImplementedError(f"{weight.name}: {what}; use --quantizer rtn")
    return leaf


def _stack(module: nn.Module, leaf: str) -> Tensor:
    found: Tensor = getattr(module, leaf)
    return found


def _gated(module: Any, leaf: str, outputs: Tensor) -> Tensor:
    """What the second matrix of experts gets from the outputs of the first, by the module's own gate."""
    if leaf == "up_proj":
        made: Tensor = module.act_fn(outputs)
    elif hasattr(module, "_apply_gate"):
        made = module._apply_gate(outputs)
    else:
        gate, value = outputs.chunk(2, dim=-1)
        made = module.act_fn(gate) * value
    return made
