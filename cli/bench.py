"""`flashbob-curv bench`: the options of its two commands, and the record that both write row by row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.console import notice
from cli.options import Dtype, Options, bind, check_device

if TYPE_CHECKING:
    from curvature.report import Measurement

__all__ = ["AttentionOptions", "BenchOptions", "ModelOptions", "Precision", "Rows", "app", "integers", "names"]

BACKENDS = ("ours", "math", "closed-form", "three-pass")
ATTENTIONS = ("flashbob", "sdpa", "eager")


class Precision(StrEnum):
    """Dtype of attention's operands."""

    auto = "auto"
    float64 = "float64"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


@dataclass(frozen=True, kw_only=True)
class BenchOptions(Options):
    """What both benchmarks take."""

    device: Annotated[str, typer.Option(callback=check_device, help="auto, cpu, cuda or cuda:INDEX.")] = "auto"
    seed: Annotated[int, typer.Option(min=0, help="Seed of the inputs.")] = 0
    out: Annotated[Path | None, typer.Option(help="JSON file of the rows. [default: runs/bench/COMMAND.json]")] = None
    append: Annotated[bool, typer.Option("--append", help="Keep the rows that --out holds from this machine.")] = False


@dataclass(frozen=True, kw_only=True)
class AttentionOptions(BenchOptions):
    """Options of `bench attention`."""

    dtype: Annotated[Precision, typer.Option(help="`auto`: float32 on a CPU, bfloat16 on a GPU.")] = Precision.auto
    seqs: Annotated[
        str | None, typer.Option(help="Lengths. [default: 256,1024,4096,8192 on a GPU, 128,256,512 on a CPU]")
    ] = None
    dims: Annotated[str, typer.Option(help="Head sizes.")] = "64"
    heads: Annotated[str, typer.Option(help="Heads: H, or QUERY/KEY heads such as 32/8.")] = "12"
    batch: Annotated[int | None, typer.Option(min=1, help="Batch size. [default: 4 on a GPU, 1 on a CPU]")] = None
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Batch 1 where batch times length exceeds this.")] = None
    causal: Annotated[bool, typer.Option("--causal/--full", help="Mask.")] = True
    window: Annotated[int, typer.Option(min=0, help="Keys that a query sees; 0 for all.")] = 0
    backends: Annotated[str, typer.Option(help="Of ours, math, closed-form, three-pass.")] = ",".join(BACKENDS)
    reps: Annotated[int, typer.Option(min=1, help="Timed repetitions at most; two seconds a row, three at least.")] = 20
    tune: Annotated[
        bool, typer.Option("--tune", help="Instead, find tile shapes for this GPU and write them to its launch table.")
    ] = False


@dataclass(frozen=True, kw_only=True)
class ModelOptions(BenchOptions):
    """Options of `bench model`."""

    dtype: Annotated[Dtype, typer.Option(help="`auto`: float32 on a CPU, bfloat16 on a GPU.")] = Dtype.auto
    models: Annotated[
        str | None,
        typer.Option(help="Built-in architectures, or `tiny`. [default: the paper's ten on a GPU, tiny on a CPU]"),
    ] = None
    seqs: Annotated[str | None, typer.Option(help="Lengths. [default: 4096 on a GPU, 256,1024 on a CPU]")] = None
    batch: Annotated[int, typer.Option(min=1, help="Batch size.")] = 1
    attentions: Annotated[str, typer.Option(help="Of flashbob, sdpa, eager.")] = ",".join(ATTENTIONS)
    longest: Annotated[
        bool, typer.Option("--longest", help="After --seqs, double the length until a Hessian product does not fit.")
    ] = False
    reps: Annotated[int, typer.Option(min=1, help="Timed repetitions at most; two seconds a row, one at least.")] = 5
    budget_seconds: Annotated[
        float | None, typer.Option(min=1, help="Start no measurement, and stop the one that runs, after this time.")
    ] = None


def attention(options: AttentionOptions) -> None:
    """Time, rate, memory and error of attention's double backward, ours beside other exact ways.

    A way that is not as accurate as it must be is not timed: its row says so, and the exit code is 1.
    """
    from cli.bench_attention import run, tune

    (tune if options.tune else run)(options)


def model(options: ModelOptions) -> None:
    """Time and memory of forward, backward and Hessian products of whole models with random weights.

    Every measurement has a process of its own. A product that disagrees with the other methods' is marked, and the exit
    code is 1.
    """
    from cli.bench_model import run

    run(options)


app = typer.Typer(
    help="Benchmarks: JSON rows, one per measurement, running out of memory included.", no_args_is_help=True
)
for body in (attention, model):
    app.command(body.__name__)(bind(body))


