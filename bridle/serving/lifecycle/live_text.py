"""Sends the plain text of an output to its client at once, without the task that reads the request.

The task that reads the request gets all other events: the first and the last events, logs, rollbacks and forks. Between
the events for the task, a front end lets a `LiveText` send each batch of tokens when it arrives, in the event loop. As
a result, the server updates its record of the request less often.
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

#: Maximum lag of the request's record: in batches of events, and in seconds.
_MAX_BATCHES, _MAX_SECONDS = 32, 0.1


@dataclass(slots=True)
class LiveText:
    """Sends the tokens of a request that has only one output. `send` does not wait. `send` returns whether the client
    has room for more; if not, `drain` waits for room."""

    send: Callable[[list[TokenEvent]], bool]
    drain: Callable[[], Awaitable[None]]


class LiveReader:
    """Passes the tokens of a stream to a `LiveText`, and leaves all other events to the stream's reader."""

    def __init__(self, part: SubRequest, story: RequestRecord, live: LiveText) -> None:
        self._part, self._story, self._send = part, story, live.send
        self.drain = live.drain
        self._sent: list[TokenEvent] = []
        self._num_batches = 0
        self._due = 0.0

    def __call__(self, events: list[Event]) -> list[Event] | None:
        """Send the events if all of them are tokens. Returns None if the events were sent, else the events for the
        reader."""
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
