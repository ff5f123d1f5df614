"""Requests as OpenTelemetry spans, with the attributes that OpenTelemetry defines for generative models.

A request is one span. The child spans of a request are its phases in the engine: creating the controller, waiting for
room, the prompt, and the output. Spans are created from the request's record when the request has ended. So tracing
does no work while the request runs. Spans never contain the text of prompts and outputs.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from opentelemetry import trace
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

import bridle
from bridle.errors import InvalidRequest, Overloaded, RequestCancelled, Unauthorized
from bridle.serving.lifecycle.request_record import RequestRecord
from bridle.telemetry import shut_down

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

_PROPAGATOR = TraceContextTextMapPropagator()
#: Errors that clients cause. With such an error, the server's span does not count as failed.
_OF_CLIENTS = (InvalidRequest, Overloaded, RequestCancelled, Unauthorized)
_REQUEST = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "max_tokens": "max_tokens",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "seed": "seed",
    "n": "choice.count",
}


class OtelTracing:
    """Creates spans with an OpenTelemetry provider; `close` shuts the provider down."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("bridle", bridle.__version__)

    def begin(self, carrier: Mapping[str, str]) -> OtelSpan:
        """Return a span that begins now, in the trace that the headers in `carrier` name. An invalid trace name begins
        a new trace."""
        parent = _PROPAGATOR.extract(carrier)
        return OtelSpan(self._tracer, self._tracer.start_span("request", parent, SpanKind.SERVER))

    def make_global(self) -> None:
        """Send the spans of other parts of this process, such as streams to shards, to the same provider."""
        trace.set_tracer_provider(self._provider)

    def close(self) -> None:
        """Send the spans that are not sent yet."""
        shut_down(self._provider)


class OtelSpan:
    """The span of a request that has not ended."""

    def __init__(self, tracer: trace.Tracer, span: trace.Span) -> None:
        self._tracer = tracer
        self._span = span
        self._offset = time.time() - time.monotonic()

    @property
    def trace_id(self) -> str:
        return trace.format_trace_id(self._span.get_span_context().trace_id)

    @property
    def traceparent(self) -> str:
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier, trace.set_span_in_context(self._span))
        return carrier.get("traceparent", "")

    def end(self, story: RequestRecord, operation: str, further: Mapping[str, Any]) -> None:
        """End the span, and give it the record of the request."""
        if self._span.is_recording():
            self._span.update_name(f"{operation} {story.model}" if story.model else operation)
            self._span.set_attributes(_attributes(story, operation) | dict(further))
            if story.error is not None and not isinstance(story.error, _OF_CLIENTS):
                self._span.set_status(Status(StatusCode.ERROR, str(story.error)))
            self._add_children(story)
        self._span.end()

    def _add_children(self, story: RequestRecord) -> None:
        """Add a child span for each phase of the request in the engine."""
        if story.submitted is None:
            return
        now, at = time.monotonic(), story.submitted
        if story.opening:
            self._child("controller", at, at + story.opening, {"bridle.controller": story.controller or ""})
        at += story.opening
        room = min(at + story.queued, story.computed or now) if story.computed is not None else now
        self._child("queue", at, room, {"bridle.priority": story.terms.priority})
        if story.computed is None:
            return
        prompt = {"gen_ai.usage.input_tokens": story.num_prompt}
        self._child("prefill", room, story.computed, prompt)
        self._child(
            "decode", story.computed, max(story.last_token or 0.0, story.computed), _decode_counts(story), story
        )

    def _child(
        self, name: str, begin: float, end: float, attributes: Mapping[str, Any], story: RequestRecord | None = None
    ) -> None:
        child = self._tracer.start_span(
            name,
            trace.set_span_in_context(self._span),
            attributes=dict(attributes),
            start_time=self._nanoseconds(begin),
        )
        for moment in story.moments if story is not None else ():
            told = {"bridle.output": moment.output, "bridle.num_tokens": moment.num_tokens}
            child.add_event(moment.what, told, self._nanoseconds(moment.at))
        child.end(self._nanoseconds(max(begin, end)))

    def _nanoseconds(self, monotonic: float) -> int:
        return int((monotonic + self._offset) * 1e9)


def _attributes(story: RequestRecord, operation: str) -> dict[str, Any]:
    """Return the attributes of the span: first those that OpenTelemetry defines, then bridle's own."""
    told: dict[str, Any] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "bridle",
        "gen_ai.response.id": story.id,
        "gen_ai.request.model": story.model,
        "gen_ai.response.model": story.adapter or story.model,
        "gen_ai.response.finish_reasons": tuple(story.finish) or None,
        "error.type": None if story.error is None else story.error.code,
        "bridle.priority": story.terms.priority,
        "bridle.deadline": story.terms.deadline,
        "bridle.adapter": story.adapter,
        "bridle.controller": story.controller,
        "bridle.constraint": story.constraint,
        "bridle.policies": ",".join(story.policies) or None,
    }
    if story.sampling is not None:
        told |= {f"gen_ai.request.{theirs}": getattr(story.sampling, ours) for ours, theirs in _REQUEST.items()}
        told["gen_ai.request.stop_sequences"] = story.sampling.stop or None
    if story.usage is not None:
        told |= {
            "gen_ai.usage.input_tokens": story.usage.prompt_tokens,
            "gen_ai.usage.output_tokens": story.usage.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": story.usage.cached_tokens,
        }
    return {name: _fitting(value) for name, value in told.items() if value is not None}


def _decode_counts(story: RequestRecord) -> dict[str, Any]:
    told: dict[str, Any] = {"bridle.controller.held_seconds": story.held} if story.held else {}
    if story.usage is None:
        return told | {"gen_ai.usage.output_tokens": story.num_tokens}
    return told | {
        "gen_ai.usage.output_tokens": story.usage.completion_tokens,
        "bridle.sampled_tokens": story.usage.sampled_tokens,
        "bridle.forced_tokens": story.usage.forced_tokens,
        "bridle.rewound_tokens": story.usage.rewound_tokens,
    }


def _fitting(value: Any) -> Any:
    """Return a value in a form that OpenTelemetry supports. OpenTelemetry's integers are signed and have 64 bits. So a
    larger integer, such as a seed, becomes a string."""
    return str(value) if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63 else value