class Rows:
    """A record that is whole on the disk after every row.

    Args:
        command: "bench attention" or "bench model".
        options: Its options.
        settings: Values in force where they differ from the options.
        device: Where the work runs.
        measurement: The running measurement of the whole command.

    Raises:
        ValueError: If the file cannot be written, or `--append` is given and it is no record of this command on this
            machine.
    """

    def __init__(
        self, command: str, options: BenchOptions, settings: Mapping[str, Any], device: Any, measurement: Measurement
    ) -> None:
        from cli.session import writable_folder
        from curvature.report import environment

        self._command, self._device, self._measurement = command, device, measurement
        self.path = options.out or Path("runs", "bench", f"{command.split()[-1]}.json")
        self._print = notice if options.json else _print
        self._json = options.json
        self._sweeps = [options.as_settings("append", "out") | dict(settings)]
        self.rows: list[dict[str, Any]] = []
        self.not_run: list[str] = []
        self._before, self._peak_before = 0.0, 0
        if self.path.is_dir():
            raise ValueError(f"--out {self.path}: is a folder; name a file, such as {self.path / 'rows.json'}")
        writable_folder(self.path.parent)
        if options.append and self.path.exists():
            self._take_over(_read(self.path, command), environment(device))

    def _take_over(self, earlier: Mapping[str, Any], here: Mapping[str, Any]) -> None:
        if earlier["environment"] != dict(here):
            raise ValueError(
                f"--append: {self.path} was made in another environment ({earlier['environment']}, here {dict(here)}); "
                "choose another --out"
            )
        self.rows, self.not_run = list(earlier["rows"]), list(earlier["not_run"])
        self._sweeps = [*earlier["settings"]["sweeps"], *self._sweeps]
        self._before, self._peak_before = earlier["seconds"], earlier["peak_memory_bytes"]

    def say(self, line: str) -> None:
        """Show a line: on stdout, with --json on stderr."""
        self._print(line)

    def add(self, row: Mapping[str, Any], line: str) -> None:
        """Store a row and show its line."""
        from curvature.report import write_json

        self.rows.append(dict(row))
        write_json(self.path, self.content())
        self.say(line)

    def skip(self, what: str) -> None:
        """Note that the time was up before this was measured."""
        self.not_run.append(what)
        notice(f"no time left for {what}")

    def content(self) -> dict[str, Any]:
        """The record so far. Model and data are null: what varies is in the rows."""
        from cli.session import modelless_record

        content = modelless_record(
            self._command,
            settings={"sweeps": self._sweeps},
            measurement=self._measurement,
            device=self._device,
            results={"rows": self.rows, "not_run": self.not_run},
        )
        content["seconds"] += self._before
        content["peak_memory_bytes"] = max(self._peak_before, content["peak_memory_bytes"])
        return content

    def finish(self, new: Sequence[Mapping[str, Any]]) -> None:
        """Store the record, say where, and end with exit code 1 if a row of this run is wrong.

        Raises:
            typer.Exit: If a row failed or is inaccurate.
        """
        from cli.console import show_json, show_written
        from curvature.report import to_json, write_json

        write_json(self.path, self.content())
        if self._json:
            show_json(to_json(self.content()))
        else:
            show_written([self.path])
        wrong = [row for row in new if row["status"] in ("inaccurate", "failed")]
        if wrong:
            notice(f"{len(wrong)} of {len(new)} rows are wrong: {wrong[0]['backend']}: {wrong[0].get('reason')}")
            raise typer.Exit(1)


def _print(line: str) -> None:
    print(line, flush=True)


def _read(path: Path, command: str) -> dict[str, Any]:
    import json

    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        known = {key: content[key] for key in ("command", "environment", "seconds", "peak_memory_bytes")}
        if not all(isinstance(of, list) for of in (content["rows"], content["not_run"], content["settings"]["sweeps"])):
            raise TypeError
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"--append: {path} is no record of `{command}`; choose another --out") from error
    if known["command"] != command:
        raise ValueError(f"--append: {path} is a record of `{known['command']}`, not of `{command}`; choose another")
    return content


def integers(option: str, text: str, least: int = 1) -> list[int]:
    """The integers of a comma-separated list.

    Raises:
        typer.BadParameter: If there is none, or one is no integer of at least `least`.
    """
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or min(values) < least:
        raise typer.BadParameter(f"{option} takes integers of at least {least}, separated by commas, got {text!r}")
    return values


def names(option: str, text: str, known: Sequence[str]) -> list[str]:
    """The names of a comma-separated list.

    Raises:
        typer.BadParameter: If one is not known.
    """
    found = [part.strip() for part in text.split(",")]
    if unknown := [name for name in found if name not in known]:
        raise typer.BadParameter(f"{option}: {unknown[0]!r} is not one of {', '.join(known)}")
    return found
