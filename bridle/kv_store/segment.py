"""Segments are files to which one process appends records, and which all processes read.

The process that writes a segment keeps it locked until the process ends or closes the segment. A file that no process
has locked is complete: no process appends to it again. A reader ignores an incomplete record at the end of a file.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

from bridle.kv_store.records import ERASED, HEADER_BYTES, Buffer, Header, block_digest, pack_header, read_header

try:
    import fcntl
except ImportError:  # on Windows no blocks are stored
    fcntl = None  # type: ignore[assignment]

SUFFIX = ".kv"
HAS_LOCKS = fcntl is not None
#: Minimum number of seconds between two updates of a segment's time of use.
_USE_EVERY = 1.0


class Segment:
    """A file of records, open for reading. Raises `OSError` if the file cannot be opened."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._end = 0  # end of the records that were read
        self._used = 0.0

    def scan(self) -> Iterator[tuple[int, Header]]:
        """Yield the position and the header of each complete record that was added since the last call. A damaged
        header ends the segment, because the position of the next record is then unknown."""
        try:
            size = os.fstat(self._file).st_size
            while (header := read_header(os.pread(self._file, HEADER_BYTES, self._end))) is not None:
                end = self._end + HEADER_BYTES + header.num_bytes
                if end > size:
                    break
                start, self._end = self._end, end
                yield start, header
        except OSError:
            return

    def read(self, position: int, key: bytes, into: memoryview) -> bool:
        """Read the block `key` from the record at `position` into `target`, which has the size of the block. Returns
        whether the record contains this block without damage."""
        try:
            head = bytearray(HEADER_BYTES)
            count = os.preadv(self._file, [head, into], position)
        except OSError:
            return False
        header = read_header(bytes(head))
        if header is None or header.key != key or count != HEADER_BYTES + len(into) or header.num_bytes != len(into):
            return False
        return block_digest(into) == header.digest

    def note_use(self) -> None:
        """Record that the segment is in use. Unused segments are removed before segments in use."""
        now = time.monotonic()
        if now - self._used >= _USE_EVERY:
            self._used = now
            with contextlib.suppress(OSError):
                os.utime(self.path)

    def __del__(self) -> None:  # runs only once no thread reads it any more
        if hasattr(self, "_file"):
            os.close(self._file)


class SegmentWriter:
    """A new segment of this process, locked until it is closed. Raises `OSError` if the segment cannot be created."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / f"{time.time_ns():020d}-{secrets.token_hex(4)}{SUFFIX}"
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        lock(self._file)
        self.size = 0

    def append(self, key: bytes, tenant: bytes, block: Buffer) -> int:
        """Append a record and return its position. If appending fails, the file is unchanged and `OSError` is
        raised."""
        header = pack_header(Header(len(block), key, tenant, block_digest(block)))
        position = self.size
        try:
            _write_all(self._file, header, block, position)
        except OSError:
            os.ftruncate(self._file, position)
            raise
        self.size = position + len(header) + len(block)
        return position

    @property
    def is_lost(self) -> bool:
        """Return whether the file was deleted. If the file was deleted, no reader can open it any more."""
        return os.fstat(self._file).st_nlink == 0

    def close(self) -> None:
        """Release the lock. A segment without records is removed."""
        if not self.size:
            with contextlib.suppress(OSError):
                self.path.unlink()
        os.close(self._file)


def _write_all(file: int, header: bytes, block: Buffer, position: int) -> None:
    count = os.pwritev(file, [header, block], position)
    if count < len(header):
        raise OSError(f"the header of a block was cut off: {count} bytes were written")
    rest = memoryview(block)[count - len(header) :]
    while rest:
        count = os.pwrite(file, rest, position + len(header) + len(block) - len(rest))
        if not count:
            raise OSError("no more bytes could be written to the file")
        rest = rest[count:]


def lock(file: int) -> None:
    """Wait until this process can lock a file. The lock is released when the file is closed, or when the process
    ends."""
    fcntl.flock(file, fcntl.LOCK_EX)


def remove_if_complete(path: Path) -> bool:
    """Remove a segment, unless a process is writing it. Returns whether the segment was removed."""
    with contextlib.suppress(OSError), _opened(path, os.O_RDONLY) as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # refused while a process writes it
        path.unlink()
        return True
    return not path.exists()


def is_being_written(path: Path) -> bool:
    """Return whether a running process appends to this segment."""
    try:
        with _opened(path, os.O_RDONLY) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def erase(path: Path, tenant: bytes) -> int:
    """Overwrite all blocks of a tenant in a segment, even if the segment is in use. Returns the number of erased
    blocks. Each block is erased before its header. So the next process can find an interrupted erasure and complete
    it."""
    num_erased = 0
    with _opened(path, os.O_RDWR) as file:
        for position, header in Segment(path).scan():
            if header.tenant == tenant:
                os.pwrite(file, bytes(header.num_bytes), position + HEADER_BYTES)
                os.pwrite(file, pack_header(Header(header.num_bytes, ERASED, ERASED, ERASED)), position)
                num_erased += 1
        if num_erased:
            os.fsync(file)
    return num_erased


@contextlib.contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    file = os.open(path, flags | os.O_CLOEXEC)
    try:
        yield file
    finally:
        os.close(file)
