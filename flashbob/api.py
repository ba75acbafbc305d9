"""The public attention call: validate, settle the masking, choose who computes what."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, cast

import torch
from torch import Tensor

from flashbob import blocked, fused, reference
from flashbob.autocast import lowered, suspended
from flashbob.autograd import Attention
from flashbob.dropout import Dropout
from flashbob.geometry import Geometry
from flashbob.graph_break import graph_break
from flashbob.plan import FirstOrder, Plan, SecondOrder
from flashbob.recall import through_recall

Backend = Literal["auto", "triton", "blocked", "reference"]
BACKENDS: tuple[Backend, ...] = ("auto", "triton", "blocked", "reference")


@graph_break
def sdpa_bob(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: int = 0,
    q_offset: int | None = None,
    k_offset: int = 0,
    key_lengths: Tensor | Sequence[int] | None = None,
    key_starts: Tensor | Sequence[int] | None = None,
    attn_bias: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | None = None,
    softcap: float | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Scaled dot-product attention with exact first and second derivatives, memory linear in the sequence.

    Computes o_i = sum_j softmax_j(softcap(scale * q_i . k_j) + bias_ij) v_j over the keys j that query i sees. Query i
    stands at position `q_offset + i`, key j at `k_offset + j`.

    Where it differs from `torch.nn.functional.scaled_dot_product_attention`: causal queries are aligned with the last
    keys (there with the first; the same where there are equally many), and there is no attn_mask and no enable_gqa
    (grouped heads always work; for a mask see attn_bias).

    In a torch.autocast block q, k and v are cast to its dtype first (float64 stays), and the output has that dtype;
    every derivative computes in the dtype of its operands, wherever it is called. torch.compile ends its graph before
    the call and begins another behind it.

    Args:
        q: queries [B, H_Q, N_Q, D], float64/float32/bfloat16/float16, any strides, D from 1 to 256.
        k: keys [B, H_KV, N_KV, D]; H_Q must be a multiple of H_KV (GQA, MQA). Never repeated in memory.
        v: values [B, H_KV, N_KV, D_v]; D_v may differ from D.
        is_causal: hide keys that stand after the query.
        scale: factor on q . k; 1 / sqrt(D) by default.
        window_size: 0 for no window; w > 0 shows the key at the query's own position and its w - 1 predecessors (so a
            window is always causal).
        q_offset: position of the first query. By default queries are aligned with the end of the keys:
            `k_offset + max(0, N_KV - N_Q)`.
        k_offset: position of the first key.
        key_lengths: [B] integers in 0..N_KV: keys from there on are padding.
        key_starts: [B] integers in 0..N_KV: keys before are padding (left-padded batches).
        attn_bias: added to the scores; floating, broadcastable to [B, H_Q, N_Q, N_KV], on q's device; must not require
            grad. Hide keys with -inf (or key_lengths), not with a large negative number, see below.
        dropout_p: probability of dropping an attention weight, in [0, 1); kept weights are divided by 1 - dropout_p.
            The mask is a function of the seed and of the weight's sequence, head, query and key alone, so every backend
            and every derivative sees the same one. Calls mapped by torch.func.vmap share it.
        seed: seed of the dropout mask, an integer in 0 .. 2^64 - 1. By default one is drawn from torch's default
            generator, so torch.manual_seed makes the call repeatable.
        softcap: c > 0 replaces each score s by c * tanh(s / c), before the bias.
        backend: "reference" materializes the scores (the oracle, any derivative order); "blocked" is memory-linear
            PyTorch on any device and dtype; "triton" runs the kernels (not float64; on CPU only under
            TRITON_INTERPRET=1); "auto" takes the kernels on CUDA where they cover the case, and "blocked" otherwise.

    Returns:
        [B, H_Q, N_Q, D_v] in q's dtype. A query that sees no key yields zeros, with zero gradients.

    Cost (products of 2 * D FLOP per visible pair): forward 2, first backward 5, double backward 18. Extra memory of the
    double backward: three floats per query and head. First and second derivatives are exact (reverse over reverse,
    forward over reverse and reverse over forward; torch.func.vmap batches by folding); a third derivative raises.

    Limit of the exactness: derivatives take P = exp(S - lse), and where lse is so large that the dtype of the scores
    (float32, or float64 for float64) does not hold log(number of keys) beside it, the derivatives of that row are off
    by up to the number of keys, though its output is right. In float32 that is where all visible scores of a row are
    beyond about 1e5 in magnitude: where a bias masks a whole row with -1e9 or finfo.min, say. The forward of "blocked"
    stores lse in two parts and has no such limit; the kernels and PyTorch's fused attention have it.

    Raises:
        ValueError, TypeError: an argument breaks a rule; the message names the rule, the value and the remedy.
        NotImplementedError: an explicitly chosen backend does not support the case; the bias requires a gradient or
            carries a tangent; a seed would have to be drawn inside torch.func.vmap with randomness="different".

    Source: Givans, Crawshaw, Liu 2026 (arXiv 2609.24089), Algorithm 1, in the form derived in flashbob/README.md.
    """
    for label, x in (("q", q), ("k", k), ("v", v)):
        _check_tensor(label, x)
    q, k, v = lowered(q, k, v)
    _check_agreement(q, k, v)
    _check_options(scale, window_size, q_offset, k_offset, dropout_p, seed, softcap, backend)
    geometry = Geometry.build(
        q.shape[2], k.shape[2], is_causal=is_causal, window_size=window_size, q_offset=q_offset, k_offset=k_offset
    )
    bounds = _bounds(key_starts, key_lengths, q.shape[0], k.shape[2], q.device)
    bias = _bias(attn_bias, q, k)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    dropout = Dropout(dropout_p, _drawn() if seed is None else seed, q.shape[0]) if dropout_p > 0.0 else None
    if backend == "reference":
        with suspended(q.device):
            return reference.attention(
                q, k, v, geometry=geometry, bounds=bounds, bias=bias, scale=scale, softcap=softcap, dropout=dropout
            )
    if 0 in q.shape or 0 in k.shape or 0 in v.shape:
        # No element to compute or no key to see: an (attached) zero.
        with suspended(q.device):
            nothing = q[..., :0].sum() + k[..., :0].sum() + v[..., :0].sum()
        return nothing + q.new_zeros(*q.shape[:3], v.shape[-1])
    first, second = _choose(q, k, v, geometry, bounds, bias, softcap, scale, backend, dropout is not None)
    plan = Plan(geometry, scale, softcap, through_recall(first), second, dropout)
    o, _ = cast(tuple[Tensor, Tensor], Attention.apply(q, k, v, bounds, bias, plan))
    return o


