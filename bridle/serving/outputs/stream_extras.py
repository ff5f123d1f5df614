"""Data (extras) that clients get besides text, for each output: logs, stored variables, the parent of a fork, and
waiting for a lost device.

All routes with controllers use this module. `StreamExtrasReader` keeps the extras that were not sent to the client yet.
The size of the extras is limited, no matter how much a controller prints and how slowly its client reads.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from bridle.outputs import Event, Forked, Log, Resuming, Stored, Traced
from bridle.traces import Record
from bridle.traces.format import plain_record

MAX_LOG_CHARS = 1 << 20
MAX_WRITES = 1 << 10
MAX_WRITTEN_BYTES = 1 << 22
_CUT = "[...]\n"


@dataclass(slots=True)
class StreamExtras:
    """The new extras of one output. `parent` is the output from which this output was forked."""

    logs: str = ""
    writes: list[Stored] = field(default_factory=list)
    parent: int | None = None
    is_resuming: bool = False
    records: list[Record] = field(default_factory=list)
    _num_bytes: int = 0

    def log(self, text: str) -> None:
        """Add printed text. If the printed text becomes too long, only its end is kept."""
        self.logs += text
        if len(self.logs) > MAX_LOG_CHARS:
            self.logs = _CUT + self.logs[-MAX_LOG_CHARS:]

    def write(self, event: Stored) -> None:
        """Add a write of a variable. If there are too many writes of variables, the writes that have no effect any more
        are dropped."""
        self.writes.append(event)
        self._num_bytes += len(event.value)
        if len(self.writes) > MAX_WRITES or self._num_bytes > MAX_WRITTEN_BYTES:
            self.writes = _essence(self.writes)
            self._num_bytes = sum(len(each.value) for each in self.writes)

    @property
    def storage(self) -> list[dict[str, Any]]:
        """Return the writes as commands of the AICI protocol."""
        return [_command(event) for event in self.writes]

    @property
    def trace(self) -> list[dict[str, Any]]:
        """Return the trace records in the form of a trace file."""
        return [plain_record(record) for record in self.records]

    def fields(self) -> dict[str, Any]:
        """Return the extras as fields of a choice. Empty fields are left out of the result."""
        shown = {"logs": self.logs, "storage": self.storage, "resuming": self.is_resuming, "trace": self.trace}
        return {name: value for name, value in shown.items() if value}


class StreamExtrasReader:
    """Collects events and returns them as extras; trace records are included if requested."""

    def __init__(self, *, tells_trace: bool = False) -> None:
        self._tells_trace = tells_trace
        self._pending: dict[int, StreamExtras] = {}

    def add(self, events: Iterable[Event]) -> None:
        """Add the events that clients get in addition to text."""
        for event in events:
            match event:
                case Log():
                    self._of(event).log(event.text)
                case Stored():
                    self._of(event).write(event)
                case Forked():
                    self._of(event).parent = event.parent
                case Traced() if self._tells_trace:
                    self._of(event).records.append(event.record)
                case Resuming():
                    self._of(event).is_resuming = True

    def read(self, index: int) -> StreamExtras:
        """Return the new extras of one output; empty if there are none."""
        return self._pending.pop(index, None) or StreamExtras()

    def read_records(self, index: int) -> list[dict[str, Any]]:
        """Return only the trace records among the new extras of one output. The other extras of the output stay."""
        note = self._pending.get(index)
        if note is None:
            return []
        told, note.records = note.trace, []
        return told

    @property
    def indexes(self) -> list[int]:
        """Return the indexes of the outputs that have new extras."""
        return sorted(self._pending)

    def _of(self, event: Event) -> StreamExtras:
        return self._pending.setdefault(event.index, StreamExtras())


def _essence(writes: list[Stored]) -> list[Stored]:
    """Return at most one write for each variable of `writes`. The returned writes together have the same effect as all
    of the writes."""
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
