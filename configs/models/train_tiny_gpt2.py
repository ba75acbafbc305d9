"""Train the embedded model `tiny-gpt2` from plain text; write its folder, its training record and its model card.

    python3 configs/models/train_tiny_gpt2.py --text A.txt B.txt --out configs/models/tiny-gpt2 --minutes 3

The tokenizer (byte-level BPE) and the model see the first 95 % of each text; the rest is held out, and the weights
kept are those with the lowest held-out loss. Losses in the record are those of the stored, rounded weights, read back
from the folder. Needs torch, transformers and tokenizers; no network.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import platform
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

SAMPLE = Path(__file__).resolve().parents[1] / "data" / "sample.txt"

DESCRIPTIONS = {
    "86e20405343c808a7faeeae6a7727f5155ae2782743ade46f316a8c08f9c0753": (
        "*War and Peace* by Leo Tolstoy, translated by Louise and Aylmer Maude, as published by Project Gutenberg; "
        "public domain in the United States"
    ),
    "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed": (
        "the tiny-shakespeare corpus: about 40,000 lines of William Shakespeare's plays; public domain"
    ),
}


@dataclass(frozen=True)
class Settings:
    """What a training run is made of, apart from its text."""

    minutes: float
    steps: int
    batch: int
    context: int
    vocabulary: int
    width: int
    layers: int
    heads: int
    peak_lr: float
    final_lr: float
    warmup: int
    weight_decay: float
    dropout: float
    clip: float
    eval_every: int
    seed: int
    compile: bool


@dataclass(frozen=True)
class Text:
    """One text, cut into a training part and a held-out part at a line end."""

    file: str
    bytes: int
    sha256: str
    description: str
    train: str
    validation: str


def read_text(path: Path, held_out: float = 0.05) -> Text:
    """Read a text; its last `held_out` share, from the next line end on, is for validation."""
    raw = path.read_bytes()
    content = raw.decode("utf-8")
    cut = content.find("\n", int(len(content) * (1 - held_out))) + 1
    if cut == 0 or not content[cut:].strip():
        raise SystemExit(f"train_tiny_gpt2: {path} holds {len(content)} characters, too few to hold a part out")
    digest = hashlib.sha256(raw).hexdigest()
    description = DESCRIPTIONS.get(digest, "not described")
    return Text(path.name, len(raw), digest, description, content[:cut], content[cut:])


def train_tokenizer(texts: list[Text], settings: Settings) -> PreTrainedTokenizerFast:
    """Byte-level BPE in GPT-2's manner, over all 256 bytes, without special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=settings.vocabulary,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[],
        show_progress=False,
    )
    tokenizer.train_from_iterator([text.train for text in texts], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=settings.context, clean_up_tokenization_spaces=False
    )


def encode(tokenizer: PreTrainedTokenizerFast, content: str, device: torch.device) -> Tensor:
    """Token ids of a whole text, int64 `[tokens]`, on `device`."""
    # The backend's own method does not warn that the text is longer than the model's context.
    return torch.tensor(tokenizer.backend_tokenizer.encode(content).ids, dtype=torch.int64, device=device)


def build_model(settings: Settings) -> GPT2LMHeadModel:
    """A GPT-2 with tied embeddings, initialised from the seed."""
    torch.manual_seed(settings.seed)
    config = GPT2Config(
        vocab_size=settings.vocabulary,
        n_positions=settings.context,
        n_embd=settings.width,
        n_layer=settings.layers,
        n_head=settings.heads,
        resid_pdrop=settings.dropout,
        embd_pdrop=settings.dropout,
        attn_pdrop=settings.dropout,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
    )
    config._attn_implementation = "sdpa"
    return GPT2LMHeadModel(config)


