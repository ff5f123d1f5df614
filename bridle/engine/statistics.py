"""Counters and gauges of an engine, ready for a metrics endpoint. Plain numbers, read without locks."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class EngineStatistics:
    """A snapshot. Counters only grow; gauges (the last group) are values of the last step."""

    num_steps: int = 0  # steps that computed something or told the backend something
    num_requests: int = 0
    num_computed_tokens: int = 0  # positions that went through the model
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_sampled_tokens: int = 0
    num_forced_tokens: int = 0
    num_rewound_tokens: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0  # of the drafted ones
    num_forks: int = 0
    num_preemptions: int = 0
    num_evicted_blocks: int = 0
    num_copied_blocks: int = 0
    num_recomputed_tokens: int = 0  # after rewinds of models with recurrent layers, for want of a state
    num_park_hits: int = 0  # requests that went on from parked KV
    num_parks_expired: int = 0
    num_parks_given_way: int = 0  # conversations of which others took blocks
    num_stored_blocks: int = 0  # blocks of the KV cache that were written to the store
    num_restored_tokens: int = 0  # tokens whose KV was read from the store
    num_store_drops: int = 0  # blocks that were not written: the queue or the disk was full
    num_stored_bytes: int = 0
    num_restored_bytes: int = 0
    num_host_reads: int = 0  # blocks of a device that were read from the host's memory
    num_host_evictions: int = 0  # blocks that left the host's memory to make room for others
    num_late_answers: int = 0
    num_failed_steps: int = 0
    finished: Counter[str] = field(default_factory=Counter)  # by finish reason
    policies: Counter[str] = field(default_factory=Counter)  # by name, version and what a policy did
    tenant_blocks: Counter[str] = field(default_factory=Counter)  # of the KV cache, by tenant with live requests
    step_seconds: float = 0.0
    forward_seconds: float = 0.0
    sample_seconds: float = 0.0
    control_seconds: float = 0.0  # time spent waiting for controllers after the forward pass
    num_adapter_reads: int = 0  # from disk to the host
    num_adapter_placements: int = 0  # from the host to the device
    num_adapter_host_evictions: int = 0  # to make room for others
    num_adapter_device_evictions: int = 0
    num_media_encoded: int = 0
    num_media_found: int = 0  # encoded before, for another step or request
    media_seconds: float = 0.0  # spent encoding
    media_bytes: int = 0  # features of pictures, where the model computes
    media_held_bytes: int = 0  # pictures of requests that are not over, as a model reads them

    num_trace_records: int = 0
    num_cut_trace_records: int = 0  # that had no room

    num_running: int = 0
    num_waiting: int = 0
    num_prefilling: int = 0  # of the running ones, those whose tokens are not all computed yet
    num_suspended: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_cached_blocks: int = 0
    num_states: int = 0  # slots for recurrent states; 0 for models without such layers
    num_free_states: int = 0
    num_kept_states: int = 0  # from which sequences may continue
    num_blocks_in_store: int = 0
    num_host_blocks: int = 0  # of a device, in the host's memory
    num_host_bytes: int = 0  # taken for them
    num_parked: int = 0  # conversations
    num_parked_blocks: int = 0
    num_retained: int = 0  # of those conversations, the prefixes that clients asked to retain
    num_adapters: int = 0  # that requests may name
    num_adapters_on_host: int = 0
    num_adapters_on_device: int = 0
    num_traced: int = 0  # requests

    @property
    def kv_usage(self) -> float:
        """Return the share of the KV cache that live sequences use, 0 to 1."""
        return 1 - self.num_free_blocks / self.num_blocks if self.num_blocks else 0.0
