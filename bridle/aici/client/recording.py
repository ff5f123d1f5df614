"""Records the messages between an engine and its runtime, as a trace of exchanges.

Each started runtime begins a new trace, so a file may contain several traces. Messages are written unchanged; messages
that are not JSON are written as text.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from bridle import traces

#: Bytes reserved for the last record, which counts the missing exchanges.
_LAST_BYTES = 512
_log = logging.getLogger(__name__)


class TraceWriter:
    """Appends exchanges to a file. Safe from any thread. `max_bytes` limits the file's size; exchanges beyond this size
    are only counted."""

    def __init__(self, path: Path, header: traces.TraceHeader, max_bytes: int = traces.MAX_EXCHANGES_BYTES) -> None:
        self._path = path
        self._file = path.open("ab")
        self._lock = threading.Lock()
        self._main: tuple[bytes, float] | None = None
        self._side: dict[str, tuple[bytes, float]] = {}
        self._room = max_bytes - _LAST_BYTES - os.fstat(self._file.fileno()).st_size
        self._num_records = self.num_cut = 0
        self._is_begun = self._write(header)

    def sent(self, message: bytes, *, side: bool) -> None:
        """Record a request that was sent to the runtime."""
        with self._lock:
            if side:
                self._side[_rid(message)] = message, time.monotonic()
            else:
                self._main = message, time.monotonic()

    def received(self, message: bytes, *, side: bool) -> None:
        """Record the reply of the runtime, and write the exchange to the file."""
        with self._lock:
            asked = self._side.pop(_rid(message), None) if side else self._main
            if asked is not None:
                request, since = asked
                seconds = time.monotonic() - since
                at = time.time() - seconds
                self._add(
                    traces.ExchangeRecord(0, self._num_records, at, seconds, side, _as_json(request), _as_json(message))
                )

    def _add(self, record: traces.ExchangeRecord) -> None:
        if self._is_begun and not self.num_cut and self._write(record):  # a trace with a gap cannot be replayed
            self._num_records += 1
            return
        if not self.num_cut:
            _log.warning("%s is full: no further messages of the control runtime are recorded", self._path)
        self.num_cut += 1

    def _write(self, record: traces.Record | traces.TraceHeader) -> bool:
        line = traces.encode_record(record) + b"\n"
        if len(line) > min(self._room, traces.MAX_LINE_BYTES):
            return False
        self._room -= len(line)
        self._file.write(line)
        self._file.flush()
        return True

    def close(self) -> None:
        """Write the number of exchanges that exceeded the limit, and close the file. Idempotent."""
        with self._lock:
            if self._file.closed:
                return
            if self._is_begun:
                self._room += _LAST_BYTES
                self._write(traces.EndRecord(0, self._num_records, "closed", num_cut=self.num_cut))
            self._file.close()


def _as_json(message: bytes) -> Any:
    """Return a message as it is written to the file: its own bytes if they are JSON on one line, otherwise a string."""
    try:
        msgspec.json.decode(message, type=msgspec.Raw)
        return msgspec.Raw(message if b"\n" not in message else msgspec.json.format(message, indent=-1))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return message.decode("utf-8", "replace")


class _Named(msgspec.Struct):
    rid: str = msgspec.field(name="$rid", default="")


def _rid(message: bytes) -> str:
    try:
        return msgspec.json.decode(message, type=_Named).rid
    except msgspec.DecodeError:
        return ""
