"""Text as windows of token ids: the data that a loss is taken over."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from curvature.hub import hub_reachable
from curvature.shipped import shipped_path

__all__ = [
    "TokenWindows",
    "hub_documents",
    "jsonl_documents",
    "parquet_documents",
    "text_pieces",
    "token_windows",
]

SAMPLE = "sample"
"""Name of the text that comes with the project."""

_PIECE = 1 << 16
"""Characters read from a file at a time."""

_MARGIN = 64
"""Tokens ahead of a cut that are not used: a cut in the text can change the tokens beside it."""

_SEPARATOR = "\n\n"
"""Between the documents of a .jsonl, a .parquet or a hub dataset."""


@dataclass(frozen=True)
class TokenWindows:
    """Consecutive windows of one text.

    Attributes:
        batches: `{"input_ids": int64 [batch, seq]}` each; window after window of the text, batch after batch.
        source: Where the text comes from.
        tokens: Number of tokens in all windows.
        sha256: Of the token ids in order, as little-endian int64.
    """

    batches: list[dict[str, Tensor]] = field(repr=False)
    source: str
    tokens: int
    sha256: str

    def as_record(self) -> dict[str, Any]:
        """The facts as JSON fields."""
        return {"source": self.source, "tokens": self.tokens, "sha256": self.sha256}


def token_windows(
    tokenizer: PreTrainedTokenizerBase, source: str, seq: int, batch: int = 1, batches: int = 1, *, skip: int = 0
) -> TokenWindows:
    """Cut a text into consecutive windows of tokens, from its beginning.

    The text is tokenized as one, without special tokens. Only as much of it is read and tokenized as the windows need;
    the ids are those of the whole text. Where words are not set apart by spaces that takes twice as much text, since a
    second prefix has to confirm the ids.

    Args:
        tokenizer: The model's tokenizer.
        source: "sample" (the shipped text), a .txt, .jsonl (field "text") or .parquet (column "text") file, or
            "hub:DATASET[:CONFIG[:SPLIT]]" (split "train" if not given). Documents are joined by an empty line.
        seq: Tokens per window, at least 2.
        batch: Windows per batch.
        batches: Number of batches.
        skip: Batches that are left out at the beginning of the text.

    Returns:
        The windows; see `TokenWindows`.

    Raises:
        ValueError: If a number is out of range, the source cannot be read, or the text is empty or too short.
    """
    for name, value, least in (("seq", seq, 2), ("batch", batch, 1), ("batches", batches, 1), ("skip", skip, 0)):
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
    needed = seq * batch * (batches + skip)
    ids = _first_ids(tokenizer, _pieces(source), needed)
    if not ids:
        raise ValueError(f"data {source!r}: the text is empty")
    if len(ids) < needed:
        fitting = len(ids) // seq
        remedy = f"ask for at most {fitting} windows" if fitting else f"use --seq {len(ids)} or less"
        raise ValueError(
            f"data {source!r}: the text has {len(ids)} tokens, but {batches + skip} x {batch} windows of {seq} need "
            f"{needed}; {remedy}, or give a longer text"
        )
    windows = torch.tensor(ids, dtype=torch.int64).view(-1, batch, seq)[skip:]
    digest = hashlib.sha256(windows.numpy().astype("<i8").tobytes()).hexdigest()
    return TokenWindows([{"input_ids": window} for window in windows], source, windows.numel(), digest)


def _first_ids(tokenizer: PreTrainedTokenizerBase, pieces: Iterator[str], needed: int) -> list[int]:
    """The first `needed` token ids of the text, or all of them if it has fewer.

    A prefix of the text, cut between words, is tokenized, and the tokens close to the cut are left out; a prefix that
    turns out too short is doubled. So is one that is cut between the letters of a word: its ids count once those of the
    longer one are the same.
    """
    text, target, ended = "", 6 * (needed + _MARGIN) + 256, False
    before: list[int] = []
    while True:
        while len(text) < target and not ended:
            piece = next(pieces, None)
            ended = piece is None
            text += piece or ""
        whole = ended and len(text) <= target
        cut, between_words = (len(text), True) if whole else _cut(text, target)
        ids: list[int] = tokenizer(text[:cut], add_special_tokens=False, verbose=False)["input_ids"]
        clear = len(ids) >= needed + _MARGIN
        if whole or (clear and (between_words or ids[:needed] == before[:needed])):
            return ids[:needed]
        before = ids[:-_MARGIN]
        target *= 2


def _cut(text: str, end: int) -> tuple[int, bool]:
    """The last good place for a cut in the second half of `text[:end]`, 0 if there is none; whether it parts two words.

    A cut between words lies ahead of a single space or line end, because most vocabularies let the space begin the
    token of the next word. Where there is none, as in scripts without spaces, the cut lies between two letters. Not
    between digits: some tokenizers group them from the right, so that all of them depend on where they end.
    """
    places = range(min(end, len(text) - 2), end // 2, -1)
    for p in places:
        if text[p].isspace() and not (text[p - 1].isspace() or text[p + 1].isspace()):
            return p, True
    return next((p for p in places if text[p - 1].isalpha() and text[p].isalpha()), 0), False


def _pieces(source: str) -> Iterator[str]:
    """The text in pieces, in order."""
    if source.startswith("hub:"):
        return _joined(hub_documents(source))
    path = shipped_path("data/sample.txt") if source == SAMPLE else Path(source).expanduser()
    readers = {".txt": text_pieces, ".jsonl": _jsonl, ".parquet": _parquet}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise ValueError(
            f"data {source!r}: must be 'sample', a {', '.join(readers)} file, or hub:DATASET[:CONFIG[:SPLIT]]"
        )
    if not path.is_file():
        raise ValueError(f"data {source!r}: there is no such file")
    return reader(path)


def _joined(documents: Iterator[str]) -> Iterator[str]:
    first = next(documents, None)
    if first is None:
        return iter(())
    return chain([first], (_SEPARATOR + document for document in documents))


def text_pieces(path: Path) -> Iterator[str]:
    """A UTF-8 text file in pieces, as it is.

    Args:
        path: The file.

    Raises:
        ValueError: If it is not UTF-8, or cannot be read.
    """
    try:
        # newline="": the text is tokenized as it is, not with its line ends translated.
        with path.open(encoding="utf-8", newline="") as file:
            while piece := file.read(_PIECE):
                yield piece
    except UnicodeDecodeError as error:
        raise ValueError(f"data '{path}': not UTF-8 text ({error.reason}); convert it to UTF-8") from error
    except OSError as error:
        raise ValueError(f"data '{path}': cannot be read ({error.strerror})") from error


def _jsonl(path: Path) -> Iterator[str]:
    return _joined(jsonl_documents(path))


def jsonl_documents(path: Path) -> Iterator[str]:
    """The field `text` of each line of a JSON Lines file; empty lines are passed over.

    Args:
        path: The file.

    Raises:
        ValueError: If a line is not JSON, has no such field, or half a surrogate pair in it; the message names the
            line.
    """
    line_number = 0
    for line_number, line in enumerate(_lines(text_pieces(path)), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"data '{path}': line {line_number} is not JSON ({error.msg})") from error
        text = record.get("text") if isinstance(record, dict) else None
        if not isinstance(text, str):
            found = f"fields {sorted(record)}" if isinstance(record, dict) else type(record).__name__
            raise ValueError(f"data '{path}': line {line_number} has no string field 'text', it has {found}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"data '{path}': line {line_number} holds half a surrogate pair, {text[error.start]!a}, in its field "
                "'text', which is no character; replace it"
            ) from error
        yield text


def _lines(pieces: Iterator[str]) -> Iterator[str]:
    line: list[str] = []
    for piece in pieces:
        rest, *begun = piece.split("\n")
        line.append(rest)
        for start in begun:
            yield "".join(line)
            line = [start]
    yield "".join(line)


def _parquet(path: Path) -> Iterator[str]:
    return _joined(parquet_documents(path))


def parquet_documents(path: Path) -> Iterator[str]:
    """The column `text` of a Parquet file, read in batches of rows; missing values are passed over.

    Args:
        path: The file.

    Raises:
        ValueError: If it is no such file, or has no such column of strings.
    """
    import pyarrow.parquet
    from pyarrow import ArrowInvalid

    try:
        table = pyarrow.parquet.ParquetFile(path)
    except (ArrowInvalid, OSError) as error:
        raise ValueError(f"data '{path}': not a parquet file ({error})") from error
    if "text" not in table.schema_arrow.names:
        raise ValueError(f"data '{path}': no column 'text' among {table.schema_arrow.names}")
    for rows in table.iter_batches(batch_size=64, columns=["text"]):
        for text in rows.column(0).to_pylist():
            if not isinstance(text, str | None):
                raise ValueError(f"data '{path}': column 'text' holds {type(text).__name__}, not strings")
            if text is not None:
                yield text


def hub_documents(source: str) -> Iterator[str]:
    """The column `text` of a dataset on the hub, streamed, or of its local copy where the hub is out of reach.

    Args:
        source: "hub:DATASET[:CONFIG[:SPLIT]]".

    Raises:
        ValueError: If the source is not of that form, cannot be had, or has no such column.
    """
    parts = source.split(":")[1:]
    if not 1 <= len(parts) <= 3 or not all(parts):
        raise ValueError(f"data {source!r}: must be hub:DATASET[:CONFIG[:SPLIT]]")
    import datasets

    online, offline_setting = hub_reachable(), datasets.config.HF_HUB_OFFLINE
    split = parts[2] if len(parts) == 3 else "train"
    try:
        datasets.config.HF_HUB_OFFLINE = not online
        try:
            # Streamed, so that a few windows of a large dataset do not download all of it; the cache cannot be.
            rows = datasets.load_dataset(*parts[:2], split=split, streaming=online)
        finally:
            datasets.config.HF_HUB_OFFLINE = offline_setting
        for row in rows:
            if not isinstance(row.get("text"), str):
                raise ValueError(f"data {source!r}: no column 'text' of strings among {sorted(row)}")
            yield row["text"]
    except (OSError, datasets.exceptions.DatasetsError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"data {source!r}: neither the hub nor its local cache gives it ({reason}); use a local .txt, .jsonl or "
            ".parquet file"
        ) from error
