"""From options to an operator: the folder, the device, the model, the text; and from results to files."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import typer

from cli.console import notice, show_json, show_table, show_written
from cli.failure import at_end, how_to_go_on
from cli.fitting import fitting_streaming
from cli.options import Dtype, Matrix, MatrixOptions, RunOptions
from curvature import FisherOperator, GGNOperator, HessianOperator, LoadedModel, TokenWindows, load_model, token_windows
from curvature.checks import check_operator, symmetry_limit
from curvature.distributed import Processes, join, launched, leave, symmetry_error
from curvature.dtype_policy import PrecisionNote, default_dtype
from curvature.fisher import FisherKind
from curvature.model_operator import ModelOperator
from curvature.report import Measurement, environment, record, to_json, write_bytes, write_json
from curvature.state import RunState, weights_digest
from flashbob import __version__

__all__ = ["Session", "choose_device", "end_if_finished", "join_run", "let_go", "modelless_record", "open_session"]

DEFAULT_SEQ = 1024

NOT_COMPARED = {"origins", "config", "out"}
"""Settings that a continued run may have otherwise: where they were written down, and where the results go."""

COMPARED = ("settings", "model", "data")
"""Sections of the record that make a run what it is."""


@dataclass(frozen=True)
class Session:
    """One run of a command: what it works on, and how its results are stored.

    Attributes:
        command: Name of the command.
        options: As given.
        out: Folder for the results, known to be writable.
        loaded: The model, its tokenizer and the facts about it.
        model: These facts for the record; of a run that keeps a state with the digest of its weights, `weights`.
        windows: The tokens.
        operator: The Hessian, or the curvature matrix that was asked for.
        settings: Every option with the value in force, and `origins`.
        notices: Remarks that belong into the report; each was shown when it arose.
        processes: Who shares the run.
        state: Its saved state; None for commands that keep none.
    """

    command: str
    options: RunOptions
    out: Path
    loaded: LoadedModel
    model: dict[str, Any]
    windows: TokenWindows
    operator: ModelOperator
    settings: dict[str, Any]
    notices: list[str]
    processes: Processes
    state: RunState | None

    @property
    def subject(self) -> str:
        """What the numbers are about, in one line."""
        s, info = self.settings, self.loaded.info
        weights = ", random weights" if info.random_init else ""
        part = f", {self.operator.space.size:,} of them in {s['params']!r}" if s["params"] else ""
        return (
            f"{info.name} ({info.parameters:,} parameters{part}{weights}) on {s['data']}: "
            f"{s['batches']} x {s['batch']} windows of {s['seq']:,} tokens, {s['dtype']} on {self.operator.device}"
        )

    @property
    def label(self) -> str:
        """The same in a few words, for the title of a picture."""
        name, s = self.loaded.info.name, self.settings
        model = name if len(name) <= 40 else Path(name).name
        tokens = " x ".join(f"{s[key]:,}" for key in ("batches", "batch", "seq") if s[key] > 1)
        return f"{model}, {tokens} tokens, {s['dtype']}"

    def remark(self, text: str) -> None:
        """Show a notice and keep it for the report."""
        notice(text)
        self.notices.append(text)

    def loss(self) -> float:
        """The loss; computed once for a run that keeps a state."""
        compute = self.operator.loss_value
        return float(compute() if self.state is None else self.state.fact("loss", compute))

    @property
    def matrix(self) -> Matrix:
        """Which curvature matrix the operator is."""
        return self.options.operator if isinstance(self.options, MatrixOptions) else Matrix.hessian

    def checks(self, *, wanted: bool) -> dict[str, float | None]:
        """Errors of the operator's products, as the record states them.

        Args:
            wanted: Whether all checks are made, and stop the run where they fail; otherwise symmetry alone is checked,
                and a notice says where the error is more than rounding.

        Raises:
            CheckError: If a check that is wanted fails.
        """
        if not wanted:
            return {
                "symmetry_error": self.check_symmetry(),
                "repeatability_error": None,
                "finite_difference_error": None,
            }
        dtype = self.operator.parameters[0].dtype
        differences = self.matrix is Matrix.hessian and dtype in (torch.float32, torch.float64)
        if not differences:
            why = f"in {str(dtype).removeprefix('torch.')}" if self.matrix is Matrix.hessian else f"of {self.matrix}"
            self.remark(f"--check: without differences of gradients, which tell nothing {why}")

        def compute() -> dict[str, float | None]:
            check = partial(check_operator, self.operator, dtype, finite_difference=differences, seed=self.options.seed)
            (found,) = self.processes.share([check])
            return asdict(found)

        found = compute() if self.state is None else self.state.fact("checks", compute)
        return {f"{name}_error": found[name] for name in ("symmetry", "repeatability", "finite_difference")}

    def check_symmetry(self) -> float:
        """The operator's symmetry error; a notice where it is more than rounding."""

        def compute() -> float:
            return symmetry_error(self.operator, self.options.seed, self.processes)

        error = float(compute() if self.state is None else self.state.fact("symmetry_error", compute))
        first = next(self.loaded.model.parameters())
        limit = symmetry_limit(first.dtype, self.operator.space.size, first.device)
        if error > limit:
            self.remark(f"the product is not symmetric: error {error:.1e}, where rounding stays below {limit:.0e}")
        return error

    def precision(self, probes: int | None) -> dict[str, Any]:
        """What the record says about the dtype; a notice where its rounding is not small against the standard error.

        Args:
            probes: Independent probes behind the run's standard error; None where it has none.
        """
        origin = "default" if self.options.dtype is Dtype.auto else self.options.origins.get("dtype", "flag")
        note = PrecisionNote(self.settings["dtype"], self.operator.device.type, origin, probes)
        if note.of_stderr is not None and note.of_stderr >= 1:
            self.remark(
                f"rounding in {note.dtype} may be {note.of_stderr:.1g} times the standard error, by measurement; "
                "choose --dtype float32"
            )
        return note.as_record()

    def record(self, measurement: Measurement, results: Mapping[str, Any]) -> dict[str, Any]:
        """The command's JSON record; its seconds are those of the whole run, with what it took before it continued."""
        content = record(
            self.command,
            model=self.model,
            data=self.windows.as_record(),
            settings=self.settings,
            measurement=measurement,
            device=self.operator.device,
            results={**results, "notices": self.notices},
        )
        content["seconds"] += self.state.seconds_before if self.state else 0.0
        content["environment"]["processes"] = self.processes.count
        return content

    def finish(
        self, content: Mapping[str, Any], table: list[tuple[str, str]], files: Mapping[str, bytes | str] | None = None
    ) -> None:
        """Store the files, the record last, and show the result: JSON alone with --json, else a short table.

        A record that is there therefore means that the whole run's files are. Then the state is no longer needed.
        """
        paths = [self.out / name for name in (*(files or {}), f"{self.command}.json")]

        def store() -> None:
            if not self.processes.leads:
                return
            try:
                for path, body in zip(paths, (files or {}).values(), strict=False):
                    write_bytes(path, body.encode("utf-8") if isinstance(body, str) else body)
                write_json(paths[-1], content)
            except OSError as error:
                reason = error.strerror or str(error)
                raise ValueError(f"--out {self.out}: the results cannot be written ({reason}); make room") from error
            if self.state is not None:
                self.state.remove()
                with suppress(OSError):  # another command's state lies beside it
                    self.state.folder.parent.rmdir()
                how_to_go_on.set("")

        self.processes.together(store)
        if self.options.json:
            show_json(to_json(content))
            return
        show_table(table, title=self.subject)
        show_written(paths)


