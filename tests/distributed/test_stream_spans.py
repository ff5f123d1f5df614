"""Tests that the stream between a router and a shard is one trace. Both ends have a span, and the shard's span is a
child of the router's."""

from __future__ import annotations

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from bridle.distributed import trace_context
from bridle.distributed.trace_context import StreamSpan, outgoing_context
from bridle.engine.engine import Engine
from bridle.testing.scripted import ScriptedExecutor
from tests.distributed.kit import hosted
from tests.engine.support import make_request


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """Return an exporter of the spans of both ends, which run in this process."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace_context.trace, "get_tracer", lambda name: provider.get_tracer(name))
    return exporter


def test_both_ends_are_one_trace(spans: InMemorySpanExporter) -> None:
    with hosted(ScriptedExecutor(num_blocks=8, block_size=4)) as host:
        engine = Engine(host.connect())
        engine.add(make_request(max_tokens=3))
        while engine.has_work:
            engine.step()
        engine.close()
        host.wait_free()
    found = {span.name: span for span in spans.get_finished_spans()}
    ours, theirs = found["shard stream"], found["shard steps"]
    assert (ours.kind, theirs.kind) == (SpanKind.CLIENT, SpanKind.SERVER)
    assert theirs.parent is not None and theirs.parent.span_id == ours.context.span_id
    assert theirs.context.trace_id == ours.context.trace_id
    assert dict(theirs.attributes or {})["bridle.shard.num_steps"] == 3
    assert ours.status.status_code is StatusCode.UNSET


def test_a_lost_stream_is_a_failure(spans: InMemorySpanExporter) -> None:
    with hosted(ScriptedExecutor(num_blocks=8, block_size=4)) as host:
        executor = host.connect()
        link = executor.link
        assert link is not None
        link.cut("the shard hangs")
        executor.close()
        host.wait_free()
    (ours,) = [span for span in spans.get_finished_spans() if span.name == "shard stream"]
    assert ours.status.status_code is StatusCode.ERROR and ours.status.description == "the shard hangs"


def test_without_tracing_nothing_is_sent() -> None:
    span = StreamSpan("shard stream", {})
    assert span.metadata == outgoing_context() == ()
    span.end("over")
    span.end("again")
