"""Windows for training: every token in its place, in an order of the seed's, from files and from streams."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import TINY
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from curvature import training_text
from curvature.training_text import TokenStream, TokenTable, held_out_windows, open_training_text


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(TINY)


def table(tokens: int, seq: int = 8, seed: int = 0) -> TokenTable:
    return TokenTable(np.arange(tokens, dtype=np.int32), seq, "count", seed)


@pytest.mark.parametrize("tokens", [8, 15, 16, 17, 100, 163])
def test_an_epoch_holds_every_window_once(tokens: int) -> None:
    text = table(tokens)
    starts = []
    for _ in range(3):
        rows = text.take(text.windows)
        assert torch.equal(rows, rows[:, :1] + torch.arange(8)), "windows are unbroken stretches"
        assert int(rows.min()) >= 0
        assert int(rows.max()) < tokens
        starts.append(rows[:, 0].sort().values)
        assert torch.equal(starts[-1].diff(), torch.full((text.windows - 1,), 8))
    assert tokens - 8 * text.windows < 16, "no more than a window and its offset are left out"


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    text = table(400)
    first, second = text.take(text.windows), text.take(text.windows)
    assert not torch.equal(first, second)
    assert not torch.equal(first, table(400, seed=1).take(text.windows))
    assert torch.equal(first, table(400).take(text.windows))


def test_a_table_goes_on_where_it_was() -> None:
    text, other = table(100), table(100)
    text.take(17)
    place, tensors = text.position()
    other.seek(json.loads(json.dumps(place)), tensors)
    assert torch.equal(other.take(20), text.take(20))


def write(path: Path, documents: list[str]) -> str:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return str(path)


DOCUMENTS = [f"Document number {n} says that {n} times {n} is {n * n}." for n in range(200)]


@pytest.mark.parametrize("end", [None, 5], ids=["no-end-token", "end-token"])
def test_documents_are_packed(tokenizer: PreTrainedTokenizerBase, end: int | None, tmp_path: Path) -> None:
    class WithEnd:
        eos_token_id = end

        def __call__(self, *given: object, **options: object) -> object:
            return tokenizer(*given, **options)

    source = write(tmp_path / "a.jsonl", [DOCUMENTS[0], "", DOCUMENTS[1]])
    ids = training_text._first_ids(WithEnd(), source, None).tolist()  # type: ignore[arg-type]
    expected: list[int] = []
    for text in DOCUMENTS[:2]:
        encoded = tokenizer(text if end is not None else text + "\n\n", add_special_tokens=False)["input_ids"]
        expected += encoded if end is None else [*encoded, end]
    assert ids == expected


def test_held_out_windows_are_not_trained_on(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    source = ",".join(write(tmp_path / f"{n}.jsonl", DOCUMENTS[n * 100 : n * 100 + 100]) for n in range(2))
    parts = open_training_text(tokenizer, source, 16, held_out=6)
    assert isinstance(parts.training, TokenTable)
    assert parts.held_out.shape == (6, 16)
    whole = [training_text._first_ids(tokenizer, one, None) for one in source.split(",")]
    assert parts.held_out.flatten().tolist() == [*whole[0][-48:].tolist(), *whole[1][-48:].tolist()]
    kept = np.concatenate([ids[:-48] for ids in whole])
    assert np.array_equal(parts.training._ids, kept)
    assert parts.training.as_record()["tokens"] == len(kept)


@pytest.mark.parametrize(("held_out", "shares"), [(1, (1, 0, 0)), (4, (2, 1, 1)), (6, (2, 2, 2))])
def test_no_more_windows_are_held_out_than_asked_for(
    tokenizer: PreTrainedTokenizerBase, held_out: int, shares: tuple[int, ...], tmp_path: Path
) -> None:
    source = ",".join(write(tmp_path / f"{n}.jsonl", DOCUMENTS[n * 66 : n * 66 + 66]) for n in range(3))
    whole = [training_text._first_ids(tokenizer, one, None) for one in source.split(",")]
    expected = np.concatenate([ids[len(ids) - 16 * share :] for ids, share in zip(whole, shares, strict=True)])
    parts = open_training_text(tokenizer, source, 16, held_out=held_out)
    assert np.array_equal(parts.held_out.flatten().numpy(), expected)


def test_a_short_text_holds_one_window_out(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", DOCUMENTS[:8])
    parts = open_training_text(tokenizer, source, 64, held_out=6)
    assert parts.held_out.shape == (1, 64)
    other = open_training_text(tokenizer, source, 64, held_out=3, evaluation=write(tmp_path / "b.jsonl", DOCUMENTS))
    assert other.held_out.shape == (3, 64)
    assert other.training.as_record()["tokens"] == parts.training.as_record()["tokens"] + 64


@pytest.mark.parametrize(
    ("documents", "told"),
    [
        ([], "the text is empty"),
        ([""], "the text is empty"),
        (["Three words here."], "fewer than two windows in one file, one of them held out, of 256"),
    ],
)
def test_texts_that_are_too_short_are_refused(
    tokenizer: PreTrainedTokenizerBase, documents: list[str], told: str, tmp_path: Path
) -> None:
    source = write(tmp_path / "a.jsonl", documents)
    with pytest.raises(ValueError, match=told):
        open_training_text(tokenizer, source, 128, held_out=1)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"seq": 1}, "seq must be at least 2, got 1"),
        ({"held_out": 0}, "held_out must be at least 1, got 0"),
        ({"held_out": 0, "evaluation": "sample"}, "held_out must be at least 1, got 0"),
        ({"seed": -1}, r"seed must be at least 0 and below 2\^64, got -1"),
        ({"seed": 1 << 64}, r"seed must be at least 0 and below 2\^64, got 18446744073709551616"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_numbers_out_of_range_are_refused(
    tokenizer: PreTrainedTokenizerBase, changes: dict[str, Any], told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        open_training_text(tokenizer, "sample", **({"seq": 32, "held_out": 1} | changes))
    with pytest.raises(ValueError, match="count must be at least 1, got 0"):
        held_out_windows(tokenizer, "sample", 32, 0)


def test_the_largest_seed_is_one() -> None:
    assert table(100, seed=(1 << 64) - 1).take(1).shape == (1, 8)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A hub dataset of DOCUMENTS; the list notes each time that it is opened."""
    opened: list[str] = []

    def documents(source: str) -> Iterator[str]:
        opened.append(source)
        yield from DOCUMENTS

    monkeypatch.setattr(training_text, "hub_documents", documents)
    return opened


