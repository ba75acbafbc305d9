"""Text for training: token windows in an order that depends on the seed and the step alone, and a held-out part.

Documents are tokenized one by one without special tokens and laid end to end ("packed"), each followed by the
tokenizer's end token where it has one, otherwise by an empty line; windows are cut from the result without regard to
where documents end. A .txt file is one document.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from curvature.shipped import shipped_path
from curvature.text import SAMPLE, hub_documents, jsonl_documents, parquet_documents, text_pieces

__all__ = ["TextParts", "TokenStream", "TokenTable", "TrainingText", "held_out_windows", "open_training_text"]

_TOGETHER = 64
"""Documents that are tokenized together."""

_Ids = npt.NDArray[np.int32]


class TrainingText(Protocol):
    """Windows for training, in order."""

    def take(self, count: int) -> Tensor:
        """The next `count` windows, int64 [count, seq], on the CPU."""
        ...

    def position(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Where the next window begins: JSON values and tensors that `seek` takes."""
        ...

    def seek(self, place: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """Go to where `position` was."""
        ...

    def as_record(self) -> dict[str, Any]:
        """Source, number of tokens and their SHA-256, as JSON fields."""
        ...


class TokenTable:
    """Windows of a text in memory, shuffled anew in every epoch.

    Epoch e cuts the text into windows at an offset drawn from (seed, e), and goes through them in an order drawn from
    it. Window number i of the run is therefore a function of (text, seq, seed, i).

    Args:
        ids: The token ids.
        seq: Tokens per window.
        source: Where they come from.
        seed: Of offsets and orders, at least 0 and below 2^64.

    Attributes:
        windows: Windows per epoch.

    Raises:
        ValueError: If the text is empty or shorter than one window, or the seed out of range.
    """

    def __init__(self, ids: _Ids, seq: int, source: str, seed: int) -> None:
        if not 0 <= seed < 1 << 64:
            raise ValueError(f"seed must be at least 0 and below 2^64, got {seed}")
        _check_length(ids, seq, source)
        self._ids, self._seq, self._source, self._seed = ids, seq, source, seed
        self.windows = max(1, len(ids) // seq - 1)
        self._next = 0
        self._epoch: tuple[int, int, npt.NDArray[np.int64]] | None = None

    def take(self, count: int) -> Tensor:
        """See `TrainingText`."""
        rows = np.stack([self._window(number) for number in range(self._next, self._next + count)])
        self._next += count
        return torch.from_numpy(rows.astype(np.int64))

    def _window(self, number: int) -> _Ids:
        epoch, place = divmod(number, self.windows)
        if self._epoch is None or self._epoch[0] != epoch:
            generator = np.random.Generator(np.random.Philox(key=np.array([self._seed, epoch], dtype=np.uint64)))
            slack = len(self._ids) - self.windows * self._seq
            self._epoch = epoch, int(generator.integers(slack + 1)), generator.permutation(self.windows)
        _, offset, order = self._epoch
        start = offset + int(order[place]) * self._seq
        return self._ids[start : start + self._seq]

    def position(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """See `TrainingText`."""
        return {"window": self._next}, {}

    def seek(self, place: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """See `TrainingText`."""
        self._next = int(place["window"])

    def as_record(self) -> dict[str, Any]:
        """See `TrainingText`; the tokens are those of one epoch's text."""
        digest = hashlib.sha256(self._ids.astype("<i8").tobytes()).hexdigest()
        return {"source": self._source, "tokens": len(self._ids), "sha256": digest}


class TokenStream:
    """Windows of a dataset that is read as it comes, once, in its own order; nothing of it stays in memory.

    Args:
        tokenizer: The model's tokenizer.
        source: "hub:DATASET[:CONFIG[:SPLIT]]".
        seq: Tokens per window.
        skip: Windows at the beginning that are left out, since they are held out.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, source: str, seq: int, skip: int) -> None:
        self._tokenizer, self._source, self._seq = tokenizer, source, seq
        self._restart(0, np.empty(0, dtype=np.int32), b"", 0)
        self._windows(skip)

    def _restart(self, documents: int, rest: _Ids, chained: bytes, tokens: int) -> None:
        self._documents, self._rest, self._chained, self._tokens = documents, rest, chained, tokens
        self._reader = islice(_documents(self._source), documents, None)

    def _windows(self, count: int) -> _Ids:
        needed = count * self._seq
        parts, held = [self._rest], len(self._rest)
        while held < needed:
            documents = list(islice(self._reader, _TOGETHER))
            if not documents:
                raise ValueError(
                    f"data {self._source!r}: it ends after {self._documents} documents and {self._tokens + held} "
                    "tokens, before the training does; ask for fewer steps"
                )
            self._documents += len(documents)
            parts.append(_packed(self._tokenizer, documents))
            held += len(parts[-1])
        ids = np.concatenate(parts)
        self._rest = ids[needed:]
        return ids[:needed].reshape(count, self._seq)

    def take(self, count: int) -> Tensor:
        """See `TrainingText`."""
        rows = self._windows(count).astype(np.int64)
        self._chained = hashlib.sha256(self._chained + rows.astype("<i8").tobytes()).digest()
        self._tokens += rows.size
        return torch.from_numpy(rows)

    def position(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """See `TrainingText`."""
        place = {"documents": self._documents, "chained": self._chained.hex(), "tokens": self._tokens}
        return place, {"rest": torch.from_numpy(self._rest.copy())}

    def seek(self, place: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """See `TrainingText`. Cost: the documents before it are read again, though not tokenized."""
        chained = bytes.fromhex(place["chained"])
        self._restart(place["documents"], tensors["rest"].numpy().astype(np.int32), chained, place["tokens"])

    def as_record(self) -> dict[str, Any]:
        """See `TrainingText`; the digest is chained: SHA-256 of (digest so far, ids of the step), step by step."""
        return {"source": self._source, "tokens": self._tokens, "sha256": self._chained.hex()}


@dataclass(frozen=True)
class TextParts:
    """What a run reads: windows to train on, and windows that it never trains on."""

    training: TrainingText
    held_out: Tensor


def open_training_text(
    tokenizer: PreTrainedTokenizerBase,
    source: str,
    seq: int,
    *,
    held_out: int,
    evaluation: str | None = None,
    seed: int = 0,
) -> TextParts:
    """Open a text for training and set windows of it aside.

    Args:
        tokenizer: The model's tokenizer.
        source: "sample", a .txt, .jsonl or .parquet file, several of these separated by commas, or
            "hub:DATASET[:CONFIG[:SPLIT]]", which is streamed.
        seq: Tokens per window, at least 2.
        held_out: Windows that are set aside at most, at least 1: of each file an equal share, from its end, a
            twentieth of it at most; the beginning of a stream.
        evaluation: Another source, whose first windows serve instead; nothing is set aside then.
        seed: Of the order of windows; see `TokenTable`.

    Returns:
        Windows to train on, and int64 [n, seq] with n at least 1.

    Raises:
        ValueError: If a number is out of range, or a source cannot be read, is empty, or has less than one window for
            each of the two.
    """
    for name, value, least in (("seq", seq, 2), ("held_out", held_out, 1)):
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
    aside = None if evaluation is None else held_out_windows(tokenizer, evaluation, seq, held_out)
    if source.startswith("hub:"):
        if aside is None:
            aside = held_out_windows(tokenizer, source, seq, held_out)
            return TextParts(TokenStream(tokenizer, source, seq, len(aside)), aside)
        return TextParts(TokenStream(tokenizer, source, seq, 0), aside)
    whole = [_first_ids(tokenizer, part, None) for part in source.split(",")]
    if aside is not None:
        return TextParts(TokenTable(np.concatenate(whole), seq, source, seed), aside)
    if not sum(map(len, whole)):
        raise ValueError(f"data {source!r}: the text is empty")
    # The end of every file; where a twentieth of each is less than a window, one window of the longest.
    share, more = divmod(held_out, len(whole))
    aside_of = [min(len(ids) // 20 // seq, share + (number < more)) for number, ids in enumerate(whole)]
    if not any(aside_of):
        longest = max(range(len(whole)), key=lambda number: len(whole[number]))
        _check_length(whole[longest], 2 * seq, source, "two windows in one file, one of them held out,")
        aside_of[longest] = 1
    cuts = [len(ids) - windows * seq for ids, windows in zip(whole, aside_of, strict=True)]
    rows = np.concatenate([ids[cut:] for ids, cut in zip(whole, cuts, strict=True)]).astype(np.int64)
    training = np.concatenate([ids[:cut] for cut, ids in zip(cuts, whole, strict=True)])
    return TextParts(TokenTable(training, seq, source, seed), torch.from_numpy(rows).view(-1, seq))


def held_out_windows(tokenizer: PreTrainedTokenizerBase, source: str, seq: int, count: int) -> Tensor:
    """The first windows of a source, `count` at most, int64 [n, seq].

    Raises:
        ValueError: If `count` is below 1, or the source cannot be read, is empty, or has less than one window.
    """
    if count < 1:
        raise ValueError(f"count must be at least 1, got {count}")
    ids = _first_ids(tokenizer, source, count * seq)
    _check_length(ids, seq, source)
    windows = min(count, len(ids) // seq)
    return torch.from_numpy(ids[: windows * seq].astype(np.int64)).view(windows, seq)


def _first_ids(tokenizer: PreTrainedTokenizerBase, source: str, needed: int | None) -> _Ids:
    """The first `needed` token ids of the packed documents, or all of them."""
    parts, held = [np.empty(0, dtype=np.int32)], 0
    documents = _documents(source)
    while (needed is None or held < needed) and (some := list(islice(documents, _TOGETHER))):
        parts.append(_packed(tokenizer, some))
        held += len(parts[-1])
    return np.concatenate(parts)[:needed]


def _packed(tokenizer: PreTrainedTokenizerBase, documents: list[str]) -> _Ids:
    end = tokenizer.eos_token_id
    if end is None:
        documents = [text if text.endswith("\n\n") else f"{text}\n\n" for text in documents]
    encoded: list[list[int]] = tokenizer(documents, add_special_tokens=False, verbose=False)["input_ids"]
    ids = array("i")
    for document in encoded:
        ids.extend(document)
        if end is not None and document:
            ids.append(end)
    return np.frombuffer(ids, dtype=np.int32)


def _documents(source: str) -> Iterator[str]:
    if source.startswith("hub:"):
        return hub_documents(source)
    path = shipped_path("data/sample.txt") if source == SAMPLE else Path(source).expanduser()
    suffix = path.suffix.lower()
    if suffix not in (".txt", ".jsonl", ".parquet"):
        raise ValueError(
            f"data {source!r}: must be 'sample', a .txt, .jsonl or .parquet file, or hub:DATASET[:CONFIG[:SPLIT]]"
        )
    if not path.is_file():
        raise ValueError(f"data {source!r}: there is no such file")
    if suffix == ".txt":
        text = "".join(text_pieces(path))
        return iter([text] if text else [])
    reader = jsonl_documents if suffix == ".jsonl" else parquet_documents
    return (text for text in reader(path) if text)


def _check_length(ids: _Ids, seq: int, source: str, what: str = "a window") -> None:
    if not len(ids):
        raise ValueError(f"data {source!r}: the text is empty")
    if len(ids) < seq:
        raise ValueError(
            f"data {source!r}: the text has {len(ids)} tokens, fewer than {what} of {seq}; use a shorter --seq or a "
            "longer text"
        )
