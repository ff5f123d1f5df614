"""Traces as JSON lines: a header, and then one line for each record. A file may contain several traces, one after the
other.

The lines have the fields of the classes in `bridle.traces`. Fields with their default value are left out. The JSON
schema is generated from the same classes. So the lines always agree with the schema.
"""

from __future__ import annotations

import functools
import io
import operator
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, Field, fields
from operator import attrgetter
from pathlib import Path
from typing import Any, BinaryIO, get_type_hints

import msgspec

from bridle.errors import InvalidRequest
from bridle.traces.records import KINDS, VERSION, Record, Trace, TraceHeader

HEADER = "header"
_BEGINNING = b'{"type":"header"'
#: Maximum length of a line: the maximum message between an engine and its control runtime, modules included.
MAX_LINE_BYTES = 256 << 20


class _Line:
    """The form of one kind of line: the fields of its class, and the kind as `type`."""

    def __init__(self, kind: type[Any], name: str) -> None:
        self.kind, self.name = kind, name
        self.names = tuple(field.name for field in fields(kind))
        types = get_type_hints(kind)
        columns = [(field.name, types[field.name], *_default(field)) for field in fields(kind)]
        self.message: type[Any] = msgspec.defstruct(
            name, columns, module=__name__, tag_field="type", tag=name, omit_defaults=True
        )
        self._values = attrgetter(*self.names)

    def pack(self, value: Any) -> Any:
        return self.message(*self._values(value))

    def unpack(self, message: Any) -> Any:
        return self.kind(*self._values(message))


def _default(field: Field[Any]) -> tuple[Any, ...]:
    if field.default_factory is not MISSING:
        return (msgspec.field(default_factory=field.default_factory),)
    # Every header has its version, because later readers check it first.
    return () if field.default is MISSING or field.name == "version" else (field.default,)


_KINDS: dict[str, type[Any]] = {HEADER: TraceHeader, **KINDS}


_LINES = {kind: _Line(kind, name) for name, kind in _KINDS.items()}
_BY_MESSAGE = {line.message: line for line in _LINES.values()}
_ANY = functools.reduce(operator.or_, _BY_MESSAGE)
_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(_ANY)


def encode_record(record: Record | TraceHeader) -> bytes:
    """Return the record as a line of JSON, without the newline."""
    return _ENCODER.encode(_LINES[type(record)].pack(record))


def decode_record(line: bytes) -> Any:
    """Return the `Record` or the `TraceHeader` that a line describes. Raises `InvalidRequest`."""
    try:
        message = _DECODER.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"not a trace record: {error}", "TRACE") from None
    value = _BY_MESSAGE[type(message)].unpack(message)
    if isinstance(value, TraceHeader) and value.version != VERSION:
        raise InvalidRequest(f"the trace has version {value.version}; this bridle reads {VERSION}", "TRACE")
    return value


def plain_record(record: Record | TraceHeader) -> dict[str, Any]:
    """Return the record as an object, to be part of a larger JSON text."""
    plain: dict[str, Any] = msgspec.to_builtins(_LINES[type(record)].pack(record))
    return plain


def encode_trace(trace: Trace) -> bytes:
    """Return the trace as JSON lines."""
    lines: list[Record | TraceHeader] = [trace.header, *trace.records]
    return b"".join(encode_record(each) + b"\n" for each in lines)


def write(traces: Iterable[Trace], path: str | Path) -> None:
    """Write traces to a file. An existing file is replaced."""
    with Path(path).open("wb") as file:
        for trace in traces:
            file.write(encode_trace(trace))


def read(path: str | Path) -> Iterator[Trace]:
    """Read the traces in a file. Raises an `InvalidRequest` with the line if the file is not a trace."""
    with Path(path).open("rb") as file:
        yield from _traces(file, str(path))


def header_of(path: str | Path) -> TraceHeader | None:
    """Return the header at the beginning of a file; None if the file is not a trace."""
    with Path(path).open("rb") as file:
        if file.read(len(_BEGINNING)) != _BEGINNING:
            return None
    with Path(path).open("rb") as file:
        _, value = next(_numbered(file, str(path)))
    return value if isinstance(value, TraceHeader) else None


def parse(text: bytes) -> Iterator[Trace]:
    """Yield the traces in the bytes of a file, in the form in which a server sends them."""
    yield from _traces(io.BytesIO(text), "the trace")


def read_records(path: str | Path) -> Iterator[tuple[int, Record | TraceHeader]]:
    """Yield the lines of a file with their numbers, from 1: a header, its records, possibly another header, and so on.
    Raises an `InvalidRequest` with the line if the file is not a trace."""
    with Path(path).open("rb") as file:
        yield from _numbered(file, str(path))


def _traces(file: BinaryIO, name: str) -> Iterator[Trace]:
    trace: Trace | None = None
    for _, value in _numbered(file, name):
        if isinstance(value, TraceHeader):
            if trace is not None:
                yield trace
            trace = Trace(value)
        else:
            assert trace is not None
            trace.add(value)
    assert trace is not None
    yield trace


def _numbered(file: BinaryIO, name: str) -> Iterator[tuple[int, Record | TraceHeader]]:
    number = 0
    for number, line in enumerate(_lines(file, name), 1):
        try:
            value = decode_record(line)
        except InvalidRequest as error:
            raise InvalidRequest(f"{name}: line {number}: {error}", "TRACE") from None
        if number == 1 and not isinstance(value, TraceHeader):
            raise InvalidRequest(f"{name}: line {number} must be the header of the trace, but is a record", "TRACE")
        yield number, value
    if not number:
        raise InvalidRequest(f"{name}: the file holds no trace", "TRACE")


def _lines(file: BinaryIO, name: str) -> Iterator[bytes]:
    number = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(line) > MAX_LINE_BYTES:
            raise InvalidRequest(f"{name}: line {number} has more than {MAX_LINE_BYTES} bytes", "TRACE")
        yield line


def schema() -> dict[str, Any]:
    """Return the JSON schema of a line."""
    made = msgspec.json.decode(_ENCODER.encode(msgspec.json.schema(_ANY)))  # defaults as JSON has them
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"A line of a bridle trace, version {VERSION}",
        **made,
    }
