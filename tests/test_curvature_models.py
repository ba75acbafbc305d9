"""Loading models: the embedded one, folders, built-in architectures, and positions beyond the table."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from curvature_oracles import dense_hessian, relative, tiny_gpt2, tiny_llama, tiny_opt, token_batch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from curvature import CausalLMLoss, HessianOperator, hub, load_model, positions
from curvature.models import architectures, shallow_model
from curvature.shipped import shipped_path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with the embedded tokenizer, saved with dropout rates above zero."""
    path = tmp_path_factory.mktemp("model")
    tiny_gpt2(vocab=2048, layers=1, attn_pdrop=0.3, resid_pdrop=0.3, embd_pdrop=0.3).float().save_pretrained(path)
    AutoTokenizer.from_pretrained(str(shipped_path("models/tiny-gpt2"))).save_pretrained(path)
    return path


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("curvature.models.hub_reachable", lambda: False)


@pytest.mark.parametrize("name", architectures())
def test_built_in_architectures_have_the_published_number_of_parameters(name: str) -> None:
    architecture = architectures()[name]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(architecture.configuration())
    assert sum(p.numel() for p in model.parameters()) == architecture.parameters


def test_the_architectures_of_the_paper_are_there() -> None:
    paper = {"gpt2", "gpt2-medium", "gpt2-large", "pythia-160m", "pythia-410m", "llama-3.2-1b", "smollm2-135m"}
    paper |= {"smollm2-360m", "qwen2.5-1.5b", "granite-3.1-1b-a400m"}
    assert paper <= set(architectures())


def test_the_embedded_model() -> None:
    loaded = load_model("tiny", dtype=torch.float64)
    assert not loaded.notices
    assert not loaded.model.training
    info = loaded.info
    assert (info.name, info.random_init, info.position_extension, info.tokenizer) == ("tiny", False, None, "tiny")
    assert (info.attention, info.dtype, info.revision) == ("flashbob", "float64", None)
    assert info.parameters == sum(p.numel() for p in loaded.model.parameters()) < 4_000_000
    ids = loaded.tokenizer("In the beginning", return_tensors="pt")["input_ids"]
    total, tokens = CausalLMLoss()(loaded.model, {"input_ids": ids})
    assert tokens == ids.shape[1] - 1
    assert 0 < float(total.detach() / tokens) < 7.62, "worse than guessing one of 2048 tokens"


def test_a_folder_is_loaded_with_dropout_off(folder: Path) -> None:
    loaded = load_model(str(folder), attention="eager")
    assert {m.p for m in loaded.model.modules() if isinstance(m, nn.Dropout)} == {0.0}
    assert loaded.model.config.use_cache is False
    assert loaded.info.path == str(folder)
    loaded.model.train()
    HessianOperator(loaded.model, [token_batch(2048, (1, 4))])  # no warning: there is no dropout to switch off


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_dtype_of_parameters(folder: Path, dtype: torch.dtype) -> None:
    for random_init in (False, True):
        model = load_model(str(folder), dtype=dtype, random_init=random_init, attention="eager").model
        assert {p.dtype for p in model.parameters()} == {dtype}
        assert model.lm_head.weight is model.transformer.wte.weight


def test_random_weights_depend_on_the_seed_alone(folder: Path) -> None:
    state = torch.random.get_rng_state()
    first, second = (load_model(str(folder), random_init=True, seed=5, attention="eager").model for _ in range(2))
    assert torch.equal(torch.random.get_rng_state(), state), "the caller's random state is left alone"
    rounded = load_model(str(folder), random_init=True, seed=5, dtype=torch.bfloat16, attention="eager").model
    other = load_model(str(folder), random_init=True, seed=6, attention="eager").model
    for a, b, c in zip(first.parameters(), second.parameters(), rounded.parameters(), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a.bfloat16(), c)
    assert not torch.equal(first.transformer.wte.weight, other.transformer.wte.weight)


@pytest.mark.parametrize("name", ["smollm2-135m", "HuggingFaceTB/SmolLM2-135M"], ids=["short name", "hub name"])
def test_a_built_in_architecture_needs_no_hub(name: str, offline: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(architectures()["smollm2-135m"].config, "num_hidden_layers", 1)
    loaded = load_model(name, random_init=True, dtype=torch.bfloat16, attention="eager", seq=9000)
    assert loaded.info.random_init
    assert loaded.info.path is None
    assert loaded.info.tokenizer == "tiny"
    assert any("tokenized with the embedded model's" in notice for notice in loaded.notices)
    assert loaded.model.model.rotary_emb.inv_freq.dtype == torch.float32, "rotary frequencies are not to be rounded"
    assert loaded.info.position_extension is not None
    assert loaded.info.position_extension.as_record() == {"method": "extrapolate", "trained": 8192, "extended": 9000}
    assert any("9000 positions on a model made for 8192" in notice for notice in loaded.notices)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gpt2", r"'gpt2': not in the local cache.*local model folder, or ask for random weights \(--random-init\)"),
        (
            "nobody/nothing",
            "'nobody/nothing': not in the local cache.*built-in architectures with --random-init: gpt2,",
        ),
        ("./no/such/folder", "there is no such folder"),
    ],
)
def test_a_missing_model_is_one_clear_line(name: str, message: str, offline: None) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        load_model(name, attention="eager")
    assert "\n" not in str(caught.value)


