"""Timeouts and retries of an LMTP client."""

from __future__ import annotations

import random
from dataclasses import dataclass

from bridle.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Time limits in seconds; None means no limit. A time limit of a stream counts only while the stream's reader waits
    for a token.

    `retries` is the allowed number of failures in a row; an answer sets the count to 0. Between attempts, the client
    waits `backoff` seconds, doubled after each failure, up to `max_backoff`; half of the wait is random.
    """

    first_token: float | None = 300.0  # the server may load the model first; original servers send no notice of that
    between_tokens: float | None = 60.0
    connect_attempts: int = 5
    retries: int = 3
    backoff: float = 0.1
    max_backoff: float = 5.0
    handshake: float | None = 300.0  # a server in a child process answers when its model is loaded

    def __post_init__(self) -> None:
        if self.connect_attempts < 1 or self.retries < 0:
            raise InvalidRequest(
                f"connect_attempts is {self.connect_attempts} and must be at least 1; retries is {self.retries} and "
                "must be at least 0",
                "patience",
            )

    def pause(self, num_failures: int) -> float:
        """Return the seconds to wait after `num_failures` failures in a row."""
        longest = min(self.max_backoff, self.backoff * 2.0 ** min(num_failures - 1, 30))
        return longest * random.uniform(0.5, 1.0)
