"""The state of a long run in a folder: saved as it goes, found whole after any interruption, refused by another run.

    state.json                what run it is (identity), and facts that need not be computed again
    PART/part.json            how far one part has come, and which of the files beside it belong to that
    PART/000012.safetensors   its numbers: samples, or Lanczos vectors, in pieces that are only ever added

A part's JSON file is replaced in one step after the files that it names have reached the disk, and a file that it names
is never written again. Whatever moment a run ends at, the part is as of its last save.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn

from curvature.distributed import ALONE, Processes
from curvature.linear_operator import LinearOperator
from curvature.report import to_json, write_bytes, write_json
from curvature.vectors import ParameterSpace

__all__ = ["Part", "RunState", "Saved", "StateError", "fingerprint", "weights_digest"]

_FORMAT = 1

_SHARE = 0.1
"""Largest share of the time that saving may take, beyond which saves are spaced out."""


class StateError(ValueError):
    """A state that does not fit the run, is damaged, in use, or cannot be written."""


@dataclass(frozen=True)
class Saved:
    """What one save holds.

    Attributes:
        progress: How far the part has come: numbers and words for the JSON file.
        tensors: The numbers of this save.
        append: Whether they are added to those of earlier saves; otherwise they replace them.
    """

    progress: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    append: bool = False


class Part:
    """The saved state of one part of a run: of one estimate, or of one Lanczos run.

    It is saved after each product, or, where writing takes long against a product (a Lanczos vector of a large model),
    as often as costs a tenth of the time; and in any case when the part ends, be it by an error or by a signal.

    Args:
        folder: Its folder.
        arguments: What the part computes; a saved state of other arguments is refused.
        clock: Seconds that the run has taken so far.

    Attributes:
        progress: The progress as of the last save, or None where nothing is saved.
        pieces: The saved tensors, one mapping per piece.
        seconds: Seconds that the run had taken at the last save.

    Raises:
        StateError: If the saved state is of other arguments, or damaged.
    """

    def __init__(self, folder: Path, arguments: Mapping[str, Any], clock: Callable[[], float]) -> None:
        self._folder, self._clock = folder, clock
        self._arguments = _plain(arguments)
        self._files: list[str] = []
        self._number = 0
        self._pending: Callable[[], Saved] | None = None
        self._last, self._cost = -math.inf, 0.0
        self.progress: dict[str, Any] | None = None
        self.seconds = 0.0
        content = _read(folder / "part.json", ("arguments", "progress", "files", "number", "seconds"))
        if content is not None:
            _refuse_difference(folder, content["arguments"], self._arguments)
            self.progress, self._files, self._number = content["progress"], content["files"], content["number"]
            self.seconds = content["seconds"]

    @property
    def pieces(self) -> Iterator[dict[str, Tensor]]:
        """The saved pieces in the order in which they were saved, on the CPU, read one after the other."""
        for name in self._files:
            try:
                yield load_file(self._folder / name)
            except (OSError, SafetensorError) as error:
                raise StateError(
                    f"state {self._folder / name}: damaged ({error}); start anew without --resume"
                ) from error

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Whatever ends the body, what was offered last is saved."""
        try:
            yield
        finally:
            self.flush()

    def offer(self, snapshot: Callable[[], Saved]) -> None:
        """Save, unless saving so soon again would cost too much; then the snapshot waits for the next offer.

        Args:
            snapshot: Makes what is to be saved. It is called now or later, once or never, and must then give the state
                as of this offer, or as of a later one.
        """
        self._pending = snapshot
        if time.monotonic() - self._last >= self._cost * (1 / _SHARE - 1):
            self.flush()

    def flush(self) -> None:
        """Save what was offered last, if it is not saved yet."""
        if self._pending is not None:
            started = time.monotonic()
            self._save(self._pending())
            self._pending = None
            self._last = time.monotonic()
            self._cost = self._last - started

    def _save(self, saved: Saved) -> None:
        files = list(self._files) if saved.append else []
        try:
            self._folder.mkdir(exist_ok=True)
            if saved.tensors:
                files.append(f"{self._number:06d}.safetensors")
                tensors = {name: t.detach().cpu().contiguous() for name, t in saved.tensors.items()}
                write_bytes(self._folder / files[-1], save(tensors))
            self.seconds = self._clock()
            content = {
                "arguments": self._arguments,
                "progress": saved.progress,
                "files": files,
                "number": self._number + 1,
                "seconds": self.seconds,
            }
            write_json(self._folder / "part.json", content)
            _sync(self._folder)
        except OSError as error:
            kept = "what was saved before is intact" if self._files else "nothing was saved before"
            raise StateError(
                f"state {self._folder}: cannot be written ({error.strerror or error}); {kept}; make room, then go on "
                "with --resume"
            ) from error
        dropped, self._files, self._number = set(self._files) - set(files), files, self._number + 1
        self.progress = dict(saved.progress)
        for name in dropped:
            (self._folder / name).unlink(missing_ok=True)