def token_loss(model: Any, rows: Tensor, reduction: str = "mean") -> Tensor:
    """Cross-entropy, in nats, of tokens 1.. of each row `[B, n+1]` given those before."""
    with torch.autocast(rows.device.type, dtype=torch.bfloat16, enabled=rows.is_cuda):
        logits = model(input_ids=rows[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten(), reduction=reduction)


@torch.no_grad()
def mean_loss(model: Any, ids: Tensor, settings: Settings) -> tuple[float, int]:
    """Mean loss over consecutive windows of the whole context, and the number of tokens it is the mean of."""
    model.eval()
    length = settings.context + 1
    starts = list(range(0, ids.numel() - 1, settings.context))
    rows = [ids[start : start + length] for start in starts]
    whole = [row for row in rows if row.numel() == length]
    total = 0.0
    for first in range(0, len(whole), settings.batch):
        total += token_loss(model, torch.stack(whole[first : first + settings.batch]), "sum").item()
    if rows[-1].numel() < length:
        total += token_loss(model, rows[-1][None], "sum").item()
    return total / (ids.numel() - 1), ids.numel() - 1


def validation_loss(model: Any, parts: list[Tensor], settings: Settings) -> float:
    """Token-weighted mean loss over the held-out parts."""
    losses = [mean_loss(model, part, settings) for part in parts]
    return sum(loss * count for loss, count in losses) / sum(count for _, count in losses)


def learning_rate(settings: Settings, step: int, progress: float) -> float:
    """Linear warm-up over the first steps, then a cosine from the peak to the final rate at `progress` = 1."""
    warm = min(1.0, (step + 1) / settings.warmup)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return warm * (settings.final_lr + (settings.peak_lr - settings.final_lr) * cosine)


def make_optimizer(model: GPT2LMHeadModel, settings: Settings) -> torch.optim.AdamW:
    """AdamW; biases and norm scales are not decayed."""
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    plain = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=settings.peak_lr, betas=(0.9, 0.95), fused=next(model.parameters()).is_cuda)


