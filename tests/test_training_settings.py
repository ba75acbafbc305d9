"""Schedule, model and shipped configurations of training runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from command_line import Run
from training_runs import record, trained
from transformers import AutoModelForCausalLM

from cli.train import TrainOptions
from curvature.training_model import grow_positions, load_for_training, set_dropout
from curvature.training_settings import Schedule


def test_the_schedule_rises_falls_and_ends_at_its_floor() -> None:
    rates = [Schedule(1e-3, 1e-4, 150, 1908).rate(step) for step in range(1908)]
    assert rates[0] == pytest.approx(1e-3 / 150)
    assert rates[149] == rates[150] == 1e-3
    assert np.all(np.diff(rates[150:]) < 0)
    assert rates[(150 + 1907) // 2] == pytest.approx(5.5e-4, rel=2e-3)
    assert rates[-1] == pytest.approx(1e-4)
    for steps in (1, 10):
        assert Schedule(1.0, 0.5, steps - 1, steps).rate(steps - 1) == 1.0, "a single step after the warmup"
    assert Schedule(1.0, 0.5, 8, 10).rate(9) == pytest.approx(0.5)


def test_the_shipped_configuration_trains_the_embedded_model(run: Run, root: Path) -> None:
    small = ("--seq", 32, "--batch", 1, "--batches", 2, "--eval-batches", 1, "--device", "cpu", "--max-steps", 2)
    found = trained(run, "out", "--config", root / "configs" / "train_tiny_sophia.yaml", *small)
    assert found[0] == pytest.approx(np.log(2048), abs=0.5), "from random weights"
    assert record(Path("out"))["model"]["parameters"] == 2369664


@pytest.mark.parametrize("name", ["train_gpt2_adamw", "train_gpt2_sophia", "train_tiny_gpt2", "train_tiny_sophia"])
def test_shipped_configurations_hold_options_and_a_possible_schedule(root: Path, name: str) -> None:
    content = yaml.safe_load((root / "configs" / f"{name}.yaml").read_text())
    options = TrainOptions(**{key.replace("-", "_"): value for key, value in content.items()})
    Schedule(float(options.lr or 0), float(options.min_lr or 0), options.warmup or 0, options.max_steps)
    if name.startswith("train_gpt2"):
        tokens = options.seq * options.batch * options.batches * 8
        assert tokens == 524_288
        assert tokens * options.max_steps == pytest.approx(1e9, rel=1e-3)


def test_random_weights_get_a_table_of_as_many_positions(tmp_path: Path, model: Path) -> None:
    loaded, seq = load_for_training(str(model), lambda _: 96, random_init=True)
    short, _ = load_for_training(str(model), lambda _: 64, random_init=True)
    assert seq == 96
    assert loaded.info.parameters == short.info.parameters + 32 * 16
    assert "its position table has 96 rows" in loaded.notices[-1]
    old, new = (m.model.transformer.wpe.weight.detach() for m in (short, loaded))
    assert torch.equal(new[:64], old)
    assert float(new[64:].std()) == pytest.approx(0.02, rel=0.15)
    loaded.model.save_pretrained(tmp_path / "grown")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "grown", attn_implementation="eager")
    ids = torch.randint(0, 2048, (1, 96))
    torch.testing.assert_close(again(input_ids=ids).logits, loaded.model(input_ids=ids).logits, rtol=1e-4, atol=1e-5)
    with torch.random.fork_rng():
        grow_positions(short.model, 70, seed=0)
    assert short.model.config.n_positions == 70


def test_a_rate_of_dropout_reaches_attention() -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model(
        "llama", hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=32
    )
    llama = AutoModelForCausalLM.from_config(config)
    set_dropout(llama, 0.25)
    assert llama.model.layers[0].self_attn.attention_dropout == 0.25
