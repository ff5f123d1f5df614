"""How long steps take, and when one has taken too long.

A shard that shows signs of life can still be stuck in a step. What a step may take is an estimate from those before
it, with a wide margin: a limit that is too tight would kill a healthy shard.
"""

from __future__ import annotations

#: A step of no tokens at all counts as one of so many.
_BASE_TOKENS = 32
#: How many times its estimate a step may take.
_MARGIN = 30.0
#: What the memory of a slow step loses with each one that is faster.
_FADING = 0.99


class Pace:
    """Learns from steps. In seconds, a step may always take `least`, and `first` while none is known."""

    def __init__(self, least: float = 15.0, first: float = 300.0) -> None:
        self._least = least
        self._first = first
        self._seconds_per_token: float | None = None  # of the slowest recent steps

    def note(self, num_tokens: int, seconds: float) -> None:
        """A step took that long."""
        cost = seconds / (_BASE_TOKENS + num_tokens)
        self._seconds_per_token = max(cost, (self._seconds_per_token or 0.0) * _FADING)

    def estimate(self, num_tokens: int) -> float | None:
        """Seconds that a step will take; None before any was seen."""
        if self._seconds_per_token is None:
            return None
        return self._seconds_per_token * (_BASE_TOKENS + num_tokens)

    def limit(self, num_tokens: int) -> float:
        """Seconds after which a step is given up."""
        estimate = self.estimate(num_tokens)
        return self._first if estimate is None else max(self._least, _MARGIN * estimate)
