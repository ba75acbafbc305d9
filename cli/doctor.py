"""`flashbob-curv doctor`: what this machine can run, and which implementation each attention case takes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.console import memory, show_json, show_table
from cli.options import Dtype, Options, check_device

if TYPE_CHECKING:
    import torch

__all__ = ["DoctorOptions", "doctor"]


@dataclass(frozen=True, kw_only=True)
class DoctorOptions(Options):
    """Options of `doctor`."""

    model: Annotated[
        str | None, typer.Option(help="Forecast the memory of this model's Hessian products: a name or a folder.")
    ] = None
    seq: Annotated[int, typer.Option(min=2, help="Tokens per sequence of the forecast.")] = 1024
    batch: Annotated[int, typer.Option(min=1, help="Sequences per batch of the forecast.")] = 1
    dtype: Annotated[Dtype, typer.Option(help="Of the model; `auto`: float32 on a CPU, bfloat16 on a GPU.")] = (
        Dtype.auto
    )
    device: Annotated[str, typer.Option(callback=check_device, help="auto, cpu, cuda or cuda:INDEX.")] = "auto"


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


GENERAL = "general kernels"
BENDING = ("softcap", "dropout_p")
"""Options of `flashbob.explain` that the Hopper kernels do not have."""

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

    from cli.session import choose_device, modelless_record
    from curvature.report import Measurement, to_json

    device = choose_device(options.device)
    devices = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    with Measurement() as measurement:
        results: dict[str, Any] = {
            "devices": [_device(name) for name in devices],
            "attention": [
                _dispatch(case, torch.device(name), dtype)
                for name in devices[:2]
                for dtype in (torch.float64, torch.float32, torch.bfloat16)
                for case in CASES
            ],
        }
        if options.model is not None:
            results["forecast"] = _forecast(options, options.model, device)
    content = modelless_record(
        "doctor", settings=options.as_settings(), measurement=measurement, device=devices[-1], results=results
    )
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
    if any(GENERAL in a["second"] for a in content["attention"]):
        show_table(
            [(GENERAL, "slower: on an H200 a third (dropout) to two thirds (padding) of the Hopper kernels' rate")]
        )
    if "forecast" in content:
        _show_forecast(content["forecast"])


def _forecast(options: DoctorOptions, name: str, device: torch.device) -> dict[str, Any]:
    """Peak memory of Hessian products by both methods, what is free, and settings that fit into it."""
    from cli.session import choose_dtype
    from curvature.costs import measure_costs
    from curvature.memory import forecast, suggest
    from curvature.models import shallow_model
    from curvature.storage import spare_bytes

    dtype = choose_dtype(options.dtype, device)
    model, layers = shallow_model(name, dtype=dtype, device=device)
    costs = measure_costs(model, layers=layers)
    free = spare_bytes(device)
    ways = [
        forecast(costs, seq=options.seq, batch=options.batch),
        forecast(costs, seq=options.seq, batch=options.batch, keep=False, reuse_bytes=0),
        forecast(costs, seq=options.seq, batch=options.batch, method="whole"),
    ]
    found = suggest(costs, free, seq=options.seq, batch=options.batch, offload=device.type == "cuda")
    return {
        "model": name,
        "parameters": costs.parameters,
        "layers": layers,
        "seq": options.seq,
        "batch": options.batch,
        "dtype": str(dtype).removeprefix("torch."),
        "device": str(device),
        "free_bytes": free,
        "ways": [
            {"way": way, "peak_bytes": f.peak_bytes, "step": f.step, "items": dict(f.items), "fits": f.fits(free)}
            for way, f in zip(("streamed", "streamed, nothing kept", "whole"), ways, strict=True)
        ],
        "fitting": None
        if found is None
        else {"change": found.change, "seq": found.seq, "peak_bytes": found.forecast.peak_bytes},
    }


def _show_forecast(found: dict[str, Any]) -> None:
    show_table(
        [(w["way"], memory(w["peak_bytes"]), "yes" if w["fits"] else "no", w["step"]) for w in found["ways"]],
        head=("method", "forecast peak", "fits", "reached in"),
        title=f"Hessian products of {found['model']} ({found['parameters']:,} parameters, {found['layers']} layers) at "
        f"{found['batch']} x {found['seq']:,} tokens in {found['dtype']}; {memory(found['free_bytes'])} free on "
        f"{found['device']}",
    )
    fitting = found["fitting"]
    if fitting is None:
        show_table([("what would fit", "nothing: not even 128 tokens")])
    else:
        change = fitting["change"] or "the default settings"
        show_table([("what fits", f"{change}: {memory(fitting['peak_bytes'])}")])


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
    from flashbob.geometry import Geometry

    size, value_size = case.sizes
    query_heads, key_heads = case.heads
    q = torch.empty(2, query_heads, case.queries, size, device=device, dtype=dtype)
    k = torch.empty(2, key_heads, 256, size, device=device, dtype=dtype)
    v = torch.empty(2, key_heads, 256, value_size, device=device, dtype=dtype)
    bias = q.new_zeros(1, 1, case.queries, 256) if case.biased else None
    options = case.options
    first, second = explain(q, k, v, attn_bias=bias, **options)
    if second == "triton":
        from flashbob.kernels.launch import hopper_takes

        mask = {"is_causal": options.get("is_causal", False), "window_size": options.get("window_size", 0)}
        geometry = Geometry.build(case.queries, 256, q_offset=None, k_offset=0, **mask)
        bounds = torch.zeros(2, 2, device=device, dtype=torch.int32) if options.get("padded") else None
        fast = hopper_takes(q, v, bounds, geometry, bias is not None or not options.keys().isdisjoint(BENDING))
        second = "triton, Hopper kernels" if fast else f"triton, {GENERAL}"
    return {
        "case": case.name,
        "device": device.type,
        "dtype": str(dtype).removeprefix("torch."),
        "first": first,
        "second": second,
    }
