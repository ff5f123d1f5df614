"""Records what an engine and its runtime send to each other.

A trace is JSON lines: `timestamp` (milliseconds), `suff` ("" for the main channel, "-side" for the other), `cmd` and
`resp`.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

import msgspec


class TraceWriter:
    """Appends exchanges to a file. Safe from any thread."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab")
        self._lock = threading.Lock()
        self._main: bytes | None = None
        self._side: dict[str, bytes] = {}

    def sent(self, message: bytes, *, side: bool) -> None:
        """Record a request that was sent."""
        with self._lock:
            if side:
                self._side[_rid(message)] = message
            else:
                self._main = message

    def received(self, message: bytes, *, side: bool) -> None:
        """Record the reply; the exchange is then written to the file."""
        with self._lock:
            command = self._side.pop(_rid(message), None) if side else self._main
            if command is not None:
                self._write(command, message, "-side" if side else "")

    def _write(self, command: bytes, reply: bytes, suffix: str) -> None:
        line = {"timestamp": int(time.time() * 1000), "suff": suffix}
        body = msgspec.json.encode({**line, "cmd": msgspec.Raw(command), "resp": msgspec.Raw(reply)})
        self._file.write(body + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._file.close()


class _Named(msgspec.Struct):
    rid: str = msgspec.field(name="$rid", default="")


def _rid(message: bytes) -> str:
    try:
        return msgspec.json.decode(message, type=_Named).rid
    except msgspec.DecodeError:
        return ""
