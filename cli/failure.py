"""How a command ends when it does not succeed: one line on stderr and an exit code."""

from __future__ import annotations

import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import typer

__all__ = ["failures_told"]

FAILED = 1
INTERRUPTED = 130


class Terminated(BaseException):
    """The process was asked to end (SIGTERM)."""


@contextmanager
def failures_told(debug: bool = False) -> Iterator[None]:
    """Turn whatever ends the body into one line on stderr and an exit code.

    Expected failures end with 1, and so do unexpected ones, which are named as such; Ctrl-C ends with 130 and SIGTERM
    with 1. Wrong usage (2) is the option parser's to tell.

    Args:
        debug: Also print the traceback.

    Raises:
        typer.Exit: With the exit code.
    """
    try:
        with _sigterm_raises():
            yield
    except (typer.Exit, typer.Abort, typer.BadParameter, BrokenPipeError):
        raise
    except KeyboardInterrupt as stop:
        raise _told("interrupted; no half-written file is left", INTERRUPTED, debug) from stop
    except Terminated as stop:
        raise _told("stopped by SIGTERM; no half-written file is left", FAILED, debug) from stop
    except Exception as error:
        raise _told(f"error: {describe(error)}", FAILED, debug) from error


def describe(error: Exception) -> str:
    """One line about an exception: what, the value, the remedy."""
    text = " ".join(str(error).split())
    name = type(error).__name__
    if _is_out_of_memory(error):
        return f"out of memory ({text}); shorten --seq or --batch, restrict --params, or choose --dtype bfloat16"
    if isinstance(error, ModuleNotFoundError):
        return f"the package {error.name!r} is not installed; install it (make install brings everything)"
    if isinstance(error, ValueError | NotImplementedError | OSError | FloatingPointError) and text:
        return text
    return f"unexpected {name}: {text or 'no message'}; run again with --debug for the traceback, and report it"


def _is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, MemoryError):
        return True
    # torch.OutOfMemoryError on a GPU; on a CPU torch raises a bare RuntimeError.
    return isinstance(error, RuntimeError) and (
        type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error)
    )


def _told(line: str, code: int, debug: bool) -> typer.Exit:
    if debug:
        traceback.print_exc(file=sys.stderr)
    print(f"flashbob-curv: {line}", file=sys.stderr, flush=True)
    return typer.Exit(code)


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
