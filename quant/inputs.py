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

    Padding is left out: positions with `attention_mask` zero add nothing. Inputs of experts are those of the tokens
    that the router sends there. Cost: one forward pass per batch; memory: a square matrix per distinct input.

    Raises:
        ValueError: If there is no batch, or an input is not finite; the message names the weight.
        NotImplementedError: For embeddings, whose inputs are indices.
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
                handles.append(model.get_submodule(path).register_forward_pre_hook(self._expert_hook(stacked)))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, weight: WeightMatrix) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def hook(_module: nn.Module, inputs: tuple[Any, ...]) -> None:
            x = inputs[0]
            if self.mask is not None and x.shape[:-1] == self.mask.shape:
                x = x[self.mask != 0]
            self._add(weight.name, 0, 1, x.reshape(-1, x.shape[-1]))

        return hook

    def _expert_hook(self, stacked: list[WeightMatrix]) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        """Inputs of experts: hidden states by the router's choice; of the second matrix, what the first makes."""
        up = next((w for w in stacked if "down" not in w.name and "output" not in w.name), None)
        down = next((w for w in stacked if w is not up), None)

        def hook(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            hidden, chosen = inputs[0].reshape(-1, inputs[0].shape[-1]), inputs[1]
            keep = None if self.mask is None else (self.mask != 0).reshape(-1)
            first: Tensor = getattr(module, "gate_up_proj")  # noqa: B009 - of a module known only at run time
            for expert in range(len(first)):
                here = (chosen == expert).any(-1)
                x = hidden[here if keep is None or len(keep) != len(here) else here & keep]
                if up is not None:
                    self._add(up.name, expert, len(first), x)
                if down is not None and len(x):
                    gate, value = nn.functional.linear(x, first[expert]).chunk(2, dim=-1)
                    activation: Any = module.act_fn
                    self._add(down.name, expert, len(first), activation(gate) * value)
                elif down is not None:
                    self._add(down.name, expert, len(first), x.new_zeros(0, down.columns))

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
