"""What `flashbob-curv train` leaves to do for the embedded model: a tokenizer before it, storage and a card after it.

    python3 configs/models/tiny_gpt2.py begin NEW --text A.txt B.txt
    flashbob-curv train --config configs/train_tiny_gpt2.yaml --model NEW --data A.txt,B.txt --out RUN
    python3 configs/models/tiny_gpt2.py store RUN configs/models/tiny-gpt2 --text A.txt B.txt

The first writes the tokenizer (byte-level BPE of the first 95 % of each text) and the architecture; with
`--model tiny` instead of NEW the embedded ones are kept, and it is not needed. The last rounds the trained weights to
float16, measures them as stored, and writes `training.json` and the model card from the run's `train.json`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, GPT2Config, PreTrainedTokenizerFast
from transformers.utils import logging

from curvature.training_text import open_training_text

SAMPLE = Path(__file__).resolve().parents[1] / "data" / "sample.txt"
VOCABULARY, CONTEXT, WIDTH, LAYERS, HEADS = 2048, 1024, 192, 4, 6

DESCRIPTIONS = {
    "86e20405343c808a7faeeae6a7727f5155ae2782743ade46f316a8c08f9c0753": (
        "*War and Peace* by Leo Tolstoy, translated by Louise and Aylmer Maude, as published by Project Gutenberg; "
        "public domain in the United States"
    ),
    "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed": (
        "the tiny-shakespeare corpus: about 40,000 lines of William Shakespeare's plays; public domain"
    ),
}


def begin(folder: Path, texts: list[Path]) -> None:
    """Write the architecture and a tokenizer of the texts: GPT-2's manner, all 256 bytes, no special tokens.

    The last twentieth of each text is left out, as `train` leaves it out.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[],
        show_progress=False,
    )
    contents = [path.read_text(encoding="utf-8") for path in texts]
    tokenizer.train_from_iterator([text[: text.find("\n", len(text) * 19 // 20) + 1] for text in contents], trainer)
    if tokenizer.get_vocab_size() != VOCABULARY:
        raise SystemExit(f"tiny_gpt2: the texts give {tokenizer.get_vocab_size()} tokens, not {VOCABULARY}; give more")
    _as_shipped(tokenizer).save_pretrained(folder)
    GPT2Config(
        architectures=["GPT2LMHeadModel"],
        vocab_size=VOCABULARY,
        n_positions=CONTEXT,
        n_embd=WIDTH,
        n_layer=LAYERS,
        n_head=HEADS,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
    ).save_pretrained(folder)


def _as_shipped(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """With the settings that the folder states, and none of where it was read from."""
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=CONTEXT, clean_up_tokenization_spaces=False
    )


def store(run: Path, folder: Path, texts: list[Path]) -> None:
    """Store a run's model in float16, measure it as stored, and write its record and its card."""
    training = json.loads((run / "train.json").read_text(encoding="utf-8"))
    settings = training["settings"]
    tokenizer = _as_shipped(Tokenizer.from_file(str(run / "model" / "tokenizer.json")))
    held_out = settings["eval_batches"] * settings["batch"]
    sources = ",".join(str(path) for path in texts)
    parts = open_training_text(tokenizer, sources, settings["seq"], held_out=held_out, seed=settings["seed"])
    if parts.training.as_record()["sha256"] != training["data"]["sha256"]:
        raise SystemExit(f"tiny_gpt2: {run} was not trained on these texts; give those of its train.json, in its order")
    AutoModelForCausalLM.from_pretrained(run / "model", dtype=torch.float16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # safetensors writes for the owner alone, which a package installed for everybody cannot use.
    (folder / "model.safetensors").chmod(0o644)
    record = _record(training, texts) | {"loss": _stored_losses(folder, tokenizer, parts.held_out)}
    (folder / "training.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    (folder / "README.md").write_text(model_card(record), encoding="utf-8")
    print(json.dumps(record["loss"], indent=1))


def _record(training: dict[str, Any], texts: list[Path]) -> dict[str, Any]:
    """The run's own record, its history as long as its evaluations, and facts of the texts."""
    settings, last = training["settings"], training["history"][-1]
    evaluated = {entry["step"] for entry in training["evaluation"]}
    contents = [path.read_bytes() for path in texts]
    digests = [hashlib.sha256(content).hexdigest() for content in contents]
    return {
        "model": {"architecture": "gpt2", "parameters": training["model"]["parameters"], "dtype": "float16"},
        "texts": [
            {"file": p.name, "bytes": len(c), "sha256": d, "description": DESCRIPTIONS.get(d, "not described")}
            for p, c, d in zip(texts, contents, digests, strict=True)
        ],
        "steps": settings["max_steps"],
        "tokens": last["tokens"],
        "epochs": round(last["tokens"] / training["data"]["tokens"], 3),
        "seconds": round(last["seconds"], 1),
        "device": training["environment"]["device"],
        "train": {
            **{name: training[name] for name in ("command", "version", "environment", "peak_memory_bytes")},
            "data": training["data"] | {"source": ",".join(path.name for path in texts)},
            # Where a run was read from and written to is no part of the model.
            "settings": {k: v for k, v in settings.items() if k not in ("model", "data", "out", "origins")},
            "history": [entry for entry in training["history"] if entry["step"] in evaluated],
            "evaluation": training["evaluation"],
        },
    }


def _stored_losses(folder: Path, tokenizer: PreTrainedTokenizerFast, held_out: Tensor) -> dict[str, Any]:
    """Losses of the weights as stored, read back in float32: on the held-out windows and on the shipped sample."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    sample = SAMPLE.read_text(encoding="utf-8")
    # The backend's own method does not warn that the text is longer than the model's context.
    ids = torch.tensor(tokenizer.backend_tokenizer.encode(sample).ids)
    held, tokens = mean_loss(model, held_out)
    seen, predicted = mean_loss(model, (ids[start : start + CONTEXT + 1] for start in range(0, len(ids) - 1, CONTEXT)))
    bits = seen * predicted / math.log(2) / len(sample.encode())
    digest = hashlib.sha256(sample.encode()).hexdigest()
    return {
        "validation": round(held, 5),
        "validation_tokens": tokens,
        "sample": {"loss": round(seen, 5), "tokens": predicted, "bits_per_byte": round(bits, 5), "sha256": digest},
        "chance": round(math.log(VOCABULARY), 5),
    }


@torch.no_grad()
def mean_loss(model: Any, rows: Iterable[Tensor]) -> tuple[float, int]:
    """Mean loss, in nats, of tokens 1.. of each row given those before, and the number of these tokens."""
    total, tokens = 0.0, 0
    for row in rows:
        total += float(F.cross_entropy(model(input_ids=row[None, :-1]).logits[0], row[1:], reduction="sum"))
        tokens += len(row) - 1
    return total / tokens, tokens


def model_card(record: dict[str, Any]) -> str:
    """The folder's README, every number of it from the record."""
    losses, settings = record["loss"], record["train"]["settings"]
    sample, windows = losses["sample"], settings["batch"] * settings["batches"]
    texts = "\n".join(
        f"- `{t['file']}`, {t['bytes']:,} bytes: {t['description']}. sha256 `{t['sha256']}`" for t in record["texts"]
    )
    files = [text["file"] for text in record["texts"]]
    optimizer = "AdamW" if settings["optimizer"] == "adamw" else "Sophia-H"
    return f"""---
license: apache-2.0
language: en
library_name: transformers
---
# tiny-gpt2

The default model of `flashbob-curv`: a GPT-2 of {record["model"]["parameters"]:,} parameters, {LAYERS} layers of
width {WIDTH}, {HEADS} heads, context {CONTEXT:,}, tied embeddings, stored in {record["model"]["dtype"]}, with a
byte-level BPE tokenizer of {VOCABULARY:,} tokens. It is small enough to run anywhere and really trained, so that its
curvature is that of a language model. It is not meant to write text.

## Trained on

{texts}

The last twentieth of each text, in whole windows, was held out. The texts themselves are not shipped. The sample text
of this project (`configs/data/sample.txt`) was not among them.

## How

{record["steps"]:,} steps of {optimizer} on {windows} windows of {settings["seq"]:,} tokens ({record["tokens"]:,} tokens
in all, {record["epochs"]:.1f} times the training text) in {record["seconds"] / 60:.1f} minutes on {record["device"]},
in {settings["dtype"]}. Peak learning rate {settings["lr"]:g} after {settings["warmup"]} warm-up steps, cosine to
{settings["min_lr"]:g}, weight decay {settings["weight_decay"]:g}, dropout {settings["dropout"]:g} (0 in the stored
configuration), gradient norm clipped at {settings["clip"]:g}, seed {settings["seed"]}:

    flashbob-curv train --config configs/train_tiny_gpt2.yaml --data {",".join(files)} --out RUN
    python3 configs/models/tiny_gpt2.py store RUN FOLDER --text {" ".join(files)}

## To which loss

Mean next-token cross-entropy of the stored weights over consecutive windows of {CONTEXT:,} tokens, dropout off. Chance
is {losses["chance"]:.3f}.

| text | nats per token | tokens predicted |
|---|---|---|
| held out | {losses["validation"]:.3f} | {losses["validation_tokens"]:,} |
| `configs/data/sample.txt` (another author, another century; {sample["bits_per_byte"]:.3f} bits per byte) | {
        sample["loss"]:.3f} | {sample["tokens"]:,} |

`training.json` beside this file holds these numbers, the settings and the loss history; this card was written from it.
"""


def main() -> None:
    """The two commands."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    beginning = commands.add_parser("begin", help="write a tokenizer and the architecture")
    storing = commands.add_parser("store", help="store what `flashbob-curv train` has trained")
    storing.add_argument("run", type=Path, help="the --out of the training")
    for command in (beginning, storing):
        command.add_argument("folder", type=Path, help="model folder to write")
        command.add_argument("--text", type=Path, nargs="+", required=True, help="the plain UTF-8 texts, in order")
    options = parser.parse_args()
    logging.disable_progress_bar()
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.command == "begin":
        begin(options.folder, options.text)
    else:
        store(options.run, options.folder, options.text)


if __name__ == "__main__":
    main()