def test_random_weights_of_an_unknown_name(offline: None) -> None:
    with pytest.raises(ValueError, match="'nobody/nothing': not in the local cache"):
        load_model("nobody/nothing", random_init=True, attention="eager")


def test_incomplete_folders(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no config\.json"):
        load_model(str(tmp_path), attention="eager")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(ValueError, match="cannot be read from its folder") as caught:
        load_model(str(tmp_path), attention="eager")
    assert "\n" not in str(caught.value)
    assert load_model(str(tmp_path), random_init=True, attention="eager").info.tokenizer == "tiny"
    weights = (folder / "model.safetensors").read_bytes()
    for damaged in (b"not a tensor file", weights[: len(weights) // 2]):
        (tmp_path / "model.safetensors").write_bytes(damaged)
        with pytest.raises(ValueError, match="cannot be read from its folder"):
            load_model(str(tmp_path), attention="eager")
    (tmp_path / "model.safetensors").write_bytes(weights)
    with pytest.raises(ValueError, match="there is no tokenizer with it"):
        load_model(str(tmp_path), attention="eager")


def test_a_llama_without_its_tokenizer_and_a_file_are_told(tmp_path: Path) -> None:
    LlamaForCausalLM(
        LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    ).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"there is no tokenizer with it; add its tokenizer\.json"):
        load_model(str(tmp_path), attention="eager")
    with pytest.raises(ValueError, match="it is a file; give the folder"):
        load_model(str(tmp_path / "config.json"), attention="eager")


def test_missing_weights_are_not_made_up(folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    del weights["transformer.h.0.ln_1.weight"]
    save_file(weights | {"transformer.extra": torch.ones(1)}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        ValueError, match=r"1 weights are not in its files, among them 'transformer\.h\.0\.ln_1\.weight'"
    ):
        load_model(str(tmp_path), attention="eager")


def test_an_embedded_tokenizer_that_does_not_fit(tmp_path: Path) -> None:
    tiny_gpt2().config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="more than the model's 7"):
        load_model(str(tmp_path), random_init=True, attention="eager")


def test_an_integer_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match=r"floating-point dtype, got torch\.int8"):
        load_model("tiny", dtype=torch.int8)


def test_offline_mode_is_not_reachable(monkeypatch: pytest.MonkeyPatch) -> None:
    hub.hub_reachable.cache_clear()
    monkeypatch.setattr("curvature.hub.constants.HF_HUB_OFFLINE", True)
    assert not hub.hub_reachable()
    hub.hub_reachable.cache_clear()


# Shallow models

WIDE = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 43,
}
EXPERTS = {"num_experts": 2, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8}
HYBRID = {"attn_layer_period": 4, "attn_layer_offset": 1, "num_experts": 2, "mamba_d_state": 4}
DEEPSEEK = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4}
DEEPSEEK |= {"n_routed_experts": 4, "moe_intermediate_size": 8, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}
WINDOWS = {
    "head_dim": 4,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] + 5 * ["full_attention"],
}
SHALLOW = {
    "all layers equal": ("llama", {}, 1),
    "two types, one structure": ("gemma2", WINDOWS, 3),
    "an expert layer every other": ("qwen2_moe", {"decoder_sparse_step": 2, **EXPERTS}, 2),
    "a dense layer first": ("deepseek_v3", {"first_k_dense_replace": 1, **DEEPSEEK}, 8),
    "types derived from the depth": ("jamba", HYBRID, 4),
    "types of a single kind": ("mamba", {"state_size": 4}, 1),
}  # fmt: skip


@pytest.mark.parametrize("case", SHALLOW)
def test_a_shallow_model_stands_for_all_layers(case: str, tmp_path: Path) -> None:
    model_type, entries, expected = SHALLOW[case]
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"the installed transformers has no {model_type}")
    special = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    config = CONFIG_MAPPING[model_type](num_hidden_layers=8, **WIDE, **special, **entries)
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(config)
    model, depth = shallow_model(str(tmp_path))
    layers = next(m for m in model.modules() if isinstance(m, nn.ModuleList))
    assert (len(layers), depth) == (expected, 8)
    inner = sum(p.numel() for p in layers.parameters())
    outer = sum(p.numel() for p in model.parameters()) - inner
    assert outer + inner * depth // len(layers) == sum(p.numel() for p in whole.parameters())


