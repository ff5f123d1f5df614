"""Hostile image, audio and video files for tests."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Sequence
from random import Random

from bridle.errors import MediaRefused


def header_of_png(width: int, height: int) -> bytes:
    """Return a PNG whose header claims this size, and whose data is only a few zeros."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    size = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = chunk(b"IDAT", zlib.compress(bytes(64)))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", size) + data + chunk(b"IEND", b"")


def check_changed_headers(files: Sequence[bytes], read: Callable[[bytes], None], count: int = 200) -> None:
    """Change bytes of valid files, mostly in their headers, and truncate some. Check that `read` accepts each file or
    raises bridle's refusal."""
    random = Random(7)
    outcomes = {"read": 0, "refused": 0}
    for _ in range(count):
        data = bytearray(random.choice(files))
        for _ in range(random.randint(1, 6)):
            data[random.randrange(min(len(data), random.choice([32, 128, 100_000])))] = random.randrange(256)
        try:
            read(bytes(data[: random.choice([len(data), random.randrange(1, len(data))])]))
            outcomes["read"] += 1
        except MediaRefused:
            outcomes["refused"] += 1
    assert min(outcomes.values()) > count // 50, outcomes
