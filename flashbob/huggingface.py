"""flashbob as an attention implementation of Hugging Face transformers.

Two functions are registered under one name. The mask function runs once per forward pass, where the model makes its
mask: it recognizes the pattern, checks the padding and returns a `KeyMask`, a few integers instead of an N x N tensor.
The attention function runs in every layer and hands the call, masked exactly so, to `flashbob.sdpa_bob`. Whatever
neither of them can express is refused: an argument that is not understood never becomes a wrong number.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any, NoReturn

import torch
from torch import Tensor

from flashbob.api import BACKENDS, Backend, sdpa_bob

_OTHERWISE = "load the model with attn_implementation='eager' for this"

# Families of transformers that compute attention in classes of their own, which know no registered name.
_ON_THEIR_OWN = {"bark", "coarse_acoustics", "falcon", "fine_acoustics", "gpt_neo", "semantic"}

# Tensors that models hand to every attention function and that say nothing about the attention itself; positions have
# been used where the mask was made. Any other tensor would change the result, so it is refused.
_WITHOUT_EFFECT = {"cache_position", "max_length_k", "max_length_q", "num_items_in_batch", "position_ids"}

_REASONS = {
    "cu_seq_lens_k": "sequences packed into one row",
    "cu_seq_lens_q": "sequences packed into one row",
    "head_mask": "masking of heads",
    "position_bias": "an additive position bias",
    "s_aux": "attention sinks",
    "seq_idx": "sequences packed into one row",
    "sinks": "attention sinks",
}


@dataclass(frozen=True)
class KeyMask:
    """Which keys each query sees, in place of transformers' mask tensor; the fields are arguments of `sdpa_bob`.

    Attributes:
        queries: number of queries that the mask was made for.
        keys: number of keys that it was made for (of a static cache: all its slots).
        is_causal: hide keys that stand after the query.
        window_size: 0, or the number of keys up to the query's own position that it sees.
        q_offset: position of the first query.
        k_offset: position of the first key.
        key_starts: int [B], keys before are padding; None without padding.
        key_lengths: int [B], keys from there on are padding; None without padding.
    """

    queries: int
    keys: int
    is_causal: bool = True
    window_size: int = 0
    q_offset: int | None = None
    k_offset: int = 0
    key_starts: Tensor | None = None
    key_lengths: Tensor | None = None

    # transformers asks a ready-made mask for its dimensions before it hands it to the mask function again.
    ndim = 4

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape of the mask tensor that this object stands for: [B or 1, 1, queries, keys]."""
        return (1 if self.key_starts is None else self.key_starts.shape[0], 1, self.queries, self.keys)

    def __getattr__(self, attribute: str) -> NoReturn:
        raise AttributeError(
            f"flashbob's mask has no {attribute!r}: it is a description of the visible keys, not a tensor, and this "
            f"model wants to edit a tensor; {_OTHERWISE}"
        )


def register_attention(name: str = "flashbob", backend: Backend = "auto") -> None:
    """Make `attn_implementation=name` available to every transformers model that supports custom attention.

        register_attention()
        model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="flashbob")

    Exact with value, gradient and second derivative: causal and full attention, padding on the left and on the right
    (2D `attention_mask`), sliding windows, soft-capped scores, grouped key/value heads (never repeated), decoding with
    dynamic and static caches, cross-attention, attention dropout in training mode (each layer draws the seed of its
    mask from torch's default generator, so torch.manual_seed and checkpointing repeat it). A padded query that sees no
    key yields zeros; eager attention averages all values there. Refused with an error: padding inside a sequence,
    packed sequences, chunked and other custom masks, ready-made mask tensors, attention sinks, position biases, masked
    heads, returned attention weights, and families with attention classes of their own (Falcon, GPT-Neo, Bark).

    Registering a name again replaces its backend. transformers takes every implementation whose name contains "flash"
    for a build of the flash-attention package: it would import that when a model is made, and prepare masks and caches
    for it. So its check, `transformers.utils.generic.is_flash_attention_requested`, is replaced, there and wherever a
    loaded module holds it, by one that knows `name`; nothing else in transformers is changed.

    Args:
        name: the name to register; not one that belongs to transformers or another package.
        backend: the backend of `sdpa_bob` that runs.

    Raises:
        ValueError: the name is taken, or there is no such backend.
        ImportError: transformers is not installed.
    """
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    present = AttentionInterface().get(name)
    if name == "eager" or (present is not None and getattr(present, "func", None) is not _attention):
        raise ValueError(f"name={name!r} already belongs to another attention implementation; choose another name")
    AttentionInterface.register(name, functools.partial(_attention, backend=backend))
    AttentionMaskInterface.register(name, key_mask)
    _declare_no_flash_package(name)


