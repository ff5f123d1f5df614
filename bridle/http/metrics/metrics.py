"""Prometheus metrics: durations and results of HTTP requests, and the counters of each engine.

Engine counters are read only when Prometheus scrapes the metrics, so they cost nothing in between. Label values come
from fixed sets (existing routes, served models), so that no client can make the number of time series grow. The number
of adapter names in labels is limited.
"""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from bridle.engine.statistics import GAUGES, HELP
from bridle.http.metrics.tgi import TgiMetrics
from bridle.http.middleware.request_context import MODEL_ROUTES, RequestContext
from bridle.outputs import TOKEN_KINDS
from bridle.serving import ModelRegistry
from bridle.serving.policies import PolicyRegistry
from bridle.serving.tracing.trace_store import TRACE_EVENTS, TraceStore

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)
_ROUTES = MODEL_ROUTES | {
    "/v1/adapters",
    "/v1/controllers",
    "/v1/controllers/tags",
    "/v1/load_lora_adapter",
    "/v1/models",
    "/v1/unload_lora_adapter",
}
#: How many adapters are counted by name; the requests of further ones are counted together.
MAX_ADAPTER_LABELS = 256
_OTHER_ADAPTERS = "(others)"
_HELP = HELP | {
    "up": "1 if the engine is healthy, else 0.",
    "control_up": "1 if the control runtime is ready, else 0.",
    "control_restarts": "Restarts of the control runtime.",
    "policy_control_up": "1 if the control runtime of policies is ready, else 0.",
    "policy_control_restarts": "Restarts of the control runtime of policies.",
}

# The buckets that OpenTelemetry's conventions for generative AI advise.
_LONG = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_PACE = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_PROVIDER = "bridle"  # as in traces
_TOKENS = tuple(float(4**i) for i in range(14))


class Metrics:
    """The metrics of one application, in a separate Prometheus registry."""

    def __init__(
        self, models: ModelRegistry, policies: PolicyRegistry | None = None, traces: TraceStore | None = None
    ) -> None:
        self._registry = CollectorRegistry()
        for collect in (
            partial(_of_engines, models),
            partial(_of_tools, models),
            partial(_of_policies, models, policies or PolicyRegistry()),
            partial(_of_traces, traces or TraceStore()),
        ):
            self.add(collect)
        labels = ("route", "model", "status")
        self._calls = Counter("bridle_http_requests", "HTTP requests answered.", labels, registry=self._registry)
        self._tokens = Counter(
            "bridle_http_tokens", "Tokens of HTTP requests, by kind.", ("model", "kind"), registry=self._registry
        )
        self._finished = Counter(
            "bridle_http_choices",
            "Outputs of HTTP requests, by finish reason.",
            ("model", "reason"),
            registry=self._registry,
        )
        self._adapters = Counter(
            "bridle_http_adapter_requests",
            "HTTP requests by LoRA adapter.",
            ("model", "adapter"),
            registry=self._registry,
        )
        self._adapter_labels: set[tuple[str, str]] = set()
        self._seconds = self._histogram("request_seconds", "Seconds that an HTTP request took.", _SECONDS)
        self._first = self._histogram(
            "first_token_seconds", "Seconds from an HTTP request to its first token.", _SECONDS
        )
        self._pace = self._histogram("token_seconds", "Mean seconds per token after the first.", _TOKEN_SECONDS)
        self._others = (TgiMetrics(self._registry, models), GenAiMetrics(self._registry))
        self.in_flight = Gauge("bridle_http_in_flight", "HTTP requests in flight.", registry=self._registry)

    def add(self, collect: Callable[[], Iterator[Metric]]) -> None:
        """Add a function that creates metrics whenever the metrics are read."""
        self._registry.register(_Scraped(collect))

    def observe(self, call: RequestContext, seconds: float) -> None:
        """Record a request that has just ended."""
        for other in self._others:
            other.observe(call, seconds)
        route = call.path if call.path in _ROUTES else "other"
        model = call.model or ""
        self._calls.labels(route, model, str(call.status or 499)).inc()
        if call.model is None or call.usage is None:
            return  # refused before it ran
        if call.adapter is not None:
            self._adapters.labels(model, self._adapter_label(model, call.adapter)).inc()
        self._seconds.labels(model).observe(seconds)
        if call.first_token is not None and call.last_token is not None:
            self._first.labels(model).observe(call.first_token - call.began)
        for reason in call.finish:
            self._finished.labels(model, reason).inc()
        for kind, name in TOKEN_KINDS.items():
            self._tokens.labels(model, kind).inc(getattr(call.usage, name))
        if call.first_token is not None and call.last_token is not None and call.usage.completion_tokens > 1:
            pace = (call.last_token - call.first_token) / (call.usage.completion_tokens - 1)
            self._pace.labels(model).observe(pace)

    def render(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def _adapter_label(self, model: str, adapter: str) -> str:
        labels = self._adapter_labels
        if (model, adapter) not in labels and len(labels) >= MAX_ADAPTER_LABELS:
            return _OTHER_ADAPTERS
        labels.add((model, adapter))
        return adapter

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"bridle_http_{name}", text, ("model",), buckets=buckets, registry=self._registry)


