"""The module store: uploaded controllers by the hash of their bytes, tags, owners, and compiled code.

Bytes are in files, everything else is in SQLite. A file is written under a temporary name, flushed, and renamed inside
the transaction that records it. So a crash leaves a complete module or no module. Incomplete files are removed at the
next start. Several runtimes may share a folder. This Python module does not compile Wasm modules.
"""

from __future__ import annotations

import contextlib
import hashlib
import sqlite3
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bridle.aici.protocol import Auth
from bridle.aici.replies import TagInfo
from bridle.aici.runtime.files import digest_of, is_stale, write_file
from bridle.aici.runtime.limits import DEFAULT_LIMITS, RuntimeLimits
from bridle.aici.runtime.tags import GhReference, check_tag, is_module_id, is_tag
from bridle.controllers.standard import names
from bridle.errors import InvalidRequest, Overloaded

_SCHEMA = """
CREATE TABLE IF NOT EXISTS modules (id TEXT PRIMARY KEY, size INTEGER NOT NULL, created REAL NOT NULL);
CREATE TABLE IF NOT EXISTS owners (
    module TEXT NOT NULL, user TEXT NOT NULL, is_admin INTEGER NOT NULL, used REAL NOT NULL,
    PRIMARY KEY (module, user));
CREATE TABLE IF NOT EXISTS tags (
    number INTEGER PRIMARY KEY AUTOINCREMENT, tag TEXT UNIQUE NOT NULL, module TEXT NOT NULL,
    updated_at INTEGER NOT NULL, updated_by TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS links (reference TEXT PRIMARY KEY, module TEXT NOT NULL, checked REAL NOT NULL);
CREATE TABLE IF NOT EXISTS compiled (
    module TEXT NOT NULL, settings TEXT NOT NULL, size INTEGER NOT NULL, digest TEXT NOT NULL,
    facts TEXT NOT NULL, used REAL NOT NULL, PRIMARY KEY (module, settings));
"""
_MAX_USER = 200


@dataclass(frozen=True, slots=True)
class Compiled:
    """Compiled code on disk. `facts` has the metadata that the compiler found about the module, as JSON."""

    path: Path
    size: int
    digest: str
    facts: str


def compiled_folder(folder: Path) -> Path:
    """Return the folder in which the store in `folder` keeps compiled code."""
    return folder / "compiled"


