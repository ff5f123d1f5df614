"""Plain text of an output that goes to its client at once, past the task that reads the request.

The task sees everything that is not plain: the first and the last events, logs, rewinds, forks. Between these, a front
end lets a `LiveText` write each batch of tokens where it arrives, in the event loop. The server's own record of a
request is then updated now and then.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bridle.outputs import Event, TokenEvent

if TYPE_CHECKING:
    from bridle.serving.lifecycle.generation import SubRequest
    from bridle.serving.lifecycle.request_record import RequestRecord

#: How many batches of events, and how many seconds, the notes may lag behind.
_MAX_BATCHES, _MAX_SECONDS = 32, 0.1


@dataclass(slots=True)
class LiveText:
    """Sends tokens of the only output of a request. `send` does not wait; it returns whether the client has room for
    more, which `drain` waits for."""

    send: Callable[[list[TokenEvent]], bool]
    drain: Callable[[], Awaitable[None]]


class LiveReader:
    """Takes a stream's tokens for a `LiveText`, and leaves all other events to the reader."""

    def __init__(self, part: SubRequest, story: RequestRecord, live: LiveText) -> None:
        self._part, self._story, self._send = part, story, live.send
        self.drain = live.drain
        self._sent: list[TokenEvent] = []
        self._num_batches = 0
        self._due = 0.0

    def __call__(self, events: list[Event]) -> list[Event] | None:
        """Send events if all of them are tokens."""
        tokens: list[TokenEvent] = []
        for event in events:
            if type(event) is not TokenEvent or event.index:
                return events
            tokens.append(event)
        self._sent += tokens
        self._num_batches += 1
        if self._num_batches >= _MAX_BATCHES or time.monotonic() >= self._due:
            self.settle()
        return None if self._send(tokens) else []

    def settle(self) -> None:
        """Record the text that was sent."""
        events: list[Event] = [*self._sent]
        self._sent, self._num_batches, self._due = [], 0, time.monotonic() + _MAX_SECONDS
        if events:
            self._part.add(events)
            self._story.record_events(events)
            self._part.reader.skip()
