"""`print` of a script: lines go to whoever sent the request as they come."""

from __future__ import annotations

import io
import sys

from wit_world.imports import host

#: So much of a line that does not end waits for its end.
_MAX_HELD = 8192


class Log(io.TextIOBase):
    """A text stream whose lines are log lines."""

    encoding = "utf-8"
    errors = "replace"

    def __init__(self) -> None:
        self._held: list[str] = []
        self._size = 0

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self._held.append(text)
        self._size += len(text)
        if "\n" in text or self._size > _MAX_HELD:
            self.flush()
        return len(text)

    def flush(self) -> None:
        text, self._held, self._size = "".join(self._held), [], 0
        if text:
            host.log(text.encode("utf-8", "replace").decode())


_log = Log()


def connect() -> None:
    """Make it the interpreter's output."""
    sys.stdout = sys.stderr = _log


def flush() -> None:
    """Nothing stays behind when a call ends."""
    _log.flush()
