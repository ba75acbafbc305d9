"""What the curvature tests compare with: matrices of known spectrum, tiny models, dense Hessians."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)

from curvature.loss import CausalLMLoss
from curvature.operators import LinearOperator
from curvature.vectors import Block, ParameterSpace


class MatrixOperator(LinearOperator):
    """A dense matrix as an operator, split into blocks of the given sizes."""

    def __init__(self, matrix: Tensor, sizes: Sequence[int] | None = None) -> None:
        blocks = tuple(Block(f"block{i}", (n,)) for i, n in enumerate(sizes or [len(matrix)]))
        super().__init__(ParameterSpace(blocks, matrix.dtype, matrix.device))
        self.matrix = matrix
        self.applied = 0

    def _apply(self, rows: Tensor) -> Tensor:
        self.applied += len(rows)
        return rows @ self.matrix.T


def with_spectrum(eigenvalues: Sequence[float] | Tensor, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A float64 matrix with these eigenvalues and random eigenvectors; both are returned."""
    values = torch.as_tensor(eigenvalues, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    vectors, _ = torch.linalg.qr(torch.randn(len(values), len(values), dtype=torch.float64, generator=generator))
    return vectors @ torch.diag(values) @ vectors.T, vectors


def tiny_gpt2(
    *, vocab: int = 7, width: int = 4, layers: int = 2, tied: bool = True, **overrides: Any
) -> GPT2LMHeadModel:
    """A float64 GPT-2 of a few hundred parameters, weights well away from zero."""
    config = GPT2Config(
        vocab_size=vocab, n_positions=12, n_embd=width, n_layer=layers, n_head=2, n_inner=4, tie_word_embeddings=tied,
        initializer_range=0.3, bos_token_id=0, eos_token_id=0, **overrides,
    )  # fmt: skip
    return _made(GPT2LMHeadModel, config)


def tiny_llama(**overrides: Any) -> LlamaForCausalLM:
    """A float64 Llama with grouped query heads."""
    entries: dict[str, Any] = {
        "vocab_size": 7, "hidden_size": 4, "intermediate_size": 4, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 2, "max_position_embeddings": 16, "initializer_range": 0.3,
        "tie_word_embeddings": True, "pad_token_id": None, "bos_token_id": 0, "eos_token_id": 0,
    }  # fmt: skip
    return _made(LlamaForCausalLM, LlamaConfig(**(entries | overrides)))


def tiny_opt() -> OPTForCausalLM:
    """A float64 OPT, whose position table has two rows ahead of position 0."""
    config = OPTConfig(
        vocab_size=7, hidden_size=4, word_embed_proj_dim=4, ffn_dim=4, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=8, init_std=0.3, dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip
    model: OPTForCausalLM = _made(OPTForCausalLM, config)
    # Otherwise PyTorch drops the derivatives of a token that the tests use as a token.
    model.model.decoder.embed_tokens.padding_idx = None
    return model


def _made(cls: Any, config: Any) -> Any:
    config._attn_implementation = "eager"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = cls(config).double().eval()
        # Biases and norms start at their neutral values, where many second derivatives vanish.
        for parameter in model.parameters():
            parameter.data += 0.05 * torch.randn_like(parameter)
    return model


class NormFree(nn.Module):
    """A language model of smooth elementary operations only: no norm, no attention, no tied weights."""

    def __init__(self, vocab: int = 7, width: int = 4) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def table(*shape: int) -> nn.Parameter:
            return nn.Parameter(0.5 * torch.randn(*shape, dtype=torch.float64, generator=generator))

        self.embed, self.mix, self.head = table(vocab, width), table(width, width), table(vocab, width)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed[input_ids]
        x = x + torch.tanh(x.cumsum(1) @ self.mix)
        return x @ self.head.T


def token_batch(vocab: int, shape: tuple[int, int], seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"input_ids": torch.randint(0, vocab, shape, generator=generator)}


def mean_loss(model: nn.Module, batches: Sequence[dict[str, Tensor]]) -> Tensor:
    """The loss by its definition: all counted tokens of all batches in one mean."""
    totals, tokens = zip(*(CausalLMLoss()(model, batch) for batch in batches), strict=True)
    return sum(totals) / sum(tokens)


def dense_hessian(model: nn.Module, batches: Sequence[dict[str, Tensor]]) -> Tensor:
    """Hessian by the vectorised double backward: all rows of the Jacobian of the gradient in one batched call."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(mean_loss(model, batches), parameters, create_graph=True)
    flat = torch.cat([g.reshape(-1) for g in gradients])
    rows = torch.autograd.grad(
        flat, parameters, torch.eye(len(flat), dtype=flat.dtype), is_grads_batched=True, materialize_grads=True
    )
    return torch.cat([r.reshape(len(flat), -1) for r in rows], dim=1)


def relative(a: Tensor, b: Tensor) -> float:
    """||a - b|| / ||b||."""
    return float((a - b).norm() / b.norm())
