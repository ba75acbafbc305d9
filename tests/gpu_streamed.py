"""The streamed product of GPT-2 (random weights, bfloat16) on a GPU: seconds, peak memory, the forecast, agreement.

    python3 -m tests.gpu_streamed --cases 8192 32768 32768x4:offload 131072:offload --out notebooks/records/streamed_gpt2_h200.json

A case is N or NxBATCH, then `@LAYERS` where these are not twelve, `:offload` where activations wait in host memory,
`:lean` where nothing is kept between products, and `:once` where no more than one first product is to be waited for.
Seconds are those of a second construction in the process, which finds kernels compiled and host memory page-locked; where products are recorded and replayed
(`curvature.capture`), a further direction is a replay. The peak is that of one product with one direction.
"""  # noqa: E501

from __future__ import annotations

import argparse
import gc
import json
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PretrainedConfig, PreTrainedModel

from cli.timing import matmul_rate
from curvature import CausalLMLoss
from curvature.capture import CAPTURED_TOKENS, RecordedBatch, Recording
from curvature.chain import Chain
from curvature.costs import measure_costs
from curvature.memory import forecast
from curvature.report import environment
from curvature.segments import find_segments
from curvature.storage import Allowance
from curvature.streamed import Streamed
from curvature.whole_graph import WholeGraph
from flashbob import register_attention

DEVICE = torch.device("cuda", 0)
COSTS_POSITIONS = 1024
CASE = re.compile(
    r"(?P<n>\d+)(x(?P<batch>\d+))?(@(?P<layers>\d+))?(?P<offload>:offload)?(?P<lean>:lean)?(?P<once>:once)?"
)
SETTINGS = {  # by whether activations are offloaded, and whether nothing is kept
    (False, False): "kept on the device",
    (True, False): "activations in host memory",
    (False, True): "on the device, for one product only",
    (True, True): "activations in host memory, for one product only",
}
_T = TypeVar("_T")


def gpt2(positions: int, layers: int) -> GPT2Config:
    """GPT-2 small with other numbers of positions and layers."""
    off = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "use_cache": False}
    return GPT2Config(n_positions=positions, n_layer=layers, **off)


def model_of(config: PretrainedConfig, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    """Random weights, the same in every dtype."""
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation="flashbob")
    return model.to(DEVICE, dtype).eval()  # type: ignore[call-arg, arg-type]


def timed(run: Callable[[], _T]) -> tuple[float, _T]:
    """Seconds until the device is done, and the result."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    result = run()
    torch.cuda.synchronize()
    return time.perf_counter() - start, result


def clean() -> None:
    """Free what is not held, and begin a new peak."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def tokens(shape: tuple[int, int], vocabulary: int, seed: int = 1) -> dict[str, Tensor]:
    """A batch of random tokens."""
    generator = torch.Generator().manual_seed(seed)
    return {"input_ids": torch.randint(0, vocabulary, shape, generator=generator).to(DEVICE)}


def measure(
    n: int, batch: int, layers: int, reuse: int | None, offload: bool, lean: bool, once: bool
) -> dict[str, Any]:
    """One row."""
    reuse = 0 if lean else reuse
    costs = measure_costs(model_of(gpt2(COSTS_POSITIONS, 1)), layers=layers)
    clean()
    model = model_of(gpt2(n, layers))
    parameters = list(model.parameters())
    data = tokens((batch, n), model.config.vocab_size)
    segments = find_segments(model, CausalLMLoss(), data)
    z = [torch.randn(p.shape, device=DEVICE) for p in parameters]

    def launch(chain: Chain, *, read: bool = True) -> Streamed:
        return Streamed(chain, parameters, allowance=Allowance(reuse), offload=offload, read=read)

    def first() -> tuple[Streamed, list[Tensor | None]]:
        derivatives = launch(segments(data))
        return derivatives, derivatives.product(z, keep=not lean)

    def recorded() -> dict[str, Any]:
        """Replayed products: further directions, and the first of a batch whose kind was recorded with another one."""
        other = tokens((batch, n), model.config.vocab_size, seed=2)
        begun, recording = timed(lambda: Recording(segments(data), lambda chain: launch(chain, read=False), z))
        known = RecordedBatch(recording, segments(data), lambda _: False)
        further = min(timed(lambda: known.product(z))[0] for _ in range(3))
        fresh: list[float] = []
        for _ in range(3):
            known.product(z)
            spent, product = timed(lambda: RecordedBatch(recording, segments(other), lambda _: False).product(z))
            fresh.append(spent)
        return {
            "recording_s": begun, "further_s": further, "first_recorded_s": min(fresh),
            "recorded_difference": difference(product, launch(segments(other)).product(z)),
        }  # fmt: skip

    cold, (derivatives, product) = timed(first)
    seconds = cold
    if not once:
        del derivatives, product
        clean()
        seconds, (derivatives, product) = timed(first)
    peak = torch.cuda.max_memory_allocated()
    del product
    launched = further = None if lean or once else timed(lambda: derivatives.product(z))[0]
    stretches = str(derivatives._stretches)
    expected = forecast(costs, seq=n, batch=batch, offload=offload, keep=not lean, reuse_bytes=reuse)
    # The position table of the costs' model is shorter; a parameter takes two bytes, and four in the direction, in the
    # product and in the batch's share of it.
    table = (n - COSTS_POSITIONS) * model.config.n_embd * (2 + 3 * 4)
    row = {
        "N": n, "batch": batch, "layers": layers,
        "setting": SETTINGS[offload, lean], "reuse_bytes": reuse,
        "first_s": seconds, "further_s": further, "unrecorded_further_s": launched, "cold_first_s": cold,
        "first_peak_GiB": peak / 2**30, "forecast_GiB": (expected.peak_bytes + table) / 2**30,
        "forecast_step": expected.step, "stretches": stretches,
    }  # fmt: skip
    if not lean and not once and n * batch <= CAPTURED_TOKENS and not offload:
        del derivatives
        row |= recorded()
    return row


