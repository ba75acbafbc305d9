"""Checkpoints: exact sizes, the same bits back through transformers, and loud failures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import TINY
from tiny_causal_lms import tiny_lm
from tokenizers import Regex, Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import logging as transformers_logging

from quant import (
    Candidates,
    CheckpointError,
    PackedStorage,
    Scheme,
    find_weights,
    round_all,
    schemes,
    untie,
    write_checkpoint,
)
from quant.checkpoint import UnreadableError
from quant.gguf_file import check_gguf, write_gguf
from quant.packing import pack, unpack
from quant.storage import GgufStorage

_SPECIAL = {"vocab_size": 97, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_WIDE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, **_SPECIAL}
# 48 output features: k and v of three key/value heads of 16.
_LLAMA = _WIDE | {
    "hidden_size": 96,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "intermediate_size": 96,
    "head_dim": 16,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "llama-tied": _LLAMA | {"tie_word_embeddings": True},
    "qwen2": _LLAMA,
    "gpt_neox": _WIDE | {"intermediate_size": 96},
    "opt": _WIDE | {"ffn_dim": 96, "word_embed_proj_dim": 64, "max_position_embeddings": 64},
    "gemma3_text": _LLAMA,
    "phi3": _LLAMA,
    "gpt2": {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 64, **_SPECIAL},
    "mixtral": _LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "mistral": _LLAMA | {"sliding_window": None},
    "falcon": _WIDE,
    "mamba": {"hidden_size": 64, "num_hidden_layers": 2, "state_size": 4, **_SPECIAL},
}
CHECK = {"input_ids": torch.randint(3, 97, (2, 9), generator=torch.Generator().manual_seed(0))}


@pytest.fixture(autouse=True)
def quiet() -> Any:
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    yield
    transformers_logging.set_verbosity(level)


def made(name: str, **entries: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = CONFIG_MAPPING[name.removesuffix("-tied")](**(MODELS[name] | entries))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model.eval()


def mixed(model: PreTrainedModel, dtype: torch.dtype, include: str | None = None) -> tuple[Candidates, list[int]]:
    """All bits and group sizes mixed, q, k and v differently."""
    candidates = round_all(find_weights(model, include), schemes(range(2, 9), (-1, 32)), scale_dtype=dtype)
    plan = []
    for t in range(len(candidates.weights)):
        kept = candidates.available(t)
        plan.append(kept[(5 * t + 1) % len(kept)])
    return candidates, plan


@pytest.mark.parametrize("bits", range(1, 9), ids=lambda b: f"{b}bit")
def test_packing_is_that_of_compressed_tensors(bits: int) -> None:
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    half = 1 << (bits - 1)
    for rows, columns in ((5, 77), (1, 32), (48, 64), (3, 1)):
        codes = torch.randint(-half, half, (rows, columns)).to(torch.int8)
        assert torch.equal(pack(codes, bits), helpers.pack_to_int32(codes, bits))
        assert torch.equal(unpack(pack(codes, bits), bits, columns), codes)
    with pytest.raises(ValueError, match="codes must lie in"):
        pack(torch.tensor([[half]], dtype=torch.int16), bits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "llama-tied", "qwen2", "gpt_neox", "opt", "gemma3_text", "phi3"])
def test_mixed_checkpoints_read_back_without_any_difference(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    model = made(name)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    candidates, plan = mixed(model, dtype)
    written = write_checkpoint(
        model, None, candidates, plan, tmp_path, export="compressed-tensors", dtype=dtype, check=CHECK
    )
    assert written.largest_difference == 0.0
    assert (tmp_path / "model.safetensors").stat().st_mode & 0o777 == 0o644
    sizes = PackedStorage(model, candidates.weights, dtype).file_bytes([candidates.options[b] for b in plan])
    assert written.bytes == sizes == (tmp_path / "model.safetensors").stat().st_size
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    targets = [t for group in config["config_groups"].values() for t in group["targets"]]
    assert sorted(targets) == sorted(m for w in candidates.weights for m in w.modules)
    assert len(config["config_groups"]) == len({candidates.options[b] for b in plan})
    assert not list(tmp_path.glob(".*part"))


def test_a_wrong_weight_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("compressed_tensors")
    model = made("llama")
    candidates, plan = mixed(model, torch.float32)
    import quant.checkpoint

    monkeypatch.setattr(quant.checkpoint, "pack", lambda codes, bits: pack(codes.flip(0), bits))
    (tmp_path / "kept.txt").touch()
    for folder in (tmp_path, tmp_path / "new"):
        with pytest.raises(CheckpointError, match=r"logits .*differ.*q_proj"):
            write_checkpoint(
                model, None, candidates, plan, folder, export="compressed-tensors", dtype=torch.float32, check=CHECK
            )
    assert [path.name for path in tmp_path.iterdir()] == ["kept.txt"]


@pytest.mark.parametrize("name", ["falcon", "mamba"])
def test_what_transformers_cannot_read_packed_leaves_nothing_and_names_dense(name: str, tmp_path: Path) -> None:
    """Its own initialization of these architectures fails on weights that are packed."""
    pytest.importorskip("compressed_tensors")
    model = made(name)
    candidates, plan = mixed(model, torch.float32)
    folder = tmp_path / "model"
    with pytest.raises(UnreadableError, match=r"does not read .*(Falcon|Mamba)ForCausalLM.*choose --export dense"):
        write_checkpoint(
            model, None, candidates, plan, folder, export="compressed-tensors", dtype=torch.float32, check=CHECK
        )
    assert not folder.exists()
    written = write_checkpoint(model, None, candidates, plan, folder, export="dense", dtype=torch.float32, check=CHECK)
    assert written.largest_difference == 0.0
    assert not list(folder.glob(".*"))


@pytest.mark.parametrize(
    ("name", "include", "told"),
    [
        ("gpt2", None, "Conv1D"), ("mixtral", "experts", "experts"), ("llama-tied", "embed_tokens", "untie"),
        ("llama", "embed_tokens", "embedding"),
    ],
    ids=lambda v: str(v).replace(" ", "_"),
)  # fmt: skip
def test_what_does_not_read_back_is_refused_packed_and_written_dense(
    name: str, include: str | None, told: str, tmp_path: Path
) -> None:
    model = made(name)
    candidates, plan = mixed(model, torch.float32, include)
    with pytest.raises(ValueError, match=told):
        write_checkpoint(model, None, candidates, plan, tmp_path, export="compressed-tensors", dtype=torch.float32)
    written = write_checkpoint(
        model, None, candidates, plan, tmp_path, export="dense", dtype=torch.float32, check=CHECK
    )
    assert written.largest_difference == 0.0
    read = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad(), candidates.applied(plan):
        assert torch.equal(model(**CHECK).logits, read(**CHECK).logits)


def test_an_untied_head_has_a_format_of_its_own(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    model = made("llama-tied")
    with torch.no_grad():
        logits = model(**CHECK).logits
    assert untie(model)
    assert not untie(model)
    with torch.no_grad():
        assert torch.equal(model(**CHECK).logits, logits)
    candidates, plan = mixed(model, torch.float32, "lm_head|v_proj")
    assert "lm_head.weight" in [w.name for w in candidates.weights]
    written = write_checkpoint(
        model, None, candidates, plan, tmp_path, export="compressed-tensors", dtype=torch.float32, check=CHECK
    )
    assert written.largest_difference == 0.0


def test_asymmetric_formats_and_foreign_scales_are_refused(tmp_path: Path) -> None:
    model = made("llama")
    asymmetric = round_all(find_weights(model), schemes((4,), (32,), (False,)))
    with pytest.raises(ValueError, match="asymmetric"):
        write_checkpoint(model, None, asymmetric, [0] * 14, tmp_path, export="compressed-tensors", dtype=torch.float32)
    candidates, plan = mixed(model, torch.float32)
    with pytest.raises(ValueError, match=r"scale_dtype=torch\.bfloat16"):
        write_checkpoint(model, None, candidates, plan, tmp_path, export="compressed-tensors", dtype=torch.bfloat16)


def test_gguf_blocks_hold_the_same_weights(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    torch.manual_seed(0)
    config = CONFIG_MAPPING["llama"](**(_LLAMA | {"vocab_size": 2048}))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    candidates = round_all(find_weights(model), schemes((4, 5, 8), (32,)), scale_dtype=torch.float16)
    plan = [t % 3 for t in range(14)]
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    written = write_gguf(model, tokenizer, candidates, plan, tmp_path)
    assert written.largest_difference == 0.0
    sizes = GgufStorage(model, candidates.weights, tokenizer).file_bytes([candidates.options[b] for b in plan])
    assert written.bytes == sizes == (tmp_path / "model.gguf").stat().st_size
    read = {t.name: t for t in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    kinds = {t.tensor_type.name for t in read.values()}
    assert kinds == {"Q4_0", "Q5_0", "Q8_0", "F16", "F32"}
    down = next(t for t, w in enumerate(candidates.weights) if "0.mlp.down_proj" in w.name)
    values = gguf.quants.dequantize(read["blk.0.ffn_down.weight"].data, read["blk.0.ffn_down.weight"].tensor_type)
    quantized = candidates.rounded[down][plan[down]]
    exact = quantized.codes.float() * quantized.scale.float().repeat_interleave(32, 1)
    np.testing.assert_array_equal(values, exact.numpy())
    lines = (tmp_path / "tensor-types.txt").read_text().splitlines()
    assert len(lines) == 14
    assert "--tensor-type blk.0.attn_q=q4_0" in lines


def test_gguf_refuses_what_it_cannot_hold(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    model = made("gpt_neox")
    candidates = round_all(find_weights(model), schemes((4,), (32,)), scale_dtype=torch.float16)
    with pytest.raises(NotImplementedError, match="gpt_neox"):
        write_gguf(model, None, candidates, [0] * 8, tmp_path)
    llama = made("llama")
    wrong = round_all(find_weights(llama), (Scheme(4, 32),), scale_dtype=torch.float32)
    with pytest.raises(ValueError, match="float16"):
        write_gguf(llama, None, wrong, [0] * 14, tmp_path)


@pytest.mark.parametrize(("numbers", "known"), [(r"\p{N}", True), (r"\p{N}{1,3}", False)], ids=["qwen2", "llama3"])
def test_gguf_names_only_a_split_of_text_that_it_knows(numbers: str, known: bool) -> None:
    pytest.importorskip("gguf")
    words, marks = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+", r" ?[^\s\p{L}\p{N}]+[\r\n]*"
    rule = "|".join([words, numbers, marks, r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"])
    backend = Tokenizer(BPE(vocab={"a": 0}, merges=[]))
    split = Split(Regex(rule), behavior="isolated")
    backend.pre_tokenizer = Sequence([split, ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    model = made("qwen2")
    if known:
        check_gguf(model, tokenizer)
        return
    with pytest.raises(NotImplementedError, match="byte-level BPE tokenizers"):
        check_gguf(model, tokenizer)


@pytest.mark.parametrize(
    ("name", "entries", "told"),
    [
        ("llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0,
                                       "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                       "original_max_position_embeddings": 64}}, r"'llama3' \(factor 8\)"),
        ("qwen2", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}}, "'yarn'"),
        ("mistral", {"sliding_window": 8}, "sliding_window is 8 of"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}, "sliding_window is 16"),
    ],
    ids=["llama3", "yarn", "mistral-window", "qwen2-window"],
)  # fmt: skip
def test_gguf_refuses_what_llama_cpp_would_compute_otherwise(name: str, entries: dict[str, Any], told: str) -> None:
    pytest.importorskip("gguf")
    with pytest.raises(NotImplementedError, match=f"{told}.*--export compressed-tensors or dense"):
        check_gguf(made(name, **entries), None)


def test_gguf_holds_linear_rope_scaling_and_no_window_that_never_acts(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    rope = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}
    model = made("mistral", rope_parameters=rope, sliding_window=64, max_position_embeddings=64)
    candidates = round_all(find_weights(model), schemes((4,), (32,)), scale_dtype=torch.float16)
    written = write_gguf(model, None, candidates, [0] * 14, tmp_path)
    fields = gguf.GGUFReader(tmp_path / "model.gguf").fields
    rope_keys = {key.removeprefix("llama.rope."): field.contents() for key, field in fields.items() if ".rope." in key}
    assert rope_keys == {"dimension_count": 16, "freq_base": 5000.0, "scaling.type": "linear", "scaling.factor": 4.0}
    sizes = GgufStorage(model, candidates.weights).file_bytes([candidates.options[0]] * 14)
    assert written.bytes == sizes == (tmp_path / "model.gguf").stat().st_size


def test_a_gguf_file_of_another_size_than_planned_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gguf")
    model = made("llama")
    candidates = round_all(find_weights(model), schemes((4,), (32,)), scale_dtype=torch.float16)
    monkeypatch.setattr(GgufStorage, "_rest", 1)
    with pytest.raises(CheckpointError, match="where the plan says"):
        write_gguf(model, None, candidates, [0] * 14, tmp_path)
    assert not list(tmp_path.iterdir())


def test_double_precision_models_are_written(tmp_path: Path) -> None:
    model = tiny_lm("llama")
    candidates = round_all(find_weights(model), schemes((4,), (8,)), scale_dtype=torch.float32)
    written = write_checkpoint(
        model, None, candidates, [0] * 14, tmp_path, export="dense", dtype=torch.float32,
        check={"input_ids": torch.tensor([[4, 5, 6]])},
    )  # fmt: skip
    assert written.largest_difference == 0.0