def _declare_no_flash_package(name: str) -> None:
    """Keep transformers from taking `name` for a flash-attention package."""
    from transformers.utils import generic

    check = "is_flash_attention_requested"
    requested: Callable[..., bool] | None = getattr(generic, check, None)
    if requested is None:
        return
    if not hasattr(requested, "flashbob_names"):
        original, names = requested, set[str]()

        @functools.wraps(original)
        def requested(config: Any = None, requested_attention_implementation: Any = None, **kwargs: Any) -> bool:
            asked = requested_attention_implementation
            if (config._attn_implementation if config is not None and asked is None else asked) not in names:
                return original(config, asked, **kwargs)
            if getattr(config, "model_type", None) in _ON_THEIR_OWN:
                raise NotImplementedError(
                    f"models of type {config.model_type!r} compute attention in classes of their own, which flashbob "
                    f"cannot replace; {_OTHERWISE}"
                )
            return False

        requested.flashbob_names = names  # type: ignore[attr-defined]
        for module in list(sys.modules.values()):
            if getattr(module, "__dict__", {}).get(check) is original:
                setattr(module, check, requested)
    requested.flashbob_names.add(name)  # type: ignore[attr-defined]


def key_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | KeyMask | None = None,
    local_size: int | None = None,
    **_unused: Any,
) -> KeyMask:
    """The mask interface of transformers: the arguments of its `sdpa_mask`, which makes the N x N tensor."""
    if isinstance(attention_mask, KeyMask):
        return attention_mask
    is_causal, window = _band(mask_function, local_size)
    starts, lengths = _padding(attention_mask, kv_length, kv_offset)
    return KeyMask(q_length, kv_length, is_causal, window, int(q_offset), int(kv_offset), starts, lengths)


def _band(mask_function: Callable[..., Any] | None, local_size: int | None) -> tuple[bool, int]:
    """(is_causal, window_size) of a mask function of transformers, recognized by its code, never by sampling it."""
    from transformers import masking_utils as library

    if mask_function is None or _same(mask_function, library.causal_mask_function):
        return True, 0
    if _same(mask_function, library.bidirectional_mask_function):
        return False, 0
    if local_size is not None and _same(mask_function, library.sliding_window_causal_mask_function(local_size)):
        return True, local_size
    raise NotImplementedError(
        "flashbob supports causal, sliding-window causal and full masks; this model asks for another one (sequences "
        "packed into one row, as position_ids that start again tell; chunked or two-sided windows; an overlay): pass "
        f"one sequence per row with a 2D attention_mask, or {_OTHERWISE}"
    )


def _same(a: object, b: object) -> bool:
    """Two functions, or values that they close over, are equal: same code, equal closures."""
    if isinstance(a, FunctionType) and isinstance(b, FunctionType):
        cells = [tuple(cell.cell_contents for cell in f.__closure__ or ()) for f in (a, b)]
        return a.__code__ is b.__code__ and _same(*cells)
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return type(a) is type(b) and isinstance(a, int) and a == b


