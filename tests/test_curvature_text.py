"""Token windows: the ids of the whole text, read no further than needed."""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections.abc import Iterator
from itertools import chain, product
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from curvature import text, token_windows
from curvature.shipped import shipped_path


@pytest.fixture(scope="module")
def byte_level() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(str(shipped_path("models/tiny-gpt2")))


@pytest.fixture(scope="module")
def sample() -> str:
    return shipped_path("data/sample.txt").read_text(encoding="utf-8")


def whole(tokenizer: PreTrainedTokenizerBase, content: str) -> list[int]:
    return tokenizer(content, add_special_tokens=False, verbose=False)["input_ids"]


def test_windows_are_consecutive_and_from_the_beginning(byte_level: PreTrainedTokenizerBase, sample: str) -> None:
    windows = token_windows(byte_level, "sample", seq=7, batch=3, batches=2)
    ids = whole(byte_level, sample)[:42]
    assert [b["input_ids"].shape for b in windows.batches] == [(3, 7), (3, 7)]
    assert torch.cat([b["input_ids"].reshape(-1) for b in windows.batches]).tolist() == ids
    assert windows.batches[0]["input_ids"].dtype == torch.int64
    assert windows.sha256 == hashlib.sha256(b"".join(i.to_bytes(8, "little") for i in ids)).hexdigest()
    assert windows.as_record() == {"source": "sample", "tokens": 42, "sha256": windows.sha256}


