"""Messages between the server and a writer process. The module has only code that both processes need.

A frame is the length of a message in four bytes, then the message in MessagePack. File descriptors of new connections
are sent together with the first byte of the frame that opens the connections, in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

import msgspec

M = TypeVar("M", bound=msgspec.Struct)

#: The maximum number of descriptors in one frame; the kernel's limit is 253.
MAX_DESCRIPTORS = 64
_LENGTH_BYTES = 4
_encode = msgspec.msgpack.Encoder().encode


class Orders(msgspec.Struct, array_like=True):
    """Orders to a writer process about connections, each of which has a number. The writer executes the fields in their
    order.

    The file descriptors of the `opened` connections come with the frame. Each part of `parts` is written to the
    connection at the same index of `targets`. The writer sends the queued data of `ended` connections and then shuts
    down their sending side. The writer closes `closed` connections after their queued data, and `dropped` connections
    at once. `ping` requests a report.
    """

    opened: list[int] = []
    targets: list[int] = []
    parts: list[bytes] = []
    ended: list[int] = []
    closed: list[int] = []
    dropped: list[int] = []
    ping: bool = False


class Reports(msgspec.Struct, array_like=True):
    """Reports of a writer process about connections. `full` connections have much queued data; `ready` connections can
    accept data again. All data of `closed` connections was sent. `lost` connections are broken. `pong` answers a
    ping."""

    full: list[int] = []
    ready: list[int] = []
    closed: list[int] = []
    lost: list[int] = []
    pong: bool = False


def frame(message: Orders | Reports) -> bytes:
    """Encode a message as a frame."""
    data = _encode(message)
    return len(data).to_bytes(_LENGTH_BYTES, "big") + data


class FrameReader(Generic[M]):
    """Decodes messages of one kind from a stream of bytes."""

    def __init__(self, kind: type[M]) -> None:
        self._decode = msgspec.msgpack.Decoder(kind).decode
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[M]:
        """Add `data` from the stream. Yields the messages that are now complete."""
        data, start = self._rest + data, 0
        while (begin := start + _LENGTH_BYTES) <= len(data):
            end = begin + int.from_bytes(data[start:begin], "big")
            if end > len(data):
                break
            yield self._decode(memoryview(data)[begin:end])
            start = end
        self._rest = data[start:]
