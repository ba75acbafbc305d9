"""Running `flashbob-curv` in a test: in this process, or as a user does; and a model small enough for it."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

from cli.main import app

ROOT = Path(__file__).resolve().parents[1]
TINY = ROOT / "configs" / "models" / "tiny-gpt2"


@dataclass(frozen=True)
class Outcome:
    """What a command left behind on its three channels."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        return json.loads(self.out)


Run = Callable[..., Outcome]


def make_model(folder: Path, positions: int = 64) -> Path:
    """A random GPT-2 of 34,000 parameters with the embedded tokenizer, saved to a folder."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=2048, n_positions=positions, n_embd=16, n_layer=2, n_head=2, bos_token_id=None, eos_token_id=None
    )
    GPT2LMHeadModel(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(TINY).save_pretrained(folder)
    return folder


def run_in_process(capsys: pytest.CaptureFixture[str], *arguments: object) -> Outcome:
    """The command line in this process."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        app([str(argument) for argument in arguments], prog_name="flashbob-curv")
    streams = capsys.readouterr()
    return Outcome(int(stop.value.code or 0), streams.out, streams.err)


def start(*arguments: object, folder: Path) -> "subprocess.Popen[str]":
    """The command line in a process of its own, started in `folder`."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "cli", *map(str, arguments)],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
