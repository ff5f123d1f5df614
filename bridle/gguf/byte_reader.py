"""Reads bytes of a GGUF file, at any offset or in order. Every read is checked against the size of the file."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from struct import Struct
from threading import Lock

from bridle.errors import UnsupportedModel

READ_AHEAD_BYTES = 1 << 20  # bytes of a header that are read at once
_U32, U64 = Struct("<I"), Struct("<Q")


class PlainFile:
    """A plain file that stays open as long as this object exists."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            if not stat.S_ISREG(path.stat().st_mode):
                raise UnsupportedModel(f"{path} is not a regular file")
            self._file = open(path, "rb", buffering=0, opener=_open_at_once)  # noqa: SIM115
            self.size = os.fstat(self._file.fileno()).st_size
        except OSError as error:
            raise UnsupportedModel(f"{path} cannot be read: {error.strerror}") from None
        if self.size < 24:
            raise UnsupportedModel(f"{path} is not a GGUF file: it has {self.size} bytes")
        self._lock = Lock()

    def read_into(self, target: memoryview, start: int) -> int:
        """Fill `target` with the bytes from `start` on; return the number of bytes read."""
        done = 0
        try:
            with self._lock:
                self._file.seek(start)
                while done < len(target) and (count := self._file.readinto(target[done:])):
                    done += count
        except OSError as error:
            raise UnsupportedModel(f"{self.path} cannot be read: {error.strerror}") from None
        return done


def _open_at_once(path: str, flags: int) -> int:
    """Open a file without waiting, because a pipe may have replaced the file."""
    return os.open(path, flags | os.O_NONBLOCK)


class ByteReader:
    """A read position in the file. Each method raises an error if the file does not have the requested number of
    bytes."""

    def __init__(self, file: PlainFile) -> None:
        self.path, self.size = file.path, file.size
        self.at = 0
        self._file = file
        self._bytes = bytearray()  # the file's beginning, as far as it was read

    def read(self, start: int, end: int) -> bytes:
        """Return the bytes from `start` to `end`, which must be in the file."""
        self._fetch(end)
        return bytes(memoryview(self._bytes)[start:end])

    def _fetch(self, end: int) -> None:
        """Read the file into memory up to `end`, and some bytes beyond it in advance."""
        have = len(self._bytes)
        if end <= have:
            return
        more = bytearray(min(max(end - have, READ_AHEAD_BYTES), self.size - have))
        if self._file.read_into(memoryview(more), have) < len(more):
            raise UnsupportedModel(f"{self.path} was cut off while it was read")
        self._bytes += more

    def fail(self, what: str) -> UnsupportedModel:
        return UnsupportedModel(f"{self.path} is damaged: {what}")

    def skip(self, size: int, what: str) -> int:
        """Move on by `size` bytes; return the offset of the skipped bytes."""
        start = self.at
        if size > self.size - start:
            raise self.fail(f"{what} needs {size} bytes from byte {start}, but the file has {self.size} bytes")
        self.at = start + size
        return start

    def stretch(self, start: int, least: int, what: str) -> bytes:
        """Return `least` or more bytes from `start` on, without moving the read position."""
        if start + least > self.size:
            raise self.fail(f"{what} reaches beyond the end of the file")
        return self.read(start, min(start + max(least, READ_AHEAD_BYTES), self.size))

    def read_next(self, size: int, what: str) -> bytes:
        """Return the next `size` bytes."""
        start = self.skip(size, what)
        return self.read(start, start + size)

    def u32(self, what: str) -> int:
        return int(_U32.unpack(self.read_next(4, what))[0])

    def u64(self, what: str) -> int:
        return int(U64.unpack(self.read_next(8, what))[0])

    def text(self, limit: int, what: str) -> str:
        """Return a string of at most `limit` bytes. Bytes that are not UTF-8 become U+FFFD."""
        size = self.u64(what)
        if size > limit:
            raise self.fail(f"{what} has {size} bytes; at most {limit} are read")
        return self.read_next(size, what).decode("utf-8", "replace")
