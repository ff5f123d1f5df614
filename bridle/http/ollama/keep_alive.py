"""Handles Ollama's `keep_alive`: the time for which a model stays loaded after a request, in seconds or in Go's
notation.

`keep_alive` changes a model for all users, so only admins may set it. On a server without keys, every client is an
admin. Models that the operator serves permanently always stay loaded.
"""

from __future__ import annotations

import re
from typing import Any

from fastapi import Request

from bridle.errors import UnknownModel
from bridle.http.middleware.identity import identity_of
from bridle.http.ollama.bodies import served_name
from bridle.http.state import http_state

_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d+(?:\.\d+)?)(ns|us|µs|ms|s|m|h)")


def seconds_of(value: Any) -> float | None:
    """Validate a `keep_alive` and return it in seconds. A negative value gives None: the model stays loaded until
    memory is needed."""
    text = str(value)
    if text.startswith("-"):
        return None
    parts = _PART.findall(text)
    return sum(float(number) * _SECONDS[unit] for number, unit in parts) if parts else float(text)


def note_keep_alive(request: Request, name: str | None, value: Any) -> None:
    """Keep the model of a request loaded for `keep_alive`, if the request has one and its sender is an admin."""
    registry = http_state(request).registry
    if value is None or not identity_of(request).is_admin:
        return
    try:
        slot = registry.slot_of(registry.choose(served_name(registry, name)).model)
    except UnknownModel:  # the model was unloaded and dropped meanwhile
        return
    if not slot.is_pinned:
        registry.keep_alive.set(slot, seconds_of(value))
