"""`quantize` and `evaluate` as a user runs them: what they write, and what they refuse."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from command_line import TINY, Outcome, Run, make_model
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import cli.session
import quant
import quant.checkpoint
from curvature import load_model, token_windows
from curvature.distributed import Processes
from quant import Plan, Scheme

QUICK = ("--seq", 24, "--batches", 4, "--eval-batches", 2, "--choices", "2,4,8", "--group-size", "-1,16", "--rounds", 1,
         "--draws", 1, "--measure", 2, "--redraws", 2, "--device", "cpu", "--method", "whole")  # fmt: skip
COMMON = {"command", "version", "model", "data", "settings", "environment", "seconds", "peak_memory_bytes"}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random tied Llama with 48-row projections and the embedded tokenizer."""
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2048, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=3,
        num_key_value_heads=3, max_position_embeddings=64, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.model.layers.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(TINY).save_pretrained(folder)
    return folder


def quantized(run: Run, model: Path, out: Path, *arguments: object) -> tuple[dict[str, object], Outcome]:
    outcome = run("quantize", "--model", model, *QUICK, "--out", out, *arguments)
    assert outcome.code == 0, outcome.err
    return json.loads((out / "quantize.json").read_text()), outcome


def test_a_packed_checkpoint_is_written_verified_and_evaluated(run: Run, llama: Path, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    out = tmp_path / "out"
    record, outcome = quantized(run, llama, out, "--bits", 4)
    assert set(record) > COMMON
    assert {path.name for path in out.iterdir()} == {"model", "plan.json", "quantize.json", "report.html"}
    plan = json.loads((out / "plan.json").read_text())
    assert COMMON | {"budget", "metric", "weights", "average_bits", "bytes"} <= set(plan)
    assert {name: plan[name] for name in COMMON} == {name: record[name] for name in COMMON}
    assert plan["metric"] == "relinearized"
    assert plan["average_bits"] <= 4
    assert set(plan["weights"][0]) >= {"name", "bits", "group_size", "symmetric", "predicted_loss_change"}
    assert record["checkpoint"] == record["checkpoint"] | {
        "export": "compressed-tensors", "bytes": plan["bytes"], "verified": True, "largest_difference": 0.0,
    }  # fmt: skip
    assert (out / "model" / "model.safetensors").stat().st_size == plan["bytes"]
    rise = record["loss_after"] - record["loss_before"]  # type: ignore[operator]
    assert record["measured_loss_change"] == pytest.approx(rise, abs=1e-9)
    assert "read back without any difference" in outcome.out
    whole = record["whole_plan"]
    assert whole["change"] == pytest.approx(whole["linear"] + whole["quadratic"])  # type: ignore[index]
    assert whole["batches"] == 2  # type: ignore[index]  # those that the rise was measured on
    assert "rise, to second order" in outcome.out
    page = (out / "report.html").read_text()
    assert page.count("<img") == 3
    assert "biggest misses" in page
    # The packed folder is an ordinary model for evaluate, on the same windows as quantize's own evaluation.
    found = run(
        "evaluate",
        "--resume",
        "--model",
        out / "model",
        "--seq",
        24,
        "--batches",
        2,
        "--skip",
        4,
        "--device",
        "cpu",
        "--json",
    )
    assert found.code == 0, found.err
    assert "evaluate keeps no state" in found.err
    assert found.json["loss"] == pytest.approx(record["loss_after"], rel=1e-5)
    assert found.json["tokens"] == record["evaluation_tokens"]
    assert set(found.json) > COMMON | {"perplexity", "loss", "tokens"}
    again = run("quantize", "--model", out / "model", *QUICK, "--out", tmp_path / "again")
    assert again.code == 1
    assert "already quantized" in again.err.splitlines()[-1]


def test_gpt2_is_written_dense_with_a_notice(run: Run, tmp_path: Path) -> None:
    model = make_model(tmp_path / "gpt2")
    record, outcome = quantized(run, model, tmp_path / "out", "--bits", 3, "--metric", "fisher", "--compare", "none")
    assert record["checkpoint"]["export"] == "dense"  # type: ignore[index]
    assert "Conv1D" in outcome.err
    assert record["predicted_loss_change"] is None
    assert record["frontier"] == []


def test_gptq_rounds_by_text_of_its_own(run: Run, llama: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    quick = ("--metric", "fisher", "--quantizer", "gptq", "--export", "dense", "--compare", "none", "--measure", 0)
    _, outcome = quantized(run, llama, tmp_path / "long", "--bits", 4, *quick)
    assert "gptq rounds by 4 batches of other text than scores are taken on" in outcome.err
    text.write_text("one two three four five six seven eight nine ten " * 12)
    _, outcome = quantized(run, llama, tmp_path / "short", "--bits", 4, *quick, "--data", text)
    assert "predicted rises are too low" in outcome.err


def test_budgets_fixed_formats_and_untied_heads(run: Run, llama: Path, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    weights = r"layers\.|lm_head"
    quick = (
        "--metric",
        "weight_error",
        "--weights",
        weights,
        "--fix",
        "lm_head=8;v_proj=8:16",
        "--no-share",
        "--untie",
    )
    record, _ = quantized(
        run, llama, tmp_path / "out", "--bytes", 560_000, *quick, "--quantizer", "rtn", "--compare", "none"
    )
    chosen = Plan.schemes_in(tmp_path / "out" / "plan.json")
    assert chosen["lm_head.weight"] == Scheme(8)
    assert {s for n, s in chosen.items() if "v_proj" in n} == {Scheme(8, 16)}
    assert (tmp_path / "out" / "model" / "model.safetensors").stat().st_size == record["bytes"] <= 560_000  # type: ignore[operator]
    tight = run("quantize", "--model", llama, *QUICK, "--bytes", 1000, *quick, "--out", tmp_path / "tight")
    assert tight.code == 1
    smallest = int(re.search(r"allow is ([\d,]+),", tight.err).group(1).replace(",", ""))  # type: ignore[union-attr]
    assert 1000 < smallest < 560_000


def test_scores_are_reused(run: Run, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quick = ("--metric", "quadratic", "--export", "dense", "--compare", "none", "--scores", tmp_path / "scores")
    quantized(run, llama, tmp_path / "a", "--bits", 4, *quick)
    import sys

    monkeypatch.setattr(sys.modules["quant.sensitivity"], "_compute", lambda *_: pytest.fail("computed again"))
    record, _ = quantized(run, llama, tmp_path / "b", "--bits", 3, *quick)
    assert record["average_bits"] <= 3  # type: ignore[operator]
    assert record["stability"]["redraws"] == 2  # type: ignore[index]
    capped, _ = quantized(run, llama, tmp_path / "c", "--max-loss-rise", 0.5, *quick)
    assert capped["predicted_loss_change"] <= 0.5  # type: ignore[operator]


def test_gguf_is_written(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2048, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4,
        max_position_embeddings=64, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "m")
    AutoTokenizer.from_pretrained(TINY).save_pretrained(tmp_path / "m")
    arguments = ("--metric", "weight_error", "--export", "gguf", "--bits", 5, "--compare", "none")
    formats = ("--choices", "4,5,8", "--group-size", 32)
    record, _ = quantized(run, tmp_path / "m", tmp_path / "out", *arguments, *formats)
    assert record["checkpoint"]["export"] == "gguf"  # type: ignore[index]
    size = (tmp_path / "out" / "model" / "model.gguf").stat().st_size
    assert size == record["checkpoint"]["bytes"] == record["bytes"]  # type: ignore[index]
    assert {p.name for p in (tmp_path / "out" / "model").iterdir()} == {"model.gguf", "tensor-types.txt"}
    wrong = run("quantize", "--model", tmp_path / "m", *QUICK, "--out", tmp_path / "w", *arguments)
    assert wrong.code == 1
    assert "no GGUF type" in wrong.err.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--bits", 3, "--bytes", 1000), "exactly one budget"),
        (("--params", "mlp"), "--weights"),
        (("--choices", "2,x"), "--choices"),
        (("--choices", "1,4"), "bits must be from 2 to 8"),
        (("--group-size", "0"), "group_size"),
        (("--fix", "lm_head"), "--fix"),
        (("--fix", "nowhere=8"), "matches no weight"),
        (("--weights", "nowhere"), "nowhere"),
        (("--batches", 1, "--bits", 4), "at least 2 calibration batches"),
        (("--batches", 100000), "the text has"),
        (("--eval-data", "missing.txt"), "missing.txt"),
        (("--metric", "uniform", "--bits", 3.5), "uniform"),
        (("--metric", "weight_error", "--compare", "magic"), "magic"),
        (("--export", "gguf", "--choices", "4", "--group-size", 32, "--fix", "down_proj=3:32"), "no GGUF type"),
    ],
    ids=lambda v: "_".join(map(str, v)) if isinstance(v, tuple) else "",
)
def test_bad_input_is_one_line_and_exit_code_1(
    arguments: tuple[object, ...], told: str, run: Run, llama: Path, tmp_path: Path
) -> None:
    outcome = run("quantize", "--model", llama, *QUICK, "--out", tmp_path / "out", *arguments)
    assert outcome.code == 1
    assert outcome.out == ""
    assert told in outcome.err.splitlines()[-1], outcome.err
    assert "Traceback" not in outcome.err
    assert not (tmp_path / "out" / "quantize.json").exists()


def test_nan_in_one_layer_is_named(run: Run, llama: Path, tmp_path: Path) -> None:
    folder = tmp_path / "nan"
    folder.mkdir()
    for path in llama.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][0, 0] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    outcome = run("quantize", "--model", folder, *QUICK, "--out", tmp_path / "out")
    assert outcome.code == 1
    assert "layers.1.mlp.up_proj" in outcome.err.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [(("--compare", "fisher,qadratic"), "--compare: 'qadratic'"), (("--scores", "a-file"), "--scores a-file: cannot")],
    ids=["compare", "scores"],
)
def test_what_needs_no_model_is_refused_ahead_of_it(
    arguments: tuple[str, ...], told: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli.session, "load_model", lambda *_, **__: pytest.fail("the model was loaded first"))
    (tmp_path / "a-file").touch()
    outcome = run("quantize", *QUICK, *arguments)
    assert outcome.code == 1
    assert told in outcome.err.splitlines()[-1]