def _choose(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    geometry: Geometry,
    bounds: Tensor | None,
    bias: Tensor | None,
    softcap: float | None,
    scale: float,
    backend: Backend,
    dropout: bool,
) -> tuple[FirstOrder, SecondOrder]:
    """Who computes the forward and first backward, and who the second derivative."""
    from flashbob import kernels  # Triton is imported by the first call that may need it

    reason = kernels.unsupported(q, k, v, bias=bias)
    if backend == "triton" and reason is not None:
        raise NotImplementedError(f"backend='triton' does not support this call: {reason}; use backend='auto'")
    own = kernels if backend == "triton" or (backend == "auto" and q.is_cuda and reason is None) else blocked
    # The fused kernels scale the masked scores and their maximum, which needs a positive scale.
    plain = bounds is None and bias is None and softcap is None and scale > 0 and not dropout
    first = fused.find(q, k, v, geometry) if plain else None
    return cast(FirstOrder, own) if first is None else first, cast(SecondOrder, own)


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: int = 0,
    padded: bool = False,
    softcap: float | None = None,
    attn_bias: Tensor | None = None,
    dropout_p: float = 0.0,
    backend: Backend = "auto",
) -> tuple[str, str]:
    """Names of the implementations that a call would use: (forward and first backward, second derivative).

    Tensors may be empty or `meta`-like stand-ins as long as shape, dtype and device are those of the call.

    Raises:
        ValueError, TypeError: an option breaks a rule of `sdpa_bob`.
        NotImplementedError: an explicitly chosen backend does not support the case.
    """
    _check_options(scale, window_size, None, 0, dropout_p, None, softcap, backend)
    q, k, v = lowered(q, k, v)
    if backend == "reference":
        return "reference", "reference"
    geometry = Geometry.build(
        q.shape[2], k.shape[2], is_causal=is_causal, window_size=window_size, q_offset=None, k_offset=0
    )
    bounds = q.new_zeros(q.shape[0], 2, dtype=torch.int32) if padded else None
    scale = 1.0 if scale is None else scale
    first, second = _choose(q, k, v, geometry, bounds, attn_bias, softcap, scale, backend, dropout_p > 0.0)
    return first.name, second.name


def _check_tensor(label: str, x: Tensor) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{label} must be a torch.Tensor, got {type(x).__name__}")
    if x.ndim != 4:
        raise ValueError(
            f"{label} must have four dimensions [batch, heads, tokens, head size], got shape {tuple(x.shape)}"
        )
    if x.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(f"{label} must be float64, float32, bfloat16 or float16, got {x.dtype}; convert it first")


def _check_agreement(q: Tensor, k: Tensor, v: Tensor) -> None:
    for label, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype or x.device != q.device:
            raise TypeError(
                f"q, k and v must share dtype and device: q is {q.dtype} on {q.device}, {label} {x.dtype} on {x.device}"
            )
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(
            f"k and v must agree in batch, heads and tokens, got k {tuple(k.shape)} and v {tuple(v.shape)}"
        )
    if q.shape[0] != k.shape[0]:
        raise ValueError(f"q and k must have the same batch size, got q {tuple(q.shape)} and k {tuple(k.shape)}")
    if q.shape[3] != k.shape[3]:
        raise ValueError(f"q and k must have the same head size, got q {tuple(q.shape)} and k {tuple(k.shape)}")
    if q.shape[3] == 0:
        raise ValueError(f"the head size must be at least 1, got q {tuple(q.shape)}")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"the number of query heads must be a multiple of the number of key/value heads, got {q.shape[1]} and "
            f"{k.shape[1]}"
        )


