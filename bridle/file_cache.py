"""Files in the cache folder, which can be created again at any time. Files are written atomically, and are used only if
their digest is right. If all files together exceed a limit, the least recently used files are removed.

An entry is a short text that describes it, and a long string of bytes (its data). Both have digests. An entry is found
only if it is complete, undamaged, and made by this version for the same inputs. Several processes may read and write
the same entries.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import struct
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bridle.errors import InvalidRequest

try:
    import fcntl
except ImportError:  # on Windows no files are cached
    fcntl = None  # type: ignore[assignment]

_log = logging.getLogger(__name__)

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
#: Default limit of all entries in bytes; the environment variable changes it.
DEFAULT_LIMIT = 20 << 30
LIMIT_VARIABLE = "BRIDLE_CACHE_LIMIT"
_MAGIC = b"bridle\x00\x01"
_HEAD = struct.Struct("<8sQQ32s")  # magic, bytes of the text, bytes of the data, digest of text and sums
_ALIGNMENT = 4096  # alignment of the start of the data
_MAX_TEXT = 64 << 20
PIECE_BYTES = 1 << 20  # bytes that are read, and checked, at once
_MAX_SUMS = 1 << 20
_THREADS = 2
_DRAFT, _SUFFIX = ".draft-", ".entry"


def cache_folder() -> Path:
    """Return the folder of all cached files: `$BRIDLE_CACHE`, or else a folder in the user's cache."""
    own = os.environ.get("BRIDLE_CACHE")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bridle"


def cache_limit() -> int:
    """Return the limit in bytes for all entries, which an environment variable can set. Raises `InvalidRequest` for an
    invalid value."""
    text = os.environ.get(LIMIT_VARIABLE, "")
    if not text:
        return DEFAULT_LIMIT
    if not re.fullmatch(r"\d{1,18}", text):
        raise InvalidRequest(f"{LIMIT_VARIABLE} is {text!r}; must be a number of bytes (0 keeps no files)")
    return int(text)


@dataclass(frozen=True, slots=True)
class CacheFile:
    """An entry on disk. `used` is when the entry was last used, as a Unix time."""

    path: Path
    num_bytes: int
    used: float


class FileCache:
    """Entries of one kind, in a separate folder. The name of an entry contains a digest of all inputs that determine
    it."""

    def __init__(self, kind: str) -> None:
        self.folder = cache_folder() / kind

    def path(self, name: str, key: bytes) -> Path:
        """Return the file of an entry. `name` makes the name of the file readable."""
        digest = hashlib.blake2b(key, digest_size=16).hexdigest()
        return self.folder / f"{re.sub(r'[^A-Za-z0-9._-]', '_', name)[:60]}-{digest}{_SUFFIX}"

    def read_text(self, path: Path) -> bytes | None:
        """Return the text of an entry; None if there is no valid entry. The data of the entry is not read."""
        with _opened(path) as file:
            found = None if file is None else _read_text(file)
        return None if found is None else found[0]

    def read(self, path: Path, allocate: Callable[[int], Bytes]) -> tuple[bytes, Bytes] | None:
        """Return the text and the data of an entry, in memory that `allocate` returns; None if there is no valid entry.
        A damaged entry is removed."""
        with _opened(path) as file:
            if file is None:
                return None
            found = _read_text(file)
            data = None if found is None else _read_data(file, found[1], found[2], allocate)
        if found is None or data is None:
            _log.info("cache file %s is damaged; it is deleted and created again", path)
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        return found[0], data

    def write(self, path: Path, text: bytes, parts: Sequence[Bytes]) -> bool:
        """Write an entry, unless there is no room for it. The parts of the data are written one after the other,
        without gaps. Returns whether the entry exists afterwards. If the entry does not exist, the reason is only in
        the log."""
        size = sum(part.nbytes for part in parts) + len(text) + _ALIGNMENT
        if fcntl is None or size > cache_limit() or size > _MAX_SUMS * PIECE_BYTES:
            return False
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            remove_oldest(cache_limit() - size)
            with _draft(self.folder) as draft:
                _write(draft.fileno(), text, parts)
                os.replace(draft.name, path)
        except OSError as error:
            _log.warning("cache file %s is not written: %s", path, error.strerror)
            return False
        return True


def entries() -> list[CacheFile]:
    """Return all entries of all kinds, the least recently used first."""
    found = []
    for path in cache_folder().glob(f"*/*{_SUFFIX}"):
        with contextlib.suppress(OSError):
            state = path.stat()
            found.append(CacheFile(path, state.st_size, state.st_mtime))
    return sorted(found, key=lambda entry: entry.used)


def remove_oldest(limit: int) -> int:
    """Remove entries, the least recently used first, until all together take at most `limit` bytes. Files of writers
    that were killed are removed too. Returns the number of freed bytes."""
    freed = _remove_drafts()
    found = entries()
    left = sum(entry.num_bytes for entry in found)
    for entry in found:
        if left <= limit:
            break
        with contextlib.suppress(OSError):
            entry.path.unlink()  # processes that have read the entry do not need the file any more
        left -= entry.num_bytes
        freed += entry.num_bytes
    return freed


