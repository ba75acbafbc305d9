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
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
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
from quant.gguf_file import write_gguf
from quant.packing import pack, unpack

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
}
CHECK = {"input_ids": torch.randint(3, 97, (2, 9), generator=torch.Generator().manual_seed(0))}


@pytest.fixture(autouse=True)
def quiet() -> Any:
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    yield
    transformers_logging.set_verbosity(level)


def made(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    config = CONFIG_MAPPING[name.removesuffix("-tied")](**MODELS[name])
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
    with pytest.raises(CheckpointError, match=r"logits .*differ.*q_proj"):
        write_checkpoint(
            model, None, candidates, plan, tmp_path, export="compressed-tensors", dtype=torch.float32, check=CHECK
        )


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
    written = write_gguf(model, AutoTokenizer.from_pretrained(TINY), candidates, plan, tmp_path)
    assert written.largest_difference == 0.0
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


def test_double_precision_models_are_written(tmp_path: Path) -> None:
    model = tiny_lm("llama")
    candidates = round_all(find_weights(model), schemes((4,), (8,)), scale_dtype=torch.float32)
    written = write_checkpoint(
        model, None, candidates, [0] * 14, tmp_path, export="dense", dtype=torch.float32,
        check={"input_ids": torch.tensor([[4, 5, 6]])},
    )  # fmt: skip
    assert written.largest_difference == 0.0
