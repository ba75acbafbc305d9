"""From options to an operator: the folder, the device, the model, the text; and from results to files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cli.console import notice, show_json, show_table, show_written
from cli.options import Dtype, RunOptions
from curvature import HessianOperator, LoadedModel, TokenWindows, load_model, token_windows
from curvature.report import Measurement, record, to_json, write_bytes, write_json

__all__ = ["Session", "choose_device", "open_session"]

DEFAULT_SEQ = 1024


@dataclass(frozen=True)
class Session:
    """One run of a command: what it works on, and how its results are stored.

    Attributes:
        command: Name of the command.
        options: As given.
        out: Folder for the results, known to be writable.
        loaded: The model, its tokenizer and the facts about it.
        windows: The tokens.
        operator: The Hessian.
        settings: Every option with the value in force, and `origins`.
        notices: Remarks that belong into the report; each was shown when it arose.
    """

    command: str
    options: RunOptions
    out: Path
    loaded: LoadedModel
    windows: TokenWindows
    operator: HessianOperator
    settings: dict[str, Any]
    notices: list[str]

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

    def check_symmetry(self) -> float:
        """The operator's symmetry error; a notice where it is more than rounding."""
        error = self.operator.symmetry_error(self.options.seed)
        limit = symmetry_limit(next(self.loaded.model.parameters()).dtype, self.operator.space.size)
        if error > limit:
            self.remark(f"the product is not symmetric: error {error:.1e}, where rounding stays below {limit:.0e}")
        return error

    def record(self, measurement: Measurement, results: Mapping[str, Any]) -> dict[str, Any]:
        """The command's JSON record."""
        return record(
            self.command,
            model=self.loaded.info.as_record(),
            data=self.windows.as_record(),
            settings=self.settings,
            measurement=measurement,
            device=self.operator.device,
            results={**results, "notices": self.notices},
        )

    def finish(
        self, content: Mapping[str, Any], table: list[tuple[str, str]], files: Mapping[str, bytes | str] | None = None
    ) -> None:
        """Store the files, the record last, and show the result: JSON alone with --json, else a short table.

        A record that is there therefore means that the whole run's files are.
        """
        paths = []
        for name, body in (files or {}).items():
            paths.append(self.out / name)
            write_bytes(paths[-1], body.encode("utf-8") if isinstance(body, str) else body)
        paths.append(self.out / f"{self.command}.json")
        write_json(paths[-1], content)
        if self.options.json:
            show_json(to_json(content))
            return
        show_table(table, title=self.subject)
        show_written(paths)


def open_session(command: str, options: RunOptions) -> Session:
    """Check the folder and the device, then load the model and the text and build the Hessian.

    Args:
        command: Name of the command, which names the default folder and the record.
        options: The command's options.

    Raises:
        ValueError: For any of the bad inputs that a user can give; the message names value and remedy.
    """
    out = writable_folder(options.out or Path("runs") / command)
    device = choose_device(options.device)
    dtype = choose_dtype(options.dtype, device)
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
    operator = HessianOperator(loaded.model, windows.batches, params=options.params, method=options.method.value)
    values = {name: value for name, value in vars(options).items() if name not in ("json", "debug", "origins")}
    in_force = {
        "seq": seq,
        "dtype": loaded.info.dtype,
        "device": str(operator.device),
        "method": operator.method,
        "out": out,
    }
    origins = {name: origin for name, origin in options.origins.items() if name in values}
    settings = {**values, **in_force, "origins": origins}
    for text in loaded.notices:
        notice(text)
    if given := [f"{name} {settings[name]} ({origin})" for name, origin in origins.items() if origin != "default"]:
        notice(f"settings: {', '.join(given)}; all others by default")
    return Session(command, options, out, loaded, windows, operator, settings, list(loaded.notices))


def symmetry_limit(dtype: torch.dtype, size: int) -> float:
    """Symmetry error above which a product is wrong and not only rounded.

    The error reads as the relative error of a product. Measured on trained models (704 to 134 million parameters, all
    dtypes, 8,192 tokens at most) it stays below 45 eps, in bfloat16 below 15 eps, in float64 below 0.4 eps sqrt(P),
    where the two inner products themselves round. A second derivative wrong by 1e-3 shows in float32 and float64.
    """
    eps = torch.finfo(dtype).eps
    return (30 if dtype == torch.bfloat16 else 300) * eps + 4 * torch.finfo(torch.float64).eps * math.sqrt(size)


def writable_folder(path: Path) -> Path:
    """The folder, made if need be, after a trial write.

    Raises:
        ValueError: If nothing can be written there.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        trial = path / ".writable"
        trial.touch()
        trial.unlink()
    except OSError as error:
        raise ValueError(f"--out {path}: cannot be written ({error.strerror}); choose another folder") from error
    return path


def choose_device(name: str) -> torch.device:
    """The device of that name; "auto" is the first GPU where there is one, else the CPU.

    Raises:
        ValueError: If it is a GPU that this machine does not have.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        return torch.device("cuda", 0) if count else torch.device("cpu")
    device = torch.device(name)
    if device.type == "cuda":
        index = device.index or 0
        if index >= count:
            there = (
                f"PyTorch sees {count} CUDA GPU{'s' if count > 1 else ''}" if count else "PyTorch sees no CUDA GPU here"
            )
            raise ValueError(f"--device {name}: {there}; choose --device {'cuda:0' if count else 'cpu'} or auto")
        return torch.device("cuda", index)
    return device


def choose_dtype(name: Dtype, device: torch.device) -> torch.dtype:
    """The dtype of that name; "auto" is bfloat16 on a GPU and float32 on a CPU."""
    if name is Dtype.auto:
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {Dtype.float64: torch.float64, Dtype.float32: torch.float32, Dtype.bfloat16: torch.bfloat16}[name]


def own_context(loaded: LoadedModel) -> int:
    """Positions that the model was made for; without a limit, the default window."""
    context = getattr(loaded.model.config.get_text_config(), "max_position_embeddings", None)
    return int(context or DEFAULT_SEQ)
