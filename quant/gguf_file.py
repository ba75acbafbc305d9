"""GGUF files for llama.cpp: our codes in its own block types, exactly.

A block holds 32 codes of one row and a float16 scale d, and means d * (code): Q4_0, Q5_0 and Q8_0 take symmetric codes
of 4, 5 and 8 bits as they are, so that no weight is rounded twice. Biases and norms are stored in float32, all other
matrices in float16. What llama.cpp would compute otherwise than transformers is refused.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from quant.candidates import Candidates
from quant.checkpoint import CheckpointError, Written, writer_versions
from quant.rounding import QuantizedWeight
from quant.storage import GgufStorage, other_tensors
from quant.weights import WeightMatrix

__all__ = ["check_gguf", "header_bytes", "write_gguf"]

BLOCK = 32
_TYPES = {4: "Q4_0", 5: "Q5_0", 8: "Q8_0"}
_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_ARCHITECTURES = {"llama": "LLAMA", "mistral": "LLAMA", "qwen2": "QWEN2"}
FILE = "model.gguf"


def check_gguf(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Find out before the work whether the model can be written.

    Raises:
        ModuleNotFoundError: Without the package gguf.
        NotImplementedError: If the architecture, its rotary embedding, a sliding window, or the kind of tokenizer is
            not supported.
    """
    import gguf  # noqa: F401

    kind = model.config.model_type
    if kind not in _ARCHITECTURES:
        raise NotImplementedError(
            f"export 'gguf' supports the architectures {', '.join(_ARCHITECTURES)}, not {kind!r}; choose another export"
        )
    rope = model.config.rope_parameters
    if rope["rope_type"] not in ("default", "linear"):
        raise NotImplementedError(
            f"export 'gguf' writes rotary embeddings that are unscaled or scaled by 'linear', not by "
            f"{rope['rope_type']!r} (factor {rope.get('factor', 1.0):g}); choose --export compressed-tensors or dense"
        )
    window, positions = getattr(model.config, "sliding_window", None), model.config.max_position_embeddings
    slides = "sliding_attention" in (getattr(model.config, "layer_types", None) or ["sliding_attention"])
    if slides and window is not None and window < positions:
        raise NotImplementedError(
            f"export 'gguf': llama.cpp has no sliding window for {kind!r}, whose sliding_window is {window:,} of "
            f"{positions:,} positions; choose --export compressed-tensors or dense"
        )
    if tokenizer is not None:
        _vocabulary(tokenizer)


def header_bytes(
    model: PreTrainedModel, weights: Sequence[WeightMatrix], tokenizer: PreTrainedTokenizerBase | None
) -> int:
    """Bytes of a file before its first tensor: settings, vocabulary, names and shapes; the same for every plan."""
    import gguf

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / FILE
        writer = _writer(path, model, tokenizer)
        shapes = {entry.name: entry.shape for entry in other_tensors(model, weights, torch.float16)}
        shapes |= {weight.name: (weight.rows, weight.columns) for weight in weights}
        for name, shape in shapes.items():
            kind = gguf.GGMLQuantizationType.F16  # an entry takes the same bytes for every type
            writer.add_tensor_info(_name(model, name), shape, np.dtype(np.float16), 0, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        writer.close()
        return -(-path.stat().st_size // BLOCK) * BLOCK


def write_gguf(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    candidates: Candidates,
    plan: Sequence[int],
    folder: str | Path,
) -> Written:
    """Write model.gguf and tensor-types.txt, then read every tensor back and compare.

    tensor-types.txt holds the types as `--tensor-type` arguments of llama.cpp's quantizer, to apply the same plan to a
    file of its own.

    Args:
        model: The unquantized model; unchanged.
        tokenizer: A byte-level BPE; None: no vocabulary, which llama.cpp does not run.
        candidates: The weights at all options, their scales in float16.
        plan: The option of each weight, 4, 5 or 8 bits in groups of 32.
        folder: Where to write.

    Returns:
        What was written; `bytes` is the size of model.gguf, `largest_difference` that of the weights.

    Raises:
        ModuleNotFoundError: Without the package gguf.
        NotImplementedError: See `check_gguf`.
        ValueError: If a format has no GGUF type, or scales are not float16.
        CheckpointError: If a tensor read back differs, or the file has another size than predicted.
    """
    check_gguf(model, tokenizer)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = _tensors(model, candidates, plan)
    predicted = GgufStorage(model, candidates.weights, tokenizer).file_bytes([candidates.options[b] for b in plan])
    path = folder / FILE
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=f".{FILE}.", suffix=".part")
    os.close(handle)
    try:
        _write(Path(temporary), model, tokenizer, tensors)
        written = Path(temporary).stat().st_size
        if written != predicted:
            raise CheckpointError(f"{path} has {written:,} bytes where the plan says {predicted:,}")
        difference = _verify(Path(temporary), model, candidates, plan)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)
    types = [f"{name.removesuffix('.weight')}={kind.lower()}" for name, (_, kind) in tensors.items() if "_" in kind]
    (folder / "tensor-types.txt").write_text("".join(f"--tensor-type {line}\n" for line in types), encoding="utf-8")
    return Written(folder, "gguf", written, True, difference, writer_versions() | {"layout": "GGUF v3"})


