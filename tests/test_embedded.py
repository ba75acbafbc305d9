"""The embedded default: the shipped sample text, and the tiny model that was really trained."""

import hashlib
import json
import re
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

MODEL = Path(__file__).resolve().parents[1] / "configs" / "models" / "tiny-gpt2"


@pytest.fixture(scope="module")
def record() -> dict:
    return json.loads((MODEL / "training.json").read_text())


@pytest.fixture(scope="module")
def sample(root: Path) -> str:
    return (root / "configs" / "data" / "sample.txt").read_text(encoding="utf-8")


def test_sample_is_the_text_its_readme_describes(root: Path, sample: str) -> None:
    readme = (root / "configs" / "data" / "README.md").read_text(encoding="utf-8")
    content = sample.encode()
    assert hashlib.sha256(content).hexdigest() in readme
    assert f"{len(content):,} bytes" in readme
    assert f"{len(sample.split()):,} words" in readme
    assert len(content) > 180_000


def test_model_was_trained_on_other_text(record: dict, sample: str) -> None:
    digest = hashlib.sha256(sample.encode()).hexdigest()
    assert digest not in {text["sha256"] for text in record["texts"]}
    assert digest == record["loss"]["sample"]["sha256"]


def test_model_is_small_and_half_precision(record: dict) -> None:
    assert (MODEL / "model.safetensors").stat().st_size <= 6_000_000
    config = json.loads((MODEL / "config.json").read_text())
    assert config["model_type"] == "gpt2"
    assert config["n_positions"] == 1024
    assert config["dtype"] in {"float16", "bfloat16"}
    assert config["resid_pdrop"] == config["embd_pdrop"] == config["attn_pdrop"] == 0.0
    assert 1_000_000 <= record["model"]["parameters"] <= 3_000_000


def test_tokenizer_round_trips_any_text_and_adds_nothing() -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    text = "In the beginning God created\n\tthe heaven’s 4 λ → 雪."
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert ids == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(tokenizer) == 2048


def test_stored_weights_reach_the_recorded_loss_on_the_sample(record: dict, sample: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32, attn_implementation="sdpa").eval()
    ids = torch.tensor(tokenizer.backend_tokenizer.encode(sample).ids)
    assert ids.numel() - 1 == record["loss"]["sample"]["tokens"]
    losses = []
    with torch.no_grad():
        for start in range(0, ids.numel() - 1, 1024):
            row = ids[start : start + 1025]
            losses.append(F.cross_entropy(model(row[None, :-1]).logits[0], row[1:], reduction="none"))
    mean = torch.cat(losses).mean().item()
    assert mean == pytest.approx(record["loss"]["sample"]["loss"], abs=2e-3)  # another device, another rounding
    assert mean < record["loss"]["chance"] - 2


def test_card_states_the_record(record: dict) -> None:
    card = (MODEL / "README.md").read_text(encoding="utf-8")
    assert f"{record['steps']:,} steps" in card
    assert f"{record['loss']['validation']:.3f} nats" in card
    assert record["device"] in card
    for text in record["texts"]:
        assert text["sha256"] in card
    assert re.search(r"train_tiny_gpt2\.py --text .* --out OUT", card)
