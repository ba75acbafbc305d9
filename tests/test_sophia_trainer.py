"""SophiaH inside transformers.Trainer."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from command_line import CHILDREN, free_port
from tiny_causal_lms import VOCABULARY, tiny_lm
from torch import nn

from curvature import CausalLMLoss
from curvature.distributed import join, leave
from curvature.sophia import SophiaH, hutchinson_diagonal
from curvature.sophia_callback import SophiaCallback

STEPS = 5
SETTINGS: dict[str, Any] = {"lr": 1e-2, "interval": 2, "eps": 1e-3}
"""The trainer's own loss rounds to float32: with a smaller eps the sign of that noise would move the key biases."""


def rows(count: int) -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(0, VOCABULARY, (count, 12), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[:, 0] = -100  # never predicted; but Trainer divides the loss by the number of labels, this one included
    return [{"input_ids": row, "labels": label} for row, label in zip(ids, labels, strict=True)]


def collate(batch: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([row[name] for row in batch]) for name in batch[0]}


def by_hand(model: nn.Module, seed: int) -> None:
    """The same training without the trainer: batches in order, the estimate at the batch of the step."""
    optimizer, loss = SophiaH(model.parameters(), **SETTINGS), CausalLMLoss()
    estimates = 0
    data = rows(2 * STEPS)
    for step in range(STEPS):
        batch = collate(data[2 * step : 2 * step + 2])
        if optimizer.curvature_due:
            total, tokens = loss(model, batch)
            optimizer.update_curvature(hutchinson_diagonal(total / tokens, optimizer.parameters, seed=seed + estimates))
            estimates += 1
        total, tokens = loss(model, batch)
        (total / tokens).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_the_trainer_with_the_callback_trains_as_by_hand(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="transformers.Trainer needs the package accelerate")
    from transformers import Trainer, TrainingArguments

    class InOrder(Trainer):  # type: ignore[misc]
        def _get_train_sampler(self, *_: Any) -> Any:
            return None

    model, other = (tiny_lm("gpt2", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0) for _ in range(2))
    optimizer = SophiaH(model.parameters(), **SETTINGS)
    callback = SophiaCallback(optimizer, seed=7)
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=STEPS,
        per_device_train_batch_size=2,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
        logging_strategy="no",
        dataloader_pin_memory=False,
    )
    trainer = InOrder(
        model,
        arguments,
        train_dataset=rows(2 * STEPS),
        data_collator=collate,
        optimizers=(optimizer, None),
        callbacks=[callback],
    )
    trainer.train()
    by_hand(other, seed=7)
    assert callback.estimates == 3
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


def step(callback: SophiaCallback, model: nn.Module) -> None:
    callback.on_pre_optimizer_step(SimpleNamespace(bf16=False), None, None, model=model)  # type: ignore[arg-type]


def test_the_callback_estimates_at_the_last_batch_when_due() -> None:
    model, loss = tiny_lm("gpt2"), CausalLMLoss()
    optimizer = SophiaH(model.parameters(), interval=2)
    callback = SophiaCallback(optimizer, seed=3)
    callback.on_train_begin(None, None, None, model=model)  # type: ignore[arg-type]
    first, second = (collate(rows(4)[i : i + 2]) for i in (0, 2))
    model.train()
    model(**first)
    model(**second)
    model.eval()
    model(**first)  # an evaluation in between
    model.train()
    step(callback, model)
    assert model.training
    total, tokens = loss(model.eval(), second)
    expected = hutchinson_diagonal(total / tokens, optimizer.parameters, seed=3)
    for p, d in zip(optimizer.parameters, expected, strict=True):
        assert d is not None
        torch.testing.assert_close(optimizer.state[p]["hessian"], (1 - 0.99) * d)
    optimizer.step()
    step(callback, model)
    assert callback.estimates == 1, "the second step needs none"
    callback.on_train_end(None, None, None, model=model)  # type: ignore[arg-type]
    assert not model._forward_pre_hooks


def test_a_resumed_run_goes_on_with_probes_of_its_own() -> None:
    def trained(model: nn.Module, optimizer: SophiaH, numbers: range) -> None:
        callback = SophiaCallback(optimizer, seed=3)
        callback.on_train_begin(None, None, None, model=model)  # type: ignore[arg-type]
        for number in numbers:
            model.train()
            model(**collate(rows(8)[2 * number : 2 * number + 2])).loss.backward()
            step(callback, model)
            optimizer.step()
            optimizer.zero_grad()
        callback.on_train_end(None, None, None, model=model)  # type: ignore[arg-type]
        assert callback.estimates == numbers.stop

    whole, first, second = (tiny_lm("gpt2", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0) for _ in range(3))
    optimizers = [SophiaH(model.parameters(), lr=1e-2, interval=1) for model in (whole, first, second)]
    trained(whole, optimizers[0], range(4))
    trained(first, optimizers[1], range(2))
    second.load_state_dict(first.state_dict())
    optimizers[2].load_state_dict(optimizers[1].state_dict())
    trained(second, optimizers[2], range(2, 4))
    assert all(torch.equal(p, q) for p, q in zip(whole.parameters(), second.parameters(), strict=True))


def one_of_two(rank: int, port: int, folder: Path) -> None:
    """A process whose batch has counted tokens in process 0 only; afterwards it adds up what a trainer might."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    join()
    model = tiny_lm("gpt2")
    optimizer = SophiaH(model.parameters(), interval=2)
    callback = SophiaCallback(optimizer)
    callback.on_train_begin(None, None, None, model=model)  # type: ignore[arg-type]
    batch = collate(rows(2))
    if rank == 1:
        batch["labels"].fill_(-100)
    model.train()(**batch)
    step(callback, model)
    after = torch.full((5,), rank + 1.0)
    dist.all_reduce(after)
    found = {"after": after, "hessian": [optimizer.state[p]["hessian"] for p in optimizer.parameters]}
    torch.save(found, folder / f"{rank}.pt")
    leave()


def test_a_process_without_counted_tokens_takes_part_in_the_mean(tmp_path: Path) -> None:
    port = free_port()
    processes = [CHILDREN.Process(target=one_of_two, args=(rank, port, tmp_path)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        process.kill()
    model = tiny_lm("gpt2")
    total, tokens = CausalLMLoss()(model, collate(rows(2)))
    expected = hutchinson_diagonal(total / tokens, list(model.parameters()), seed=0)
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt")
        assert found["after"].tolist() == [3.0] * 5
        for h, d in zip(found["hessian"], expected, strict=True):
            torch.testing.assert_close(h, (1 - 0.99) * d / 2)


def test_a_model_called_otherwise_is_refused() -> None:
    model = tiny_lm("gpt2")
    callback = SophiaCallback(SophiaH(model.parameters()))
    with pytest.raises(RuntimeError, match="has seen no batch with input_ids"):
        step(callback, model)
    with pytest.raises(TypeError, match="must be the SophiaH that the trainer uses, got AdamW"):
        SophiaCallback(torch.optim.AdamW(model.parameters()))  # type: ignore[arg-type]