def open_session(command: str, options: RunOptions, *, long: bool = False) -> Session:
    """Check the folder and the device, then load the model and the text and build the Hessian.

    Args:
        command: Name of the command, which names the default folder and the record.
        options: The command's options.
        long: Whether the command shares its work among the processes of a launcher such as torchrun, and keeps a state
            in the folder `state` of --out from which it can go on.

    Raises:
        ValueError: For any of the bad inputs that a user can give; the message names value and remedy.
    """
    processes = join_run(command, long=long)
    return processes.together(lambda: _open_session(command, options, processes, long))


def join_run(command: str, *, long: bool = False) -> Processes:
    """The processes of a launcher such as torchrun that share the run, until the command ends.

    Args:
        command: Name of the command.
        long: Whether it shares its work.

    Raises:
        ValueError: If it does not, and there are several.
    """
    at_end(leave)
    processes = join()
    if processes.count > 1 and not long:
        raise ValueError(f"{command} runs in one process, not in {processes.count}; start it without torchrun")
    return processes


def _open_session(command: str, options: RunOptions, processes: Processes, long: bool) -> Session:
    out = options.out or Path("runs") / command
    if processes.leads:
        writable_folder(out)
    device = choose_device(options.device)
    if options.deterministic:
        repeat_products()
    dtype = choose_dtype(options.dtype, device, options.most_probes, options.residual, options.stop)
    loaded = load_model(
        options.model,
        random_init=options.random_init,
        dtype=dtype,
        device=device,
        seq=options.seq,
        extend_positions=options.extend_positions.value,
        seed=options.seed,
    )
    seq = options.seq or min(DEFAULT_SEQ, own_context(loaded))
    windows = token_windows(loaded.tokenizer, options.data, seq, options.batch, options.batches)
    operator = build_operator(options, loaded, windows)
    if operator.method_reason is not None:
        loaded.notices.append(f"products go through the graph of the whole model, since {operator.method_reason}")
    settings = options.as_settings("resume") | {
        "seq": seq,
        "dtype": loaded.info.dtype,
        "device": str(operator.device),
        "method": operator.method,
        "out": out,
    }
    for text in loaded.notices:
        notice(text)
    show_given(settings)
    model, state = loaded.info.as_record(), None
    if long:
        if processes.leads:
            model["weights"] = weights_digest(loaded.model)
        facts = {"command": command, "settings": settings, "model": model, "data": windows.as_record()}
        state = _open_state(out, facts, options.resume, operator.device, processes)
    elif options.resume:
        notice(keeps_no_state(command))
    notices = list(loaded.notices)
    return Session(command, options, out, loaded, model, windows, operator, settings, notices, processes, state)


