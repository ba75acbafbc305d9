"""The table of attention calls that every backend is tested on, and all eight outputs of one call.

A case is a shape and a mask; `inputs` draws its tensors, `outputs` runs value, gradient and second derivative through
autograd, `errors` compares two runs norm by norm.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from flashbob import sdpa_bob

OUTPUTS = ("o", "dq", "dk", "dv", "gq", "gk", "gv", "gdo")
Layout = Literal["contiguous", "tokens-first", "strided", "expanded"]


@dataclass(frozen=True)
class Case:
    """One call of `sdpa_bob`: heads (H_Q, H_KV), tokens (N_Q, N_KV), head sizes (D, D_v), and its options."""

    name: str
    heads: tuple[int, int] = (1, 1)
    tokens: tuple[int, int] = (17, 17)
    sizes: tuple[int, int] = (8, 8)
    batch: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    bias: tuple[int, int] | None = None  # leading dimensions of a bias [., ., N_Q, N_KV]
    holes: bool = False  # some entries of the bias are -inf
    layout: Layout = "contiguous"

    def __str__(self) -> str:
        return self.name


def _case(name: str, **fields: Any) -> Case:
    own = {key: fields.pop(key) for key in tuple(fields) if key in Case.__dataclass_fields__}
    return Case(name, **own, options=fields)


CASES = [
    # Masks without padding, square.
    _case("full", heads=(2, 2), batch=2),
    _case("causal", heads=(2, 2), batch=3, is_causal=True),
    _case("full-odd", tokens=(33, 33)),
    _case("causal-odd", tokens=(63, 63), is_causal=True),
    _case("one-token", tokens=(1, 1), is_causal=True),
    _case("one-token-full", tokens=(1, 1)),
    _case("window-1", window_size=1),
    _case("window-5", batch=2, window_size=5),
    _case("window-odd", tokens=(63, 63), window_size=20),
    _case("window-wider-than-sequence", window_size=40),
    _case("scale", is_causal=True, scale=0.7),
    _case("scale-negative", is_causal=True, scale=-0.3),
    _case("scale-zero", is_causal=True, scale=0.0),
    # Rectangles, aligned with the end of the keys by default.
    _case("few-queries-full", tokens=(5, 17)),
    _case("few-queries-causal", tokens=(5, 17), is_causal=True),
    _case("few-queries-window", tokens=(5, 17), window_size=6),
    _case("one-query-causal", tokens=(1, 23), is_causal=True),
    _case("many-queries-full", tokens=(19, 6)),
    _case("many-queries-causal", tokens=(19, 6), is_causal=True),
    _case("many-queries-window", tokens=(19, 6), window_size=4),
    _case("one-key-causal", tokens=(9, 1), is_causal=True),
    _case("offset-query", tokens=(7, 20), is_causal=True, q_offset=4),
    _case("offset-key", tokens=(12, 12), is_causal=True, q_offset=9, k_offset=4),
    _case("offset-key-after-queries", tokens=(12, 9), is_causal=True, q_offset=0, k_offset=5),
    _case("offset-sees-nothing", tokens=(6, 7), is_causal=True, q_offset=0, k_offset=50),
    _case("offset-sees-everything", tokens=(6, 7), is_causal=True, q_offset=50),
    _case("offset-window", tokens=(11, 18), window_size=4, q_offset=3),
    _case("offset-window-runs-out", tokens=(11, 9), window_size=3, q_offset=4),
    # Padding.
    _case("lengths", batch=2, key_lengths=(17, 11)),
    _case("lengths-causal", batch=2, is_causal=True, key_lengths=(9, 17)),
    _case("lengths-zero", batch=3, key_lengths=(0, 17, 1)),
    _case("lengths-zero-causal", batch=3, is_causal=True, key_lengths=(0, 17, 1)),
    _case("starts", batch=2, key_starts=(0, 6)),
    _case("starts-causal", batch=2, is_causal=True, key_starts=(6, 0)),
    _case("starts-all", batch=3, is_causal=True, key_starts=(17, 0, 16)),
    _case("starts-and-lengths", batch=4, key_starts=(0, 3, 8, 9), key_lengths=(17, 14, 8, 5)),
    _case(
        "starts-and-lengths-causal",
        heads=(2, 2),
        batch=3,
        is_causal=True,
        key_starts=(0, 3, 8),
        key_lengths=(17, 14, 8),
    ),
    _case("starts-window", batch=2, window_size=4, key_starts=(0, 9)),
    _case("lengths-rectangular", batch=2, tokens=(5, 17), is_causal=True, key_lengths=(12, 17), key_starts=(0, 4)),
    # Grouped heads.
    _case("gqa", batch=2, heads=(4, 2), is_causal=True),
    _case("gqa-full", heads=(4, 2)),
    _case("gqa-3", heads=(6, 2), is_causal=True),
    _case("mqa", heads=(4, 1), is_causal=True),
    _case("gqa-window", heads=(4, 2), window_size=5),
    _case("gqa-rectangular", heads=(4, 2), tokens=(7, 18), is_causal=True),
    _case("gqa-padded", batch=2, heads=(4, 2), is_causal=True, key_starts=(0, 5), key_lengths=(12, 17)),
    _case(
        "mqa-everything",
        batch=2,
        heads=(3, 1),
        tokens=(9, 21),
        sizes=(16, 5),
        window_size=7,
        q_offset=11,
        key_starts=(0, 6),
    ),
    # Head sizes, alone and different for the values.
    *[
        _case(f"head-{d}", tokens=(18, 18), sizes=(d, d), is_causal=True)
        for d in (1, 2, 3, 16, 31, 32, 40, 64, 80, 96, 128, 192, 256)
    ],
    _case("value-head-smaller", sizes=(16, 8), is_causal=True),
    _case("value-head-larger", sizes=(8, 16), is_causal=True),
    _case("value-head-one", sizes=(12, 1)),
    _case("value-head-much-larger", sizes=(8, 129), tokens=(12, 14)),
    _case("value-head-gqa-padded", batch=2, heads=(4, 2), sizes=(24, 40), is_causal=True, key_lengths=(17, 8)),
    # Strides.
    _case("tokens-first", heads=(2, 2), batch=2, layout="tokens-first", is_causal=True),
    _case("tokens-first-gqa", layout="tokens-first", heads=(4, 2), window_size=6),
    _case("strided", heads=(2, 2), layout="strided", is_causal=True),
    _case("strided-padded", batch=2, layout="strided", key_lengths=(17, 9)),
    _case("expanded", heads=(2, 2), layout="expanded", is_causal=True),
    # Scores that are bent or shifted.
    _case("softcap", heads=(2, 2), is_causal=True, softcap=1.5),
    _case("softcap-full", softcap=0.4),
    _case(
        "softcap-everything",
        batch=2,
        heads=(4, 2),
        tokens=(9, 17),
        sizes=(8, 12),
        window_size=6,
        softcap=2.0,
        key_starts=(0, 9),
    ),
    _case("bias", heads=(2, 2), batch=2, bias=(2, 2)),
    _case("bias-broadcast", heads=(2, 2), bias=(1, 1), is_causal=True),
    _case("bias-gqa-softcap", batch=2, heads=(4, 2), bias=(2, 4), is_causal=True, softcap=1.0, key_lengths=(17, 4)),
    _case("bias-holes", heads=(2, 2), bias=(1, 2), holes=True, tokens=(35, 33)),
    _case("bias-tokens-first", batch=2, heads=(2, 2), bias=(2, 2), layout="tokens-first", window_size=9),
    _case("bias-strided", batch=2, heads=(2, 1), bias=(2, 1), holes=True, layout="strided", is_causal=True),
    # Dropout, whose mask does not depend on tiles and passes.
    _case("dropout", batch=2, heads=(2, 2), tokens=(37, 37), is_causal=True, dropout_p=0.3, seed=7),
    _case("dropout-full", heads=(1, 1), tokens=(33, 18), dropout_p=0.5, seed=2**64 - 1),
    _case(
        "dropout-everything",
        batch=2,
        heads=(4, 2),
        tokens=(19, 34),
        sizes=(8, 12),
        bias=(1, 4),
        holes=True,
        window_size=20,
        softcap=1.2,
        key_lengths=(34, 25),
        dropout_p=0.2,
        seed=11,
    ),
]


def _strided(x: Tensor, layout: Layout) -> Tensor:
    """The same values in memory laid out another way."""
    if layout == "tokens-first":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "strided":
        return torch.stack([x, torch.full_like(x, float("nan"))], dim=-1).flatten(-2)[..., ::2]
    if layout == "expanded":
        return x[:, :1].expand_as(x)
    return x


@dataclass(frozen=True)
class Inputs:
    """Tensors of one call: attention's own, the gradient `do` of its output, and the direction (uq, uk, uv)."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    uq: Tensor
    uk: Tensor
    uv: Tensor
    bias: Tensor | None

    def to(self, dtype: torch.dtype) -> Inputs:
        return Inputs(*(None if x is None else x.to(dtype) for x in vars(self).values()))  # type: ignore[arg-type]


