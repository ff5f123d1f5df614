"""What there is to say beside text, output by output: logs, variables written, where a fork came from, and that an
output waits for a device that was lost.

Shared by all routes that carry controllers. `NoteReader` keeps what was not told yet; that is bounded, however much a
controller says and however slowly its client reads.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from bridle.outputs import Event, Forked, Log, Resuming, Stored

MAX_LOG_CHARS = 1 << 20
MAX_WRITES = 1 << 10
MAX_WRITTEN_BYTES = 1 << 22
_CUT = "[...]\n"


@dataclass(slots=True)
class Note:
    """What is new of one output. `parent` is the output it was forked from."""

    logs: str = ""
    writes: list[Stored] = field(default_factory=list)
    parent: int | None = None
    is_resuming: bool = False
    _num_bytes: int = 0

    def log(self, text: str) -> None:
        """More was printed; of very much the end is kept."""
        self.logs += text
        if len(self.logs) > MAX_LOG_CHARS:
            self.logs = _CUT + self.logs[-MAX_LOG_CHARS:]

    def write(self, event: Stored) -> None:
        """A variable was written; of very many writes those that count are kept."""
        self.writes.append(event)
        self._num_bytes += len(event.value)
        if len(self.writes) > MAX_WRITES or self._num_bytes > MAX_WRITTEN_BYTES:
            self.writes = _essence(self.writes)
            self._num_bytes = sum(len(each.value) for each in self.writes)

    @property
    def storage(self) -> list[dict[str, Any]]:
        """The writes as commands of the AICI protocol."""
        return [_command(event) for event in self.writes]

    def fields(self) -> dict[str, Any]:
        """Extra fields of a choice: only those that say something."""
        shown = {"logs": self.logs, "storage": self.storage, "resuming": self.is_resuming}
        return {name: value for name, value in shown.items() if value}


class NoteReader:
    """Takes events in, gives notes out."""

    def __init__(self) -> None:
        self._pending: dict[int, Note] = {}

    def add(self, events: Iterable[Event]) -> None:
        """Note what is worth it."""
        for event in events:
            match event:
                case Log():
                    self._of(event).log(event.text)
                case Stored():
                    self._of(event).write(event)
                case Forked():
                    self._of(event).parent = event.parent
                case Resuming():
                    self._of(event).is_resuming = True

    def take(self, index: int) -> Note:
        """What was not told yet of one output; empty if there is nothing."""
        return self._pending.pop(index, None) or Note()

    @property
    def indexes(self) -> list[int]:
        """Outputs of which there is something to tell."""
        return sorted(self._pending)

    def _of(self, event: Event) -> Note:
        return self._pending.setdefault(event.index, Note())


def _essence(writes: list[Stored]) -> list[Stored]:
    """At most one write for each variable, which does what all of them did."""
    last: dict[str, Stored] = {}
    for event in writes:
        before = last.get(event.name)
        if before is not None and event.is_append:
            value = before.value + event.value
            event = Stored(event.request_id, event.index, event.name, value, before.is_append)
        last[event.name] = event
    return list(last.values())


def _command(event: Stored) -> dict[str, Any]:
    write = {
        "name": event.name,
        "value": event.value.hex(),
        "op": "Append" if event.is_append else "Set",
        "when_version_is": None,
    }
    return {"WriteVar": write}