class GenAiMetrics:
    """Metrics under OpenTelemetry's names, in Prometheus' spelling: duration, time to first token, time per further
    token, and number of tokens, by operation and model."""

    def __init__(self, registry: CollectorRegistry) -> None:
        labels = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model")

        def histogram(name: str, text: str, buckets: tuple[float, ...], more: tuple[str, ...] = ()) -> Histogram:
            return Histogram(f"gen_ai_{name}", text, labels + more, buckets=buckets, registry=registry)

        self._duration = histogram(
            "server_request_duration_seconds", "Seconds that a request took.", _LONG, ("error_type",)
        )
        self._first = histogram(
            "server_time_to_first_token_seconds", "Seconds from a request to its first token.", _FIRST
        )
        self._pace = histogram("server_time_per_output_token_seconds", "Seconds per token after the first.", _PACE)
        self._tokens = histogram(
            "client_token_usage", "Tokens of a request, input or output.", _TOKENS, ("gen_ai_token_type",)
        )

    def observe(self, call: RequestContext, seconds: float) -> None:
        """Record a request that has just ended."""
        if call.model is None:
            return
        labels = (call.operation, _PROVIDER, call.model)
        self._duration.labels(*labels, "" if call.error is None else call.error.code).observe(seconds)
        if call.usage is None:
            return
        self._tokens.labels(*labels, "input").observe(call.usage.prompt_tokens)
        self._tokens.labels(*labels, "output").observe(call.usage.completion_tokens)
        if call.first_token is None or call.last_token is None:
            return
        self._first.labels(*labels).observe(call.first_token - call.began)
        if call.usage.completion_tokens > 1:
            pace = (call.last_token - call.first_token) / (call.usage.completion_tokens - 1)
            self._pace.labels(*labels).observe(pace)


class _Scraped(Collector):
    """A collector that creates its metrics whenever the metrics are read."""

    def __init__(self, collect: Callable[[], Iterator[Metric]]) -> None:
        self._collect = collect

    def collect(self) -> Iterator[Metric]:
        return self._collect()


def _of_engines(models: ModelRegistry) -> Iterator[Metric]:
    """Yield the statistics of every engine."""
    families: dict[str, Any] = {}
    for model in models:
        _add(families, "up", True, model.name, float(model.client.is_healthy))
        for name, runtime in (("control", model.control), ("policy_control", model.policy_control)):
            if runtime is not None:
                _add(families, f"{name}_up", True, model.name, float(runtime.is_ready))
                _add(families, f"{name}_restarts", False, model.name, runtime.num_restarts)
        for name, value in numbers_of(model.client.statistics()):
            _add(families, name, name in GAUGES, model.name, value)
    yield from families.values()


