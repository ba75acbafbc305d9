"""The loss whose second derivatives are taken: next-token cross-entropy, summed over counted tokens."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from curvature.cross_entropy import cross_entropy_sum
from curvature.precision import keep_double

__all__ = ["Batch", "CausalLMLoss", "Loss", "count_targets"]

Batch = Mapping[str, Any]
"""One batch as Hugging Face collators make it: `input_ids`, and where needed `attention_mask` and `labels`."""


class Loss(Protocol):
    """A loss that an operator can combine over batches.

    The operators' loss is `sum_b total_b / sum_b tokens_b` over batches b, so that unequal and padded batches count
    token by token and not batch by batch.
    """

    def __call__(self, model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        """Evaluate one batch.

        Args:
            model: The model, in evaluation mode.
            batch: One batch, its tensors on the model's device.

        Returns:
            The sum of the token losses as a differentiable scalar, and the number of tokens in that sum.
        """
        ...


@dataclass(frozen=True)
class CausalLMLoss:
    """Next-token cross-entropy of a causal language model.

        total = sum over counted (b, t) of -log softmax(logits[b, t])[label[b, t + 1]]

    Labels are `batch["labels"]` where present, otherwise `input_ids`; they are shifted by one here, not by the caller.
    A prediction is counted when its label is not `ignore_index` and neither the predicting nor the predicted position
    is padding (`attention_mask == 0`). Padding on the left therefore adds no prediction made from a pad token, and,
    where the model takes `position_ids`, it shifts no position: a padded batch has the loss of its unpadded sequences.

    The cross-entropy is computed here and not by the model, whose own would lower float64 logits to float32. Logits in
    bf16 or fp16 are raised to float32. Units: nats. Cost: one forward pass; the logits [B, N, vocabulary] are whole.

    Args:
        ignore_index: The label value that takes a position out of the loss.
    """

    ignore_index: int = -100

    def __call__(self, model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        """Evaluate one batch; see `Loss`.

        Returns:
            The summed loss (float64 for a float64 model, otherwise float32) and the number of counted tokens.

        Raises:
            ValueError: If `input_ids` is missing or not [B, N], a mask or the labels have another shape, a label that
                counts lies outside the vocabulary, or `model_inputs` raises it.
        """
        targets = self.targets(batch)
        with keep_double(model):
            output = model(**self.model_inputs(model, batch))
            logits = output if isinstance(output, Tensor) else output.logits
            if logits.dtype in (torch.bfloat16, torch.float16):
                logits = logits.float()
            tokens = count_targets(targets, self.ignore_index, logits.shape[-1])
            total = F.cross_entropy(
                logits.flatten(0, 1), targets.flatten(), ignore_index=self.ignore_index, reduction="sum"
            )
        return total, tokens

    def token_sum(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Summed cross-entropy of any stretch of positions, by way of `curvature.cross_entropy`.

        Args:
            logits: [B, n, vocabulary].
            targets: The same positions of `targets`, int64 [B, n].

        Returns:
            A scalar, float64 for float64 logits, otherwise float32; 0 where no target is counted.
        """
        return cross_entropy_sum(logits, targets, self.ignore_index)

    def targets(self, batch: Batch) -> Tensor:
        """What each position must predict.

        Returns:
            int64 [B, N]: entry (b, t) is the label of position t + 1, or `ignore_index` where nothing is counted (the
            last position always).
        """
        input_ids, mask = _input_ids(batch), _padding_mask(batch)
        labels = batch.get("labels")
        if labels is None:
            labels = input_ids
        elif labels.shape != input_ids.shape:
            raise ValueError(
                f"batch['labels'] must have the shape of input_ids, {tuple(input_ids.shape)}, got "
                f"{tuple(labels.shape)}; labels are shifted inside, so pass them unshifted"
            )
        targets = torch.full_like(input_ids, self.ignore_index, dtype=torch.int64)
        targets[:, :-1] = labels[:, 1:]
        if mask is not None:
            targets[:, :-1].masked_fill_((mask[:, 1:] == 0) | (mask[:, :-1] == 0), self.ignore_index)
        return targets

    def model_inputs(self, model: nn.Module, batch: Batch) -> dict[str, Any]:
        """The keyword arguments for the model's forward pass.

        A mask of ones is dropped (attention then takes its unpadded path); further entries of the batch are passed on.

        Raises:
            ValueError: If there is padding on the left, no `position_ids` in the batch, and the model is a wrapper of
                which it cannot be told whether it takes them.
        """
        mask = _padding_mask(batch)
        inputs = {k: v for k, v in batch.items() if k not in ("labels", "attention_mask")}
        if mask is not None:
            inputs["attention_mask"] = mask
            padded_right_only = bool((mask[:, 1:] <= mask[:, :-1]).all())
            if not padded_right_only and "position_ids" not in inputs and _takes_positions(model):
                inputs["position_ids"] = (mask.long().cumsum(-1) - 1).clamp_min(0)
        if hasattr(model, "config"):
            inputs |= {"use_cache": False, "return_dict": True}
        return inputs


