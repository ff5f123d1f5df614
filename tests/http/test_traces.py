"""Tests of OpenTelemetry traces: a request has a span in its client's trace, and child spans for the engine's work."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import SpanKind, StatusCode
from starlette.testclient import TestClient

from bridle import telemetry
from bridle.engine.request import Request
from bridle.errors import InvalidRequest, ShardUnavailable, UnsupportedFeature
from bridle.http import HttpSettings, create_app
from bridle.http.server.run import start_tracing
from bridle.outputs import Event, Finished, FinishReason, Forked, PromptEvent, Rewind, TokenEvent, Usage
from bridle.serving import LoadedModel, ModelRegistry
from bridle.serving.lifecycle.otel import OtelTracing
from tests.http.harness import saying, scripted_model
from tests.serving.fakes import fake_model, prompt_event

TRACE, PARENT = "ab" * 16, "cd" * 8
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"


@pytest.fixture
def spans() -> InMemorySpanExporter:
    return InMemorySpanExporter()


def client_of(model: LoadedModel, spans: InMemorySpanExporter, **options: Any) -> TestClient:
    provider = TracerProvider(**options)
    provider.add_span_processor(SimpleSpanProcessor(spans))
    return TestClient(create_app(ModelRegistry([model]), HttpSettings(), tracing=OtelTracing(provider)))


def by_name(spans: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in spans.get_finished_spans()}


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def test_a_request_is_a_span_in_its_clients_trace(spans: InMemorySpanExporter) -> None:
    model = scripted_model(next_token=saying("Hello there."))
    client = client_of(model, spans)
    body = {
        "messages": [{"role": "user", "content": "secret words"}],
        "temperature": 0,
        "max_tokens": 40,
        "priority": 2,
    }
    answer = client.post("/v1/chat/completions", json=body, headers={"traceparent": TRACEPARENT}).json()
    model.close()
    found = by_name(spans)
    assert set(found) == {"chat scripted", "queue", "prefill", "decode"}
    root = found["chat scripted"]
    assert root.kind is SpanKind.SERVER and root.parent is not None
    assert (f"{root.context.trace_id:032x}", f"{root.parent.span_id:016x}") == (TRACE, PARENT)
    told, usage = attributes(root), answer["usage"]
    assert told["gen_ai.operation.name"] == "chat" and told["gen_ai.provider.name"] == "bridle"
    assert told["gen_ai.request.model"] == told["gen_ai.response.model"] == "scripted"
    assert told["gen_ai.request.temperature"] == 0 and told["gen_ai.request.max_tokens"] == 40
    assert told["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert told["gen_ai.usage.output_tokens"] == usage["completion_tokens"]
    assert told["gen_ai.response.finish_reasons"] == ("stop",)
    assert told["http.response.status_code"] == 200 and told["bridle.priority"] == 2
    assert root.status.status_code is StatusCode.UNSET
    everything = " ".join(str(attributes(span)) for span in spans.get_finished_spans())
    assert "secret" not in everything and "Hello" not in everything


def test_children_follow_each_other_within_the_request(spans: InMemorySpanExporter) -> None:
    model = scripted_model(next_token=saying("Hello there."))
    client_of(model, spans).post("/v1/completions", json={"prompt": "a", "max_tokens": 5}).raise_for_status()
    model.close()
    found = by_name(spans)
    root = found["text_completion scripted"]
    times = [(span.start_time, span.end_time) for span in (found["queue"], found["prefill"], found["decode"])]
    assert all(found[name].parent == root.context for name in ("queue", "prefill", "decode"))
    flat = [moment for pair in times for moment in pair]
    assert flat == sorted(flat)
    slack = 1_000_000  # the clock of spans and that of stories are read one after the other
    assert root.start_time - slack <= flat[0] and flat[-1] <= root.end_time + slack
    assert attributes(found["decode"])["bridle.sampled_tokens"] == 5


def test_what_a_controller_does_is_told(spans: InMemorySpanExporter) -> None:
    """Starting the controller has its own child span, and forks and rollbacks are events of the output's span."""

    def script(request: Request) -> Iterator[list[Event]]:
        rid = request.id
        yield [PromptEvent(rid, 0, request.prompt, queued=0.5, opening=2.0), Forked(rid, 1, 0)]
        yield [TokenEvent(rid, 0, 97, "a"), TokenEvent(rid, 0, 98, "b"), Rewind(rid, 0, 1, 1)]
        usage = Usage(1, 0, 1, 2, 0, 1)
        yield [Finished(rid, 0, FinishReason.STOP, usage, is_last=False, held=0.25)]
        yield [Finished(rid, 1, FinishReason.STOP, Usage(1), held=0.125)]

    client_of(fake_model(script), spans).post("/v1/completions", json={"prompt": "a", "n": 2}).raise_for_status()
    found = by_name(spans)
    controller, queue, decode = found["controller"], found["queue"], found["decode"]
    assert controller.end_time - controller.start_time == pytest.approx(2e9, rel=1e-3)
    assert queue.start_time == controller.end_time
    assert [event.name for event in decode.events] == ["fork", "rewind"]
    assert dict(decode.events[1].attributes or {}) == {"bridle.output": 0, "bridle.num_tokens": 1}
    assert attributes(decode)["bridle.controller.held_seconds"] == 0.25
    assert attributes(decode)["bridle.rewound_tokens"] == 1