def _remove_drafts() -> int:
    freed = 0
    for path in cache_folder().glob(f"*/{_DRAFT}*"):
        with contextlib.suppress(OSError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # refused while a process writes the file
            freed += os.fstat(file.fileno()).st_size
            path.unlink()
    return freed


# -- files -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _draft(folder: Path) -> Iterator[Any]:
    """Yield a file with a temporary name. The file is removed afterwards, unless it was renamed."""
    with tempfile.NamedTemporaryFile(dir=folder, prefix=_DRAFT, delete=False) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield file
        finally:
            with contextlib.suppress(OSError):
                os.unlink(file.name)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int | None]:
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        yield None
        return
    try:
        yield file
    finally:
        os.close(file)


def _write(file: int, text: bytes, parts: Sequence[Bytes]) -> None:
    begin = _begin(len(text), sum(part.nbytes for part in parts))
    sums, at = _Sums(), begin
    for part in parts:
        flat = part.reshape(-1)
        for first in range(0, flat.nbytes, PIECE_BYTES):
            piece = flat[first : first + PIECE_BYTES]
            sums.add(piece)
            at += write_all_bytes(file, piece, at)
    values = sums.values()
    digest = hashlib.blake2b(text + values, digest_size=32).digest()
    head = _HEAD.pack(_MAGIC, len(text), at - begin, digest) + text + values
    write_all_bytes(file, np.frombuffer(head, np.uint8), 0)
    os.ftruncate(file, at)


def write_all_bytes(file: int, data: Bytes, at: int) -> int:
    done = 0
    while done < data.nbytes:
        done += os.pwrite(file, data[done:], at + done)  # type: ignore[arg-type]  # an array is a buffer
    return done


def _read_text(file: int) -> tuple[bytes, int, bytes] | None:
    """Return the text of an entry's file, the size of its data in bytes, and its checksums. The result is None if this
    module did not write the file."""
    try:
        head = os.pread(file, _HEAD.size, 0)
        if len(head) < _HEAD.size:
            return None
        magic, length, size, digest = _HEAD.unpack(head)
        if magic != _MAGIC or length > _MAX_TEXT or size > _MAX_SUMS * PIECE_BYTES:
            return None
        if os.fstat(file).st_size != _begin(length, size) + size:
            return None
        body = os.pread(file, length + 8 * _num_sums(size), _HEAD.size)
    except OSError:
        return None
    if hashlib.blake2b(body, digest_size=32).digest() != digest:
        return None
    return body[:length], size, body[length:]


def _read_data(file: int, size: int, sums: bytes, allocate: Callable[[int], Bytes]) -> Bytes | None:
    begin = os.fstat(file).st_size - size
    data = allocate(size)

    def read(first: int) -> int:
        piece = data[first : first + PIECE_BYTES]
        done = 0
        while done < piece.nbytes:
            count = os.preadv(file, [piece[done:]], begin + first + done)  # type: ignore[list-item]
            if count == 0:
                raise OSError("the cache file ends early")
            done += count
        return _sum(piece)

    try:
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="bridle-cache") as threads:
            found = list(threads.map(read, range(0, size, PIECE_BYTES)))
    except OSError:
        return None
    return data if _packed(found) == sums else None


def _begin(length: int, size: int) -> int:
    """Return the offset at which the data begins."""
    head = _HEAD.size + length + 8 * _num_sums(size)
    return -(-head // _ALIGNMENT) * _ALIGNMENT


def _num_sums(size: int) -> int:
    return -(-size // PIECE_BYTES)


class _Sums:
    """Checksums of pieces of `PIECE_BYTES` bytes, for data that arrives in parts of any size."""

    def __init__(self) -> None:
        self._found: list[int] = []
        self._rest = np.empty(0, np.uint8)

    def add(self, data: Bytes) -> None:
        if self._rest.nbytes == 0 and data.nbytes == PIECE_BYTES:
            self._found.append(_sum(data))
            return
        self._rest = np.concatenate([self._rest, data])
        while self._rest.nbytes >= PIECE_BYTES:
            self._found.append(_sum(self._rest[:PIECE_BYTES]))
            self._rest = self._rest[PIECE_BYTES:].copy()

    def values(self) -> bytes:
        return _packed([*self._found, *([_sum(self._rest)] if self._rest.nbytes else [])])


def _sum(piece: Bytes) -> int:
    """Return a checksum that depends on every bit, computed as fast as memory is read. A checksum detects damage, but
    not forgery."""
    whole = piece.nbytes // 8 * 8
    words = piece[:whole].view(np.uint64)
    middle = len(words) // 2
    halves = [int(np.add.reduce(part, dtype=np.uint64)) for part in (words[:middle], words[middle:])]
    rest = int.from_bytes(piece[whole:].tobytes(), "little")
    return (halves[0] + 3 * halves[1] + 5 * rest + piece.nbytes) & (1 << 64) - 1


def _packed(sums: Sequence[int]) -> bytes:
    return np.array(sums, np.uint64).tobytes()