def _check_options(
    scale: float | None,
    window_size: int,
    q_offset: int | None,
    k_offset: int,
    dropout_p: float,
    seed: int | None,
    softcap: float | None,
    backend: str,
) -> None:
    for label, number in (("scale", scale), ("dropout_p", dropout_p), ("softcap", softcap)):
        if number is not None and (isinstance(number, bool) or not isinstance(number, (int, float))):
            raise TypeError(
                f"{label} must be an int or a float (it has no gradient), got {type(number).__name__}; pass a number"
            )
    for label, offset in (("q_offset", q_offset), ("k_offset", k_offset)):
        if offset is not None and (isinstance(offset, bool) or not isinstance(offset, int)):
            raise TypeError(f"{label} must be an integer, got {offset!r}; convert it with int()")
    if scale is not None and not math.isfinite(scale):
        raise ValueError(f"scale must be finite, got {scale}; leave it None for 1 / sqrt(D)")
    if isinstance(window_size, bool) or not isinstance(window_size, int) or window_size < 0:
        raise ValueError(f"window_size must be an integer >= 0 (0 means no window), got {window_size!r}")
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p must lie in [0, 1), got {dropout_p}")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**64):
        raise ValueError(f"seed must be an integer in 0 .. 2^64 - 1 or None (draw one), got {seed!r}")
    if softcap is not None and not (math.isfinite(softcap) and softcap > 0):
        raise ValueError(f"softcap must be a finite number > 0 or None, got {softcap}")
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")


def _drawn() -> int:
    """A seed from torch's default generator."""
    seed = torch.randint(0, 2**63 - 1, ())
    if torch._C._functorch.is_batchedtensor(seed):
        raise NotImplementedError(
            'seed=None inside torch.func.vmap(..., randomness="different"): mapped calls of attention share their '
            'dropout mask; use randomness="same" or pass a seed'
        )
    return int(seed)


def _bounds(
    starts: Tensor | Sequence[int] | None,
    stops: Tensor | Sequence[int] | None,
    batch: int,
    keys: int,
    device: torch.device,
) -> Tensor | None:
    """int32 [B, 2]: first and one-past-last valid key of each sequence, or None when no padding is given."""
    if starts is None and stops is None:
        return None
    columns = []
    for label, x, default in (("key_starts", starts, 0), ("key_lengths", stops, keys)):
        values = torch.full((batch,), default, device=device) if x is None else torch.as_tensor(x, device=device)
        if values.shape != (batch,) or values.is_floating_point() or values.dtype == torch.bool:
            raise ValueError(
                f"{label} must hold one integer per sequence, shape ({batch},), got shape {tuple(values.shape)} of "
                f"{values.dtype}"
            )
        plain = _plain(values)
        inside = ((plain >= 0) & (plain <= keys)).all()
        message = f"{label} must lie in 0..{keys} (the number of keys)"
        if plain.is_cuda:
            torch._assert_async(inside, message)
        elif not inside:
            raise ValueError(f"{message}, got {plain.tolist()}")
        columns.append(values.to(torch.int32))
    return torch.stack(columns, dim=1)


def _plain(x: Tensor) -> Tensor:
    """The tensor inside all wrappers of torch.func: with the mapped dimensions of torch.func.vmap."""
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        x = torch._C._functorch.get_unwrapped(x)
    return x


def _bias(bias: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """[B, H_Q | 1, N_Q, N_KV] view of the additive bias."""
    if bias is None:
        return None
    if not isinstance(bias, Tensor):
        raise TypeError(f"attn_bias must be a torch.Tensor, got {type(bias).__name__}")
    if bias.device != q.device:
        raise TypeError(f"attn_bias must be on q's device {q.device}, got {bias.device}; move it first")
    if bias.dtype == torch.bool or not bias.is_floating_point():
        raise TypeError(
            f"attn_bias must be floating (it is added to the scores), got {bias.dtype}; for a boolean mask pass "
            "torch.zeros(mask.shape).masked_fill(~mask, -inf), or key_lengths / window_size / is_causal"
        )
    if bias.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError("attn_bias with requires_grad: its gradient is not implemented; pass bias.detach()")
    target = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    try:
        torch.broadcast_shapes(bias.shape, target)
        if len(bias.shape) > 4:
            raise RuntimeError
        bias = bias.reshape((1,) * (4 - bias.ndim) + tuple(bias.shape))
        return bias.expand(target)
    except RuntimeError:
        raise ValueError(f"attn_bias must be broadcastable to {target}, got shape {tuple(bias.shape)}") from None
