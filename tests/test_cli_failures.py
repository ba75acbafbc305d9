"""Everything that a user can get wrong: one line on stderr, the right exit code, and nothing half-written."""

import json
import os
import signal
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from command_line import Run, make_model, start
from safetensors.torch import load_file, save_file

import cli.session
from cli.failure import describe
from curvature.checks import symmetry_limit

QUICK = ("--seq", 32, "--steps", 2, "--probes", 1, "--device", "cpu")


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A folder with texts and models that are wrong in one way each."""
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "short.txt").write_text("Too short a text.")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00text")
    (tmp_path / "text.docx").write_text("text")
    (tmp_path / "not_a_model").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--model", "no-such-organisation/no-such-model"), ["no-such-model", "local"]),
        (("--model", "gpt2"), ["gpt2", "--random-init"]),
        (("--model", "./missing"), ["./missing"]),
        (("--model", "not_a_model"), ["not_a_model", "config.json"]),
        (("--data", "empty.txt"), ["empty.txt", "empty"]),
        (("--data", "short.txt"), ["short.txt", "--seq"]),
        (("--seq", 10_000_000), ["10000000", "--seq"]),
        (("--batches", 1_000_000), ["1000000", "windows"]),
        (("--data", "missing.txt"), ["missing.txt"]),
        (("--data", "binary.txt"), ["binary.txt", "UTF-8"]),
        (("--data", "text.docx"), ["text.docx", ".parquet"]),
        (("--params", "no_such_parameter"), ["no_such_parameter", "ln_1"]),
        (("--params", "ln_["), ["ln_[", "regular expression"]),
        (("--seq", 128, "--extend-positions", "refuse"), ["128", "64"]),
        (("--out", "short.txt/below"), ["--out short.txt/below", "another folder"]),
        pytest.param(
            ("--device", "cuda"),
            ["--device cuda", "--device cpu"],
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU"),
        ),
        (("--device", "cuda:99"), ["--device cuda:99", "auto"]),
    ],
    ids=lambda value: "_".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_bad_input_is_one_line_and_exit_code_1(
    arguments: tuple[object, ...], told: list[str], run: Run, model: Path, files: Path
) -> None:
    given = () if "--model" in arguments else ("--model", model)
    outcome = run("spectrum", *given, *QUICK, *arguments)
    assert outcome.code == 1
    assert outcome.out == ""
    errors = [line for line in outcome.err.splitlines() if "settings:" not in line]
    assert len(errors) == 1, outcome.err
    assert errors[0].startswith("flashbob-curv: error: ")
    assert all(part in errors[0] for part in told), errors[0]
    assert not list(files.rglob("*.json.*.part"))


def test_nan_weights_are_named(run: Run, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "nan")
    weights = load_file(folder / "model.safetensors")
    weights["transformer.h.1.mlp.c_fc.weight"][0, 0] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    outcome = run("spectrum", "--model", folder, *QUICK)
    assert outcome.code == 1
    assert "h.1.mlp.c_fc.weight" in outcome.err.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("nonsense",), "nonsense"),
        (("spectrum", "--nonsense"), "--nonsense"),
        (("spectrum", "--dtype", "float12"), "float12"),
        (("spectrum", "--device", "tpu"), "tpu"),
        (("spectrum", "--seq", 1), "--seq"),
        (("spectrum", "--seq", "many"), "--seq"),
        (("spectrum", "--steps", 0), "--steps"),
        (("spectrum", "--batch", 0), "--batch"),
        (("trace", "--max-products", 1), "--max-products"),
        (("hvp", "--repeat", 0), "--repeat"),
        (("spectrum", "--extend-positions", "guess"), "guess"),
        (("spectrum", "--method", "magic"), "magic"),
        (("spectrum", "--config", "missing.yaml"), "missing.yaml"),
    ],
    ids=lambda value: "_".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_wrong_usage_is_exit_code_2(arguments: tuple[object, ...], told: str, run: Run) -> None:
    outcome = run(*arguments)
    assert outcome.code == 2
    assert outcome.out == ""
    assert told in outcome.err
    assert "Traceback" not in outcome.err


def test_an_unwritable_folder_is_found_before_the_work(
    run: Run, files: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: object, **__: object) -> NoReturn:
        pytest.fail("the model was loaded first")

    monkeypatch.setattr(cli.session, "load_model", load)
    assert run("spectrum", "--model", model, *QUICK, "--out", "short.txt").code == 1


def test_debug_shows_the_traceback(run: Run) -> None:
    outcome = run("spectrum", "--model", "./missing", "--debug")
    assert outcome.code == 1
    assert "Traceback (most recent call last)" in outcome.err
    assert outcome.err.splitlines()[-1].startswith("flashbob-curv: error: ")


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), "out of memory (CUDA"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 5 bytes"), "shorten --seq"),
        (MemoryError(), "shorten --seq"),
        (ModuleNotFoundError("No module named 'datasets'", name="datasets"), "'datasets' is not installed; install it"),
        (ModuleNotFoundError("No module named 'gguf'", name="gguf"), "pip install -e '.[export]'"),
        (ValueError("seq must be at\n  least 2"), "seq must be at least 2"),
        (KeyError("surprise"), "unexpected KeyError: 'surprise'; run again with --debug"),
        (RuntimeError(""), "unexpected RuntimeError: no message"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_each_kind_of_error_becomes_one_helpful_line(error: Exception, told: str) -> None:
    line = describe(error)
    assert told in line
    assert "\n" not in line


def test_an_asymmetric_product_is_announced(
    run: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli.session, "symmetry_error", lambda *_: 0.5)
    outcome = run("spectrum", "--model", model, *QUICK, "--out", tmp_path)
    assert outcome.code == 0
    assert "not symmetric" in outcome.err
    assert "not symmetric" in (tmp_path / "report.html").read_text()


def test_ctrl_c_while_the_record_is_written_leaves_no_file(
    run: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    outcome = run("hvp", "--model", model, "--seq", 32, "--repeat", 1, "--device", "cpu", "--out", tmp_path / "out")
    assert outcome.code == 1
    assert "interrupted" in outcome.err.splitlines()[-1]
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(("sent", "told"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "SIGTERM")])
def test_a_signal_during_a_run_leaves_its_state_and_no_half_written_file(
    sent: signal.Signals, told: str, model: Path, tmp_path: Path
) -> None:
    process = start("spectrum", "--model", model, "--steps", 1_000, "--out", "out", folder=tmp_path)
    assert process.stderr is not None
    seen = ""
    while "probe 1/2" not in seen:  # the bar shows the first products
        piece = process.stderr.read(1)
        assert piece, f"it ended by itself: {seen}"
        seen += piece
    process.send_signal(sent)
    try:
        out, rest = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 1, seen + rest
    last = rest.splitlines()[-1]
    assert told in last
    assert "out/state/spectrum" in last
    assert "--resume" in last
    assert "Traceback" not in rest
    assert out == ""
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["state"]
    part = json.loads((tmp_path / "out" / "state" / "spectrum" / "probe-0" / "part.json").read_text())
    assert part["progress"]["steps"] >= 1
    assert not list((tmp_path / "out").rglob("*.part"))


def test_as_a_user_runs_it_from_the_tree(model: Path, tmp_path: Path) -> None:
    process = start("spectrum", "--model", model, *QUICK, "--out", "out", "--json", folder=tmp_path)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert json.loads(out) == json.loads((tmp_path / "out" / "spectrum.json").read_text())
    assert "Lanczos" in err


def test_as_a_user_gets_it_wrong(tmp_path: Path) -> None:
    process = start("spectrum", "--model", "./missing", folder=tmp_path)
    out, err = process.communicate(timeout=300)
    assert (process.returncode, out) == (1, "")
    assert [line for line in err.splitlines() if "error" in line] == [err.splitlines()[-1]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("size", [1_000, 1_000_000])
def test_the_symmetry_limit_lies_between_rounding_and_a_wrong_derivative(dtype: torch.dtype, size: int) -> None:
    through_layer_norm = 7.7e-4  # the error of jvp of jacrev on GPT-2
    assert 15 * torch.finfo(dtype).eps < symmetry_limit(dtype, size) < through_layer_norm
