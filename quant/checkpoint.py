"""Quantized checkpoints: written, read back by transformers, and compared."""

from __future__ import annotations

import copy
import io
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from curvature.loss import Batch
from flashbob import __version__
from quant.candidates import Candidates
from quant.packing import pack
from quant.perplexity import on_device
from quant.scheme import Scheme
from quant.storage import PackedStorage, other_tensors, packed_tensors
from quant.weights import WeightMatrix

__all__ = ["CheckpointError", "Export", "UnreadableError", "Written", "packable", "untie", "write_checkpoint"]

Export: TypeAlias = Literal["compressed-tensors", "dense", "gguf"]

WEIGHTS = "model.safetensors"

LAYOUT = "0.18"
"""The release of compressed-tensors since which 3, 5, 6 and 7 bits are packed as here."""


class CheckpointError(RuntimeError):
    """A checkpoint that was written does not give back what was put in."""


class UnreadableError(CheckpointError):
    """transformers fails to read this architecture with packed weights; dense ones remain."""


@dataclass(frozen=True)
class Written:
    """What was written.

    Attributes:
        folder: The model folder.
        export: The format in fact written.
        bytes: Size of its weights file.
        verified: Whether it was read back and compared.
        largest_difference: Of the logits against the fake-quantized model; None where not verified.
        writer: Names and versions.
    """

    folder: Path
    export: Export
    bytes: int
    verified: bool
    largest_difference: float | None
    writer: dict[str, str | None]


def packable(weights: Sequence[WeightMatrix], schemes: Sequence[Scheme]) -> str | None:
    """Why these weights cannot be stored as pack-quantized so that transformers reads them; None if they can."""
    for weight in weights:
        if weight.layout == "conv1d":
            return f"compressed-tensors skips Conv1D modules such as {weight.modules[0]!r} silently"
        if weight.layout == "experts":
            return f"transformers does not read packed stacks of experts such as {weight.name!r}"
        if weight.layout == "embedding" or weight.tied:
            return (
                f"transformers does not read the packed embedding or tied head {weight.name!r}; keep it at 16 bits or "
                "untie it"
            )
    for scheme in schemes:
        if not scheme.symmetric:
            return "transformers does not read asymmetric pack-quantized checkpoints; choose symmetric formats"
    return None


def untie(model: PreTrainedModel) -> bool:
    """Give a head that is tied to the embedding a weight of its own, so that it can have a format of its own.

    Returns:
        Whether the head was tied.
    """
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if not isinstance(head, nn.Linear) or head.weight is not embedding.weight:
        return False
    tied = head.weight
    head.weight = nn.Parameter(tied.detach().clone(), requires_grad=tied.requires_grad)
    for config in (model.config, model.config.get_text_config()):
        config.tie_word_embeddings = False
    # What saving consults beside the configuration.
    model.all_tied_weights_keys = {}
    return True


