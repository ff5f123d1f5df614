"""Metrics under the names of OpenTelemetry's conventions for generative AI, as Prometheus spells them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Histogram

if TYPE_CHECKING:
    from bridle.http.transport.call import Call

# The buckets that the conventions advise.
_SECONDS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_PACE = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_PROVIDER = "bridle"  # as in traces
_TOKENS = tuple(float(4**i) for i in range(14))


class GenAiMetrics:
    """Duration, time to the first token, time per further token, and how many tokens, by operation and model."""

    def __init__(self, registry: CollectorRegistry) -> None:
        labels = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model")

        def histogram(name: str, text: str, buckets: tuple[float, ...], more: tuple[str, ...] = ()) -> Histogram:
            return Histogram(f"gen_ai_{name}", text, labels + more, buckets=buckets, registry=registry)

        self._duration = histogram(
            "server_request_duration_seconds", "Duration of a request.", _SECONDS, ("error_type",)
        )
        self._first = histogram("server_time_to_first_token_seconds", "From a request to its first token.", _FIRST)
        self._pace = histogram("server_time_per_output_token_seconds", "Time per token after the first.", _PACE)
        self._tokens = histogram("client_token_usage", "Tokens of a request.", _TOKENS, ("gen_ai_token_type",))

    def observe(self, call: Call, seconds: float) -> None:
        """Count a call that just ended."""
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
