"""Sequences longer than a model's learned table of positions, without new parameters.

The table stays the model's own parameter, under its own name: the number of parameters, and so the dimension of the
Hessian, does not change. What changes is how positions read it. Reading is linear in the table, so every derivative,
the second included, is exact.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

__all__ = ["ExtendPositions", "PositionExtension", "extend"]

ExtendPositions: TypeAlias = Literal["interpolate", "tile", "refuse"]


@dataclass(frozen=True)
class PositionExtension:
    """How a model was taken beyond the positions that it was made for.

    Attributes:
        method: "interpolate" or "tile" for a learned table, "extrapolate" for rotary positions.
        trained: Positions the model was made for.
        extended: Positions it now takes.
    """

    method: Literal["interpolate", "tile", "extrapolate"]
    trained: int
    extended: int

    def as_record(self) -> dict[str, Any]:
        """This extension as JSON fields."""
        return asdict(self)

    @property
    def notice(self) -> str:
        """One line for the user."""
        how = {
            "interpolate": "the learned position table is interpolated linearly: position p reads row "
            f"p * {self.trained - 1}/{self.extended - 1}",
            "tile": f"the learned position table is repeated: position p reads row p mod {self.trained}",
            "extrapolate": "rotary positions are extrapolated as the model computes them",
        }[self.method]
        return f"{self.extended} positions on a model made for {self.trained}: {how}"


def extend(model: PreTrainedModel, seq: int, how: ExtendPositions) -> PositionExtension | None:
    """Let a model take sequences of `seq` tokens, if it was made for fewer.

    A learned table of P rows (GPT-2, GPT-Neo, OPT) is read at position p of N = seq as

        interpolate: (1 - f) table[r] + f table[r + 1],   r + f = p (P - 1) / (N - 1)
        tile:        table[p mod P]

    Rotary embeddings need no table and extrapolate; nothing is changed. The model is changed in place.

    Args:
        model: A Hugging Face causal language model.
        seq: Sequence length to come.
        how: What to do beyond the model's own positions; "refuse" raises.

    Returns:
        What was done, or None if the model takes `seq` tokens as it is.

    Raises:
        ValueError: If `how` is unknown, or is "refuse" and `seq` exceeds the model's positions.
        NotImplementedError: If the model's positions are neither a learned table nor rotary.
    """
    if how not in get_args(ExtendPositions):
        raise ValueError(f"extend_positions must be one of {', '.join(get_args(ExtendPositions))}, got {how!r}")
    config = model.config.get_text_config()
    trained = getattr(config, "max_position_embeddings", None)
    if trained is None or seq <= trained:
        return None
    if how == "refuse":
        raise ValueError(
            f"seq={seq} exceeds the model's {trained} positions and extend_positions is 'refuse'; "
            f"use a seq of at most {trained}, or extend_positions='interpolate' or 'tile'"
        )
    tables = learned_tables(model, trained)
    for table in tables:
        _read_differently(table, trained, seq, how)
    if tables:
        return PositionExtension(how, trained, seq)
    if getattr(config, "rope_parameters", None):
        return PositionExtension("extrapolate", trained, seq)
    raise NotImplementedError(
        f"seq={seq} exceeds the model's {trained} positions, and {type(model).__name__} has neither a learned position "
        f"table nor rotary positions; use a seq of at most {trained}"
    )


def learned_tables(model: PreTrainedModel, rows: int) -> list[nn.Embedding]:
    """Learned position tables: embeddings, other than that of the words, that hold so many positions.

    Args:
        model: The model.
        rows: Positions; rows that a table keeps ahead of the first are not counted.
    """
    words = model.get_input_embeddings()
    return [
        m
        for m in model.modules()
        if isinstance(m, nn.Embedding) and m is not words and m.num_embeddings - _offset(m) == rows
    ]


def _offset(table: nn.Embedding) -> int:
    """Rows ahead of position 0, which OPT and its kin skip inside their own forward."""
    offset = getattr(table, "offset", 0)
    return offset if isinstance(offset, int) else 0


class _ExtendedTable(nn.Embedding):
    """An embedding whose rows are read at `extended` positions; mixed into a table by `_read_differently`."""

    trained: int
    extended: int
    tiled: bool

    def forward(self, input: Tensor) -> Tensor:
        """Rows for row numbers `position + offset`."""
        offset = _offset(self)
        position = input - offset
        if self.tiled:
            return F.embedding(position % self.trained + offset, self.weight)
        scaled = position * (self.trained - 1)
        lower = scaled // (self.extended - 1)
        # The last position reads the last row itself, not half way to one that is not there.
        upper = (lower + 1).clamp_max(self.trained - 1)
        fraction = (scaled % (self.extended - 1)).double() / (self.extended - 1)
        share = fraction.to(self.weight.dtype).unsqueeze(-1)
        return torch.lerp(F.embedding(lower + offset, self.weight), F.embedding(upper + offset, self.weight), share)


def _read_differently(table: nn.Embedding, trained: int, extended: int, how: ExtendPositions) -> None:
    """Change how a table is read, in place, and keep the module, its parameter and its own forward's signature.

    The new class lies between the table's own class and `nn.Embedding` in the method order, so that a subclass which
    derives positions itself and then calls `super().forward` arrives at the extended reading.
    """
    own = type(table)
    bases = (_ExtendedTable,) if own is nn.Embedding else (own, _ExtendedTable)
    reading = {"trained": trained, "extended": extended, "tiled": how == "tile"}
    table.__class__ = type(f"Extended{own.__name__}", bases, reading)
