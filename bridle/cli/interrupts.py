"""Ctrl-C in a process of ours: one line and exit code 130, at whatever moment.

While modules are imported and models loaded it ends the process on the spot. An exception would surface in the middle
of C++ that takes it for another one, and threads that load cannot be told to stop. Nothing there needs an orderly end:
processes that were started notice by themselves that this one is gone. At any other time it is the usual exception.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from typing import NoReturn

INTERRUPTED = 130

_SHOW_CURSOR = "\x1b[?25h"  # a progress bar hides it
_is_ours = False


def listen() -> None:
    """This process is ours: its command line was. Where Ctrl-C is ignored, or somebody else's, it stays so."""
    global _is_ours
    _is_ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler


@contextlib.contextmanager
def ending_at_once() -> Iterator[None]:
    """What goes on in here, in the main thread, is not unwound by Ctrl-C."""
    if not _is_ours:
        yield
        return
    before = signal.signal(signal.SIGINT, lambda number, frame: leave())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def leave() -> NoReturn:
    """End the process now, without waiting for any thread."""
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        sys.stdout.flush()
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        os.write(2, f"{_SHOW_CURSOR if os.isatty(2) else ''}bridle: interrupted\n".encode())
    os._exit(INTERRUPTED)
