"""Decompresses request bodies in pieces up to a size limit, so that a small body cannot expand without limit.

Clients compress requests with gzip. A request with any other coding is refused before its body is read; the error names
the coding.
"""

from __future__ import annotations

import zlib
from typing import Protocol

from fastapi import Request

from bridle.errors import InvalidRequest
from bridle.http.errors import RefusedBody
from bridle.safe_repr import short_repr

_GZIP = 16 + zlib.MAX_WBITS  # for zlib: data with gzip's header and checksum


class Decompressor(Protocol):
    """Interface for the decompression of a request body in pieces."""

    def push(self, piece: bytes, limit: int) -> bytes:
        """Decompress the next piece. If the result exceeds `limit` bytes, return `limit` + 1 bytes, so that the caller
        notices."""

    def close(self) -> None:
        """Record that there are no more pieces. Raises `RefusedBody` if the body is incomplete."""


class Gzip:
    """Decompresses a body that is compressed with gzip."""

    def __init__(self) -> None:
        self._stream = zlib.decompressobj(_GZIP)

    def push(self, piece: bytes, limit: int) -> bytes:
        if self._stream.eof:
            raise _broken("more bytes follow after the end of the gzip data")
        try:
            made = self._stream.decompress(piece, limit + 1)
        except zlib.error as error:
            raise _broken(str(error)) from None
        if self._stream.unused_data:
            raise _broken("more bytes follow after the end of the gzip data")
        return made

    def close(self) -> None:
        if not self._stream.eof:
            raise _broken("the gzip data is cut off before its end")


def unpacker_of(request: Request) -> Decompressor | None:
    """Return the decompressor of a request body; None if the body is not compressed. Raises `RefusedBody` with 415 for
    an unknown coding."""
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding in ("", "identity"):
        return None
    if coding in ("gzip", "x-gzip"):
        return Gzip()
    raise RefusedBody(415, InvalidRequest(f"the request body is encoded as {short_repr(coding)}; must be gzip or none"))


def check_plain(request: Request) -> None:
    """Refuse a compressed body on a route that does not decompress bodies."""
    if unpacker_of(request) is not None:
        raise RefusedBody(415, InvalidRequest("the request body is gzip; this route accepts only plain bodies"))


def _broken(reason: str) -> RefusedBody:
    return RefusedBody(400, InvalidRequest(f"the request body is not valid gzip: {reason}"))
