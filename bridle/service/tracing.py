"""Traces of requests, as far as those who serve them are concerned: a span begins with a request, and at its end is
told the whole story. Without tracing there is no span, and nothing else is done.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from bridle.service.story import Story

_HEADERS = (b"traceparent", b"tracestate")


class Span(Protocol):
    """One request on its way."""

    @property
    def trace_id(self) -> str:
        """32 hexadecimal digits."""
        raise NotImplementedError

    @property
    def traceparent(self) -> str:
        """The span as W3C's trace context names it to others."""
        raise NotImplementedError

    def end(self, story: Story, operation: str, further: Mapping[str, Any]) -> None:
        """The request is over. `operation` is what OpenTelemetry calls it, `further` are attributes of the way it
        came."""


class Tracing(Protocol):
    """Where spans go."""

    def begin(self, carrier: Mapping[str, str]) -> Span:
        """A span that begins now, in the trace that the headers in `carrier` name, if they name one."""
        raise NotImplementedError

    def close(self) -> None:
        """Send what is left. Idempotent; may take a few seconds."""


def trace_headers(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """The trace that a request or a connection belongs to, as far as its client says: a carrier for `begin`. Headers as
    ASGI has them."""
    return {name.decode(): value.decode("latin-1") for name, value in headers if name in _HEADERS}
