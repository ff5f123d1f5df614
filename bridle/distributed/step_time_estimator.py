"""Estimates how long steps take, and gives each step a time limit.

A shard that sends heartbeats can still be stuck in a step. The time limit of a step is estimated from earlier steps.
The limit has a wide margin, because too tight a limit would kill a healthy shard.
"""

from __future__ import annotations

#: Tokens that are added to the tokens of a step, for the fixed cost of a step.
_BASE_TOKENS = 32
#: The time limit of a step, as a multiple of its estimate.
_MARGIN = 30.0
#: Factor of the estimate after each step that is faster than the estimate.
_FADING = 0.99


class StepTimeEstimator:
    """Learns the duration of steps. The time limit of a step is at least `least` seconds, and `first` seconds before
    any step was measured."""

    def __init__(self, least: float = 15.0, first: float = 300.0) -> None:
        self._least = least
        self._first = first
        self._seconds_per_token: float | None = None  # of the slowest recent steps

    def note(self, num_tokens: int, seconds: float) -> None:
        """Update the estimate: a step of `num_tokens` tokens took `seconds`."""
        cost = seconds / (_BASE_TOKENS + num_tokens)
        self._seconds_per_token = max(cost, (self._seconds_per_token or 0.0) * _FADING)

    def estimate(self, num_tokens: int) -> float | None:
        """Return the expected duration of a step in seconds; None before any step was measured."""
        if self._seconds_per_token is None:
            return None
        return self._seconds_per_token * (_BASE_TOKENS + num_tokens)

    def limit(self, num_tokens: int) -> float:
        """Return the time limit of a step in seconds."""
        estimate = self.estimate(num_tokens)
        return self._first if estimate is None else max(self._least, _MARGIN * estimate)