def test_a_failure_of_ours_is_one_of_the_span_and_a_clients_is_not(spans: InMemorySpanExporter) -> None:
    def script(request: Request) -> Iterator[list[Event]]:
        yield [prompt_event(request)]
        yield [Finished(request.id, 0, FinishReason.ERROR, error=ShardUnavailable("gone"))]

    client = client_of(fake_model(script), spans)
    assert client.post("/v1/completions", json={"prompt": "a"}).status_code == 503
    (failed,) = [span for span in spans.get_finished_spans() if span.name.startswith("text_completion")]
    assert failed.status.status_code is StatusCode.ERROR and attributes(failed)["error.type"] == "shard_unavailable"
    spans.clear()
    assert client.post("/v1/completions", json={"prompt": ""}).status_code == 400
    (refused,) = spans.get_finished_spans()
    assert refused.status.status_code is StatusCode.UNSET and attributes(refused)["error.type"] == "invalid_request"


@pytest.mark.parametrize("header", ["", "00-zz", "00-" + "0" * 32 + "-" + PARENT + "-01", "ff" * 4000, "00-é"])
def test_a_malformed_parent_begins_a_trace(header: str, spans: InMemorySpanExporter) -> None:
    client = client_of(fake_model(), spans)
    headers = {"traceparent": header.encode("latin-1")}
    client.post("/v1/completions", json={"prompt": "a"}, headers=headers).raise_for_status()  # type: ignore[arg-type]
    (root,) = [span for span in spans.get_finished_spans() if span.kind is SpanKind.SERVER]
    assert root.parent is None


def test_routes_without_a_model_are_not_traced(spans: InMemorySpanExporter) -> None:
    client = client_of(fake_model(), spans)
    for path in ("/health", "/metrics", "/v1/models", "/"):
        client.get(path)
    assert not spans.get_finished_spans()


def test_what_is_not_sampled_still_has_its_name_in_the_log(
    spans: InMemorySpanExporter, capsys: pytest.CaptureFixture[str]
) -> None:
    client = client_of(fake_model(), spans, sampler=ALWAYS_OFF)
    client.post("/v1/completions", json={"prompt": "a"}, headers={"traceparent": TRACEPARENT}).raise_for_status()
    assert not spans.get_finished_spans()
    assert f"trace={TRACE}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("route", "body"),
    [("completions", {"prompt": "a"}), ("run", {"controller": "none", "controller_arg": "", "prompt": "a"})],
)
def test_a_request_carries_its_span_to_other_processes(
    spans: InMemorySpanExporter, route: str, body: dict[str, str]
) -> None:
    model = fake_model()
    client_of(model, spans).post(f"/v1/{route}", json=body, headers={"traceparent": TRACEPARENT})
    (request,) = model.client.requests  # type: ignore[attr-defined]
    root = by_name(spans)["text_completion fake"]
    assert request.metadata == {"traceparent": f"00-{TRACE}-{root.context.span_id:016x}-01"}


# -- where they go -------------------------------------------------------------------------------------------


def test_nothing_is_traced_unless_somebody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(telemetry.os.environ):
        if name.startswith("OTEL_"):
            monkeypatch.delenv(name)
    assert start_tracing(None) is None
    model = fake_model()
    TestClient(create_app(ModelRegistry([model]))).post("/v1/completions", json={"prompt": "a"}).raise_for_status()
    assert model.client.requests[0].metadata == {}  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("environment", "wanted"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://a"}, True),
        ({"OTEL_TRACES_EXPORTER": "console"}, True),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://a"}, False),
        ({"OTEL_SDK_DISABLED": "true", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://a"}, False),
    ],
)
def test_the_standard_variables_decide(environment: dict[str, str], wanted: bool) -> None:
    assert telemetry.wants_traces(environment) is wanted


@pytest.mark.parametrize("endpoint", ["localhost:4318", "grpc://a:1", "http://", ""])
def test_an_endpoint_is_an_address(endpoint: str) -> None:
    with pytest.raises(InvalidRequest, match="otlp_endpoint"):
        telemetry.check_endpoint(endpoint)


def test_variables_that_cannot_be_followed_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="OTEL_TRACES_EXPORTER is 'zipkin'"):
        telemetry.start_traces({"OTEL_TRACES_EXPORTER": "zipkin"})
    with pytest.raises(InvalidRequest, match="http/protobuf or grpc"):
        telemetry.start_traces({"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"})


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(UnsupportedFeature, match=r"pip install 'bridle-llm\[otel\]'"):
        telemetry.start_traces({})


def test_spans_reach_a_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans are sent to a collector in this process, and the server waits at its end until they have arrived."""
    received: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    for name in list(telemetry.os.environ):
        if name.startswith("OTEL_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "")  # so that it is put back
    monkeypatch.setenv("OTEL_SERVICE_NAME", "my-bridle")
    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        tracing = start_tracing(f"http://127.0.0.1:{server.server_port}")
        assert tracing is not None
        client = TestClient(create_app(ModelRegistry([fake_model()]), tracing=tracing))
        client.post("/v1/completions", json={"prompt": "a"}).raise_for_status()
        tracing.close()
        server.shutdown()
        thread.join()
    path, content = received[0]
    assert path == "/v1/traces"
    assert b"text_completion fake" in content and b"my-bridle" in content and b"prefill" in content