@pytest.mark.usefixtures("hub")
def test_a_stream_is_read_in_order_behind_what_is_held_out(tokenizer: PreTrainedTokenizerBase) -> None:
    parts = open_training_text(tokenizer, "hub:some/text", 16, held_out=3)
    rows = torch.cat([parts.training.take(2) for _ in range(30)])
    ids = torch.cat([parts.held_out, rows]).flatten().tolist()
    packed = tokenizer([f"{text}\n\n" for text in DOCUMENTS], add_special_tokens=False)["input_ids"]
    assert ids == [token for document in packed for token in document][: len(ids)]
    assert parts.training.as_record()["tokens"] == 60 * 16


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize("steps", [0, 1, 25])
def test_a_stream_goes_on_where_it_was(tokenizer: PreTrainedTokenizerBase, steps: int) -> None:
    text, other = (TokenStream(tokenizer, "hub:some/text", 16, 2) for _ in range(2))
    for _ in range(steps):
        text.take(3)
    place, tensors = text.position()
    other.seek(json.loads(json.dumps(place)), {name: t.clone() for name, t in tensors.items()})
    for _ in range(10):
        assert torch.equal(text.take(3), other.take(3))
    assert text.as_record() == other.as_record()


@pytest.mark.usefixtures("hub")
def test_a_stream_that_ends_is_told(tokenizer: PreTrainedTokenizerBase) -> None:
    text = TokenStream(tokenizer, "hub:some/text", 64, 0)
    with pytest.raises(ValueError, match=r"it ends after 200 documents and \d+ tokens, before the training does"):
        text.take(10_000)
