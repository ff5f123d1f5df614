"""State of a server that survives a restart: responses, batches, traces, prompt caches and more, in one SQLite file.

The stores keep their entries in memory, within their limits, and write each change to this file. One thread writes the
changes, several in one transaction. So no request waits for the disk. If the process is killed, changes that are not
written yet are lost, but the file stays intact. The file belongs to one process, and only the user of the operating
system who runs it can read it.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from bridle.errors import InvalidRequest
from bridle.threads import start_thread

_log = logging.getLogger(__name__)

#: Maximum number of bytes of changes that wait to be written. Further changes are dropped.
MAX_WAITING_BYTES = 64 << 20
_SCHEMA = """
PRAGMA locking_mode = EXCLUSIVE;
PRAGMA journal_mode = WAL;
PRAGMA synchronous = NORMAL;
PRAGMA secure_delete = ON;
CREATE TABLE IF NOT EXISTS entries (
    kind TEXT, user TEXT, name TEXT, until REAL, value BLOB, PRIMARY KEY (kind, user, name)
) WITHOUT ROWID;
"""
_PUT = "INSERT OR REPLACE INTO entries VALUES (?, ?, ?, ?, ?)"
_DROP = "DELETE FROM entries WHERE kind = ? AND user = ? AND name = ?"


class SavedEntry(NamedTuple):
    """A saved entry: its user and name, the seconds until it expires, and its value."""

    user: str
    name: str
    seconds: float
    value: bytes


class StateDb:
    """The state file at `path`. Raises `InvalidRequest` if the file cannot be used. Safe from any thread."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self.path, self.clock = path, clock
        self.num_dropped = 0
        self._changes: deque[tuple[object, ...]] = deque()
        self._waiting_bytes = 0
        self._changed = threading.Condition()
        self._is_closed = False
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
            self._connection = sqlite3.connect(path, timeout=1.0, check_same_thread=False)
            self._connection.executescript(_SCHEMA)
            self._write([("DELETE FROM entries WHERE until <= ?", (clock(),))])
        except (OSError, sqlite3.Error) as error:
            raise InvalidRequest(
                f"state_db: got {str(path)!r}, which cannot be used: {error}. Use a file that no other process has "
                "open; if the file is damaged, move it away",
                "state_db",
            ) from None
        self._thread = start_thread(self._run, "bridle-state")

    def table(self, kind: str) -> StateTable:
        """Return the entries of one store."""
        return StateTable(self, kind)

    def rows(self, kind: str) -> Iterator[SavedEntry]:
        """Yield the entries of a store; the next entry to expire comes first. The entries must be read before any entry
        is written."""
        query = "SELECT user, name, until, value FROM entries WHERE kind = ? ORDER BY until"
        now = self.clock()
        for user, name, until, value in self._connection.execute(query, (kind,)).fetchall():
            yield SavedEntry(user, name, until - now, value)

    def change(self, sql: str, values: tuple[object, ...], num_bytes: int = 0) -> None:
        """Queue a change, which is written soon. The change is dropped if too many bytes are queued."""
        with self._changed:
            if self._is_closed or self._waiting_bytes + num_bytes > MAX_WAITING_BYTES:
                self.num_dropped += 1
                return
            self._changes.append((sql, values, num_bytes))
            self._waiting_bytes += num_bytes
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._changes or self._is_closed)
                changes, self._changes = list(self._changes), deque()
                if not changes:
                    return
            try:
                self._write([(sql, values) for sql, values, _ in changes])
            except sqlite3.Error as error:
                self.num_dropped += len(changes)
                _log.warning("state_db %s: %d changes could not be saved: %s", self.path, len(changes), error)
            with self._changed:
                self._waiting_bytes -= sum(each[2] for each in changes)  # type: ignore[misc]

    def _write(self, changes: list[tuple[object, object]]) -> None:
        with self._connection, closing(self._connection.cursor()) as cursor:
            for sql, values in changes:
                cursor.execute(sql, values)  # type: ignore[arg-type]

    def close(self) -> None:
        """Write all queued changes, and close the file. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.result()
        self._connection.close()


@dataclass(frozen=True, slots=True)
class StateTable:
    """The entries of one store in a `StateDb`."""

    db: StateDb
    kind: str

    def rows(self) -> Iterator[SavedEntry]:
        """Yield the saved entries; the next entry to expire comes first."""
        return self.db.rows(self.kind)

    def put(self, user: str, name: str, seconds: float, value: bytes) -> None:
        """Save an entry. An entry with the same name is replaced."""
        self.db.change(_PUT, (self.kind, user, name, self.db.clock() + seconds, value), len(value))

    def drop(self, user: str, name: str) -> None:
        """Remove an entry."""
        self.db.change(_DROP, (self.kind, user, name))
