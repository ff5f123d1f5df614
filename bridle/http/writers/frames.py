"""Messages between the server and a process that writes streams. It contains only the knowledge that both share.

A frame is its length in four bytes, then a message in MessagePack. Descriptors of connections travel together with the
first byte of the frame that opens them, in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

import msgspec

M = TypeVar("M", bound=msgspec.Struct)

#: Descriptors that one message may carry; the kernel's limit is 253.
MAX_DESCRIPTORS = 64
_LENGTH_BYTES = 4
_encode = msgspec.msgpack.Encoder().encode


class Orders(msgspec.Struct, array_like=True):
    """Orders to a writer about connections, carried out in this order. Each is known by a number.

    `opened` connections come as descriptors. The parts of `parts` belong to the connections at the same places of
    `targets`. Connections that are `ended` send no more after their queue, those `closed` are closed after it, and
    those `dropped` are closed at once. `ping` asks for a sign of life.
    """

    opened: list[int] = []
    targets: list[int] = []
    parts: list[bytes] = []
    ended: list[int] = []
    closed: list[int] = []
    dropped: list[int] = []
    ping: bool = False


class Reports(msgspec.Struct, array_like=True):
    """Reports of a writer about connections: bytes of `full` ones wait, `ready` ones have room again, all bytes of
    `closed` ones were sent, and `lost` ones have broken. `pong` is the sign of life."""

    full: list[int] = []
    ready: list[int] = []
    closed: list[int] = []
    lost: list[int] = []
    pong: bool = False


def frame(message: Orders | Reports) -> bytes:
    """Return the bytes of a message."""
    data = _encode(message)
    return len(data).to_bytes(_LENGTH_BYTES, "big") + data


class FrameReader(Generic[M]):
    """Puts messages of one kind together from the bytes of a stream."""

    def __init__(self, kind: type[M]) -> None:
        self._decode = msgspec.msgpack.Decoder(kind).decode
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[M]:
        """Yield the messages that are complete with `data`."""
        data, start = self._rest + data, 0
        while (begin := start + _LENGTH_BYTES) <= len(data):
            end = begin + int.from_bytes(data[start:begin], "big")
            if end > len(data):
                break
            yield self._decode(memoryview(data)[begin:end])
            start = end
        self._rest = data[start:]
