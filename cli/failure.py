"""How a command ends when it does not succeed: one line on stderr and an exit code."""

from __future__ import annotations

import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from types import FrameType

import typer

from cli.console import leads

__all__ = ["at_end", "failures_told", "how_to_go_on", "is_out_of_memory"]

FAILED = 1

EXTRAS = {"auto_round": "quantizers", "compressed_tensors": "export", "curvlinops": "oracles", "gguf": "export"}
"""Optional packages and the extras of pyproject.toml that bring them."""

how_to_go_on: ContextVar[str | Callable[[], str]] = ContextVar("how_to_go_on", default="")
"""What a run that keeps a state says beside the reason why it ends: where the state is, and how to continue it.

Text, or what makes it at that moment.
"""

_closing: ContextVar[ExitStack | None] = ContextVar("closing", default=None)


class Terminated(BaseException):
    """The process was asked to end (SIGTERM)."""


@contextmanager
def failures_told(debug: bool = False) -> Iterator[None]:
    """Turn whatever ends the body into one line on stderr and an exit code.

    Expected failures end with 1, and so do Ctrl-C, SIGTERM and unexpected failures, which are named as such. Wrong
    usage (2) is the option parser's to tell. Of several processes that share a run the first one tells for all.

    Args:
        debug: Also print the traceback.

    Raises:
        typer.Exit: With the exit code.
    """
    how_to_go_on.set("")
    with ExitStack() as closing:
        _closing.set(closing)
        with _told_in_one_line(debug):
            yield


def at_end(close: Callable[[], object]) -> None:
    """Have something closed when the command ends, however it ends."""
    closing = _closing.get()
    if closing is not None:
        closing.callback(close)


@contextmanager
def _told_in_one_line(debug: bool) -> Iterator[None]:
    try:
        with _sigterm_raises():
            yield
    except (typer.Exit, typer.Abort, typer.BadParameter, BrokenPipeError):
        raise
    except KeyboardInterrupt as stop:
        raise _told(f"interrupted; {_left_behind()}", debug) from stop
    except Terminated as stop:
        raise _told(f"stopped by SIGTERM; {_left_behind()}", debug) from stop
    except Exception as error:
        text = describe(error)
        advice = f"; {how}" if (how := _how_to_go_on()) and "--resume" not in text else ""
        raise _told(f"error: {text}{advice}", debug, shared=type(error).__name__ == "PeerError") from error


def _how_to_go_on() -> str:
    said = how_to_go_on.get()
    return said if isinstance(said, str) else said()


def _left_behind() -> str:
    return _how_to_go_on() or "no half-written file is left"


def describe(error: Exception) -> str:
    """One line about an exception: what, the value, the remedy."""
    text = " ".join(str(error).split())
    name = type(error).__name__
    if is_out_of_memory(error):
        return (
            f"out of memory ({text}); shorten --seq or --batch, restrict --params, or choose --dtype bfloat16; "
            "`flashbob-curv doctor --model M --seq N` forecasts what fits"
        )
    if isinstance(error, ModuleNotFoundError):
        extra = EXTRAS.get(str(error.name).split(".")[0])
        remedy = "install it" if extra is None else f"it comes with the extra: pip install -e '.[{extra}]'"
        return f"the package {error.name!r} is not installed; {remedy}"
    if name == "PeerError" and text:
        return text
    if isinstance(error, ValueError | NotImplementedError | OSError | FloatingPointError) and text:
        return text
    return f"unexpected {name}: {text or 'no message'}; run again with --debug for the traceback, and report it"


def is_out_of_memory(error: Exception) -> bool:
    """Whether an exception says that memory ran out, on a GPU or a CPU."""
    if isinstance(error, MemoryError):
        return True
    # torch.OutOfMemoryError on a GPU; on a CPU torch raises a bare RuntimeError.
    return isinstance(error, RuntimeError) and (
        type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error)
    )


def _told(line: str, debug: bool, shared: bool = True) -> typer.Exit:
    """Tell it; what all processes know (`shared`) only the first one tells, what only one knows that one."""
    if debug:
        traceback.print_exc(file=sys.stderr)
    if leads() or not shared:
        print(f"flashbob-curv: {line}", file=sys.stderr, flush=True)
    return typer.Exit(FAILED)


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """SIGTERM unwinds the stack like Ctrl-C, so that temporary files are removed and bars closed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def terminate(_signal: int, _frame: FrameType | None) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
