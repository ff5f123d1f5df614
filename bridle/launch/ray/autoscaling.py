"""Autoscaling of engines: as many as keep queued prompt tokens, and running requests, below a target. Token counts
are used because requests differ: one prompt may have 10 tokens, another 100,000. Serve's own delays and bounds
apply to this target."""

from __future__ import annotations

import math
from typing import Any

#: What engines report; the names of the metrics.
QUEUED_TOKENS = "queued_tokens"
BUSY_SHARE = "busy_share"


class QueuedTokens:
    """A policy of Serve: `target_tokens` queued per engine, `target_busy` of its places taken."""

    def __init__(self, target_tokens: float, target_busy: float) -> None:
        self._target_tokens = target_tokens
        self._target_busy = target_busy

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """The wanted number of engines, and an empty state."""
        metrics = context.aggregated_metrics or {}
        by_queue = sum(metrics.get(QUEUED_TOKENS, {}).values()) / self._target_tokens
        by_places = sum(metrics.get(BUSY_SHARE, {}).values()) / self._target_busy
        wanted = math.ceil(max(by_queue, by_places))
        low, high = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
        return max(low, min(wanted, high)), {}
