"""Measuring processes that come to an end, for tests of the process that waits for them."""

import os
import signal
import time
from typing import Any


def die(task: Any, rows: Any) -> None:
    """One row, then what a system short of memory does."""
    rows.send(task.as_row("forward") | {"status": "ok"})
    os.kill(os.getpid(), signal.SIGKILL)


def leave(task: Any, rows: Any) -> None:
    """No row."""
    os._exit(3)


def linger(task: Any, rows: Any) -> None:
    """One row, then nothing for long."""
    rows.send(task.as_row("forward") | {"status": "ok"})
    time.sleep(600)