def show_given(settings: Mapping[str, Any]) -> None:
    """A notice of the settings that were given, and where."""
    origins = settings["origins"].items()
    if given := [f"{name} {settings[name]} ({origin})" for name, origin in origins if origin != "default"]:
        notice(f"settings: {', '.join(given)}; all others by default")


def keeps_no_state(command: str) -> str:
    """What is said of --resume where there is no state."""
    return f"{command} keeps no state: --resume has nothing to go on from, it starts anew"


def let_go(state: RunState) -> None:
    """Leave a run's state as it is; where nothing is saved in it, remove it with the folders made for it."""
    state.withdraw()
    with suppress(OSError):  # the parent holds this command's state, or another's
        state.folder.parent.rmdir()


def end_if_finished(out: Path, facts: Mapping[str, Any]) -> None:
    """End a command that is to resume a run which has come to its end: nothing is left to do, and nothing is replaced.

    Args:
        out: The folder of its results.
        facts: What the record must say: `command`, and fields of `settings`, `model` and `data`. A field that the
            record does not have is passed over, since an earlier version may have written it.

    Raises:
        typer.Exit: With 0, if the folder holds the results of the same settings, model and text.
        ValueError: If it holds those of others, or the record is damaged.
    """
    path = out / f"{facts['command']}.json"
    if not path.is_file():
        return
    wanted, found = json.loads(to_json(facts)), _finished(path)
    differing = [
        f"{section}.{name} was {found[section][name]}, is {value}"
        for section in COMPARED
        for name, value in wanted[section].items()
        if name not in NOT_COMPARED and found[section].get(name, value) != value
    ]
    if differing:
        raise ValueError(
            f"--resume: the run in {out} has ended ({path.name}), and it was another one ({'; '.join(differing)}); "
            "leave out --resume to replace its results, or choose another --out"
        )
    notice(f"the run in {out} has ended ({path.name}): nothing is left to do; without --resume it is run again")
    raise typer.Exit(0)


