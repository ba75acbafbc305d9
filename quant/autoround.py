"""AutoRound through its own package: rounding directions and clipping learned block by block, by signed gradients."""

from __future__ import annotations

import copy
import importlib
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from curvature.loss import Batch
from quant.rounding import QuantizedWeight, round_to_nearest
from quant.scheme import Scheme
from quant.weights import WeightMatrix

__all__ = ["AutoRoundQuantizer"]

_SCALE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_UNQUANTIZED = {"bits": 16}


class AutoRoundQuantizer:
    """Rounds weights by AutoRound, for `quant.candidates.round_all`.

    For every format the package tunes a copy of the whole model in which all asked weights have that format, each block
    on the outputs of the quantized blocks before it; the codes and scales are read back from what it leaves, exactly.
    Cost: `iterations` first-order passes through every block and format; memory: a second model in float32.

    Args:
        model: The unquantized model; it is not changed.
        batches: Calibration batches of `input_ids`, equally long and without padding.
        iterations: Steps of the tuning per block.
        scale_dtype: Dtype of stored scales; None: float32.
        seed: Seed of the order in which it sees the windows.

    Attributes:
        notices: Weights that AutoRound does not take and that were rounded to nearest.

    Raises:
        ModuleNotFoundError: Without the package auto-round.
        NotImplementedError: For scales in another dtype than float32, bfloat16 or float16.
        ValueError: If a batch is padded, or the batches are not equally long.

    Source: Cheng et al., Optimize weight rounding via signed gradient descent (2023).
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Sequence[Batch],
        *,
        iterations: int = 200,
        scale_dtype: torch.dtype | None = None,
        seed: int = 0,
    ) -> None:
        try:
            self._package: Any = importlib.import_module("auto_round")
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "quantizer 'autoround' needs the package auto-round: pip install 'flashbob-curv[quantizers]'",
                name=error.name,
            ) from error
        self._scale_dtype = scale_dtype or torch.float32
        if self._scale_dtype not in _SCALE_NAMES:
            raise NotImplementedError(
                f"quantizer 'autoround' stores scales in float32, bfloat16 or float16, not in {self._scale_dtype}; "
                "choose another storage dtype"
            )
        self._model, self._windows = model, _windows(batches)
        self._size = int(batches[0]["input_ids"].shape[0])
        self._iterations, self._seed = iterations, seed
        self._told: dict[str, str] = {}

    @property
    def notices(self) -> list[str]:
        """One remark per weight that there is something to say about."""
        return list(self._told.values())

    def __call__(self, jobs: Sequence[tuple[WeightMatrix, Scheme]]) -> list[QuantizedWeight]:
        """Round each (weight, format), one tuning per format.

        Raises:
            NotImplementedError: If a weight is not that of one Linear module.
        """
        for weight, _ in jobs:
            if weight.layout != "linear" or weight.tied:
                what = "tied" if weight.tied else f"of the layout {weight.layout!r}"
                raise NotImplementedError(
                    f"{weight.name}: it is {what}, and quantizer 'autoround' takes the weights of Linear modules; "
                    "choose another quantizer, or leave it out with include"
                )
        found: list[QuantizedWeight | None] = [None] * len(jobs)
        for scheme in dict.fromkeys(scheme for _, scheme in jobs):
            places = [i for i, (_, s) in enumerate(jobs) if s == scheme]
            tuned = self._tune([jobs[i][0] for i in places], scheme)
            for i in places:
                found[i] = self._read(tuned, jobs[i][0], scheme)
            del tuned
        return [q for q in found if q is not None]

    def _tune(self, weights: Sequence[WeightMatrix], scheme: Scheme) -> nn.Module:
        """A copy of the model that the package has quantized."""
        wanted = {weight.modules[0] for weight in weights}
        model = copy.deepcopy(self._model).float().requires_grad_(False).eval()
        linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        device = next(model.parameters()).device
        with _quiet(), torch.random.fork_rng(), torch.enable_grad():
            tuning = self._package.AutoRound(
                model,
                object(),  # a tokenizer must be there, but windows of ids have no use for one
                bits=scheme.bits,
                group_size=scheme.group_size,
                sym=scheme.symmetric,
                layer_config={name: dict(_UNQUANTIZED) for name in linear if name not in wanted},
                dataset=[{"input_ids": part} for part in self._windows.split(self._size)],
                nsamples=len(self._windows),
                seqlen=self._windows.shape[1],
                batch_size=min(8, len(self._windows)),
                iters=self._iterations,
                seed=self._seed,
                scale_dtype=_SCALE_NAMES[self._scale_dtype],
                device_map=str(device),
                enable_torch_compile=False,
            )
            tuned: nn.Module = tuning.quantize()[0]
        return tuned

    def _read(self, tuned: nn.Module, weight: WeightMatrix, scheme: Scheme) -> QuantizedWeight:
        module: Any = tuned.get_submodule(weight.modules[0])
        scale, zero = getattr(module, "scale", None), getattr(module, "zp", None)
        if not isinstance(scale, Tensor) or getattr(module, "bits", None) != scheme.bits:
            self._told.setdefault(weight.name, f"{weight.name}: AutoRound does not take its shape; rounded to nearest")
            return round_to_nearest(weight.matrix(), scheme, scale_dtype=self._scale_dtype)
        device = weight.parameter.device
        scale = scale.to(device).reshape(weight.rows, -1)
        values = module.weight.detach().to(device).float().unflatten(-1, (scale.shape[-1], -1))
        codes = (values / scale.float().unsqueeze(-1)).round()
        zeros: Tensor | None = None
        if not scheme.symmetric:
            # Its codes are counted from zero, ours from the middle.
            zeros = torch.as_tensor(zero, device=device).reshape(weight.rows, -1).float() + scheme.lowest
            codes += zeros.unsqueeze(-1)
            zeros = zeros.to(torch.int8)
        result = QuantizedWeight(codes.flatten(-2).to(torch.int8), scale.to(self._scale_dtype), zeros, scheme)
        difference = float((result.dequantize().float() - values.flatten(-2)).abs().max())
        coarsest = 2.0**-8 if self._scale_dtype != torch.float32 else 1e-5
        if difference > coarsest * float(values.abs().max()):
            raise RuntimeError(
                f"{weight.name}: AutoRound's weight is not on the grid of its scales (off by {difference:.2g}); the "
                "installed version of auto-round is not supported"
            )
        return result


def _windows(batches: Sequence[Batch]) -> Tensor:
    """All windows below one another: int64 [windows, tokens]."""
    if not batches:
        raise ValueError("batches: there is none; give at least one calibration batch")
    if len({tuple(b["input_ids"].shape[1:]) for b in batches}) > 1 or any(
        not bool((b["attention_mask"] != 0).all()) for b in batches if "attention_mask" in b
    ):
        raise ValueError("batches: quantizer 'autoround' needs windows of equal length without padding")
    return torch.cat([b["input_ids"].cpu() for b in batches])


@contextmanager
def _quiet() -> Iterator[None]:
    """The package's own reports left out: what matters in them is in the notices."""
    logger = logging.getLogger("autoround")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
