"""Handles Ctrl-C in a bridle process: at any time, Ctrl-C prints one line and ends the process with exit code 130.

While modules are imported and models are loaded, Ctrl-C ends the process at once. A Python exception would not be safe:
C++ code may mistake it for another error, and loading threads cannot be stopped. No cleanup is needed, because child
processes notice the end of this process themselves. At any other time, Ctrl-C raises `KeyboardInterrupt`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from typing import NoReturn

from bridle.cli.terminal import complaint

INTERRUPTED = 130

_SHOW_CURSOR = "\x1b[?25h"  # a progress bar hides the cursor
_is_ours = False


def listen() -> None:
    """Install bridle's handler for Ctrl-C. Nothing changes if the process ignores Ctrl-C, or if other code has set a
    handler."""
    global _is_ours
    _is_ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler


@contextlib.contextmanager
def ending_at_once() -> Iterator[None]:
    """Let Ctrl-C end the process at once, without raising an exception, while this block runs in the main thread."""
    if not _is_ours:
        yield
        return
    before = signal.signal(signal.SIGINT, lambda number, frame: leave())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def leave() -> NoReturn:
    """End the process at once, without waiting for any thread. Later log messages of other threads are dropped."""
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        sys.stdout.flush()
    line, told = (_SHOW_CURSOR if os.isatty(2) else "") + complaint("interrupted", "info"), 2
    with contextlib.suppress(OSError):  # the process may have no free descriptor
        told = os.dup(2)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    with contextlib.suppress(OSError):
        os.write(told, line.encode())
    os._exit(INTERRUPTED)
