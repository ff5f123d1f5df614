"""API keys: the users of the server, which of them are admins, and the limits of each user. Keys are stored in SQLite,
as hashes only.

A key is 32 random bytes in text form. So one round of SHA-256 protects a key as well as a slow hash. The key itself is
shown only once, when it is created. This module does not use HTTP.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import secrets
import sqlite3
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bridle.errors import InvalidRequest
from bridle.serving.tenancy.rate_limit import NO_LIMITS, UserLimits

_MAX_FOUND = 4_096  # number of remembered lookups, of known and unknown keys
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,39}")
_SCHEMA = """
CREATE TABLE IF NOT EXISTS keys (
    hash BLOB PRIMARY KEY,
    prefix TEXT NOT NULL,
    user TEXT NOT NULL,
    is_admin INTEGER NOT NULL,
    created REAL NOT NULL,
    user_group TEXT NOT NULL DEFAULT ''
) STRICT
"""
_LIMITS_SCHEMA = """
CREATE TABLE IF NOT EXISTS limits (
    user TEXT PRIMARY KEY,
    requests_per_minute INTEGER,
    tokens_per_minute INTEGER,
    weight REAL NOT NULL,
    most_urgent INTEGER NOT NULL DEFAULT 0
) STRICT
"""
#: Columns that files of older versions do not have.
_ADDED = (
    ("limits", "most_urgent", "INTEGER NOT NULL DEFAULT 0"),
    ("keys", "user_group", "TEXT NOT NULL DEFAULT ''"),
)

_FIND = """
SELECT user, is_admin, user_group, requests_per_minute, tokens_per_minute, weight, most_urgent
FROM keys LEFT JOIN limits USING (user) WHERE hash = ?
"""
_FIND_USER = _FIND.replace("hash = ?", "user = ? ORDER BY is_admin, user_group LIMIT 1")
_LIST = """
SELECT prefix, user, is_admin, created, user_group, requests_per_minute, tokens_per_minute, weight, most_urgent
FROM keys LEFT JOIN limits USING (user) ORDER BY created
"""


@dataclass(frozen=True, slots=True)
class Identity:
    """The user that sent a request, and the group with which the user may share prompts ("" for no group)."""

    user: str
    is_admin: bool
    limits: UserLimits = NO_LIMITS
    group: str = ""


#: The only user of a server without keys.
LOCAL_USER = Identity("localhost", True)


@dataclass(frozen=True, slots=True)
class KeyInfo:
    """Metadata of an API key: its first characters, its owner and the owner's limits, its creation time (Unix seconds),
    and its group."""

    prefix: str
    user: str
    is_admin: bool
    created: float
    limits: UserLimits = NO_LIMITS
    group: str = ""


class KeyStore:
    """The API keys in one file. Safe from any thread. Several processes may share the file. A change by one process
    takes effect at once in all processes. Raises `InvalidRequest` if the file cannot be used."""

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        self._found: OrderedDict[bytes, Identity | None] = OrderedDict()
        self._version: tuple[int, int] | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)
            self._db = sqlite3.connect(path, check_same_thread=False, timeout=5, isolation_level=None)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute(_SCHEMA)
            self._db.execute(_LIMITS_SCHEMA)
            self._add_columns()
        except (OSError, sqlite3.Error) as error:
            reason = getattr(error, "strerror", None) or error
            raise InvalidRequest(f"{path} cannot be used as a file of API keys: {reason}", "keys") from None

    def _add_columns(self) -> None:
        """Add the columns that the file of an older version does not have. Another process may add the same columns at
        the same time."""
        for table, column, kind in _ADDED:
            if column not in {row[1] for row in self._db.execute(f"PRAGMA table_info({table})")}:
                with contextlib.suppress(sqlite3.OperationalError):
                    self._db.execute(f"ALTER TABLE {table} ADD COLUMN {column} {kind}")

    def add(self, user: str, *, is_admin: bool = False, group: str = "") -> str:
        """Create a key for `user`, in a group if one is given. Returns the key, which cannot be read again later."""
        for field, name in (("user", user), ("group", group or "none")):
            if not _NAME.fullmatch(name):
                message = f"{field} is {name!r}; must be 1 to 40 letters, digits, '_' or '-', the first a letter"
                raise InvalidRequest(message, field)
        key = "brd-" + secrets.token_urlsafe(32)
        row = _hash(key), key[:10], user, is_admin, time.time(), group
        with self._lock:
            self._db.execute("INSERT INTO keys VALUES (?, ?, ?, ?, ?, ?)", row)
        return key

    def find(self, key: str) -> Identity | None:
        """Return the owner of this key; None if the key is unknown."""
        hashed = _hash(key)
        with self._lock:
            self._forget_old()
            if hashed not in self._found:
                self._found[hashed] = self.look_up(hashed)
                if len(self._found) > _MAX_FOUND:
                    self._found.popitem(last=False)
            return self._found[hashed]

    def look_up(self, hashed: bytes) -> Identity | None:
        return _identity(self._db.execute(_FIND, (hashed,)).fetchone())

    def of_user(self, user: str) -> Identity | None:
        """Return a user, with the fewest rights that any of the user's keys has. For a user without a key, the result
        is None."""
        with self._lock:
            return _identity(self._db.execute(_FIND_USER, (user,)).fetchone())

    def _forget_old(self) -> None:
        """Forget cached lookups if the file was changed by this process or by another one (which SQLite reports)."""
        version = self._db.total_changes, self._db.execute("PRAGMA data_version").fetchone()[0]
        if version != self._version:
            self._version = version
            self._found.clear()

    def set_limits(self, user: str, limits: UserLimits) -> None:
        """Set the limits of a user from now on, for all keys of the user. Raises `InvalidRequest` for a user without a
        key."""
        with self._lock:
            if self._db.execute("SELECT 1 FROM keys WHERE user = ? LIMIT 1", (user,)).fetchone() is None:
                raise InvalidRequest(f"the user {user!r} has no API key", "user")
            row = (user, limits.requests_per_minute, limits.tokens_per_minute, limits.weight, limits.most_urgent)
            self._db.execute("INSERT OR REPLACE INTO limits VALUES (?, ?, ?, ?, ?)", row)

    def list(self) -> list[KeyInfo]:
        """Return all keys, the oldest first."""
        with self._lock:
            rows = self._db.execute(_LIST).fetchall()
        return [
            KeyInfo(prefix, user, bool(is_admin), created, _limits(*limits), group)
            for prefix, user, is_admin, created, group, *limits in rows
        ]

    def remove(self, prefix_or_user: str) -> int:
        """Remove the key with this prefix, or all keys of this user. Returns how many keys were removed."""
        with self._lock:
            cursor = self._db.execute("DELETE FROM keys WHERE prefix = ?1 OR user = ?1", (prefix_or_user,))
        return cursor.rowcount

    @property
    def is_empty(self) -> bool:
        with self._lock:
            return self._db.execute("SELECT 1 FROM keys LIMIT 1").fetchone() is None

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._db.close()


def _identity(row: tuple[Any, ...] | None) -> Identity | None:
    if row is None:
        return None
    user, is_admin, group, *limits = row
    return Identity(user, bool(is_admin), _limits(*limits), group)


def _limits(requests: int | None, tokens: int | None, weight: float | None, most_urgent: int) -> UserLimits:
    """Return the limits in a row of the table. A user without a row has no limits."""
    return NO_LIMITS if weight is None else UserLimits(requests, tokens, weight, most_urgent)


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