@dataclass
class RunState:
    """The folder that holds the state of one run; made by `open`.

    Attributes:
        folder: Where.
        resumed: Whether an earlier run's state was found and is continued.
        replaced: Where another state that was in the way has been moved to, or None.
        facts: Results that need not be computed again, by name; see `fact`.
    """

    folder: Path
    resumed: bool
    replaced: Path | None
    facts: dict[str, Any]
    _identity: dict[str, Any]
    _processes: Processes
    _before: float = 0.0
    _opened: float = field(default_factory=time.perf_counter)
    _lock: int | None = None
    _prefix: str = ""
    _given: set[str] = field(default_factory=set)

    @classmethod
    def open(
        cls, folder: str | Path, identity: Mapping[str, Any], *, resume: bool = False, processes: Processes = ALONE
    ) -> RunState:
        """Continue the state in a folder, or begin one there.

        Args:
            folder: The folder; made if need be.
            identity: What makes the run what it is (settings, model, data, versions), as JSON values. A saved state of
                another identity is refused.
            resume: Whether to continue a state that is there. Otherwise such a state is moved aside, to the name with
                ".previous" at its end, which replaces an earlier one of that name.
            processes: Who shares the run, and the folder.

        Raises:
            StateError: If the state is another run's, is in use by a running process, is damaged, or cannot be written;
                the message names what differs, or what to do.
        """
        folder, identity = Path(folder), _plain(identity)
        opened: list[RunState] = []

        def begin() -> None:
            if processes.leads:
                opened.append(_begin(folder, identity, resume, processes))

        processes.together(begin)
        if not opened:
            facts = (_read(folder / "state.json") or {})["facts"]
            opened.append(cls(folder, resume, None, facts, identity, processes))
        state = opened[0]
        seconds = [c["seconds"] for path in folder.glob("*/part.json") if (c := _read(path, ("seconds",)))]
        state._before = max(seconds, default=0.0) if state.resumed else 0.0
        return state

    def named(self, name: str) -> RunState:
        """The same state with parts of its own: for a second estimate of a kind, or for another operator.

        Args:
            name: What the names of its parts begin with; letters, digits, `-` and `_`.
        """
        if not name or not name.replace("-", "").replace("_", "").isalnum():
            raise ValueError(f"name must be of letters, digits, - and _, got {name!r}")
        return replace(self, _prefix=f"{self._prefix}{name}-")

    def part(self, name: str, op: LinearOperator | None, arguments: Mapping[str, Any]) -> Part:
        """The state of one part of the run; see `Part`.

        Args:
            name: Its name.
            op: The operator that it is about, if any: one of another kind, or over another space, is refused.
            arguments: What it computes, beside that.

        Raises:
            StateError: If this part has been given out before: the second estimate would go on with the first one's
                numbers.
        """
        name = self._prefix + name
        if name in self._given:
            raise StateError(
                f"state {self.folder}: {name!r} has been estimated with it already; give another estimate "
                "`state=state.named(...)`, or open the state anew to do the same one again"
            )
        self._given.add(name)
        about = {} if op is None else {"operator": op.identity(), "space": fingerprint(op.space)}
        return Part(self.folder / name, {**arguments, **about}, self.elapsed)

    def fact(self, name: str, compute: Callable[[], Any]) -> Any:
        """A result (a JSON value) that is computed once and then saved; every process must ask for it."""
        if name not in self.facts:
            self.facts[name] = compute()
            if self._processes.leads:
                _write_state(self.folder, self._identity, self.facts)
        return self.facts[name]

    def elapsed(self) -> float:
        """Seconds that the run has taken so far: those before the last save, and those of this process."""
        return self._before + time.perf_counter() - self._opened

    @property
    def seconds_before(self) -> float:
        """Seconds that the run had taken when it was last saved, before this process continued it."""
        return self._before

    def remove(self) -> None:
        """Remove the state, and the one that it had replaced: the run's results are written."""
        if self._processes.leads:
            _remove(self.folder)
            _remove(_previous(self.folder))
            self.close()

    @property
    def empty(self) -> bool:
        """Whether nothing is saved yet that a run could go on from."""
        return not self.facts and not list(self.folder.glob("*/part.json"))

    def withdraw(self) -> None:
        """Let go of the folder; a state that is empty is removed, and the one that it had replaced comes back."""
        if self._lock is not None and self.empty:
            _remove(self.folder)
            if self.replaced is not None:
                self.replaced.rename(self.folder)
        self.close()

    def close(self) -> None:
        """Let go of the folder; the state stays."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def fingerprint(space: ParameterSpace) -> dict[str, Any]:
    """What tells one space of vectors from another: its blocks' names and shapes (hashed), its size and dtype."""
    names = json.dumps([[b.name, list(b.shape)] for b in space.blocks])
    return {
        "parameters": space.size,
        "blocks": hashlib.sha256(names.encode()).hexdigest()[:16],
        "dtype": str(space.dtype).removeprefix("torch."),
    }


