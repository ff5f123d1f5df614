"""W3C trace context between processes: what names the trace that a call belongs to, as metadata of the call.

OpenTelemetry's API fills it in where an application has set one up; without it nothing is sent.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from opentelemetry.propagate import inject

#: https://www.w3.org/TR/trace-context/
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_NAMES = ("traceparent", "tracestate")
_MAX_CHARS = 512


def outgoing_context() -> tuple[tuple[str, str], ...]:
    """Metadata that names the current trace; empty if there is none."""
    carrier: dict[str, str] = {}
    inject(carrier)
    return tuple((name, carrier[name]) for name in _NAMES if carrier.get(name))


def incoming_context(metadata: Iterable[tuple[str, str | bytes]]) -> dict[str, str]:
    """What a caller sent of it; a malformed one is ignored, as the standard demands."""
    found = {name: value for name, value in metadata if name in _NAMES and isinstance(value, str)}
    if not _TRACEPARENT.fullmatch(found.get("traceparent", "")):
        return {}
    return {name: value for name, value in found.items() if len(value) <= _MAX_CHARS}
