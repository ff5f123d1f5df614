"""Record of one request. The log line, the metrics, the trace and the row in `bridle top` of a request are made from
its record.

Every front end fills in a record while the request runs, mostly from the engine's events. All reports use only the
record. This module does not send anything. With tracing, a span begins with the request and gets the whole record at
the end.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from bridle.controllers.composition import parts_of, user_controllers
from bridle.deprecated_names import LOG_FIELDS
from bridle.engine.request import name_of
from bridle.outputs import TOKEN_KINDS, Event, Finished, Forked, PromptEvent, PromptProgress, Rewind, TokenEvent
from bridle.serving.requests.request_limits import DEFAULT_TERMS, RequestLimits
from bridle.structured_output.spec import Constraint

if TYPE_CHECKING:
    from bridle.engine.client import EventStream
    from bridle.engine.request import Request
    from bridle.errors import BridleError
    from bridle.outputs import Usage
    from bridle.sampling import SamplingParams
    from bridle.serving.tenancy.keys import Identity

#: Maximum number of forks and rewinds that are recorded one by one; further ones are only counted.
MAX_MOMENTS = 64
_MAX_ERROR_CHARS = 300
#: Kinds of tokens that most requests do not have. They are reported only if there are any.
_RARE = ("shared", "drafted", "accepted", "best_of_saved")
_TRACE_HEADERS = (b"traceparent", b"tracestate")


class TimelineEvent(NamedTuple):
    """A fork or rollback of an output by a controller, with the time at which it happened."""

    at: float
    what: str
    output: int
    num_tokens: int


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """The record of one request. Points in time are times of the monotonic clock. Durations are in seconds.

    `opening` is the time to create the controller. `queued` is the time that the request waited for room in the engine.
    `held` is the time that an output waited for its controller. If a request has several parts, each time is that of
    the slowest part. `computed` is the time at which the prompt was computed, if the front end knows it. `streams`
    report the progress of each prompt.
    """

    id: str
    route: str = ""
    began: float = field(default_factory=time.monotonic)
    identity: Identity | None = None
    terms: RequestLimits = DEFAULT_TERMS
    model: str | None = None
    adapter: str | None = None
    controller: str | None = None
    constraint: str | None = None
    policies: tuple[str, ...] = ()  # names and versions of the policies that apply
    tells_policies: bool = False  # whether a header reports the policies to the client
    dropped_blocks: int = 0  # blocks of the client's instructions that the operator drops
    traced: str | None = None  # result of the client's request for a trace, for a header
    sampling: SamplingParams | None = None
    usage: Usage | None = None
    streams: list[EventStream] = field(default_factory=list)
    submitted: float | None = None
    opening: float = 0.0
    queued: float = 0.0
    held: float = 0.0
    computed: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    num_prompt: int = 0
    num_tokens: int = 0  # output tokens so far
    moments: list[TimelineEvent] = field(default_factory=list)
    finish: list[str] = field(default_factory=list)
    error: BridleError | None = None
    span: RequestSpan | None = None

    def submit(self, request: Request, num_prompt: int | None = None) -> None:
        """Record that `request` is submitted to the engine. If a call has several requests, `request` is the first
        one."""
        self.submitted = time.monotonic()
        self.sampling = request.sampling
        # the client's name for the adapter, which differs from the engine's key
        self.adapter = self.adapter or request.adapter
        if request.controller is not None:
            self.controller, self.constraint = names_of(user_controllers(request.controller))
        self.num_prompt = len(request.prompt) if num_prompt is None else num_prompt

    def record_events(self, events: Iterable[Event]) -> None:
        """Add events of the engine."""
        now = time.monotonic()
        for event in events:
            match event:
                case TokenEvent():
                    self.num_tokens += 1
                    self.last_token = now
                    if self.first_token is None:
                        self.first_token = now
                case Rewind():
                    self.num_tokens -= event.num_tokens
                    self._remember(TimelineEvent(now, "rewind", event.index, event.num_tokens))
                case Forked():
                    self._remember(TimelineEvent(now, "fork", event.index, event.num_tokens))
                case PromptEvent():
                    self.computed = now
                    self.opening = max(self.opening, event.opening)
                    self.queued = max(self.queued, event.queued)
                case Finished():
                    self.held = max(self.held, event.held)

    def _remember(self, moment: TimelineEvent) -> None:
        if len(self.moments) < MAX_MOMENTS:
            self.moments.append(moment)

    @property
    def state(self) -> str:
        """Return the state of the request as one word."""
        if self.submitted is None:
            return "coming in"
        if self.first_token is not None:
            return "running"
        is_begun = self.computed is not None or any(stream.prompt is not None for stream in self.streams)
        return "prompt" if is_begun else "waiting"

    @property
    def prompt_counts(self) -> tuple[int, int]:
        """Return how many prompt tokens were computed so far, and how many came from the prefix cache."""
        computed = cached = 0
        for stream in self.streams:
            match stream.prompt:
                case PromptProgress(num_computed=num_computed, num_cached=num_cached):
                    computed, cached = computed + num_computed, cached + num_cached
                case PromptEvent(tokens=tokens, num_cached=num_cached):
                    computed, cached = computed + len(tokens) - num_cached, cached + num_cached
        return computed, cached

    def fields(self) -> dict[str, Any]:
        """Return the fields of the record for a log line, in order."""
        told: dict[str, Any] = {} if self.identity is None else {"user": self.identity.user}
        for name in ("model", "adapter", "controller", "constraint"):
            if getattr(self, name) is not None:
                told[name] = getattr(self, name)
        if self.policies:
            told["policies"] = ",".join(self.policies)
        if self.dropped_blocks:
            told["dropped_blocks"] = self.dropped_blocks
        if self.submitted is not None:
            told["priority"] = self.terms.priority
        if self.usage is not None:
            counts = {LOG_FIELDS.get(kind, kind): getattr(self.usage, name) for kind, name in TOKEN_KINDS.items()}
            told |= {kind: count for kind, count in counts.items() if count or kind not in _RARE}
        if not all(isinstance(stream.prompt, PromptEvent) for stream in self.streams):
            told["computed"] = self.prompt_counts[0]
        told |= self._times()
        if self.finish:
            told["finish"] = ",".join(sorted(set(self.finish)))
        if self.error is not None:
            told["error"] = f"{self.error.code}: {self.error}"[:_MAX_ERROR_CHARS]
        return told | ({} if self.span is None else {"trace": self.span.trace_id})

    def _times(self) -> dict[str, float]:
        """Return the durations in milliseconds. A duration that only some requests have is left out if it is zero."""
        seconds = {
            "controller_start_ms": self.opening or None,
            "queue_ms": None if self.submitted is None else self.queued,
            "first_token_ms": None if self.first_token is None else self.first_token - self.began,
            "controller_wait_ms": self.held or None,
            "ms": time.monotonic() - self.began,
        }
        return {name: round(1000 * each, 1) for name, each in seconds.items() if each is not None}


def names_of(controller: object | None) -> tuple[str | None, str | None]:
    """Return the names of the request's controllers and the names of its constraints, each joined into one string."""
    parts = parts_of(controller)
    forms = [name_of(part) for part in parts if isinstance(part, Constraint)]
    others = [name_of(part) for part in parts if not isinstance(part, Constraint)]
    return "+".join(others) or None, "+".join(forms) or None


class RequestSpan(Protocol):
    """The span of a request that has not ended."""

    @property
    def trace_id(self) -> str:
        """Return the id of the trace: 32 hexadecimal digits."""

    @property
    def traceparent(self) -> str:
        """Return the name of the span for other services, in the format of W3C's trace context."""

    def end(self, story: RequestRecord, operation: str, further: Mapping[str, Any]) -> None:
        """End the span. `operation` is OpenTelemetry's name for the kind of request. `further` are attributes of the
        protocol over which the request came."""


class Tracing(Protocol):
    """Creates spans and sends them."""

    def begin(self, carrier: Mapping[str, str]) -> RequestSpan:
        """Begin a span, in the trace that the headers in `carrier` name, if they name one."""

    def close(self) -> None:
        """Send the spans that are not sent yet. Idempotent; may take a few seconds."""


def trace_headers(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """Return the headers that name the trace of a request or a connection, as a carrier for `begin`. `headers` have the
    form that ASGI defines."""
    return {name.decode(): value.decode("latin-1") for name, value in headers if name in _TRACE_HEADERS}