@pytest.mark.parametrize("kind", ["byte-level", "stories260k"])
def test_ids_are_those_of_the_whole_text(
    kind: str, byte_level: PreTrainedTokenizerBase, sample: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Wherever the text is cut: also in texts with long runs of spaces, without spaces, and of other scripts."""
    tokenizer = byte_level
    if kind == "stories260k":
        tokenizer = AutoTokenizer.from_pretrained(str(request.getfixturevalue("shared") / "models" / "stories260k"))
    generator = random.Random(0)
    alphabet = [
        "a",
        "b",
        "the",
        " ",
        "  ",
        "\n",
        "\n\n\n",
        "\t",
        "          ",
        "é",
        "雪",
        "٣",
        ".",
        "1234",
        "don't",
        "\r\n",
    ]
    noise = "".join(generator.choice(alphabet) for _ in range(20_000))
    for content in (
        sample[:60_000],
        noise,
        "x" * 9_000,
        "雪山" * 4_000,
        "word\n" * 4_000,
        sample[:20_000].replace(" ", "  "),
    ):
        file = tmp_path / "text.txt"
        file.write_bytes(content.encode())
        ids = whole(tokenizer, content)
        for count in sorted({2, 3, 17, *(generator.randrange(2, len(ids)) for _ in range(6)), len(ids)}):
            got = token_windows(tokenizer, str(file), seq=count).batches[0]["input_ids"][0].tolist()
            assert got == ids[:count]


@pytest.mark.parametrize("phrase", ["and it came to pass ", "雪山", "雪山三四。", "x"])
def test_only_the_beginning_is_read_and_tokenized(
    phrase: str, byte_level: PreTrainedTokenizerBase, monkeypatch: Any
) -> None:
    seen: list[int] = []

    def recording(content: str, **options: Any) -> Any:
        seen.append(len(content))
        return byte_level(content, **options)

    def endless() -> Iterator[str]:
        for _ in range(1000):
            yield phrase * 50
        pytest.fail("all of it was read")

    monkeypatch.setattr(text, "_pieces", lambda source: endless())
    windows = token_windows(recording, "sample", seq=512)  # type: ignore[arg-type]
    assert windows.tokens == 512
    assert max(seen) < 20_000


def write(path: Path, content: str | bytes) -> str:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def test_documents_are_joined_by_an_empty_line(byte_level: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    documents = ["In the beginning", "God created\nthe heaven", "and the earth."]
    lines = "\n\n".join(json.dumps({"text": d, "n": 1}) for d in documents) + "\n"
    plain = write(tmp_path / "a.txt", "\n\n".join(documents))
    jsonl = write(tmp_path / "a.jsonl", lines)
    pyarrow.parquet.write_table(pyarrow.table({"text": documents, "n": [1, 2, 3]}), tmp_path / "a.parquet")
    digests = {token_windows(byte_level, s, seq=12).sha256 for s in (plain, jsonl, str(tmp_path / "a.parquet"))}
    assert len(digests) == 1


def test_line_ends_are_kept(byte_level: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    ids = token_windows(byte_level, write(tmp_path / "a.txt", b"one\r\ntwo\r\n"), seq=4).batches[0]["input_ids"][0]
    assert "\r\n" in byte_level.decode(ids.tolist() + whole(byte_level, "\r\n"))
    assert ids.tolist() == whole(byte_level, "one\r\ntwo\r\n")[:4]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", "", "the text is empty"),
        ("a.jsonl", "\n", "the text is empty"),
        (
            "a.txt",
            "a few words only",
            r"the text has \d+ tokens, but 2 x 3 windows of 50 need 300; use --seq \d+ or less",
        ),
        ("a.txt", "and it came to pass " * 30, r"need 300; ask for at most \d windows, or give a longer text"),
        ("a.txt", b"\xff\xfe\x00", "not UTF-8 text"),
        ("a.jsonl", "{\n", "line 1 is not JSON"),
        ("a.jsonl", '{"body": "x"}\n', r"line 1 has no string field 'text', it has fields \['body'\]"),
        ("a.jsonl", "3\n", "no string field 'text', it has int"),
        ("a.jsonl", '{"text": "x"}\n{"text": "y \\ud800"}\n', r"line 2 holds half a surrogate pair, '\\ud800'"),
        ("a.parquet", "not parquet", "not a parquet file"),
        ("a.csv", "x", "must be 'sample', a .txt, .jsonl, .parquet file"),
    ],
    ids=[
        "empty",
        "no records",
        "shorter than a window",
        "too short",
        "bytes",
        "json",
        "field",
        "number",
        "surrogate",
        "parquet",
        "csv",
    ],
)
def test_bad_texts_are_one_clear_line(
    name: str, content: str | bytes, message: str, byte_level: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        token_windows(byte_level, write(tmp_path / name, content), seq=50, batch=3, batches=2)
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_bad_numbers(byte_level: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no such file"):
        token_windows(byte_level, str(tmp_path / "no.txt"), seq=8)
    for options, message in (
        ({"seq": 1}, "seq must be at least 2"),
        ({"seq": 8, "batch": 0}, "batch must be at least 1"),
        ({"seq": 8, "batches": 0}, "batches must be at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            token_windows(byte_level, "sample", **options)


def test_a_long_line_is_put_together_once() -> None:
    started = time.process_time()
    (line, end) = text._lines(chain(["x" * 4096] * 2000, ["\ny"]))
    assert (len(line), end) == (4096 * 2000, "y")
    assert time.process_time() - started < 1, "and not again with each of its pieces, which takes 5 s"


def test_lines_end_anywhere_in_a_piece() -> None:
    content = "a\n\nbc\n"
    for cuts in product([False, True], repeat=len(content) - 1):
        pieces = "".join(letter + "|" * end for letter, end in zip(content, (*cuts, False), strict=True)).split("|")
        assert list(text._lines(iter(pieces))) == content.split("\n")


@pytest.mark.parametrize("values", [[1, 2], [["x"], ["y"]], [b"x", b"y"]], ids=["int", "list", "bytes"])
def test_a_parquet_whose_column_is_not_of_strings(
    values: list[Any], byte_level: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"text": values}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=f"column 'text' holds {type(values[0]).__name__}, not strings"):
        token_windows(byte_level, str(tmp_path / "a.parquet"), seq=8)


def test_a_parquet_without_the_column(byte_level: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"body": ["x"]}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"no column 'text' among \['body'\]"):
        token_windows(byte_level, str(tmp_path / "a.parquet"), seq=8)


# The hub, with its client replaced: what is asked of it, and what becomes of its errors.


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    import datasets

    calls: list[Any] = []

    def load(*names: str, split: str, streaming: bool) -> Any:
        calls.append((names, split, streaming, datasets.config.HF_HUB_OFFLINE))
        return iter([{"text": "In the beginning"}, {"text": "God created the heaven and the earth."}])

    monkeypatch.setattr(datasets, "load_dataset", load)
    return calls


@pytest.mark.parametrize("online", [True, False], ids=["online", "offline"])
def test_hub_datasets(online: bool, asked: list[Any], byte_level: PreTrainedTokenizerBase, monkeypatch: Any) -> None:
    import datasets

    monkeypatch.setattr(text, "hub_reachable", lambda: online)
    setting = datasets.config.HF_HUB_OFFLINE
    joined = whole(byte_level, "In the beginning\n\nGod created the heaven and the earth.")
    for source, names, split in (
        ("hub:org/set", ("org/set",), "train"), ("hub:org/set:cfg", ("org/set", "cfg"), "train"),
        ("hub:org/set:cfg:test", ("org/set", "cfg"), "test"),
    ):  # fmt: skip
        windows = token_windows(byte_level, source, seq=8)
        assert windows.batches[0]["input_ids"][0].tolist() == joined[:8]
        assert asked.pop() == (names, split, online, not online)
    assert setting == datasets.config.HF_HUB_OFFLINE


@pytest.mark.usefixtures("asked")
def test_the_hub_is_out_of_reach_for_no_longer_than_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(text, "hub_reachable", lambda: False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    documents = text.hub_documents("hub:org/set")
    assert next(documents) == "In the beginning"
    assert not datasets.config.HF_HUB_OFFLINE


def test_hub_errors_are_one_clear_line(byte_level: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(text, "hub_reachable", lambda: False)
    with pytest.raises(ValueError, match=r"neither the hub nor its local cache gives it .*use a local \.txt") as caught:
        token_windows(byte_level, "hub:nobody/nothing", seq=8)
    assert "\n" not in str(caught.value)
    for source in ("hub:", "hub:a::b", "hub:a:b:c:d"):
        with pytest.raises(ValueError, match=r"must be hub:DATASET\[:CONFIG\[:SPLIT\]\]"):
            token_windows(byte_level, source, seq=8)
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: iter([{"body": "x"}]))
    with pytest.raises(ValueError, match=r"no column 'text' of strings among \['body'\]"):
        token_windows(byte_level, "hub:a", seq=8)
