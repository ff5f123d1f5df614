"""Counters and gauges of an engine, ready for a metrics endpoint. All values are plain numbers and are read without
locks."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Any


def _counter(text: str, start: float = 0) -> Any:
    """Declare a field that is a counter: it only grows. `text` is the help text of the field's metric and names its
    unit."""
    return field(default=start, metadata={"help": text})


def _gauge(text: str) -> Any:
    """Declare a field that is a gauge: it goes up and down. `text` is the help text of the field's metric and names its
    unit."""
    return field(default=0, metadata={"help": text, "is_gauge": True})


@dataclass(slots=True)
class EngineStatistics:
    """A snapshot. Counters only grow. Gauges are the values of the last step. Fields with a help text are metrics."""

    num_steps: int = _counter("Steps of the engine that computed tokens or changed the KV cache.")
    num_requests: int = _counter("Requests that the engine accepted.")
    num_computed_tokens: int = _counter("Tokens computed by the model, prompt and output together.")
    num_prompt_tokens: int = _counter("Prompt tokens of all requests, cached ones included.")
    num_cached_tokens: int = _counter("Prompt tokens whose KV was found in the prefix cache.")
    num_sampled_tokens: int = _counter("Output tokens that were sampled.")
    num_forced_tokens: int = _counter("Output tokens that a controller or a constraint set without sampling.")
    num_rewound_tokens: int = _counter("Output tokens that were rolled back.")
    num_drafted_tokens: int = _counter("Draft tokens that speculative decoding proposed.")
    num_accepted_tokens: int = _counter("Draft tokens that the model accepted.")
    num_forks: int = _counter("Forks: sequences that were started as copies of another.")
    num_preemptions: int = _counter("Preemptions: running sequences that had to give up their KV blocks.")
    num_evicted_blocks: int = _counter("Cached KV blocks that were evicted to make room.")
    num_copied_blocks: int = _counter("KV blocks copied because a sequence wrote to a shared block.")
    num_recomputed_tokens: int = _counter(
        "Tokens computed again after a rollback because no recurrent state was kept there."
    )
    num_park_hits: int = _counter("Requests that continued from the KV of a parked conversation.")
    num_parks_expired: int = _counter("Parked conversations that ended because their time was over.")
    num_parks_given_way: int = _counter("Parked conversations that lost KV blocks because other requests needed room.")
    num_stored_blocks: int = _counter("KV blocks written to the KV store on disk.")
    num_restored_tokens: int = _counter("Tokens whose KV was read from the KV store on disk.")
    num_store_drops: int = _counter("KV blocks not written to the KV store because the queue or the disk was full.")
    num_stored_bytes: int = _counter("Bytes written to the KV store on disk.")
    num_restored_bytes: int = _counter("Bytes read from the KV store on disk.")
    num_host_reads: int = _counter("KV blocks copied back to the device from host memory.")
    num_host_evictions: int = _counter("KV blocks evicted from host memory to make room.")
    num_late_answers: int = _counter("Controller answers that came after the deadline of their step.")
    num_failed_steps: int = _counter("Steps of the engine that failed.")
    finished: Counter[str] = field(default_factory=Counter, metadata={"help": "Outputs that finished, by reason."})
    policies: Counter[str] = field(default_factory=Counter)  # by name, version and what a policy did
    tenant_blocks: Counter[str] = field(default_factory=Counter)  # of the KV cache, by tenant with live requests
    step_seconds: float = _counter("Seconds spent in steps of the engine.", 0.0)
    forward_seconds: float = _counter("Seconds spent in forward passes of the model.", 0.0)
    sample_seconds: float = _counter("Seconds spent sampling tokens.", 0.0)
    control_seconds: float = _counter("Seconds spent waiting for controllers after forward passes.", 0.0)
    num_adapter_reads: int = _counter("LoRA adapters read from disk into host memory.")
    num_adapter_placements: int = _counter("LoRA adapters copied from host memory to the device.")
    num_adapter_host_evictions: int = _counter("LoRA adapters evicted from host memory to make room.")
    num_adapter_device_evictions: int = _counter("LoRA adapters evicted from the device to make room.")
    num_media_encoded: int = _counter("Images and other media that were encoded.")
    num_media_found: int = _counter("Images and other media that had already been encoded for another request.")
    media_seconds: float = _counter("Seconds spent encoding images and other media.", 0.0)
    media_bytes: int = _gauge("Bytes of encoded media cached on the model's device.")
    media_held_bytes: int = _gauge("Bytes of model input held for the media of unfinished requests.")

    num_trace_records: int = _counter("Records written to traces.")
    num_cut_trace_records: int = _counter("Trace records left out because a limit was reached.")

    num_running: int = _gauge("Sequences in the batch.")
    num_waiting: int = _gauge("Sequences that wait for KV blocks or for their controller to be ready.")
    num_prefilling: int = _gauge("Sequences in the batch whose prompt is not fully computed yet.")
    num_suspended: int = _gauge("Sequences in the batch that wait for their controller.")
    num_blocks: int = _gauge("KV blocks in total.")
    num_free_blocks: int = _gauge("KV blocks that no live sequence uses.")
    num_cached_blocks: int = _gauge("Free KV blocks that still hold tokens for the prefix cache.")
    num_states: int = _gauge("Slots for recurrent states; 0 for models without recurrent layers.")
    num_free_states: int = _gauge("Slots for recurrent states that are free.")
    num_kept_states: int = _gauge("Recurrent states kept so that sequences can continue from them.")
    num_blocks_in_store: int = _gauge("KV blocks of this model in the KV store on disk.")
    num_host_blocks: int = _gauge("KV blocks of the device that are kept in host memory.")
    num_host_bytes: int = _gauge("Bytes of host memory that hold KV blocks of the device.")
    num_parked: int = _gauge("Parked conversations.")
    num_parked_blocks: int = _gauge("KV blocks of parked conversations.")
    num_retained: int = _gauge("Prompt prefixes that clients asked to retain.")
    num_adapters: int = _gauge("LoRA adapters that requests may name.")
    num_adapters_on_host: int = _gauge("LoRA adapters in host memory.")
    num_adapters_on_device: int = _gauge("LoRA adapters on the device.")
    num_traced: int = _gauge("Requests that are traced now.")

    @property
    def kv_usage(self) -> float:
        """Return the share of the KV cache that active sequences use, from 0 to 1."""
        return 1 - self.num_free_blocks / self.num_blocks if self.num_blocks else 0.0


#: Help text of each field that is a metric.
HELP: dict[str, str] = {each.name: each.metadata["help"] for each in fields(EngineStatistics) if each.metadata}
HELP["kv_usage"] = "Share of the KV blocks that live sequences use, from 0 to 1."
#: Fields that go up and down; the others only grow.
GAUGES = {each.name for each in fields(EngineStatistics) if each.metadata.get("is_gauge")} | {"kv_usage"}
