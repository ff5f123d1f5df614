"""Keeps a guest's output until it is reported. Beyond a size limit, the oldest text is dropped."""

from __future__ import annotations


class LogBuffer:
    """The text that a guest writes to file descriptors 1 and 2. When the buffer is full, its oldest quarter is
    removed."""

    __slots__ = ("_data", "_limit")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._data = bytearray()

    def write(self, data: bytes) -> None:
        if len(data) >= self._limit:
            self._data[:] = data[-self._limit :]
            return
        if len(self._data) + len(data) > self._limit:
            del self._data[: max(self._limit // 4, len(self._data) + len(data) - self._limit)]
        self._data += data

    def drain(self) -> str:
        """Return the text since the last call of this method. Bytes that are not UTF-8 are replaced."""
        if not self._data:
            return ""
        text = self._data.decode(errors="replace")
        self._data.clear()
        return text

    def copy(self) -> LogBuffer:
        other = LogBuffer(self._limit)
        other._data[:] = self._data
        return other