def write_checkpoint(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    candidates: Candidates,
    plan: Sequence[int],
    folder: str | Path,
    *,
    export: Export,
    dtype: torch.dtype,
    check: Batch | None = None,
) -> Written:
    """Write a model folder, and compare what transformers reads from it with the fake-quantized model.

    - "compressed-tensors": pack-quantized, symmetric; one config group per format with exact module names as targets;
      one weights file of exactly `PackedStorage.file_bytes`.
    - "dense": the rounded weights as ordinary ones, in `dtype`; for models that packed formats do not cover.

    All files are written beside their places and moved there after the comparison: a failure leaves none of them.
    `dequantize=True` of transformers' CompressedTensorsConfig reads all groups with the first one's format; the default
    does not.

    Args:
        model: The unquantized model, on any device; unchanged.
        tokenizer: Saved beside it; None: no tokenizer.
        candidates: The weights at all options.
        plan: The option of each weight.
        folder: Where to write; made if need be.
        export: The format.
        dtype: Dtype of scales and unquantized tensors; the scales were chosen in it.
        check: A batch to compare logits on; None: no verification.

    Returns:
        See `Written`.

    Raises:
        ValueError: If the weights cannot be packed, or scales have another dtype.
        ModuleNotFoundError: If a packed checkpoint is to be verified without compressed-tensors.
        UnreadableError: If transformers cannot read the packed weights of this architecture.
        CheckpointError: If what was read back differs, or the file has another size than predicted.
    """
    if export not in ("compressed-tensors", "dense"):
        raise ValueError(f"export must be 'compressed-tensors' or 'dense' here, got {export!r}; see quant.gguf_file")
    folder = Path(folder)
    schemes = [candidates.options[b] for b in plan]
    if export == "compressed-tensors":
        if reason := packable(candidates.weights, schemes):
            raise ValueError(f"export 'compressed-tensors': {reason}; or choose export 'dense'")
        wrong = {candidates.rounded[t][b].scale.dtype for t, b in enumerate(plan)} - {dtype}
        if wrong:
            raise ValueError(f"dtype {dtype}: the scales were chosen in {wrong.pop()}; round with scale_dtype={dtype}")
    reference = _reference(model, candidates, plan, dtype)
    difference = None
    with _moved_into(folder) as place:
        if export == "compressed-tensors":
            _write_packed(reference, candidates, plan, place, dtype)
        else:
            reference.save_pretrained(place, max_shard_size="1000TB")
        if tokenizer is not None:
            tokenizer.save_pretrained(place)
        if check is not None:
            difference = _verify(reference, place, check, dtype, export)
        os.chmod(place / WEIGHTS, 0o644)
        size = (place / WEIGHTS).stat().st_size
    return Written(folder, export, size, check is not None, difference, writer_versions())


@contextmanager
def _moved_into(folder: Path) -> Iterator[Path]:
    """A folder to write to, whose files are moved into `folder` at the end; after an error nothing of it is left."""
    existed = folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    place = Path(tempfile.mkdtemp(dir=folder, prefix=".", suffix=".part"))
    try:
        yield place
        for path in [p for p in place.rglob("*") if not p.is_dir()]:
            target = folder / path.relative_to(place)
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(path, target)
    except BaseException:
        shutil.rmtree(place if existed else folder)
        raise
    shutil.rmtree(place)