def inputs(case: Case, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> Inputs:
    """Normal tensors of a case, drawn in float32 on the CPU, so that every dtype and device gets the same ones."""
    generator = torch.Generator().manual_seed(seed)
    (heads_q, heads_kv), (queries, keys), (d, d_v) = case.heads, case.tokens, case.sizes
    q_shape, k_shape = (case.batch, heads_q, queries, d), (case.batch, heads_kv, keys, d)
    v_shape, o_shape = (*k_shape[:3], d_v), (*q_shape[:3], d_v)

    def draw(*shape: int) -> Tensor:
        return _strided(torch.randn(shape, generator=generator).to(device, dtype), case.layout)

    tensors = [draw(*shape) for shape in (q_shape, k_shape, v_shape, o_shape, q_shape, k_shape, v_shape)]
    bias = None
    if case.bias is not None:
        bias = torch.randn(*case.bias, queries, keys, generator=generator).to(device, dtype)
        if case.holes:
            bias.view(-1)[::3] = -torch.inf
        bias = _strided(bias, case.layout)
    return Inputs(*tensors, bias=bias)


def attend(case: Case, x: Inputs, backend: str) -> Tensor:
    """The case's call of `sdpa_bob`."""
    return sdpa_bob(x.q, x.k, x.v, **case.options, attn_bias=x.bias, backend=backend)  # type: ignore[arg-type]


def outputs(case: Case, x: Inputs, backend: str) -> dict[str, Tensor]:
    """o; the gradient (dq, dk, dv) of <do, o>; the gradient (gq, gk, gv, gdo) of <dq, uq> + <dk, uk> + <dv, uv>."""
    leaves = Inputs(*(t.detach().requires_grad_() for t in (x.q, x.k, x.v, x.do)), x.uq, x.uk, x.uv, x.bias)
    o = attend(case, leaves, backend)
    first = torch.autograd.grad(o, (leaves.q, leaves.k, leaves.v), leaves.do, create_graph=True)
    second = torch.autograd.grad(first, (leaves.q, leaves.k, leaves.v, leaves.do), (x.uq, x.uk, x.uv))
    return {label: t.detach() for label, t in zip(OUTPUTS, (o, *first, *second), strict=True)}


def errors(found: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """|found - exact| / |exact| of each output, in float64.

    Sums of order one that cancel (the gradient of a softmax over one key is zero) are measured against a third of their
    natural size instead of zero.
    """
    return {
        label: float((found[label].double() - x.double()).norm() / max(x.double().norm(), 0.3 * x.numel() ** 0.5))
        for label, x in exact.items()
    }