def _padding(attention_mask: Tensor | None, keys: int, k_offset: int) -> tuple[Tensor | None, Tensor | None]:
    """(key_starts, key_lengths) of a 2D mask; positions beyond its end (a static cache's free slots) are hidden."""
    if attention_mask is None:
        return None, None
    if attention_mask.ndim != 2:
        raise NotImplementedError(
            f"flashbob needs a 2D attention_mask [batch, tokens], got shape {tuple(attention_mask.shape)}; {_OTHERWISE}"
        )
    seen = attention_mask.to(torch.bool)
    seen = torch.nn.functional.pad(seen, (0, max(0, k_offset + keys - seen.shape[1])))[:, k_offset : k_offset + keys]
    if seen.all():
        return None, None
    count = seen.sum(dim=1)
    starts = seen.to(torch.int32).argmax(dim=1)
    lengths = starts + count
    columns = torch.arange(keys, device=seen.device)
    holes = (seen != ((columns >= starts[:, None]) & (columns < lengths[:, None]))).any(dim=1)
    if holes.any():
        row = int(holes.nonzero()[0])
        raise ValueError(
            "attention_mask must be 1 over one unbroken stretch of each row (padding left and right of it); row "
            f"{row} has {int(count[row])} ones with zeros between the first and the last: move the padding to an end "
            f"of the row, or {_OTHERWISE}"
        )
    return starts, lengths


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: KeyMask | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    *,
    backend: Backend,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention interface of transformers: tensors [B, H, N, D] in, [B, N, H, D_v] contiguous out."""
    refuse_unsupported(module, attention_mask, kwargs)
    queries, keys = query.shape[2], key.shape[2]
    if isinstance(attention_mask, KeyMask):
        mask = attention_mask
        _check_agreement(mask, queries, keys, is_causal, sliding_window)
    else:
        mask = mask_of_module(module, queries, keys, is_causal, sliding_window)
    out = sdpa_bob(
        query,
        key,
        value,
        is_causal=mask.is_causal,
        scale=scaling,
        window_size=mask.window_size,
        q_offset=mask.q_offset,
        k_offset=mask.k_offset,
        key_starts=mask.key_starts,
        key_lengths=mask.key_lengths,
        dropout_p=dropout,
        softcap=softcap,
        backend=backend,
    )
    return out.transpose(1, 2).contiguous(), None


def mask_of_module(
    module: torch.nn.Module, queries: int, keys: int, is_causal: bool | None, sliding_window: int | None
) -> KeyMask:
    """The mask of a layer that was given none: its own `is_causal` and window, queries aligned with the last keys."""
    if is_causal is None:
        is_causal = getattr(module, "is_causal", None)
    if is_causal is None:
        raise NotImplementedError(
            f"{type(module).__name__} was given no mask and has no attribute is_causal, so what its queries may see is "
            f"unknown; {_OTHERWISE}"
        )
    if sliding_window and not is_causal and sliding_window < max(queries, keys):
        raise NotImplementedError(
            f"{type(module).__name__} asks for a sliding window ({sliding_window}) that is not causal; {_OTHERWISE}"
        )
    return KeyMask(queries, keys, is_causal, (sliding_window or 0) if is_causal else 0)


def refuse_unsupported(module: torch.nn.Module, attention_mask: object, kwargs: dict[str, Any]) -> None:
    """Raise for everything that would change the result and that flashbob does not compute."""
    if attention_mask is not None and not isinstance(attention_mask, KeyMask):
        shape = tuple(getattr(attention_mask, "shape", ()))
        raise NotImplementedError(
            f"a ready-made mask ({type(attention_mask).__name__} of shape {shape}) reached the attention: flashbob "
            f"takes padding as a 2D attention_mask [batch, tokens], given to the model; {_OTHERWISE}"
        )
    for label, x in kwargs.items():
        if isinstance(x, Tensor) and label not in _WITHOUT_EFFECT:
            reason = _REASONS.get(label, "an argument that flashbob does not know")
            raise NotImplementedError(f"{label}: {reason}, is not supported by flashbob; {_OTHERWISE}")
    if getattr(module, "sinks", None) is not None:
        raise NotImplementedError(f"sinks: {_REASONS['sinks']}, is not supported by flashbob; {_OTHERWISE}")
    if kwargs.get("output_attentions") or _weights_are_collected():
        raise NotImplementedError(
            f"output_attentions=True: flashbob never forms the attention weights that it would return; {_OTHERWISE}"
        )


def _weights_are_collected() -> bool:
    """Whether the running forward pass records attention weights through hooks."""
    from transformers.utils import output_capturing

    collector = getattr(output_capturing, "_active_collector", None)
    collected = None if collector is None else collector.get()
    return collected is not None and any(key.endswith("attentions") for key in collected)


def _check_agreement(
    mask: KeyMask, queries: int, keys: int, is_causal: bool | None, sliding_window: int | None
) -> None:
    """The mask was made for this call, and the layer's own arguments do not contradict it."""
    if (mask.queries, mask.keys) != (queries, keys):
        raise NotImplementedError(
            f"the mask was made for {mask.queries} queries and {mask.keys} keys, but the layer attends with {queries} "
            f"queries and {keys} keys; {_OTHERWISE}"
        )
    if is_causal is not None and is_causal != mask.is_causal and queries > 1:
        raise NotImplementedError(
            f"is_causal={is_causal} contradicts the mask that the model made (is_causal={mask.is_causal}): set "
            f"model.config.is_causal instead, or {_OTHERWISE}"
        )
    windows = {w for w in (sliding_window or 0, mask.window_size) if 0 < w < keys}
    if sliding_window is not None and windows and (sliding_window or 0) != mask.window_size:
        raise NotImplementedError(
            f"the layer's sliding_window={sliding_window} contradicts the mask's ({mask.window_size}); {_OTHERWISE}"
        )
