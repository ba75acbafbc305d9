"""Running `flashbob-curv` in a test: in this process, or as a user does; and a model small enough for it."""

import json
import multiprocessing
import os
import signal
import socket
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
        preexec_fn=_hear_interrupts,
    )


def _hear_interrupts() -> None:
    """Tests in the background of a shell inherit deafness to Ctrl-C, and so would their processes."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


CHILDREN = multiprocessing.get_context("forkserver")
CHILDREN.set_forkserver_preload(
    ["cli.session", "transformers.models.gpt2.modeling_gpt2", "command_line", "saved_estimates"]
)


class Child:
    """The command line in a process that can be killed; it starts in a moment, since the imports are done before.

    Args:
        arguments: Of the command.
        folder: Where it runs. Its stdout and stderr go to files there.
        processes: (rank, number of processes, port) as a launcher tells them, or None.
        before: Called in the process ahead of the command, to sabotage it.
    """

    def __init__(
        self,
        *arguments: object,
        folder: Path,
        processes: tuple[int, int, int] | None = None,
        before: Callable[[], None] | None = None,
    ) -> None:
        name = f"process-{processes[0] if processes else 0}"
        self._out, self._err = folder / f"{name}.out", folder / f"{name}.err"
        self._err.unlink(missing_ok=True)
        given = (list(map(str, arguments)), folder, self._out, self._err, processes, before)
        self.process = CHILDREN.Process(target=_child, args=given)
        self.process.start()

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.join()

    def end(self, timeout: float = 300) -> Outcome:
        """Wait for its end."""
        self.process.join(timeout)
        if self.process.exitcode is None:
            self.kill()
            pytest.fail(f"still running after {timeout} s: {self._err.read_text()}")
        return Outcome(self.process.exitcode, self._out.read_text(), self.err)

    @property
    def err(self) -> str:
        """Its stderr so far."""
        return self._err.read_text() if self._err.exists() else ""


def _child(
    arguments: list[str],
    folder: Path,
    out: Path,
    err: Path,
    processes: tuple[int, int, int] | None,
    before: Callable[[], None] | None,
) -> None:
    os.chdir(folder)
    sys.stdout, sys.stderr = out.open("w"), err.open("w")
    torch.set_num_threads(1)
    if processes is not None:
        rank, count, port = map(str, processes)
        os.environ |= {"RANK": rank, "WORLD_SIZE": count, "LOCAL_RANK": rank}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    if before is not None:
        before()
    try:
        app(arguments, prog_name="flashbob-curv")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def result(folder: Path, command: str) -> dict[str, Any]:
    """A run's record without what two runs of the same thing may differ in: time, memory, number of processes."""
    record = json.loads((folder / f"{command}.json").read_text())
    del record["seconds"], record["peak_memory_bytes"], record["environment"]["processes"], record["settings"]["out"]
    return record
