"""`flashbob-curv doctor`: what this machine can run, and which implementation each attention case takes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cli.console import memory, show_json, show_table
from cli.options import Options

if TYPE_CHECKING:
    import torch

__all__ = ["DoctorOptions", "doctor"]


@dataclass(frozen=True, kw_only=True)
class DoctorOptions(Options):
    """Options of `doctor`."""


@dataclass(frozen=True)
class Case:
    """One kind of attention call.

    Attributes:
        name: What is special about it.
        options: Arguments of `flashbob.explain`.
        heads: Query and key/value heads.
        sizes: Head size of queries and keys, and of values.
        queries: Number of queries, against 256 keys.
        biased: Whether a bias is added to the scores.
    """

    name: str
    options: dict[str, Any]
    heads: tuple[int, int] = (4, 4)
    sizes: tuple[int, int] = (64, 64)
    queries: int = 256
    biased: bool = False


CASES = (
    Case("causal, head size 64", {"is_causal": True}),
    Case("causal, head size 128", {"is_causal": True}, sizes=(128, 128)),
    Case("causal, head size 256", {"is_causal": True}, sizes=(256, 256)),
    Case("not causal", {}),
    Case("grouped heads, 4 to 1", {"is_causal": True}, heads=(4, 1)),
    Case("sliding window", {"is_causal": True, "window_size": 64}),
    Case("padded batch", {"is_causal": True, "padded": True}),
    Case("fewer queries than keys", {"is_causal": True}, queries=64),
    Case("value size 32, head size 64", {"is_causal": True}, sizes=(64, 32)),
    Case("soft-capped scores", {"is_causal": True, "softcap": 30.0}),
    Case("additive bias", {"is_causal": True}, biased=True),
    Case("attention dropout", {"is_causal": True, "dropout_p": 0.1}),
)


def doctor(options: DoctorOptions) -> None:
    """What this machine can run: versions, devices, and which implementation each attention case takes."""
    import torch

    from curvature.report import environment, to_json
    from flashbob import __version__

    devices = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    content: dict[str, Any] = {
        "command": "doctor",
        "version": __version__,
        "environment": environment(devices[-1]),
        "devices": [_device(name) for name in devices],
        "attention": [
            _dispatch(case, torch.device(name), dtype)
            for name in devices[:2]
            for dtype in (torch.float64, torch.float32, torch.bfloat16)
            for case in CASES
        ],
    }
    if options.json:
        show_json(to_json(content))
        return
    show_table([(name, str(value)) for name, value in content["environment"].items()], title="Environment")
    show_table(
        [(d["name"], d["hardware"], memory(d["memory_bytes"])) for d in content["devices"]],
        head=("device", "hardware", "memory"),
        title="Devices",
    )
    rows = [(a["case"], a["device"], a["dtype"], a["first"], a["second"]) for a in content["attention"]]
    show_table(
        rows,
        head=("attention", "device", "dtype", "forward, backward", "second derivative"),
        title="Which implementation each case takes",
    )


def _device(name: str) -> dict[str, Any]:
    import torch

    if name == "cpu":
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return {"name": name, "hardware": f"{os.cpu_count()} cores", "memory_bytes": total}
    properties = torch.cuda.get_device_properties(name)
    capability = f"{properties.major}.{properties.minor}"
    return {
        "name": name,
        "hardware": f"{properties.name}, capability {capability}",
        "memory_bytes": properties.total_memory,
    }


def _dispatch(case: Case, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    import torch

    from flashbob import explain

    size, value_size = case.sizes
    query_heads, key_heads = case.heads
    q = torch.empty(2, query_heads, case.queries, size, device=device, dtype=dtype)
    k = torch.empty(2, key_heads, 256, size, device=device, dtype=dtype)
    v = torch.empty(2, key_heads, 256, value_size, device=device, dtype=dtype)
    bias = q.new_zeros(1, 1, case.queries, 256) if case.biased else None
    first, second = explain(q, k, v, attn_bias=bias, **case.options)
    return {
        "case": case.name,
        "device": device.type,
        "dtype": str(dtype).removeprefix("torch."),
        "first": first,
        "second": second,
    }
