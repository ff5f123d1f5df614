"""Events that wait for a reader. Tokens are bounded by what a request may generate; what its controllers print and
store is not, so when much of it waits it is merged: of logs the end is kept, of variables what they came to.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from bridle.errors import ControllerError
from bridle.outputs import Event, Log, Stored

#: Bytes of logs and variables that wait before they are merged, and that may be left then.
MAX_NOTE_BYTES = 16 << 20
#: Characters of one output's log that are left when logs are merged.
MAX_LOG_CHARS = 1 << 18
#: Distinct variables that may wait, so that merging does not become slow.
MAX_VARIABLES = 4_096
#: What an event takes beside its text or value, in bytes.
_OVERHEAD = 128
_CUT = "[...]\n"


class Backlog:
    """A list of events with a bound. One thread at a time."""

    def __init__(self, max_bytes: int = MAX_NOTE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._events: list[Event] = []
        self._num_bytes = 0

    def add(self, events: Iterable[Event]) -> None:
        """Append events. Raises `ControllerError` if more waits than may, even when it is merged."""
        for event in events:
            self._events.append(event)
            if isinstance(event, (Log, Stored)):
                self._num_bytes += _size(event)
        if self._num_bytes > self._max_bytes:
            self._merge()

    def take(self) -> list[Event]:
        """All that waits."""
        events, self._events, self._num_bytes = self._events, [], 0
        return events

    def _merge(self) -> None:
        self._events = _merged(self._events)
        notes = [event for event in self._events if isinstance(event, (Log, Stored))]
        self._num_bytes = sum(map(_size, notes))
        if self._num_bytes > self._max_bytes // 2 or len(notes) > MAX_VARIABLES:
            raise ControllerError(
                f"{self._num_bytes} bytes of logs and variables, in {len(notes)} pieces, wait for a client that does "
                f"not read; at most {self._max_bytes // 2} in {MAX_VARIABLES}"
            )


def _size(event: Log | Stored) -> int:
    content = len(event.text) if isinstance(event, Log) else len(event.name) + len(event.value)
    return content + _OVERHEAD


def _merged(events: list[Event]) -> list[Event]:
    """The same news with one log for each output, where its first one was, and one event for each variable, where it
    was written last. Outputs of a request share their variables, so the order of writes counts across them."""
    logs: dict[int, list[str]] = {}
    values: dict[str, _Value] = {}
    for event in events:
        if isinstance(event, Log):
            logs.setdefault(event.index, []).append(event.text)
        elif isinstance(event, Stored):
            values[event.name] = _Value.after(values.get(event.name), event)
    merged: list[Event] = []
    for event in events:
        if isinstance(event, Log):
            if (texts := logs.pop(event.index, None)) is not None:
                merged.append(Log(event.request_id, event.index, _tail("".join(texts))))
        elif not isinstance(event, Stored):
            merged.append(event)
        elif (value := values[event.name]).last is event:
            merged.append(replace(event, value=b"".join(value.pieces), is_append=value.is_append))
    return merged


@dataclass(slots=True)
class _Value:
    """What several writes of a variable came to."""

    last: Stored
    pieces: list[bytes]
    is_append: bool

    @classmethod
    def after(cls, known: _Value | None, event: Stored) -> _Value:
        """A write replaces what was written before; an append goes on from there."""
        if known is None or not event.is_append:
            return cls(event, [event.value], event.is_append)
        known.pieces.append(event.value)
        known.last = event
        return known


def _tail(text: str) -> str:
    return text if len(text) <= MAX_LOG_CHARS else _CUT + text[-MAX_LOG_CHARS:]
