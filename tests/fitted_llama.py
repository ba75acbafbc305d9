"""A small Llama whose weights matter, the text that it was fitted to, and some of its weights at several options."""

from __future__ import annotations

from typing import Any

import torch
from tiny_causal_lms import tiny_lm, tokens
from torch import nn

from quant import PackedStorage, Problem, Relinearization, evaluate_perplexity, find_weights, round_all, schemes

BATCHES = [tokens((4, 12), seed=seed) for seed in range(4)]
ROWS = [{"input_ids": row[None]} for batch in BATCHES[:3] for row in batch["input_ids"]]
INCLUDE = r"layers\.[01]\.(self_attn\.[qov]_proj|mlp\.down_proj)"
SEARCH = Relinearization(rounds=2, share=0.5, curvature_batches=1, draws=4)


def fitted_llama() -> nn.Module:
    """Fitted to the calibration text, so that rounding raises the loss."""
    model = tiny_lm("llama")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(12):
        optimizer.zero_grad()
        ids = torch.cat([b["input_ids"] for b in BATCHES])
        logits = model(input_ids=ids).logits
        nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()
    return model.requires_grad_(True).eval()


def problem_of(model: nn.Module) -> Problem:
    """The weights of INCLUDE at 2, 3, 4 and 8 bits."""
    weights = find_weights(model, INCLUDE)
    candidates = round_all(weights, schemes((2, 3, 4, 8), (8,)))
    return Problem(candidates, PackedStorage(model, weights, torch.float64), tuple((i,) for i in range(len(weights))))


def loss_of(model: nn.Module, batches: Any = BATCHES) -> float:
    """The mean loss."""
    return evaluate_perplexity(model, batches).loss
