"""Writes server-sent events with names, for APIs whose events have a `type`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import msgspec

from bridle.errors import BridleError, RequestCancelled
from bridle.http.middleware.request_context import RequestContext
from bridle.http.sse import Produce, SseWriter

Event = dict[str, Any]


async def send_events(writer: SseWriter, events: Iterable[Event]) -> None:
    """Send events in one write. The name of each event is its `type`."""
    await writer.write(b"".join(map(named_event, events)))


def named_event(event: Event) -> bytes:
    """Encode an event. The name of the event is its `type`."""
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), msgspec.json.encode(event))


def with_last_event(
    produce: Callable[[SseWriter], Awaitable[None]], call: RequestContext, shape: Callable[[BridleError], Event]
) -> Produce:
    """Wrap `produce` so that an error of `produce` is sent as a last event."""

    async def guarded(writer: SseWriter) -> None:
        try:
            await produce(writer)
        except RequestCancelled:
            raise
        except BridleError as error:
            call.error = error
            await send_events(writer, [shape(error)])

    return guarded