def writer_versions() -> dict[str, str | None]:
    """Versions that a checkpoint's record states."""
    found: dict[str, str | None] = {"flashbob-curv": __version__, "layout": f"compressed-tensors >= {LAYOUT}"}
    for name in ("compressed-tensors", "transformers", "safetensors"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def _reference(
    model: PreTrainedModel, candidates: Candidates, plan: Sequence[int], dtype: torch.dtype
) -> PreTrainedModel:
    """A copy on the CPU with rounded weights and everything else in the stored dtype."""
    memo: dict[int, Any] = {
        id(p): nn.Parameter(p.detach().to("cpu", dtype, copy=True), False) for p in model.parameters()
    }
    persistent = {name for name, _ in model.named_buffers()} & set(model.state_dict())
    buffers = dict(model.named_buffers())
    for name, buffer in buffers.items():
        stored = buffer.detach().cpu().clone()
        memo[id(buffer)] = stored.to(dtype) if name in persistent and stored.is_floating_point() else stored
    reference: PreTrainedModel = copy.deepcopy(model, memo)
    named = dict(reference.named_parameters())
    for t, (weight, option) in enumerate(zip(candidates.weights, plan, strict=True)):
        with torch.no_grad():
            value = candidates.rounded[t][option].dequantize().cpu()
            named[weight.name].copy_(weight.tensor(value))
    reference.config.dtype = dtype
    reference.eval()
    return reference


def _write_packed(
    reference: PreTrainedModel, candidates: Candidates, plan: Sequence[int], folder: Path, dtype: torch.dtype
) -> None:
    state = dict(reference.named_parameters()) | dict(reference.named_buffers())
    tensors: dict[str, Tensor] = {}
    for entry in other_tensors(reference, candidates.weights, dtype):
        tensors[entry.name] = state[entry.name].detach().contiguous()
    schemes = [candidates.options[b] for b in plan]
    for t, (weight, scheme) in enumerate(zip(candidates.weights, schemes, strict=True)):
        quantized = candidates.rounded[t][plan[t]].to("cpu")
        values = (
            pack(quantized.codes, scheme.bits),
            quantized.scale.contiguous(),
            torch.tensor([weight.rows, weight.columns]),
        )
        for entry, value in zip(packed_tensors(weight, scheme, dtype), values, strict=True):
            tensors[entry.name] = value
    path = folder / WEIGHTS
    save_file(tensors, path, metadata=PackedStorage.METADATA)
    expected = PackedStorage(reference, candidates.weights, dtype).file_bytes(schemes)
    if path.stat().st_size != expected:
        raise CheckpointError(f"{WEIGHTS} has {path.stat().st_size:,} bytes where the plan says {expected:,}")
    config = copy.deepcopy(reference.config)
    config.architectures = [type(reference).__name__]
    config.quantization_config = quantization_config(reference, candidates.weights, schemes)
    config.save_pretrained(folder)
    if reference.generation_config is not None:
        reference.generation_config.save_pretrained(folder)


def quantization_config(model: nn.Module, weights: Sequence[WeightMatrix], schemes: Sequence[Scheme]) -> dict[str, Any]:
    """The `quantization_config` of config.json: one group per format, exact module names as its targets."""
    targets: dict[Scheme, list[str]] = {}
    for weight, scheme in zip(weights, schemes, strict=True):
        targets.setdefault(scheme, []).extend(weight.modules)
    quantized = {path for paths in targets.values() for path in paths}
    ignored = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and n not in quantized]
    groups = {
        f"group_{number}": {
            "format": "pack-quantized",
            "input_activations": None,
            "output_activations": None,
            "targets": paths,
            "weights": {
                "num_bits": scheme.bits,
                "type": "int",
                "symmetric": scheme.symmetric,
                "strategy": "channel" if scheme.group_size == -1 else "group",
                "group_size": None if scheme.group_size == -1 else scheme.group_size,
                "dynamic": False,
            },
        }
        for number, (scheme, paths) in enumerate(sorted(targets.items()))
    }
    versions = writer_versions()
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": ignored,
        "kv_cache_scheme": None,
        "version": versions["compressed-tensors"] or f"{LAYOUT}.0",
    }


def _verify(reference: PreTrainedModel, folder: Path, check: Batch, dtype: torch.dtype, export: Export) -> float:
    """Largest difference of logits between the folder, as transformers reads it, and the reference; zero or an error.

    Both run on the CPU with the same attention and the same products of experts, and their weights are the same bits,
    so nothing else is accepted.
    """
    inputs = {k: v for k, v in on_device(check, torch.device("cpu")).items() if k in ("input_ids", "attention_mask")}
    try:
        with redirect_stderr(io.StringIO()):  # the bars of four passes over a model that is read once
            read = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
            for parameter in read.parameters():  # a file's place in memory can change how sums are ordered
                parameter.data = parameter.data.clone()
            found = _logits(read, inputs)
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        told = (
            f"transformers does not read {export} weights of {type(reference).__name__} back "
            f"({type(error).__name__}: {error}); no checkpoint is kept"
        )
        if export == "dense":
            raise CheckpointError(told) from error
        raise UnreadableError(f"{told}, choose --export dense") from error
    expected = _logits(reference, inputs)
    difference = float((found - expected).abs().max())
    if difference != 0.0:  # NaN too
        state, wanted = dict(read.named_parameters()), dict(reference.named_parameters())
        first = next((n for n, p in wanted.items() if n in state and not torch.equal(state[n], p)), None)
        where = (
            f"the first weight that differs is {first!r}" if first else "though all weights that can be compared agree"
        )
        raise CheckpointError(
            f"logits read back differ from the fake-quantized model's by up to {difference:.3g}, {where}; no "
            "checkpoint is kept"
        )
    return difference


@torch.no_grad()
def _logits(model: PreTrainedModel, inputs: Batch) -> Tensor:
    model.requires_grad_(False)  # by which torch.matmul chooses how to multiply, without gradients too
    for name in ("set_attn_implementation", "set_experts_implementation"):
        if (choose := getattr(model, name, None)) is not None:
            choose("eager")
    logits: Tensor = model(**inputs, use_cache=False).logits.double()
    return logits