def count_targets(targets: Tensor, ignore_index: int, vocabulary: int | None = None, what: str = "batch") -> int:
    """Number of counted targets, once they are known to be entries of the vocabulary.

    A GPU would answer to another one with an error that ends the process, or not at all. Cost: what the count costs,
    which is one value read back.

    Args:
        targets: int64, of any shape.
        ignore_index: The target that is not counted.
        vocabulary: Width of the logits; None: targets are not looked at.
        what: What they belong to, for the message.

    Raises:
        ValueError: If a counted target is negative, or not below `vocabulary`.
    """
    counted = targets != ignore_index
    if vocabulary is None or not targets.numel():
        return int(counted.sum())
    entries = targets.masked_fill(~counted, 0)
    tokens, least, most = torch.stack([counted.sum(), entries.min(), entries.max()]).tolist()
    if not 0 <= least <= most < vocabulary:
        raise ValueError(
            f"{what}: labels that count reach from {least} to {most}, but the model's vocabulary has {vocabulary} "
            f"entries; labels that do not count are {ignore_index}"
        )
    return int(tokens)


def _takes_positions(model: nn.Module) -> bool:
    """Whether a model takes `position_ids`; wrappers that take any keyword argument hand it on to what they wrap."""
    outer = model
    while True:
        parameters = inspect.signature(model.forward).parameters
        if "position_ids" in parameters:
            return True
        if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
            return False
        inner = _wrapped(model)
        if inner is None and isinstance(model, PreTrainedModel):
            return False
        if inner is None:
            raise ValueError(
                f"batch: its rows are padded on the left, and whether {type(outer).__name__} takes position_ids cannot "
                "be told from its forward(**kwargs); pad on the right, or put position_ids into the batch"
            )
        model = inner


def _wrapped(model: nn.Module) -> nn.Module | None:
    """The model inside one of torch.compile, DataParallel and the like, PEFT, or transformers' own head."""
    found = [getattr(model, name, None) for name in ("_orig_mod", "module", "get_base_model", "base_model")]
    found = [each() if inspect.ismethod(each) else each for each in found]
    return next((inner for inner in found if isinstance(inner, nn.Module) and inner is not model), None)


def _input_ids(batch: Batch) -> Tensor:
    input_ids = batch.get("input_ids")
    if not isinstance(input_ids, Tensor) or input_ids.ndim != 2:
        found = tuple(input_ids.shape) if isinstance(input_ids, Tensor) else f"keys {sorted(batch)}"
        raise ValueError(f"a batch must hold 'input_ids', a tensor of shape [batch, sequence], got {found}")
    return input_ids


def _padding_mask(batch: Batch) -> Tensor | None:
    """The batch's attention mask [B, N], or None where nothing is masked."""
    mask = batch.get("attention_mask")
    if mask is None:
        return None
    if mask.shape != _input_ids(batch).shape:
        raise ValueError(
            f"batch['attention_mask'] must have the shape of input_ids, {tuple(_input_ids(batch).shape)}, got "
            f"{tuple(mask.shape)}; masks of pairs of positions are not supported"
        )
    return None if bool((mask != 0).all()) else mask
