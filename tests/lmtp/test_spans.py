"""Tests of OpenTelemetry traces of LMTP: a request has a span in the trace that the connection's upgrade named."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from queue import SimpleQueue

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import SpanKind
from websockets.sync.client import ClientConnection, connect

from bridle.lmtp.server import websocket_front
from bridle.serving import LoadedModel
from bridle.serving.lifecycle.otel import OtelTracing
from tests.http.harness import served
from tests.serving.fakes import fake_model
from tests.waiting import PATIENCE

TRACE, PARENT = "ab" * 16, "cd" * 8
GENERATE = 'GENERATE {"model": "fake", "prompt": [5, 6], "stream_id": 1, "max_tokens": 3}'
SCORE = 'SCORE {"model": "fake", "prompt": [5], "scored": [6, 7], "stream_id": 1}'


class Spans(SpanExporter):
    """An exporter whose spans tests wait for, because an answer may arrive before its span has ended."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[ReadableSpan] = SimpleQueue()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        for span in spans:
            self._queue.put(span)
        return SpanExportResult.SUCCESS

    def next_request(self) -> tuple[ReadableSpan, set[str]]:
        """Return the next span of a request, and the names of its child spans, which end earlier."""
        children = set()
        while (span := self._queue.get(timeout=PATIENCE)).kind is not SpanKind.SERVER:
            children.add(span.name)
        return span, children


@pytest.fixture
def spans() -> Spans:
    return Spans()


@contextlib.contextmanager
def connected(model: LoadedModel, spans: Spans, headers: dict[str, str]) -> Iterator[ClientConnection]:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    with (
        served(model, fronts=[websocket_front()], tracing=OtelTracing(provider)) as url,
        connect(url.replace("http", "ws"), additional_headers=headers, open_timeout=PATIENCE) as socket,
    ):
        yield socket


def ask(socket: ClientConnection, message: str) -> None:
    """Send a request, and read its stream to the end."""
    socket.send(message)
    finish = None
    while finish is None:
        finish = json.loads(str(socket.recv(30)).partition(" ")[2])[-1].get("finish_reason")


def test_every_request_is_a_span_in_the_trace_of_its_connection(spans: Spans) -> None:
    model = fake_model()
    with connected(model, spans, {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "a=b"}) as socket:
        for message in (GENERATE, SCORE):
            ask(socket, message)
            root, children = spans.next_request()
            assert root.name == "text_completion fake" and children == {"queue", "prefill", "decode"}
            assert root.parent is not None and root.context.trace_state.get("a") == "b"
            assert (f"{root.context.trace_id:032x}", f"{root.parent.span_id:016x}") == (TRACE, PARENT)
            metadata = model.client.requests[-1].metadata  # type: ignore[attr-defined]
            assert metadata == {"traceparent": f"00-{TRACE}-{root.context.span_id:016x}-01"}


@pytest.mark.parametrize("headers", [{}, {"traceparent": "00-zz"}])
def test_without_a_good_parent_each_begins_a_trace(headers: dict[str, str], spans: Spans) -> None:
    with connected(fake_model(), spans, headers) as socket:
        roots = []
        for message in (GENERATE, GENERATE):
            ask(socket, message)
            roots.append(spans.next_request()[0])
    assert [root.parent for root in roots] == [None, None]
    assert roots[0].context.trace_id != roots[1].context.trace_id