def _name(model: PreTrainedModel, name: str) -> str:
    """llama.cpp's name of a parameter."""
    import gguf

    architecture = gguf.MODEL_ARCH[_ARCHITECTURES[model.config.model_type]]
    base, _, leaf = name.rpartition(".")
    found = gguf.get_tensor_name_map(architecture, model.config.num_hidden_layers).get_name(base)
    if found is None:
        raise NotImplementedError(f"export 'gguf': llama.cpp has no tensor for {name!r}")
    return f"{found}.{leaf}"


def _row_order(model: PreTrainedModel, name: str, rows: int) -> npt.NDArray[np.int64] | None:
    """The rows of q and k in llama.cpp's order: its rotary embedding turns neighbours, transformers' turns halves."""
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    kind = next((h for part, h in heads.items() if f".{part}." in name), None)
    if kind is None or _ARCHITECTURES[model.config.model_type] != "LLAMA":
        return None
    count = int(getattr(model.config, kind))
    return np.arange(rows).reshape(count, 2, rows // count // 2).swapaxes(1, 2).reshape(rows)


def _tensors(
    model: PreTrainedModel, candidates: Candidates, plan: Sequence[int]
) -> dict[str, tuple[npt.NDArray[Any], str]]:
    """{llama.cpp's name: (array, type)}."""
    found: dict[str, tuple[npt.NDArray[Any], str]] = {}
    state = model.state_dict()
    for entry in other_tensors(model, candidates.weights, torch.float16):
        values = state[entry.name].detach().float().cpu().numpy()
        order = _row_order(model, entry.name, values.shape[0])
        values = values if order is None else values[order]
        kind = "F32" if values.ndim == 1 else "F16"
        found[_name(model, entry.name)] = (values.astype(np.float32 if values.ndim == 1 else np.float16), kind)
    for t, weight in enumerate(candidates.weights):
        quantized = candidates.rounded[t][plan[t]].to("cpu")
        if quantized.scale.dtype != torch.float16:
            raise ValueError(f"{weight.name}: GGUF scales are float16, got {quantized.scale.dtype}; round with them")
        if weight.layout not in ("linear", "embedding"):
            raise NotImplementedError(f"export 'gguf': {weight.name} is stored as {weight.layout}")
        order = _row_order(model, weight.name, weight.rows)
        found[_name(model, weight.name)] = (_blocks(quantized, order), _TYPES[quantized.scheme.bits])
    return found


def _blocks(quantized: QuantizedWeight, order: npt.NDArray[np.int64] | None) -> npt.NDArray[np.uint8]:
    """Rows of blocks as bytes: [rows, bytes per row]."""
    codes, scale = quantized.codes.numpy(), quantized.scale.numpy()
    if order is not None:
        codes, scale = codes[order], scale[order]
    rows = codes.shape[0]
    blocks = codes.reshape(rows, -1, BLOCK)
    d = np.ascontiguousarray(scale)[..., None].view(np.uint8)
    if quantized.scheme.bits == 8:
        return np.concatenate([d, blocks.view(np.uint8)], axis=-1).reshape(rows, -1)
    shifted = (blocks.astype(np.int16) + (1 << (quantized.scheme.bits - 1))).astype(np.uint8)
    low, high = shifted[..., : BLOCK // 2], shifted[..., BLOCK // 2 :]
    nibbles = (low & 15) | ((high & 15) << 4)
    parts = [d, nibbles]
    if quantized.scheme.bits == 5:
        parts.insert(1, np.packbits(shifted >> 4, axis=-1, bitorder="little"))
    return np.concatenate(parts, axis=-1).reshape(rows, -1)


def _write(
    path: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    tensors: dict[str, tuple[npt.NDArray[Any], str]],
) -> None:
    import gguf

    writer = _writer(path, model, tokenizer)
    for name, (array, kind) in tensors.items():
        writer.add_tensor(name, array, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _writer(path: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> Any:
    """A gguf.GGUFWriter with the model's settings and vocabulary, no tensors yet."""
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH[_ARCHITECTURES[config.model_type]]])
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_name(str(config.name_or_path or config.model_type))
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(head)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_freq_base(float(config.rope_parameters["rope_theta"]))
    if config.rope_parameters["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(float(config.rope_parameters["factor"]))
    writer.add_vocab_size(config.vocab_size)
    writer.add_file_type(gguf.LlamaFileType.GUESSED)
    if tokenizer is not None:
        _add_vocabulary(writer, tokenizer, config.vocab_size)
    return writer


def _vocabulary(tokenizer: PreTrainedTokenizerBase) -> tuple[dict[str, Any], str]:
    """The tokenizer's own description, and llama.cpp's name of how it splits text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    description = json.loads(backend.to_str()) if backend is not None else {}
    split = description.get("pre_tokenizer") or {}
    parts = [part["type"] for part in split.get("pretokenizers", [split]) if "type" in part]
    known = {("ByteLevel",): "gpt-2", ("Digits", "ByteLevel"): "smollm"}
    if parts[:1] == ["Split"] and split["pretokenizers"][0]["pattern"].get("Regex") == _QWEN2_SPLIT:
        known["Split", "ByteLevel"] = "qwen2"  # others of these parts, such as Llama 3's, split otherwise
    if description.get("model", {}).get("type") != "BPE" or tuple(parts) not in known:
        raise NotImplementedError(
            "export 'gguf' supports byte-level BPE tokenizers (GPT-2, SmolLM, Qwen2), not this one; choose another "
            "export"
        )
    return description, known[tuple(parts)]


def _add_vocabulary(writer: Any, tokenizer: PreTrainedTokenizerBase, size: int) -> None:
    import gguf

    description, split = _vocabulary(tokenizer)
    tokens = {index: token for token, index in description["model"]["vocab"].items()}
    added = {entry["id"]: entry for entry in description.get("added_tokens", [])}
    names, types = [], []
    for index in range(size):
        entry = added.get(index)
        kind = gguf.TokenType.NORMAL if index in tokens else gguf.TokenType.UNUSED
        if entry is not None:
            kind = gguf.TokenType.CONTROL if entry["special"] else gguf.TokenType.USER_DEFINED
        names.append(entry["content"] if entry is not None else tokens.get(index, f"[PAD{index}]"))
        types.append(kind)
    merges = description["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(names)
    writer.add_token_types(types)
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    for role in ("bos", "eos", "pad", "unk"):
        number = getattr(tokenizer, f"{role}_token_id", None)
        if number is not None:
            getattr(writer, f"add_{role}_token_id")(number)
    writer.add_add_bos_token(False)


def _verify(path: Path, model: PreTrainedModel, candidates: Candidates, plan: Sequence[int]) -> float:
    """Largest difference between the weights as the gguf package reads them and scale * code; zero or an error."""
    import gguf

    read = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for t, weight in enumerate(candidates.weights):
        tensor = read[_name(model, weight.name)]
        found = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        expected = _exact(candidates.rounded[t][plan[t]].to("cpu")).numpy()
        order = _row_order(model, weight.name, weight.rows)
        difference = float(np.abs(found - (expected if order is None else expected[order])).max())
        if difference != 0.0:
            raise CheckpointError(f"{path}: {weight.name} read back differs by up to {difference:.3g}; do not use it")
    return 0.0


def _exact(quantized: QuantizedWeight) -> Tensor:
    """Scale * code in float32, where it is exact."""
    groups = quantized.scale.shape[-1]
    grouped = quantized.codes.float().reshape(len(quantized.codes), groups, -1)
    return (grouped * quantized.scale.float().unsqueeze(-1)).flatten(-2)
