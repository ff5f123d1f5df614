"""Passes W3C trace context between processes, in the metadata of a call.

OpenTelemetry's API fills in the metadata if the application has configured tracing; otherwise nothing is sent. A stream
between a router and a shard has a span at both ends. The shard's span is a child of the router's span. Both spans last
as long as the connection, which carries the steps of all requests.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.propagate import extract, inject
from opentelemetry.trace import SpanKind, Status, StatusCode

#: https://www.w3.org/TR/trace-context/
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_NAMES = ("traceparent", "tracestate")
_MAX_CHARS = 512


class StreamSpan:
    """The span of one end of a stream. The span begins when this object is created. Without tracing, this class does
    nothing."""

    def __init__(
        self, name: str, attributes: Mapping[str, str | int], carrier: Mapping[str, str] | None = None
    ) -> None:
        """`carrier` is the trace context that the other end sent, or None at the end that opens the stream."""
        kind = SpanKind.CLIENT if carrier is None else SpanKind.SERVER
        parent = None if carrier is None else extract(carrier)
        self._span = trace.get_tracer("bridle.distributed").start_span(name, parent, kind, attributes)
        self._is_open = True

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return metadata that identifies this span to the other end."""
        return outgoing_context(trace.set_span_in_context(self._span))

    def end(self, failure: str = "", **attributes: str | int) -> None:
        """End the span; `failure` is the reason if the stream failed. Only the first call of this method has an
        effect."""
        if not self._is_open:
            return
        self._is_open = False
        self._span.set_attributes({f"bridle.shard.{name}": value for name, value in attributes.items()})
        if failure:
            self._span.set_status(Status(StatusCode.ERROR, failure))
        self._span.end()


def outgoing_context(context: Context | None = None) -> tuple[tuple[str, str], ...]:
    """Return metadata that identifies the trace of `context`, by default the current context; empty without a trace."""
    carrier: dict[str, str] = {}
    inject(carrier, context)
    return tuple((name, carrier[name]) for name in _NAMES if carrier.get(name))


def incoming_context(metadata: Iterable[tuple[str, str | bytes]]) -> dict[str, str]:
    """Return the trace context in a caller's metadata. A malformed context is ignored, as the standard requires."""
    found = {name: value for name, value in metadata if name in _NAMES and isinstance(value, str)}
    if not _TRACEPARENT.fullmatch(found.get("traceparent", "")):
        return {}
    return {name: value for name, value in found.items() if len(value) <= _MAX_CHARS}
