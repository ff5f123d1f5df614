"""Autoscaling of engines: keeps queued prompt tokens and running requests per engine below a target. Token counts are
used because requests differ: one prompt may have 10 tokens, another 100,000. Ray Serve applies its own delays and
limits to the resulting number of engines."""

from __future__ import annotations

import math
from typing import Any

#: The names of the metrics that engines report.
QUEUED_TOKENS = "queued_tokens"
BUSY_SHARE = "busy_share"


class QueuedTokens:
    """An autoscaling policy of Ray Serve. The targets per engine are `target_tokens` queued tokens, and the share
    `target_busy` of the maximum number of running requests."""

    def __init__(self, target_tokens: float, target_busy: float) -> None:
        self._target_tokens = target_tokens
        self._target_busy = target_busy

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Return the target number of engines, and an empty state, which Serve requires."""
        metrics = context.aggregated_metrics or {}
        by_queue = sum(metrics.get(QUEUED_TOKENS, {}).values()) / self._target_tokens
        by_places = sum(metrics.get(BUSY_SHARE, {}).values()) / self._target_busy
        wanted = math.ceil(max(by_queue, by_places))
        low, high = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
        return max(low, min(wanted, high)), {}
