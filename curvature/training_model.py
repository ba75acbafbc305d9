"""Models to train: attention by name, dropout as asked for, and a position table as long as the windows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn
from transformers import PreTrainedModel

from curvature.models import LoadedModel, load_model
from curvature.positions import ExtendPositions, learned_tables
from curvature.training_settings import Attention
from flashbob.hybrid import register_hybrid_attention

__all__ = ["grow_positions", "load_for_training", "set_dropout"]

_IMPLEMENTATIONS: dict[Attention, str] = {"flashbob": "flashbob", "math": "sdpa", "hybrid": "hybrid"}


def load_for_training(
    name_or_path: str,
    seq: Callable[[LoadedModel], int],
    *,
    random_init: bool = False,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    extend_positions: ExtendPositions = "interpolate",
    attention: Attention = "flashbob",
    dropout: float = 0.0,
    seed: int = 0,
) -> tuple[LoadedModel, int]:
    """Load a model to train, or make one with random weights.

    Random weights get a learned position table of `seq` rows where the architecture's own is shorter; pretrained ones
    keep theirs, and read it as `extend_positions` says.

    Args:
        name_or_path: See `curvature.models.load_model`.
        seq: Tokens per window, from the model.
        random_init: See `load_model`.
        dtype: Of the weights, float32 or float64.
        device: Where.
        extend_positions: See `load_model`.
        attention: See `curvature.training_settings.TrainingSettings`.
        dropout: Rate of every dropout of the model.
        seed: Of random weights.

    Returns:
        The model with its tokenizer and facts, and the tokens per window.

    Raises:
        ValueError: See `load_model`; or if the dropout is not in [0, 1).
    """
    register_hybrid_attention()

    def load(positions: int | None) -> LoadedModel:
        return load_model(
            name_or_path,
            random_init=random_init,
            dtype=dtype,
            device=device,
            seq=positions,
            extend_positions=extend_positions,
            attention=_IMPLEMENTATIONS[attention],
            seed=seed,
        )

    loaded = load(None)
    length = seq(loaded)
    context = getattr(loaded.model.config.get_text_config(), "max_position_embeddings", None)
    if context is not None and length > context:
        if random_init:
            grow_positions(loaded.model, length, seed)
            parameters = sum(p.numel() for p in loaded.model.parameters())
            notice = f"{length} positions on an architecture made for {context}: its position table has {length} rows"
            info = replace(loaded.info, parameters=parameters)
            loaded = replace(loaded, info=info, notices=[*loaded.notices, notice])
        else:
            loaded = load(length)
    set_dropout(loaded.model, dropout)
    return loaded, length


def grow_positions(model: PreTrainedModel, rows: int, seed: int) -> None:
    """Give a model with random weights a longer table of learned positions, in place.

    New rows are drawn as the model's own are, normal with the configuration's `initializer_range`.

    Args:
        model: The model.
        rows: Positions; more than it has.
        seed: Of the new rows.
    """
    config = model.config.get_text_config()
    deviation = float(getattr(config, "initializer_range", 0.02))
    for table in learned_tables(model, config.max_position_embeddings):
        old = table.weight.detach()
        generator = torch.Generator().manual_seed(seed)
        shape = (rows - config.max_position_embeddings, table.embedding_dim)
        new = (torch.randn(shape, generator=generator) * deviation).to(old.device, old.dtype)
        table.weight = nn.Parameter(torch.cat([old, new]))
        table.num_embeddings = len(table.weight)
    config.max_position_embeddings = rows


def set_dropout(model: nn.Module, rate: float) -> None:
    """Set the rate of every dropout, attention's included; it acts in training mode only.

    Raises:
        ValueError: If the rate is not in [0, 1).
    """
    if not 0 <= rate < 1:
        raise ValueError(f"dropout must be in [0, 1), got {rate}")
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = rate
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = rate  # type: ignore[assignment]
