"""Records of runs: files that are whole or not there, and the facts about environment, time and memory."""

from __future__ import annotations

import json
import math
import os
import platform
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, is_dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flashbob import __version__

__all__ = ["Measurement", "environment", "record", "write_bytes", "write_json", "write_text"]


def write_bytes(path: str | Path, content: bytes) -> None:
    """Write a file so that a reader finds the whole of it or none of it.

    The bytes go to a hidden name beside it, reach the disk, and take the final name by one rename. An interruption at
    any moment leaves the earlier file, if there was one; what a killed process leaves under the hidden name, the next
    write of the same file replaces.

    Args:
        path: Where to write; its folder must exist.
        content: What to write.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.part")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(FileNotFoundError):
            temporary.unlink()
        raise


def write_text(path: str | Path, content: str) -> None:
    """Write a UTF-8 text file whole or not at all; see `write_bytes`."""
    write_bytes(path, content.encode("utf-8"))


def write_json(path: str | Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file whole or not at all; see `write_bytes`.

    Dataclasses, numpy numbers and arrays, small tensors, paths and dtypes become plain JSON. JSON has no NaN and no
    infinity: a value that does not exist is None in the record, and anything else that is not finite is an error.

    Raises:
        ValueError: If a number is not finite; the message names its place.
        TypeError: If a value has no JSON form.
    """
    write_text(path, to_json(content))


def to_json(content: Mapping[str, Any]) -> str:
    """The text that `write_json` writes."""
    return json.dumps(_plain(content, ""), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _plain(value: Any, place: str) -> Any:
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float | np.floating):
        if not math.isfinite(value):
            raise ValueError(f"record: {place.lstrip('.') or 'the value'} is {value}, which JSON cannot hold")
        return float(value)
    if isinstance(value, np.integer | np.bool_):
        return value.item()
    if isinstance(value, Path | torch.dtype | torch.device):
        return str(value).removeprefix("torch.")
    if isinstance(value, np.ndarray | Tensor):
        return _plain(value.tolist(), place)
    if is_dataclass(value) and not isinstance(value, type):
        return _plain(asdict(value), place)
    if isinstance(value, Mapping):
        return {str(k): _plain(v, f"{place}.{k}") for k, v in value.items()}
    if isinstance(value, Sequence):
        return [_plain(v, f"{place}[{i}]") for i, v in enumerate(value)]
    raise TypeError(f"record: {place.lstrip('.')} is a {type(value).__name__}, which has no JSON form")


def environment(device: torch.device | str = "cpu") -> dict[str, Any]:
    """Versions and the device, as every record states them."""
    device = torch.device(device)
    named = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "transformers": _version("transformers"),
        "device": f"{device.type}: {named}",
    }


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


class Measurement:
    """Wall time and peak memory of a `with` block.

    Attributes:
        seconds: Wall time; still running inside the block.
        peak_memory_bytes: On a GPU the most that PyTorch had allocated there during the block; on the CPU the most
            resident memory that the process has had so far.

    Args:
        device: The device that does the work.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device)
        self._started = time.perf_counter()
        self._ended: float | None = None
        self._peak: int | None = None

    def __enter__(self) -> Measurement:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
        self._started, self._ended, self._peak = time.perf_counter(), None, None
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._device.type == "cuda" and kind is None:
            torch.cuda.synchronize(self._device)
        self._ended, self._peak = time.perf_counter(), self._current_peak()

    @property
    def seconds(self) -> float:
        """Wall time of the block."""
        return (self._ended or time.perf_counter()) - self._started

    @property
    def peak_memory_bytes(self) -> int:
        """Peak memory of the block; see the class."""
        return self._current_peak() if self._peak is None else self._peak

    def _current_peak(self) -> int:
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._device))
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return resident if sys.platform == "darwin" else resident * 1024


def record(
    command: str,
    *,
    model: Mapping[str, Any],
    data: Mapping[str, Any],
    settings: Mapping[str, Any],
    measurement: Measurement,
    device: torch.device | str,
    results: Mapping[str, Any],
) -> dict[str, Any]:
    """The record of one run: the fields that every command writes, then its results.

    Args:
        command: Name of the command.
        model: `ModelInfo.as_record()`.
        data: `TokenWindows.as_record()`.
        settings: Every setting of the run.
        measurement: Time and memory of the work.
        device: Where it ran.
        results: The command's own fields.

    Raises:
        ValueError: If a result has the name of a common field.
    """
    common = {
        "command": command,
        "version": __version__,
        "model": dict(model),
        "data": dict(data),
        "settings": dict(settings),
        "environment": environment(device),
        "seconds": measurement.seconds,
        "peak_memory_bytes": measurement.peak_memory_bytes,
    }
    if taken := sorted(common.keys() & results.keys()):
        raise ValueError(f"results: {taken} are names of common fields")
    return common | dict(results)
