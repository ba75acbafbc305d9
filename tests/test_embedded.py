"""The embedded default: the shipped sample text, and the tiny model that was really trained."""

import hashlib
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import yaml
from command_line import run_in_process
from safetensors.torch import load_file
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


def test_card_is_the_records(record: dict, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card = (MODEL / "README.md").read_text(encoding="utf-8")
    assert card == _script(root / "configs" / "models" / "tiny_gpt2.py", monkeypatch).model_card(record)
    assert f"{record['steps']:,} steps" in card
    assert f"| held out | {record['loss']['validation']:.3f} | {record['loss']['validation_tokens']:,} |" in card
    assert record["device"] in card
    for text in record["texts"]:
        assert text["sha256"] in card
    assert "--config configs/train_tiny_gpt2.yaml" in card


def test_record_is_of_a_run_of_the_shipped_configuration(record: dict, root: Path) -> None:
    config = yaml.safe_load((root / "configs" / "train_tiny_gpt2.yaml").read_text(encoding="utf-8"))
    train = record["train"]
    assert train["data"]["source"] == config.pop("data")
    assert config.pop("model") == "tiny"
    settings = {name.replace("-", "_"): value for name, value in config.items()}
    assert train["settings"].items() >= settings.items()
    assert train["history"][-1]["step"] == record["steps"] == settings["max_steps"]
    assert record["loss"]["validation"] == pytest.approx(train["evaluation"][-1]["loss"], abs=2e-3), "rounded"
    assert '"/' not in json.dumps(record), "a path of the machine that trained it"


def test_a_model_is_begun_trained_and_stored(
    root: Path, sample: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The way in which the embedded model is made, on two halves of the sample."""
    steps = _script(root / "configs" / "models" / "tiny_gpt2.py", monkeypatch)
    monkeypatch.chdir(tmp_path)
    texts = [Path("a.txt"), Path("b.txt")]
    for path, part in zip(texts, (sample[:90_000], sample[90_000:]), strict=True):
        path.write_text(part, encoding="utf-8")
    monkeypatch.setattr(steps, "SAMPLE", tmp_path / "other.txt")
    (tmp_path / "other.txt").write_text(sample[:3_000], encoding="utf-8")
    (tmp_path / "new").mkdir()
    steps.begin(tmp_path / "new", texts)
    small = ("--seq", 64, "--batch", 1, "--max-steps", 2, "--warmup", 1, "--eval-batches", 4, "--device", "cpu")
    config = ("--config", root / "configs" / "train_tiny_gpt2.yaml", "--model", "new", "--data", "a.txt,b.txt")
    outcome = run_in_process(capsys, "train", *config, *small, "--out", "run")
    assert outcome.code == 0, outcome.err
    (tmp_path / "stored").mkdir()
    steps.store(Path("run"), tmp_path / "stored", texts)
    record = json.loads(Path("stored/training.json").read_text())
    trained = json.loads(Path("run/train.json").read_text())
    assert record["train"]["history"] == trained["history"][-1:], "as long as the evaluations"
    assert record["model"]["parameters"] == 2369664
    assert record["loss"]["validation"] == pytest.approx(trained["evaluation"][-1]["loss"], abs=2e-3), "rounded"
    assert record["loss"]["validation_tokens"] == 4 * 63
    stored = load_file("stored/model.safetensors")
    assert {t.dtype for t in stored.values()} == {torch.float16}
    for name, t in load_file("run/model/model.safetensors").items():
        assert torch.equal(stored[name], t.half())
    card = Path("stored/README.md").read_text()
    assert "2 steps of AdamW on 1 windows of 64 tokens (128 tokens" in " ".join(card.split())
    assert str(tmp_path) not in card + json.dumps(record)
    with pytest.raises(SystemExit, match="was not trained on these texts"):
        steps.store(Path("run"), tmp_path / "stored", texts[::-1])


def _script(path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, path.stem, module)
    spec.loader.exec_module(module)
    return module