def weights_digest(model: nn.Module) -> str:
    """SHA-256 of all parameters and buffers, names and values. Cost: one read of them, through the CPU."""
    digest = hashlib.sha256()
    for name, t in sorted(model.state_dict(keep_vars=True).items()):
        values = t.detach().reshape(-1).contiguous().cpu()
        digest.update(f"{name} {t.dtype} {tuple(t.shape)};".encode())
        digest.update(memoryview(values.view(torch.uint8).numpy()))
    return digest.hexdigest()


def _begin(folder: Path, identity: dict[str, Any], resume: bool, processes: Processes) -> RunState:
    try:
        try:
            found = _read(folder / "state.json", ("format",))
        except StateError:
            if resume:
                raise
            found = {}  # damaged, and to be moved aside
        replaced = None
        if found is not None:
            lock = _locked(folder)
            if resume:
                try:
                    _refuse_format(folder, found)
                    _refuse_difference(folder, found["identity"], identity)
                    _remove_temporary(folder)
                except BaseException:
                    os.close(lock)
                    raise
                return RunState(folder, True, None, found["facts"], identity, processes, _lock=lock)
            os.close(lock)
            replaced = _previous(folder)
            _remove(replaced)
            folder.rename(replaced)
        else:
            _remove(folder)  # a folder without its state.json is one whose removal, or beginning, was interrupted
        folder.mkdir(parents=True)
        lock = _locked(folder)
        _write_state(folder, identity, {})
    except OSError as error:
        raise StateError(
            f"state {folder}: cannot be written ({error.strerror or error}); make room, or choose another --out"
        ) from error
    return RunState(folder, False, replaced, {}, identity, processes, _lock=lock)


def _write_state(folder: Path, identity: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    try:
        write_json(folder / "state.json", {"format": _FORMAT, "identity": identity, "facts": facts})
        _sync(folder)
    except OSError as error:
        raise StateError(
            f"state {folder}: cannot be written ({error.strerror or error}); make room, then go on with --resume"
        ) from error


def _locked(folder: Path) -> int:
    """An open handle on the folder, locked until it is closed or the process ends, however it ends."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(handle)
        raise StateError(
            f"state {folder}: a running process is using it; wait for it, or choose another --out"
        ) from error
    except OSError:  # a file system without locks
        pass
    return handle


def _refuse_format(folder: Path, found: Mapping[str, Any]) -> None:
    if found.get("format") != _FORMAT:
        raise StateError(
            f"state {folder}: of format {found.get('format')}, and this version reads {_FORMAT}; start without --resume"
        )


def _refuse_difference(folder: Path, saved: Any, given: Any) -> None:
    differences = list(_differences(saved, given, ""))
    if differences:
        shown = ", ".join(differences[:4]) + (f" and {len(differences) - 4} more" if len(differences) > 4 else "")
        raise StateError(
            f"state {folder}: it is another run's: {shown}; give what it had, or start anew without --resume"
        )


def _differences(saved: Any, given: Any, place: str) -> Iterator[str]:
    if isinstance(saved, dict) and isinstance(given, dict):
        for key in sorted(saved.keys() | given.keys()):
            yield from _differences(saved.get(key), given.get(key), f"{place}.{key}" if place else key)
    elif saved != given:
        yield f"{place} was {_short(saved)}, is {_short(given)}"


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 48 else f"{text[:20]}...{text[-12:]}"


def _plain(content: Mapping[str, Any]) -> dict[str, Any]:
    """As it reads back from JSON, so that saved and given values compare."""
    plain: dict[str, Any] = json.loads(to_json(content))
    return plain


def _read(path: Path, names: Sequence[str] = ()) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise StateError(f"state {path}: cannot be read ({error}); start anew without --resume") from error
    if not isinstance(content, dict) or not content.keys() >= set(names):
        raise StateError(f"state {path}: not a state of this program; start anew without --resume")
    return content


def _previous(folder: Path) -> Path:
    return folder.with_name(folder.name + ".previous")


def _remove(folder: Path) -> None:
    """Remove a state, and nothing else; an interruption leaves nothing that could be taken for a whole one."""
    (folder / "state.json").unlink(missing_ok=True)
    _remove_temporary(folder)
    for part in folder.glob("*/"):
        (part / "part.json").unlink(missing_ok=True)
        for piece in part.glob("[0-9]*.safetensors"):
            piece.unlink()
        with suppress(OSError):  # it holds something else
            part.rmdir()
    with suppress(FileNotFoundError):
        try:
            folder.rmdir()
        except FileNotFoundError:
            raise
        except OSError as error:
            raise StateError(
                f"state {folder}: it holds files that are not a run's state; move them, or choose another --out"
            ) from error


def _remove_temporary(folder: Path) -> None:
    """Remove what a killed process was about to write."""
    for pattern in (".*.part", "*/.*.part"):
        for path in folder.glob(pattern):
            path.unlink(missing_ok=True)


def _sync(folder: Path) -> None:
    """Let the names of new files reach the disk, which a file's own fsync does not do."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