def test_layers_that_do_not_fit_into_memory_are_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("curvature.models.spare_bytes", lambda device: 10**6)
    with pytest.raises(ValueError, match=r"a forecast runs 1 of its 12 layers, and their .* do not fit into"):
        shallow_model("gpt2")


# Positions


def logits(model: nn.Module, ids: Tensor) -> Tensor:
    out: Tensor = model(input_ids=ids, use_cache=False).logits
    return out.detach()


@pytest.mark.parametrize("make", [tiny_gpt2, tiny_opt], ids=["gpt2", "opt"])
@pytest.mark.parametrize("how", ["interpolate", "tile"])
def test_a_longer_sequence_reads_the_table_as_stated(make: object, how: positions.ExtendPositions) -> None:
    """Against a model whose own table was made as long, by the formula."""
    extended = make()  # type: ignore[operator]
    trained = extended.config.max_position_embeddings
    seq = 2 * trained + 3
    longer = copy.deepcopy(extended)
    table = longer.transformer.wpe if make is tiny_gpt2 else longer.model.decoder.embed_positions
    offset = 0 if make is tiny_gpt2 else 2
    rows = table.weight.detach()[offset:]
    if how == "tile":
        stretched = torch.stack([rows[p % trained] for p in range(seq)])
    else:
        stretched = nn.functional.interpolate(rows.T[None], size=seq, mode="linear", align_corners=True)[0].T
    table.weight = nn.Parameter(torch.cat([table.weight.detach()[:offset], stretched]))
    ids = token_batch(7, (2, seq))["input_ids"]

    done = positions.extend(extended, seq, how)
    assert done is not None
    assert done.as_record() == {"method": how, "trained": trained, "extended": seq}
    assert f"{seq} positions on a model made for {trained}" in done.notice
    torch.testing.assert_close(logits(extended, ids), logits(longer, ids), rtol=0, atol=1e-13)


@pytest.mark.parametrize("make", [tiny_gpt2, tiny_opt], ids=["gpt2", "opt"])
@pytest.mark.parametrize("how", ["interpolate", "tile"])
def test_the_hessian_keeps_its_dimension_and_is_exact(make: object, how: positions.ExtendPositions) -> None:
    model = make()  # type: ignore[operator]
    names, before = [n for n, _ in model.named_parameters()], sum(p.numel() for p in model.parameters())
    positions.extend(model, 17, how)
    assert [n for n, _ in model.named_parameters()] == names
    batches = [token_batch(7, (1, 17))]
    op = HessianOperator(model, batches, params="wpe|embed_positions")
    assert HessianOperator(model, batches).shape[0] == before
    assert op.symmetry_error() < 1e-12
    v = torch.randn(op.shape[0], dtype=torch.float64)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in op.space.names)
    assert relative(op @ v, dense_hessian(model, batches) @ v) < 1e-12


def test_positions_within_the_table_are_left_alone() -> None:
    model = tiny_gpt2()
    assert positions.extend(model, 12, "refuse") is None
    assert type(model.transformer.wpe) is nn.Embedding


def test_refusal_and_unknown_ways() -> None:
    with pytest.raises(ValueError, match="seq=13 exceeds the model's 12 positions"):
        positions.extend(tiny_gpt2(), 13, "refuse")
    with pytest.raises(ValueError, match="exceeds the model's 16 positions"):
        positions.extend(tiny_llama(), 17, "refuse")
    with pytest.raises(ValueError, match="must be one of interpolate, tile, refuse, got 'stretch'"):
        positions.extend(tiny_gpt2(), 13, "stretch")  # type: ignore[arg-type]
    model = tiny_llama()
    model.config.rope_parameters = None
    with pytest.raises(NotImplementedError, match="neither a learned position table nor rotary positions"):
        positions.extend(model, 17, "interpolate")


def test_rotary_positions_extrapolate_unchanged() -> None:
    short, long = tiny_llama(), tiny_llama(max_position_embeddings=64)
    ids = token_batch(7, (1, 40))["input_ids"]
    done = positions.extend(short, 40, "interpolate")
    assert done is not None
    assert done.method == "extrapolate"
    assert torch.equal(logits(short, ids), logits(long, ids))


def test_loading_extends_positions_and_keeps_saving(folder: Path, tmp_path: Path) -> None:
    loaded = load_model(str(folder), seq=40, extend_positions="tile", attention="eager")
    assert loaded.info.position_extension is not None
    assert loaded.info.position_extension.method == "tile"
    assert len(loaded.notices) == 1
    loaded.model.save_pretrained(tmp_path)
    again = load_model(str(folder), attention="eager").model
    assert all(torch.equal(a, b) for a, b in zip(loaded.model.parameters(), again.parameters(), strict=True))
    with pytest.raises(ValueError, match="extend_positions is 'refuse'"):
        load_model(str(folder), seq=40, extend_positions="refuse", attention="eager")
