"""Timeouts and retries of a client."""

from __future__ import annotations

import random
from dataclasses import dataclass

from bridle.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Time limits in seconds; None means no limit. The clock of a stream runs only while its reader waits for it.

    `retries` counts in a row: a stream that got an answer meanwhile starts again with all of them. Between tries a
    client waits `backoff` seconds, twice as long each time up to `max_backoff`, half of it at random.
    """

    first_token: float | None = 300.0  # models may be loaded first, and servers of the original say nothing meanwhile
    between_tokens: float | None = 60.0
    connect_attempts: int = 5
    retries: int = 3
    backoff: float = 0.1
    max_backoff: float = 5.0
    handshake: float | None = 300.0  # a server that is a child of ours answers when its model is loaded

    def __post_init__(self) -> None:
        if self.connect_attempts < 1 or self.retries < 0:
            raise InvalidRequest(
                f"connect_attempts is {self.connect_attempts} and retries {self.retries}; at least 1 and 0", "patience"
            )

    def pause(self, num_failures: int) -> float:
        """Seconds to wait after this many failures in a row."""
        longest = min(self.max_backoff, self.backoff * 2.0 ** min(num_failures - 1, 30))
        return longest * random.uniform(0.5, 1.0)
