"""Shared variables of a request: byte strings with versions, visible to all sequences of the request.

A write may be conditional on the version, which makes it an atomic exchange between forks. All sizes that a guest can
increase are limited, and each error names its limit. Tool calls are variables with reserved names. If space is needed,
the variables of tool calls whose answers were read are removed.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from bridle.aici.replies import ReadVar, StorageCommand, WriteVar
from bridle.aici.runtime.limits import RuntimeLimits
from bridle.aici.runtime.wasm import GuestFault

_commands = msgspec.json.Decoder(StorageCommand)
_MISSING = b'{"VariableMissing":{}}'
#: The variables of a tool call are `tool:ID`, and `tool:ID` with one of these suffixes.
_TOOL, _ANSWER, _ERROR = "tool:", ":answer", ":error"
#: Number of answers, the last ones read, that are not removed, because a guest may read an answer in pieces.
_NUM_KEPT = 4


def parse_command(data: bytes) -> ReadVar | WriteVar:
    """Parse a storage command of a guest. Raises `GuestFault` if the command is malformed."""
    try:
        command = _commands.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise GuestFault(f"malformed storage command: {error}") from None
    if isinstance(command.write, WriteVar) and command.read is msgspec.UNSET:
        if command.write.op not in ("Set", "Append"):
            raise GuestFault(f"storage command: op is {command.write.op[:40]!r}; must be Set or Append")
        return command.write
    if isinstance(command.read, ReadVar) and command.write is msgspec.UNSET:
        return command.read
    raise GuestFault("a storage command must have exactly one of ReadVar and WriteVar")


class Variables(Protocol):
    """The interface that executes a guest's storage commands."""

    def execute(self, command: ReadVar | WriteVar) -> bytes:
        """Execute a command. Returns the JSON reply. Raises `GuestFault` when a limit is exceeded."""

    def version(self, name: str) -> int:
        """Return the version of a variable, 0 if it is not set."""


@dataclass(slots=True)
class SharedVariables:
    """The variables of one request. Thread-safe."""

    limits: RuntimeLimits
    _values: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    _size: int = 0
    _answers_read: dict[str, None] = field(default_factory=dict)  # calls whose answers were read, the oldest first
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def execute(self, command: ReadVar | WriteVar) -> bytes:
        with self._lock:
            if isinstance(command, ReadVar):
                return self._read(command.name)
            return self._write(command)

    def version(self, name: str) -> int:
        found = self._values.get(name)
        return found[0] if found else 0

    def copy(self) -> SharedVariables:
        """Return an independent copy of the variables."""
        with self._lock:
            return SharedVariables(self.limits, dict(self._values), self._size)

    def _read(self, name: str) -> bytes:
        found = self._values.get(name)
        if found is None:
            return _MISSING
        if name.startswith(_TOOL) and name.endswith(_ANSWER):
            call = name.removesuffix(_ANSWER)
            self._answers_read.pop(call, None)
            self._answers_read[call] = None
        return msgspec.json.encode({"ReadVar": {"version": found[0], "value": found[1].hex()}})

    def _write(self, command: WriteVar) -> bytes:
        old = self._values.get(command.name)
        if command.when_version_is is not None and (old is None or old[0] != command.when_version_is):
            return self._read(command.name)
        try:
            value = bytes.fromhex(command.value)
        except ValueError:
            raise GuestFault("storage command: value is not hexadecimal") from None
        if command.op == "Append" and old is not None:
            value = old[1] + value
        self._make_room(command.name, len(value), len(old[1]) if old else None)
        self._check(command.name, len(value), len(old[1]) if old else None)
        version = old[0] + 1 if old else 1
        self._size += len(value) - (len(old[1]) if old else 0)
        self._values[command.name] = (version, value)
        return msgspec.json.encode({"WriteVar": {"version": version}})

    def _make_room(self, name: str, size: int, old_size: int | None) -> None:
        """Make space for a value: remove the variables of tool calls whose answers were read, as many as necessary."""
        calls = list(self._answers_read)[:-_NUM_KEPT] if len(self._answers_read) > _NUM_KEPT else []
        for call in calls:
            is_full = old_size is None and len(self._values) >= self.limits.max_variables
            if not is_full and self._size + size - (old_size or 0) <= self.limits.max_variable_bytes:
                return
            if name.startswith(call):
                continue  # the call is in use again
            del self._answers_read[call]
            for each in (call, call + _ANSWER, call + _ERROR):
                self._size -= len(self._values.pop(each, (0, b""))[1])

    def _check(self, name: str, size: int, old_size: int | None) -> None:
        limits = self.limits
        if len(name) > limits.max_variable_name:
            raise GuestFault(f"the name of a variable has {len(name)} characters; at most {limits.max_variable_name}")
        if old_size is None and len(self._values) >= limits.max_variables:
            raise GuestFault(f"the request has more than {limits.max_variables} variables, the limit")
        total = self._size + size - (old_size or 0)
        if total > limits.max_variable_bytes:
            raise GuestFault(f"the variables of the request have {total} bytes; at most {limits.max_variable_bytes}")


@dataclass(slots=True)
class RequestState:
    """The state that all sequences of one request share. `variables` is used only if each request has its own
    processes."""

    id: int
    name: str
    tenant: str
    module: str
    variables: SharedVariables
    trace: str | None = None  # W3C trace context of the request
    num_alive: int = 0
    num_ever: int = 0
