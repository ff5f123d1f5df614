"""Streams of JSON objects, one object per line. A stream that fails ends with an object that has the field `error`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

import msgspec

from bridle.errors import BridleError, RequestCancelled
from bridle.http.middleware.request_context import RequestContext
from bridle.http.ollama.bodies import ollama_error
from bridle.http.settings import HttpSettings
from bridle.http.sse import SseResponse, SseWriter

Row = dict[str, Any]


class NdjsonResponse(SseResponse):
    """A streamed response that `produce` writes. No keepalive lines are sent, because a client of Ollama's API parses
    each line as an object."""

    media_type = "application/x-ndjson"

    def __init__(
        self, produce: Callable[[SseWriter], Awaitable[None]], call: RequestContext, settings: HttpSettings
    ) -> None:
        async def guarded(writer: SseWriter) -> None:
            try:
                await produce(writer)
            except RequestCancelled:
                raise
            except BridleError as error:
                call.error = error
                await send_rows(writer, ollama_error(error))

        super().__init__(guarded, settings, ping=b"")


async def send_rows(writer: SseWriter, *rows: Row) -> None:
    """Send objects in one write."""
    await writer.write(lines(*rows))


def lines(*rows: Row) -> bytes:
    """Encode objects, one per line."""
    return b"".join([msgspec.json.encode(row) + b"\n" for row in rows])


def timestamp(seconds: float | None = None) -> str:
    """Return a time (None: now) in Ollama's format."""
    moment = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return moment.isoformat().replace("+00:00", "Z")


def nanoseconds(seconds: float) -> int:
    return max(int(seconds * 1e9), 0)
