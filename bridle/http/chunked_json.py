"""Sends JSON responses of many megabytes in pieces. A response that is built as a whole would be copied several times,
and would block other requests meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

#: The approximate size of a piece in bytes; rows are joined up to it.
PIECE_BYTES = 1 << 18


class ChunkedJsonResponse(Response):
    """A response with a JSON list of `rows`, each of which is encoded JSON. If `name` is given, the list is the field
    `name` of an object that also has `fields`. The server serves other requests between pieces."""

    media_type = "application/json"

    def __init__(self, rows: Sequence[bytes], name: str | None = None, fields: Mapping[str, Any] | None = None) -> None:
        self._head, self._rows, self._tail = b"[", rows, b"]"
        if name is not None:
            self._head = b"{" + msgspec.json.encode(name) + b":["
            self._tail = b"]}" if not fields else b"]," + msgspec.json.encode(fields)[1:]
        super().__init__()
        size = len(self._head) + sum(map(len, rows)) + max(len(rows) - 1, 0) + len(self._tail)
        self.headers["content-length"] = str(size)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for piece in self._pieces():
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _pieces(self) -> Iterator[bytes]:
        piece, size = [self._head], len(self._head)
        for number, row in enumerate(self._rows):
            piece += [b",", row] if number else [row]
            size += len(row) + 1
            if size >= PIECE_BYTES:
                yield b"".join(piece)
                piece, size = [], 0
        yield b"".join((*piece, self._tail))
