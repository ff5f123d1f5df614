"""Limits on tool calls; errors name the field."""

from __future__ import annotations

from dataclasses import dataclass, fields

from bridle.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class ToolLimits:
    """Bounds of every call, and of all calls of a request.

    A call ends after `timeout` seconds, or after the time that its controller sets, up to `max_timeout`. The arguments
    of a call have at most `max_argument_bytes` as JSON, its answer has at most `max_result_bytes`. One request may have
    `max_pending` running calls, and make `max_calls` in total. All requests together may have `max_running` running
    calls and `max_threads` running Python functions. Functions of cancelled calls that have not returned count too.
    """

    timeout: float = 30.0
    max_timeout: float = 600.0
    max_argument_bytes: int = 64 << 10
    max_result_bytes: int = 1 << 20
    max_pending: int = 16
    max_calls: int = 1_000
    max_running: int = 1_024
    max_threads: int = 64

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not is_number or not 0 < value <= 1 << 40 or (field.name.startswith("max_") and value < 1):
                raise InvalidRequest(f"{field.name} is {value!r}; must be a number above 0", field.name)
            if field.name not in ("timeout", "max_timeout") and not isinstance(value, int):
                raise InvalidRequest(f"{field.name} is {value!r}; must be a whole number", field.name)
        if self.timeout > self.max_timeout:
            raise InvalidRequest(
                f"timeout is {self.timeout:g}; must be at most max_timeout ({self.max_timeout:g})", "timeout"
            )


DEFAULT_LIMITS = ToolLimits()