def _of_tools(models: ModelRegistry) -> Iterator[Metric]:
    """Yield the counts of tool calls. A tool's name may be a label, because only the operator names tools."""
    desks = {id(model.tools): model.tools for model in models if model.tools is not None}  # mostly one
    if not desks:
        return
    families: list[Any] = [
        CounterMetricFamily("bridle_tool_calls", "Tool calls started.", labels=["tool"]),
        CounterMetricFamily("bridle_tool_failures", "Tool calls that failed.", labels=["tool"]),
        CounterMetricFamily("bridle_tool_seconds", "Seconds spent in tool calls.", labels=["tool"]),
        GaugeMetricFamily("bridle_tool_running", "Tool calls that are running.", labels=["tool"]),
    ]
    total: dict[str, list[float]] = {}
    for desk in desks.values():
        for name, counts in desk.counts().items():
            known = total.setdefault(name, [0.0] * len(families))
            found = (counts.num_calls, counts.num_failed, counts.seconds, counts.num_running)
            total[name] = [a + b for a, b in zip(known, found, strict=True)]
    for name, values in total.items():
        for family, value in zip(families, values, strict=True):
            family.add_metric([name], value)
    yield from families


def _of_policies(models: ModelRegistry, policies: PolicyRegistry) -> Iterator[Metric]:
    """Yield the number of requests under each policy, and the number of each policy's actions on texts."""
    labels = ["policy", "version", "action"]
    family = CounterMetricFamily("bridle_policy_actions", "Actions of policies on requests and texts.", labels=labels)
    for label, count in dict(policies.applied).items():
        name, _, version = label.partition("@")
        family.add_metric([name, version, "applied"], float(count))
    done: Counts[str] = Counts()
    for model in models:
        done.update(getattr(model.client.statistics(), "policies", {}))
    for key, count in done.items():
        family.add_metric(key.split(" "), float(count))
    yield family


def _of_traces(book: TraceStore) -> Iterator[Metric]:
    """Yield the number of stored traces, and of requested traces by what happened to them."""
    yield GaugeMetricFamily("bridle_traces_kept", "Traces kept for clients.", len(book.texts))
    yield GaugeMetricFamily("bridle_traces_kept_bytes", "Bytes of the traces kept for clients.", book.texts.num_bytes)
    family = CounterMetricFamily("bridle_traces", "Traces, by what happened to them.", labels=["event"])
    for event in TRACE_EVENTS:
        family.add_metric([event], book.counts[event])
    family.add_metric(["dropped"], book.texts.num_dropped)
    yield family


def numbers_of(statistics: object) -> Iterator[tuple[str, Any]]:
    """Yield the name and value of a statistics object's numeric fields and properties, and of its counts by key. Counts
    of policies and tenants are left out, because they are not labelled by reason."""
    if not is_dataclass(statistics):
        return
    names = [each.name for each in fields(statistics)]
    names += [name for name, value in vars(type(statistics)).items() if isinstance(value, property)]
    for name in names:
        value = getattr(statistics, name)
        if isinstance(value, (int, float, Mapping)) and name not in ("policies", "tenant_blocks"):
            yield name, value


def _add(families: dict[str, Any], name: str, is_gauge: bool, model: str, value: Any) -> None:
    by_key = isinstance(value, Mapping)
    labels = ["model", "reason"] if by_key else ["model"]
    family = families.get(name)
    if family is None:
        kind = GaugeMetricFamily if is_gauge else CounterMetricFamily
        public = "bridle_engine_" + name.removeprefix("num_")
        family = families[name] = kind(public, _HELP[name], labels=labels)
    for key, number in value.items() if by_key else ((None, value),):
        family.add_metric([model] if key is None else [model, str(key)], float(number))
