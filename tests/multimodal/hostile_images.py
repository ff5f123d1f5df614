"""Hostile image files."""

from __future__ import annotations

import struct
import zlib


def header_of_png(width: int, height: int) -> bytes:
    """A PNG that claims this size; its data is a few zeros."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    size = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = chunk(b"IDAT", zlib.compress(bytes(64)))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", size) + data + chunk(b"IEND", b"")
