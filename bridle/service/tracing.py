"""Traces of requests, as front-ends see them: a span begins with a request, and at the end it is given the whole story.
Without tracing there is no span, and nothing else is done.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from bridle.service.story import Story

_HEADERS = (b"traceparent", b"tracestate")


class Span(Protocol):
    """The span of one request that is not over."""

    @property
    def trace_id(self) -> str:
        """The id of the trace: 32 hexadecimal digits."""
        raise NotImplementedError

    @property
    def traceparent(self) -> str:
        """The span's name in W3C's trace context, for other services."""
        raise NotImplementedError

    def end(self, story: Story, operation: str, further: Mapping[str, Any]) -> None:
        """End the span. `operation` is OpenTelemetry's name for the kind of request; `further` are attributes of the
        protocol it came by."""


class Tracing(Protocol):
    """Makes spans and sends them."""

    def begin(self, carrier: Mapping[str, str]) -> Span:
        """Begin a span, in the trace that the headers in `carrier` name, if they name one."""
        raise NotImplementedError

    def close(self) -> None:
        """Send the spans that were not sent yet. Idempotent; may take a few seconds."""


def trace_headers(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """The headers that name the trace of a request or a connection, as a carrier for `begin`. `headers` are as ASGI has
    them."""
    return {name.decode(): value.decode("latin-1") for name, value in headers if name in _HEADERS}
