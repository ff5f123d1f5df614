"""Sets up OpenTelemetry's SDK in a process that sends traces.

A process sends traces if an endpoint is configured, or if one of the standard variables names an endpoint. The `OTEL_*`
variables set all other options (sampler, resource, size of batches); the SDK reads them. OpenTelemetry is imported only
if traces are sent.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from bridle.distribution import install_hint
from bridle.errors import InvalidRequest, UnsupportedFeature

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
_TRACES_ENDPOINT = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
_EXPORTER = "OTEL_TRACES_EXPORTER"
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_CLOSE_SECONDS = 3.0
_GRPC_PACKAGE = "opentelemetry-exporter-otlp-proto-grpc"


def wants_traces(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether the standard `OTEL_*` variables ask for traces."""
    exporter = environment.get(_EXPORTER, "")
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true" or exporter == "none":
        return False
    return bool(exporter or environment.get(ENDPOINT) or environment.get(_TRACES_ENDPOINT))


def check_endpoint(endpoint: str) -> str:
    """Check the address of a collector and return it. Raises `InvalidRequest`."""
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidRequest(
            f"otlp_endpoint is {endpoint[:200]!r}; must be http(s)://HOST:PORT, as in http://localhost:4318",
            "otlp_endpoint",
        )
    return endpoint


def start_traces(environment: Mapping[str, str] = os.environ) -> TracerProvider:
    """Return a provider that sends spans in a separate thread, as the standard variables say. The caller must shut the
    provider down. Raises `UnsupportedFeature` if a package is missing, and `InvalidRequest` for an invalid variable."""
    try:
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise _missing(install_hint("otel")) from None
    import bridle

    own = Resource({"service.name": "bridle", "service.version": bridle.__version__})
    provider = TracerProvider(resource=Resource.create().merge(own).merge(OTELResourceDetector().detect()))
    provider.add_span_processor(BatchSpanProcessor(_exporter(environment)))
    return provider


@contextmanager
def traced_process() -> Iterator[TracerProvider | None]:
    """Send the spans of this process inside the block, if the standard variables ask for traces. Unsent spans are sent
    when the block ends."""
    if not wants_traces():
        yield None
        return
    provider = start_traces()
    from opentelemetry import trace

    trace.set_tracer_provider(provider)
    try:
        yield provider
    finally:
        shut_down(provider)


def shut_down(provider: TracerProvider) -> None:
    """Send the unsent spans, for at most a few seconds. An unreachable collector must not delay the end of the
    process."""
    closing = threading.Thread(target=provider.shutdown, name="bridle-traces-end", daemon=True)
    closing.start()
    closing.join(_CLOSE_SECONDS)


def _exporter(environment: Mapping[str, str]) -> SpanExporter:
    kind = environment.get(_EXPORTER) or "otlp"
    if kind == "console":
        from opentelemetry.sdk.trace.export import ConsoleSpanExporter

        return ConsoleSpanExporter()
    if kind != "otlp":
        raise InvalidRequest(f"{_EXPORTER} is {kind[:80]!r}; must be otlp, console or none", _EXPORTER)
    protocol = next((environment[name] for name in _PROTOCOLS if environment.get(name)), "http/protobuf")
    exporter: Any
    if protocol == "grpc":
        try:
            exporter = import_module("opentelemetry.exporter.otlp.proto.grpc.trace_exporter").OTLPSpanExporter
        except ImportError:
            raise _missing(f"pip install {_GRPC_PACKAGE}, or set {_PROTOCOLS[1]}=http/protobuf") from None
    elif protocol == "http/protobuf":
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter
        except ImportError:
            raise _missing(install_hint("otel")) from None
        exporter = HttpExporter
    else:
        raise InvalidRequest(f"{_PROTOCOLS[1]} is {protocol[:80]!r}; must be http/protobuf or grpc", _PROTOCOLS[1])
    made: SpanExporter = exporter()
    return made


def _missing(remedy: str) -> UnsupportedFeature:
    return UnsupportedFeature(f"traces need packages that are not installed: {remedy}", "otlp_endpoint")
