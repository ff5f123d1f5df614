"""Metrics under the names of text-generation-inference, so that dashboards made for that server work with this server.

The original counters have no suffix `_total`. The exposition format would add this suffix, so the counters are sent as
untyped metrics. A request counts once, also on the chat routes. A step of bridle computes prompts together with the
next tokens of all sequences. So all steps are counted under the method `decode`, with sums and counts of durations, but
no quantiles. Metrics about filtered, joined or skipped batches do not exist.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric, SummaryMetricFamily, UntypedMetricFamily
from prometheus_client.registry import Collector

from bridle.http.errors import error_type_of
from bridle.http.middleware.request_context import GENERATING_ROUTES, RequestContext
from bridle.serving import ModelRegistry

_DURATIONS = tuple(0.00015 * 1.5**i for i in range(35))  # seconds, the original's buckets
_LENGTHS = tuple(float(1 << i) for i in range(21))  # tokens
_FAILURES = {
    "validation": "validation",
    "overloaded": "overloaded",
    "generation": "generation",
    "incomplete_generation": "incomplete",
}
#: The parts of a step, by our names.
_PARTS = {"step": "inference", "forward": "forward", "sample": "decode"}


class TgiMetrics:
    """Counts requests that generate text."""

    def __init__(self, registry: CollectorRegistry, models: ModelRegistry) -> None:
        self._registry = registry
        self._counts: Counter[tuple[str, str]] = Counter()
        self._durations = {
            name: self._histogram(f"{name}duration", f"Seconds {text}.", _DURATIONS)
            for name, text in (
                ("", "that a request took"),
                ("validation_", "until a request was submitted to the engine"),
                ("queue_", "that a request waited for room in the engine"),
                ("inference_", "that a request was computed"),
                ("mean_time_per_token_", "per output token, mean of a request"),
            )
        }
        self._lengths = {
            name: self._histogram(name, f"Tokens {text}.", _LENGTHS)
            for name, text in (
                ("input_length", "in the prompt"),
                ("max_new_tokens", "that a request allows in the output at most"),
                ("generated_tokens", "in the output"),
            )
        }
        registry.register(_Collector(self._counts, models))

    def observe(self, call: RequestContext, seconds: float) -> None:
        """Record a request that has just ended."""
        if call.path not in GENERATING_ROUTES:
            return
        self._counts["tgi_request_count", ""] += 1
        if call.error is not None:
            self._counts["tgi_request_failure", _FAILURES.get(error_type_of(call.error), "generation")] += 1
            return
        if call.usage is None or call.submitted is None:
            return
        self._counts["tgi_request_success", ""] += 1
        validation = call.submitted - call.began
        inference = max(seconds - validation - call.queued, 0.0)
        num_output = call.usage.completion_tokens
        for name, value in (
            ("", seconds),
            ("validation_", validation),
            ("queue_", call.queued),
            ("inference_", inference),
            ("mean_time_per_token_", inference / max(num_output, 1)),
        ):
            self._durations[name].observe(value)
        self._lengths["input_length"].observe(call.usage.prompt_tokens)
        self._lengths["generated_tokens"].observe(num_output)
        if call.sampling is not None and call.sampling.max_tokens is not None:
            self._lengths["max_new_tokens"].observe(call.sampling.max_tokens)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"tgi_request_{name}", text, buckets=buckets, registry=self._registry)


class _Collector(Collector):
    """Collects the counters and the current state of the engines."""

    def __init__(self, counts: Counter[tuple[str, str]], models: ModelRegistry) -> None:
        self._counts = counts
        self._models = models

    def collect(self) -> Iterator[Metric]:
        for name, text in (("count", "Requests to generating routes."), ("success", "Requests that succeeded.")):
            yield UntypedMetricFamily(f"tgi_request_{name}", text, self._counts[f"tgi_request_{name}", ""])
        failures = UntypedMetricFamily("tgi_request_failure", "Requests that failed, by kind.", labels=["err"])
        for kind in sorted(set(_FAILURES.values())):
            failures.add_metric([kind], self._counts["tgi_request_failure", kind])
        yield failures
        yield from self._gauges()
        yield from self._steps()

    def _steps(self) -> Iterator[Metric]:
        """Yield the number and durations of the engines' steps. In the original metrics, "decode" means sampling."""
        every = [model.client.statistics() for model in self._models]

        def total(name: str) -> float:
            return float(sum(getattr(counts, name, 0) for counts in every))

        num_steps, num_failed = total("num_steps"), total("num_failed_steps")
        for name, text, value in (
            ("count", "Steps of the engine.", num_steps),
            ("success", "Steps of the engine that succeeded.", num_steps - num_failed),
            ("failure", "Steps of the engine that failed.", num_failed),
        ):
            family = UntypedMetricFamily(f"tgi_batch_inference_{name}", text, labels=["method"])
            family.add_metric(["decode"], value)
            yield family
        for name, text in (("step", "in steps"), ("forward", "in forward passes"), ("sample", "sampling tokens")):
            seconds = SummaryMetricFamily(f"tgi_batch_{_PARTS[name]}_duration", f"Seconds {text}.", labels=["method"])
            seconds.add_metric(["decode"], int(num_steps), total(f"{name}_seconds"))
            yield seconds

    def _gauges(self) -> Iterator[Metric]:
        waiting, running, used, room = 0, 0, 0, 0
        for model in self._models:
            counts, info = model.client.statistics(), model.info
            waiting += getattr(counts, "num_waiting", 0)
            running += getattr(counts, "num_running", 0)
            used += (getattr(counts, "num_blocks", 0) - getattr(counts, "num_free_blocks", 0)) * info.block_size
            room += info.num_blocks * info.block_size
        for name, text, value in (
            ("tgi_queue_size", "Sequences that wait for room in the batch.", waiting),
            ("tgi_batch_current_size", "Sequences in the batch.", running),
            ("tgi_batch_current_max_tokens", "Tokens that the used KV blocks can hold.", used),
            ("tgi_batch_max_total_tokens", "Tokens that all KV blocks can hold.", room),
        ):
            yield GaugeMetricFamily(name, text, float(value))