def _finished(path: Path) -> dict[str, Any]:
    """The record of a run that has ended."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not all(isinstance(content[section], dict) for section in COMPARED):
            raise TypeError
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"--resume: {path} is damaged, no record of a run that has ended; leave out --resume to replace it, or "
            "choose another --out"
        ) from error
    found: dict[str, Any] = content
    return found


def modelless_record(command: str, **facts: Any) -> dict[str, Any]:
    """The record of a command that is not about one model on one text: both are null; see `curvature.report.record`."""
    return record(command, model={}, data={}, **facts) | {"model": None, "data": None}


def _open_state(
    out: Path, facts: Mapping[str, Any], resume: bool, device: torch.device, processes: Processes
) -> RunState:
    """Continue or begin the state of a run with these facts (see `end_if_finished`), and say which."""
    versions = {"flashbob-curv": __version__, **environment(device)}
    if device.type == "cpu":
        versions["threads"] = torch.get_num_threads()  # how sums on a CPU are rounded depends on it
    compared = {name: value for name, value in facts["settings"].items() if name not in NOT_COMPARED}
    folder = out / "state" / facts["command"]
    identity = {**facts, "settings": compared, "environment": versions}
    state = RunState.open(folder, identity, resume=resume, processes=processes)
    at_end(partial(let_go, state))
    saved = f"the state is saved in {folder}: the same command with --resume goes on from there"
    how_to_go_on.set(lambda: "" if state.empty else saved)
    if state.replaced is not None:
        notice(
            f"{folder} held the state of a run that did not end; this run starts anew without --resume, and that state "
            f"is now {state.replaced} until this run ends"
        )
    if resume and not state.resumed:
        end_if_finished(out, facts)
        notice(f"there is no state in {folder} to go on from; this run starts anew")
    elif state.resumed:
        notice(f"going on from {folder}, after {state.seconds_before:.1f} s")
    return state


def repeat_products() -> None:
    """Have PyTorch choose algorithms that repeat their results, on GPUs too."""
    # cuBLAS reads it when it is first used.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # Its check for reads of memory that nothing has written costs time, and changes no result.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def build_operator(options: RunOptions, loaded: LoadedModel, windows: TokenWindows) -> ModelOperator:
    """The curvature matrix that the options ask for."""
    matrix = options.operator if isinstance(options, MatrixOptions) else Matrix.hessian
    given: dict[str, Any] = {"params": options.params, "method": options.method.value}
    if matrix is Matrix.hessian:
        if options.params is None:
            rows, seq = windows.batches[0]["input_ids"].shape
            device = next(loaded.model.parameters()).device
            given["streaming"], remark = fitting_streaming(
                loaded, seq=seq, batch=rows, method=options.method.value, device=device
            )
            if remark:
                loaded.notices.append(remark)
        return HessianOperator(loaded.model, windows.batches, **given)
    if matrix is Matrix.ggn:
        return GGNOperator(loaded.model, windows.batches, **given)
    kind: FisherKind = "empirical" if matrix is Matrix.empirical_fisher else "monte-carlo"
    samples = options.samples if isinstance(options, MatrixOptions) else 1
    return FisherOperator(loaded.model, windows.batches, kind=kind, samples=samples, seed=options.seed, **given)


def writable_folder(path: Path, option: str = "--out") -> Path:
    """The folder, made if need be, after a trial write.

    Args:
        path: The folder.
        option: What it was given by.

    Raises:
        ValueError: If nothing can be written there.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        trial = path / ".writable"
        trial.touch()
        trial.unlink()
    except OSError as error:
        raise ValueError(f"{option} {path}: cannot be written ({error.strerror}); choose another folder") from error
    return path


def choose_device(name: str) -> torch.device:
    """The device of that name; "auto" is a GPU where there is one, else the CPU.

    Of several processes on this machine each takes the GPU of its own number.

    Raises:
        ValueError: If it is a GPU that this machine does not have, or one for several processes.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    _, processes, local = launched()
    if name == "cpu" or (name == "auto" and not count):
        return torch.device("cpu")
    device = torch.device("cuda" if name == "auto" else name)
    if processes > 1 and device.index is not None:
        raise ValueError(f"--device {name}: {processes} processes would share one GPU; choose --device cuda")
    index = local if device.index is None else device.index
    if index >= count:
        there = f"PyTorch sees {count} CUDA GPU{'s' if count > 1 else ''}" if count else "PyTorch sees no CUDA GPU here"
        wanted = f", and process {local} of this machine wants one of its own" if processes > 1 and count else ""
        raise ValueError(f"--device {name}: {there}{wanted}; choose --device {'cuda:0' if count else 'cpu'} or auto")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def choose_dtype(
    name: Dtype,
    device: torch.device,
    probes: int = 1,
    residual: float | None = None,
    stop: tuple[float, int] | None = None,
) -> torch.dtype:
    """The dtype of that name; "auto" follows `curvature.dtype_policy.default_dtype`, whose arguments these are."""
    if name is Dtype.auto:
        return default_dtype(device, probes, residual, stop)
    return {Dtype.float64: torch.float64, Dtype.float32: torch.float32, Dtype.bfloat16: torch.bfloat16}[name]


def own_context(loaded: LoadedModel) -> int:
    """Positions that the model was made for; without a limit, the default window."""
    context = getattr(loaded.model.config.get_text_config(), "max_position_embeddings", None)
    return int(context or DEFAULT_SEQ)
