"""Playing a recorded trace again: every request goes to a fresh runtime, and the replies must be the same.

Times are left out of the comparison. The format is that of `recording`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from bridle.aici.client.process import RuntimeConfig, RuntimeProcess
from bridle.errors import InvalidRequest, ProtocolError

#: Fields whose values differ from run to run.
_VOLATILE = frozenset({"micros", "time", "updated_at", "compiled_size", "$rid"})
_MAX_LINE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Difference:
    """A reply that is not what the trace has. `line` counts from 1."""

    line: int
    operation: str
    expected: Any
    got: Any


def replay(path: Path, config: RuntimeConfig) -> Iterator[Difference | None]:
    """Play a trace against a fresh runtime: one item per exchange, None where the reply is the same."""
    process = RuntimeProcess(config)
    try:
        for number, entry in enumerate(_entries(path), 1):
            yield _play(process, number, entry)
    finally:
        process.kill()
        process.close()


class _Entry(msgspec.Struct):
    cmd: dict[str, Any]
    resp: dict[str, Any]
    suff: str = ""
    timestamp: float = 0


def _entries(path: Path) -> Iterator[_Entry]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if len(line) > _MAX_LINE_BYTES:
                raise InvalidRequest(f"{path}: line {number} has {len(line)} bytes; at most {_MAX_LINE_BYTES}")
            try:
                yield msgspec.json.decode(line, type=_Entry)
            except msgspec.DecodeError as error:
                raise InvalidRequest(f"{path}: line {number} is no exchange: {error}") from None


def _play(process: RuntimeProcess, number: int, entry: _Entry) -> Difference | None:
    side = entry.suff == "-side"
    channel = process.link.side if side else process.link.main
    channel.send(msgspec.json.encode(entry.cmd), 10.0, process.is_alive)
    reply = channel.receive(process.config.start_timeout, process.is_alive)
    if reply is None:
        raise ProtocolError(f"the runtime did not answer exchange {number}")
    got, expected = _stable(msgspec.json.decode(reply)), _stable(entry.resp)
    return None if got == expected else Difference(number, str(entry.cmd.get("op")), expected, got)


def _stable(value: Any) -> Any:
    """The value without what differs from run to run."""
    if isinstance(value, dict):
        return {key: _stable(item) for key, item in value.items() if key not in _VOLATILE}
    return [_stable(item) for item in value] if isinstance(value, list) else value