class ModuleStore:
    """The module store. Thread-safe. Every change is atomic, also if the process crashes."""

    def __init__(self, folder: Path, limits: RuntimeLimits = DEFAULT_LIMITS) -> None:
        self._limits = limits
        self._wasm = folder / "modules"
        self._cache = compiled_folder(folder)
        for path in (folder, self._wasm, self._cache):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = threading.RLock()
        self._db = sqlite3.connect(folder / "index.sqlite", timeout=30, isolation_level=None, check_same_thread=False)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=FULL")
        with self._lock:
            self._db.executescript(_SCHEMA)
        self._sweep()

    def close(self) -> None:
        with self._lock:
            self._db.close()

    # -- modules -------------------------------------------------------------------------------------------

    def add(self, wasm: bytes, auth: Auth) -> str:
        """Store a module. Returns the module's id, the SHA-256 of its bytes. Storing the same bytes again is cheap. If
        the space of the user or of the store is used up, the user's oldest untagged modules are removed. Raises
        `Overloaded` if removing modules does not free enough space."""
        _check_user(auth.user)
        if len(wasm) > self._limits.max_module_bytes:
            raise InvalidRequest(f"the module has {len(wasm)} bytes; at most {self._limits.max_module_bytes}", "binary")
        module = self.identify(wasm)
        with self._transaction():
            if not self._row("SELECT 1 FROM owners WHERE module = ? AND user = ?", module, auth.user):
                self._make_room(len(wasm), auth.user, module)
            if not self.has(module):
                write_file(self._wasm / f"{module}.wasm", wasm)
            now = time.time()
            self._db.execute("INSERT OR IGNORE INTO modules VALUES (?, ?, ?)", (module, len(wasm), now))
            self._db.execute(
                "INSERT OR REPLACE INTO owners VALUES (?, ?, ?, ?)", (module, auth.user, auth.is_admin, now)
            )
        return module

    @staticmethod
    def identify(wasm: bytes) -> str:
        """Return the module id of these bytes. The module need not be stored."""
        return hashlib.sha256(wasm).hexdigest()

    def has(self, module: str) -> bool:
        """Return whether a module with this id is stored."""
        if not is_module_id(module) or not self._row("SELECT 1 FROM modules WHERE id = ?", module):
            return False
        return self.path(module).exists()

    def path(self, module: str) -> Path:
        """Return the path of the file with a module's bytes."""
        assert is_module_id(module)
        return self._wasm / f"{module}.wasm"

    def size(self, module: str) -> int:
        row = self._row("SELECT size FROM modules WHERE id = ?", module)
        return int(row[0]) if row else 0

    def resolve(self, name: str) -> str:
        """Return the module id that an id, a tag or a linked `gh:` reference means. Raises `InvalidRequest`."""
        if name.startswith("gh:"):
            GhReference.parse(name)
            linked = self.linked(name)
            if linked is None:
                raise InvalidRequest(
                    f"the controller {name!r} is not installed on this server, and downloads are not allowed",
                    "module_id",
                )
            return linked[0]
        if is_tag(name):
            row = self._row("SELECT module FROM tags WHERE tag = ?", name)
            if row is None:
                known = ", ".join(names())
                raise InvalidRequest(f"unknown controller {name!r}; the standard controllers are {known}", "module_id")
            return str(row[0])
        if not self.has(name):
            raise InvalidRequest(f"unknown module {name[:80]!r}", "module_id")
        return name

    def is_named(self, name: str) -> bool:
        """Return whether the name is a tag or a linked reference."""
        return self.linked(name) is not None or self._row("SELECT 1 FROM tags WHERE tag = ?", name) is not None

    # -- tags ----------------------------------------------------------------------------------------------

    def set_tags(self, module: str, tags: list[str], auth: Auth) -> list[TagInfo]:
        """Point all of the tags at a module, or change nothing if one tag is not allowed. Returns all tags of the
        store."""
        _check_user(auth.user)
        for tag in tags:
            check_tag(tag, auth)
        with self._transaction():
            if not self.has(module):
                raise InvalidRequest(f"unknown module {module[:80]!r}", "module_id")
            self._check_tag_count(tags, auth)
            now = int(time.time())
            for tag in tags:
                self._db.execute(
                    "INSERT OR REPLACE INTO tags (tag, module, updated_at, updated_by) VALUES (?, ?, ?, ?)",
                    (tag, module, now, auth.user),
                )
        wanted = set(tags)
        found = {info.tag: info for info in self.tags() if info.tag in wanted}
        return [found[tag] for tag in tags if tag in found]

    def tags(self) -> list[TagInfo]:
        """Return all tags, newest first."""
        with self._lock:
            rows = self._db.execute(
                "SELECT tag, module, updated_at, updated_by, m.size, "
                "(SELECT max(size) FROM compiled c WHERE c.module = t.module) "
                "FROM tags t LEFT JOIN modules m ON m.id = t.module ORDER BY updated_at DESC, number DESC"
            ).fetchall()
        return [TagInfo(row[0], row[1], row[2], row[3], row[4] or 0, row[5] or 0) for row in rows]

    # -- references ----------------------------------------------------------------------------------------

    def link(self, reference: str, module: str) -> None:
        """Let a `gh:` reference, or the key of a release asset, mean a stored module."""
        with self._transaction():
            self._db.execute("INSERT OR REPLACE INTO links VALUES (?, ?, ?)", (reference, module, time.time()))

    def linked(self, reference: str) -> tuple[str, float] | None:
        """Return the module and the time of a linked reference; None if the module is no longer stored."""
        row = self._row("SELECT module, checked FROM links WHERE reference = ?", reference)
        return (str(row[0]), float(row[1])) if row and self.has(str(row[0])) else None

    # -- compiled code -------------------------------------------------------------------------------------

    def compiled(self, module: str, settings: str) -> Compiled | None:
        """Return compiled code that was made with exactly these settings; None if there is none, or if its file has
        changed."""
        row = self._row("SELECT size, digest, facts FROM compiled WHERE module = ? AND settings = ?", module, settings)
        if row is None:
            return None
        found = Compiled(self._compiled_path(module, settings), int(row[0]), str(row[1]), str(row[2]))
        if digest_of(found.path) != found.digest:
            self.forget_compiled(module, settings)
            return None
        self._execute("UPDATE compiled SET used = ? WHERE module = ? AND settings = ?", time.time(), module, settings)
        return found

    def add_compiled(self, module: str, settings: str, code: bytes, facts: str) -> Compiled:
        """Store compiled code. If the cache is full, the least recently used code is removed."""
        path = self._compiled_path(module, settings)
        digest = hashlib.sha256(code).hexdigest()
        with self._transaction():
            self._make_compiled_room(len(code))
            write_file(path, code)
            self._db.execute(
                "INSERT OR REPLACE INTO compiled VALUES (?, ?, ?, ?, ?, ?)",
                (module, settings, len(code), digest, facts, time.time()),
            )
        return Compiled(path, len(code), digest, facts)

    def forget_compiled(self, module: str, settings: str) -> None:
        """Remove compiled code that could not be loaded. Idempotent."""
        with self._transaction():
            self._db.execute("DELETE FROM compiled WHERE module = ? AND settings = ?", (module, settings))
            self._compiled_path(module, settings).unlink(missing_ok=True)

    # -- helpers -------------------------------------------------------------------------------------------

    def _compiled_path(self, module: str, settings: str) -> Path:
        assert is_module_id(module) and settings.isalnum()
        return self._cache / f"{module}-{settings}.cwasm"

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._lock:
            nested = self._db.in_transaction
            if not nested:
                self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                if not nested:
                    self._db.execute("ROLLBACK")
                raise
            if not nested:
                self._db.execute("COMMIT")

    def _row(self, query: str, *values: object) -> tuple[Any, ...] | None:
        with self._lock:
            row: tuple[Any, ...] | None = self._db.execute(query, values).fetchone()
            return row

    def _execute(self, query: str, *values: object) -> None:
        with self._lock:
            self._db.execute(query, values)

    def _number(self, query: str, *values: object) -> int:
        row = self._row(query, *values)
        return int(row[0]) if row and row[0] is not None else 0

    def _check_tag_count(self, tags: list[str], auth: Auth) -> None:
        limit = self._limits.max_tags_per_user
        mine = self._number("SELECT count(*) FROM tags WHERE updated_by = ?", auth.user)
        if mine + len(tags) > limit:
            raise Overloaded(
                f"user {auth.user!r} has {mine} tags and sets {len(tags)} more; at most {limit}",
                retry_after=0,
            )

    def _make_room(self, size: int, user: str, module: str) -> None:
        limits = self._limits
        while True:
            mine = self._number("SELECT count(*) FROM owners WHERE user = ?", user)
            count = self._number("SELECT count(*) FROM modules WHERE id != ?", module)
            total = self._number("SELECT sum(size) FROM modules WHERE id != ?", module)
            fits = count < limits.max_modules and total + size <= limits.max_store_bytes
            if fits and mine < limits.max_modules_per_user:
                return
            if not self._drop_oldest(user):
                raise Overloaded(
                    f"no room for a module of {size} bytes: user {user!r} has {mine} of at most "
                    f"{limits.max_modules_per_user} modules; the store has {count} of at most {limits.max_modules} "
                    f"modules and {total} of {limits.max_store_bytes} bytes",
                    retry_after=0,
                )

    def _drop_oldest(self, user: str) -> bool:
        row = self._row(
            "SELECT module FROM owners WHERE user = ? AND module NOT IN (SELECT module FROM tags) "
            "AND module NOT IN (SELECT module FROM links) ORDER BY used LIMIT 1",
            user,
        )
        if row is None:
            return False
        module = str(row[0])
        self._db.execute("DELETE FROM owners WHERE module = ? AND user = ?", (module, user))
        if not self._row("SELECT 1 FROM owners WHERE module = ?", module):
            self._db.execute("DELETE FROM modules WHERE id = ?", (module,))
            self.path(module).unlink(missing_ok=True)
        return True

    def _make_compiled_room(self, size: int) -> None:
        limit = self._limits.max_compiled_bytes
        while self._number("SELECT sum(size) FROM compiled") + size > limit:
            row = self._row("SELECT module, settings FROM compiled ORDER BY used LIMIT 1")
            if row is None:
                raise Overloaded(
                    f"the compiled module has {size} bytes; the cache of compiled modules holds at most {limit}",
                    retry_after=0,
                )
            self.forget_compiled(str(row[0]), str(row[1]))

    def _sweep(self) -> None:
        """Clean up after a crash: remove temporary files of ended processes, files without a database row, and rows
        without a file."""
        with self._transaction():
            known = {row[0] for row in self._db.execute("SELECT id FROM modules")}
            for path in self._wasm.iterdir():
                if (path.suffix == ".wasm" and path.stem not in known) or is_stale(path):
                    path.unlink(missing_ok=True)
            kept = {f"{m}-{s}.cwasm" for m, s in self._db.execute("SELECT module, settings FROM compiled")}
            for path in self._cache.iterdir():
                if (path.suffix == ".cwasm" and path.name not in kept) or is_stale(path):
                    path.unlink(missing_ok=True)
            for module in known:
                if not self.path(module).exists():
                    self._db.execute("DELETE FROM modules WHERE id = ?", (module,))
                    self._db.execute("DELETE FROM owners WHERE module = ?", (module,))


def _check_user(user: str) -> None:
    if len(user) > _MAX_USER:
        raise InvalidRequest(f"the user name has {len(user)} characters; at most {_MAX_USER}")