def fit(model: GPT2LMHeadModel, train: Tensor, held_out: list[Tensor], settings: Settings) -> dict[str, Any]:
    """Train until the steps or the minutes are used up; leave the best held-out weights in `model`.

    Returns:
        The run's record: steps done, step of the kept weights, tokens, seconds, and the history of losses.
    """
    device = train.device
    generator = torch.Generator(device=device).manual_seed(settings.seed)
    offsets = torch.arange(settings.context + 1, device=device)
    optimizer = make_optimizer(model, settings)
    runner: Any = torch.compile(model) if settings.compile else model
    history: list[dict[str, float]] = []
    best, best_step, best_weights = math.inf, 0, dict[str, Tensor]()
    running, since = torch.zeros((), device=device), 0
    started = time.perf_counter()
    step, finished = 0, False
    while not finished:
        elapsed = time.perf_counter() - started
        rate = learning_rate(settings, step, max(step / settings.steps, elapsed / (60 * settings.minutes)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        model.train()
        starts = torch.randint(
            train.numel() - settings.context, (settings.batch, 1), generator=generator, device=device
        )
        loss = token_loss(runner, train[starts + offsets])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        running, since, step = running + loss.detach(), since + 1, step + 1
        finished = step >= settings.steps or time.perf_counter() - started >= 60 * settings.minutes
        if not (finished or step % settings.eval_every == 0):
            continue
        held = validation_loss(model, held_out, settings)
        seen = (running / since).item()
        if not (math.isfinite(held) and math.isfinite(seen)):
            raise SystemExit(f"train_tiny_gpt2: the loss at step {step} is {seen} (held out {held}); lower --peak-lr")
        running, since = torch.zeros((), device=device), 0
        seconds = time.perf_counter() - started
        history.append({"step": step, "train": seen, "validation": held, "lr": rate, "seconds": round(seconds, 3)})
        print(
            f"step {step:6d}  train {seen:.4f}  held out {held:.4f}  lr {rate:.2e}  {seconds:.1f} s",
            file=sys.stderr,
            flush=True,
        )
        if held < best:
            best, best_step = held, step
            best_weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.load_state_dict(best_weights, strict=False)
    tokens = step * settings.batch * settings.context
    seconds = round(time.perf_counter() - started, 3)
    return {"steps": step, "kept_step": best_step, "tokens": tokens, "seconds": seconds, "history": history}


def save(model: GPT2LMHeadModel, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Store float16 weights, the configuration with dropout off, and the tokenizer."""
    model.config.resid_pdrop = model.config.embd_pdrop = model.config.attn_pdrop = 0.0
    model.half().save_pretrained(out)
    tokenizer.save_pretrained(out)
    # safetensors writes for the owner alone, which a package installed for everybody cannot use.
    (out / "model.safetensors").chmod(0o644)


def device_name(device: torch.device) -> str:
    """The device as the record names it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def stored_losses(
    out: Path, tokenizer: PreTrainedTokenizerFast, texts: list[Text], settings: Settings, device: torch.device
) -> dict[str, Any]:
    """Losses of the weights as stored, read back in float32: per text, and on the shipped sample text."""
    model: Any = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, attn_implementation="sdpa")
    model.to(device)

    def measure(content: str) -> dict[str, float]:
        loss, tokens = mean_loss(model, encode(tokenizer, content, device), settings)
        bits = loss * tokens / math.log(2) / len(content.encode())
        return {"loss": round(loss, 5), "tokens": tokens, "bits_per_byte": round(bits, 5)}

    held = [measure(text.validation) for text in texts]
    # As much training text as is held out: what the model makes of text it has seen.
    seen = [measure(text.train[-len(text.validation) :]) for text in texts]

    def mean(parts: list[dict[str, float]]) -> float:
        return round(sum(p["loss"] * p["tokens"] for p in parts) / sum(p["tokens"] for p in parts), 5)

    sample = SAMPLE.read_text(encoding="utf-8")
    return {
        "device": device_name(device),
        "train": mean(seen),
        "validation": mean(held),
        "validation_by_text": {text.file: part for text, part in zip(texts, held, strict=True)},
        "sample": {**measure(sample), "sha256": hashlib.sha256(sample.encode()).hexdigest()},
        "chance": round(math.log(settings.vocabulary), 5),
    }


def model_card(record: dict[str, Any]) -> str:
    """The folder's README, every number of it from the record."""
    settings, losses, model = record["settings"], record["loss"], record["model"]
    texts = "\n".join(
        f"- `{t['file']}`, {t['bytes']:,} bytes, {t['train_tokens']:,} training and "
        f"{t['validation_tokens']:,} held-out tokens: {t['description']}. sha256 `{t['sha256']}`"
        for t in record["texts"]
    )
    measured = {f"held-out part of `{name}`": part for name, part in losses["validation_by_text"].items()}
    measured["`configs/data/sample.txt` (another author, another century)"] = losses["sample"]
    rows = "\n".join(
        f"| {name} | {part['loss']:.3f} | {part['bits_per_byte']:.3f} | {part['tokens']:,} |"
        for name, part in measured.items()
    )
    return f"""---
license: apache-2.0
language: en
library_name: transformers
---
# tiny-gpt2

The default model of `flashbob-curv`: a GPT-2 of {model["parameters"]:,} parameters, {settings["layers"]} layers of
width {settings["width"]}, {settings["heads"]} heads, context {settings["context"]:,}, tied embeddings, stored in
{model["dtype"]}, with a byte-level BPE tokenizer of {settings["vocabulary"]:,} tokens. It is small enough to run
anywhere and really trained, so that its curvature is that of a language model. It is not meant to write text.

## Trained on

{texts}

The last 5 % of each text was held out. The texts themselves are not shipped. The sample text of this project
(`configs/data/sample.txt`) was not among them.

## How

{record["steps"]:,} steps of AdamW on {settings["batch"]} random windows of {settings["context"]:,} tokens
({record["tokens"]:,} tokens in all, {record["epochs"]:.1f} times the training text) in
{record["seconds"] / 60:.1f} minutes on one {record["device"]}. Peak learning rate {settings["peak_lr"]:g} after
{settings["warmup"]} warm-up steps, cosine to {settings["final_lr"]:g}, weight decay {settings["weight_decay"]:g},
dropout {settings["dropout"]:g} (0 in the stored configuration), gradient norm clipped at {settings["clip"]:g},
seed {settings["seed"]}. The weights kept are those of step {record["kept_step"]:,}, where the held-out loss was lowest.

## To which loss

Mean next-token cross-entropy of the stored weights over consecutive windows of {settings["context"]:,} tokens,
dropout off (measured on: {losses["device"]}): {losses["validation"]:.3f} nats on all held-out text and
{losses["train"]:.3f} on as much of the training text. Chance is {losses["chance"]:.3f}.

| text | nats per token | bits per byte | tokens predicted |
|---|---|---|---|
{rows}

`training.json` beside this file holds these numbers, the settings and the loss history. This card was written from it
by `configs/models/train_tiny_gpt2.py`, which trains the model again:

    python3 configs/models/train_tiny_gpt2.py {record["arguments"]}
"""


def write_record(out: Path, record: dict[str, Any]) -> None:
    """Store the record and the card made of it, and show the losses."""
    (out / "training.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    (out / "README.md").write_text(model_card(record), encoding="utf-8")
    print(json.dumps(record["loss"], indent=1))


def measure_again(out: Path, texts: list[Text], device: torch.device) -> None:
    """Measure a stored model anew, say after the sample text changed, and bring its record and card up to date."""
    record = json.loads((out / "training.json").read_text(encoding="utf-8"))
    if [text.sha256 for text in texts] != [text["sha256"] for text in record["texts"]]:
        raise SystemExit(
            f"train_tiny_gpt2: {out} was not trained on these texts; give those that its training.json names"
        )
    settings = Settings(**{name: record["settings"][name] for name in Settings.__dataclass_fields__})
    tokenizer = PreTrainedTokenizerFast.from_pretrained(out)
    write_record(out, {**record, "loss": stored_losses(out, tokenizer, texts, settings, device)})


def parse_arguments(arguments: list[str] | None) -> tuple[argparse.Namespace, Settings, str]:
    """The command line, where every setting is an option: the options, the settings, and how to ask for them again."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--text", type=Path, nargs="+", required=True, help="plain UTF-8 text files to train on")
    parser.add_argument("--out", type=Path, required=True, help="model folder to write")
    parser.add_argument("--measure-only", action="store_true", help="measure the model in --out anew; do not train")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--minutes", type=float, default=3.0, help="stop after this time, whatever --steps says")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--batch", type=int, default=32, help="windows per step")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--peak-lr", type=float, default=2e-3)
    parser.add_argument("--final-lr", type=float, default=1e-4)
    parser.add_argument("--warmup", type=int, default=100)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--eval-every", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args(arguments)
    values = {name: value for name, value in vars(options).items() if name in Settings.__dataclass_fields__}
    again = ["--text", *(path.name for path in options.text), "--out", "OUT"]
    for name, value in values.items():
        if value != parser.get_default(name):
            flag = "--" + name.replace("_", "-")
            again += [flag] if value is True else [flag, str(value)]
    return options, Settings(**values), " ".join(again)


def main(arguments: list[str] | None = None) -> None:
    """Train, save, measure what was saved, and write the record and the card."""
    options, settings, again = parse_arguments(arguments)
    transformers.utils.logging.disable_progress_bar()
    device = torch.device(options.device)
    torch.set_float32_matmul_precision("high")
    options.out.mkdir(parents=True, exist_ok=True)
    texts = [read_text(path) for path in options.text]
    if options.measure_only:
        measure_again(options.out, texts, device)
        return
    tokenizer = train_tokenizer(texts, settings)
    train_parts = [encode(tokenizer, text.train, device) for text in texts]
    held_out = [encode(tokenizer, text.validation, device) for text in texts]
    train = torch.cat(train_parts)
    if train.numel() <= settings.context:
        raise SystemExit(
            f"train_tiny_gpt2: {train.numel()} training tokens, but one window needs {settings.context + 1}"
        )
    model: Any = build_model(settings)
    model.to(device)
    print(
        f"{model.num_parameters():,} parameters, {train.numel():,} training tokens, {device}",
        file=sys.stderr,
        flush=True,
    )
    run = fit(model, train, held_out, settings)
    save(model, tokenizer, options.out)
    described = [
        {
            **{key: value for key, value in asdict(text).items() if key not in ("train", "validation")},
            "train_tokens": seen.numel(),
            "validation_tokens": held.numel(),
        }
        for text, seen, held in zip(texts, train_parts, held_out, strict=True)
    ]
    record = {
        "model": {"architecture": "gpt2", "parameters": model.num_parameters(), "dtype": "float16"},
        "texts": described,
        "arguments": again,
        "settings": {**asdict(settings), "optimizer": "AdamW", "betas": [0.9, 0.95]},
        "device": device_name(device),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "tokenizers": tokenizers.__version__,
        },
        "epochs": round(run["tokens"] / train.numel(), 3),
        "loss": stored_losses(options.out, tokenizer, texts, settings, device),
        **run,
    }
    write_record(options.out, record)


if __name__ == "__main__":
    main()