def test_a_run_that_fails_leaves_the_earlier_one_whole_or_without_records(
    run: Run, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = ("--metric", "uniform", "--export", "dense", "--compare", "none", "--measure", 0)
    out = tmp_path / "out"
    quantized(run, llama, out, "--bits", 4, *quick)
    (out / "model" / "NOTES.md").touch()
    arguments = ("quantize", "--model", llama, *QUICK, "--out", out, *quick, "--bits", 2)

    def contents() -> dict[str, bytes]:
        return {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()}

    before = contents()
    for target, name in ((quant.checkpoint, "_verify"), (quant, "expand")):
        with monkeypatch.context() as patched:
            patched.setattr(target, name, lambda *_, **__: (_ for _ in ()).throw(MemoryError))
            assert run(*arguments).code == 1
        if name == "_verify":
            assert contents() == before
    after = contents()
    assert set(after) == {name for name in before if name.startswith("model/")}
    assert after["model/model.safetensors"] != before["model/model.safetensors"]
    assert [path.name for path in out.iterdir()] == ["model"]


def test_evaluate_records_the_windows_that_it_keeps(run: Run, llama: Path) -> None:
    def evaluated(*arguments: object) -> dict[str, object]:
        return run("evaluate", "--model", llama, "--seq", 16, "--device", "cpu", *arguments, "--json").json

    tokenizer = load_model(str(llama), dtype=torch.float32).tokenizer
    every = token_windows(tokenizer, "sample", 16, 1, 4)
    assert evaluated("--batches", 4)["data"] == every.as_record()
    found = evaluated("--skip", 3, "--batches", 1)
    last = every.batches[3]["input_ids"].numpy().astype("<i8")
    assert found["data"] == {"source": "sample", "tokens": 16, "sha256": hashlib.sha256(last.tobytes()).hexdigest()}
    assert not {"resume", "method", "params"} & set(found["settings"])  # type: ignore[call-overload]


def test_a_perplexity_that_no_float_holds_is_null(run: Run, llama: Path, tmp_path: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(llama)
    with torch.no_grad():
        model.model.norm.weight.mul_(1e4)
    model.save_pretrained(tmp_path / "m")
    AutoTokenizer.from_pretrained(TINY).save_pretrained(tmp_path / "m")
    arguments = ("--model", tmp_path / "m", "--seq", 16, "--device", "cpu", "--batches", 2, "--out", tmp_path)
    outcome = run("evaluate", *arguments)
    assert "more than a float holds" in outcome.out
    record = json.loads((tmp_path / "evaluate.json").read_text())
    assert (record["perplexity"], record["loss"] > np.log(np.finfo(float).max)) == (None, True)


def test_evaluate_is_deterministic_where_asked(run: Run, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(cli.session, "repeat_products", lambda: asked.append(True))
    arguments = ("evaluate", "--model", llama, "--seq", 16, "--device", "cpu", "--batches", 1)
    assert run(*arguments).code == 0
    assert not asked
    assert run(*arguments, "--deterministic").code == 0
    assert asked


def test_evaluate_refuses_what_it_does_not_have(run: Run, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for option, value in (("--params", "x"), ("--method", "whole")):
        outcome = run("evaluate", "--model", llama, option, value, "--device", "cpu")
        assert outcome.code == 1
        assert option in outcome.err
    with monkeypatch.context() as patched:
        patched.setattr(cli.session, "join", lambda: Processes(0, 2))
        several = run("evaluate", "--model", llama, "--device", "cpu")
    assert several.code == 1
    assert "evaluate runs in one process, not in 2" in several.err
    short = run("evaluate", "--model", llama, "--seq", 24, "--batches", 10**6, "--device", "cpu")
    assert short.code == 1
    assert "the text has" in short.err


@pytest.mark.parametrize("name", ["gpt2_quant.yaml", "smollm2_quant.yaml"])
def test_shipped_configurations_are_read(name: str, run: Run, root: Path) -> None:
    outcome = run("quantize", "--config", root / "configs" / name, "--model", "./missing", "--device", "cpu")
    assert outcome.code == 1
    assert "./missing" in outcome.err.splitlines()[-1]


def test_evaluation_on_the_calibration_text_itself_reads_behind_the_calibration(
    llama: Path, tmp_path: Path, run: Run
) -> None:
    pytest.importorskip("compressed_tensors")
    text, link = tmp_path / "text.txt", tmp_path / "the-same.txt"
    text.write_text(" ".join(f"Line {i} of the text tells of {i * i % 97} things." for i in range(300)))
    link.symlink_to(text)
    common = ("--data", text, "--metric", "uniform", "--bits", 4, "--compare", "none", "--measure", 0)
    behind, _ = quantized(run, llama, tmp_path / "a", *common)
    same, _ = quantized(run, llama, tmp_path / "b", *common, "--eval-data", link)
    assert same["loss_before"] == behind["loss_before"]