def difference(a: Sequence[Tensor | None], b: Sequence[Tensor | None]) -> float:
    """Relative difference of two products."""
    pairs = [(x.double(), y.double()) for x, y in zip(a, b, strict=True) if x is not None and y is not None]
    return float((sum((x - y).square().sum() for x, y in pairs) / sum(y.square().sum() for _, y in pairs)) ** 0.5)


def agreement(name: str, config: PretrainedConfig) -> dict[str, Any]:
    """Streamed against whole graph, in float32, and both in bfloat16 against it."""
    model, loss = model_of(config, torch.float32), CausalLMLoss()
    data = tokens((2, 1024), config.vocab_size)
    z = [torch.randn(p.shape, device=DEVICE) for p in model.parameters()]

    def products() -> tuple[list[Tensor | None], list[Tensor | None]]:
        parameters: list[nn.Parameter] = list(model.parameters())
        whole = list(WholeGraph(model, loss, data, parameters).product(z))
        return Streamed(find_segments(model, loss, data)(data), parameters).product(z), whole

    streamed, exact = products()
    model.bfloat16()
    rough, whole = products()
    return {
        "model": name, "tokens": 2048, "float32_streamed_against_whole": difference(streamed, exact),
        "bfloat16_whole_error": difference(whole, exact), "bfloat16_streamed_error": difference(rough, exact),
    }  # fmt: skip


def main() -> None:
    """Measure the cases one after another; the record is written after each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", default=["8192", "32768", "32768x4:offload", "131072:offload"])
    parser.add_argument("--reuse-gib", type=float, help="memory for what is kept on the device (default: no limit)")
    parser.add_argument(
        "--agreement", action=argparse.BooleanOptionalAction, default=True, help="compare with whole graphs first"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/streamed_gpt2.json"))
    options = parser.parse_args()
    register_attention()
    llama = LlamaConfig(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=3, num_attention_heads=9, num_key_value_heads=3,
        vocab_size=49153, tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    content: dict[str, Any] = {
        "device": torch.cuda.get_device_name(), "cublas_tflops": matmul_rate(DEVICE),
        "model": "gpt2, random weights, bfloat16", "environment": environment(DEVICE), "rows": [],
    }  # fmt: skip
    if options.agreement:
        content["agreement"] = [agreement("GPT-2, 3 layers", gpt2(2048, 3)), agreement("Llama, 3 layers", llama)]
    for case in options.cases:
        asked = CASE.fullmatch(case)
        if asked is None:
            raise SystemExit(f"--cases {case}: not N[xBATCH][@LAYERS][:offload][:lean][:once]")
        n, batch, layers = int(asked["n"]), int(asked["batch"] or 1), int(asked["layers"] or 12)
        reuse = None if options.reuse_gib is None else int(options.reuse_gib * 2**30)
        clean()
        try:
            row = measure(n, batch, layers, reuse, *(asked[flag] is not None for flag in ("offload", "lean", "once")))
        except torch.OutOfMemoryError as error:
            row = {"N": n, "batch": batch, "layers": layers, "status": "oom", "reason": str(error).splitlines()[0]}
        content["rows"].append(row)
        print(json.dumps(row), flush=True)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
