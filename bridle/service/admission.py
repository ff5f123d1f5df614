"""How much may be in the house at once: requests and tokens, with a clear no beyond that.

A bounded queue answers quickly either way; an unbounded one answers everybody late. Front-ends take a ticket
before they spend work on a request, charge it with tokens once these are counted, and release it at the end.
Knows nothing of engines: the bound covers everything a process has accepted, waiting or running.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from types import TracebackType

from bridle.errors import InvalidRequest, Overloaded

_SMOOTHING = 0.1  # weight of the newest sample in the mean time that a ticket is held
_MIN_RETRY = 1.0  # seconds
_MAX_RETRY = 60.0


class Admission:
    """Counts what is in flight against two limits. For use by one thread or event loop."""

    def __init__(
        self, max_requests: int = 512, max_tokens: int = 1 << 20, clock: Callable[[], float] = time.monotonic
    ) -> None:
        for name, value in (("max_requests", max_requests), ("max_tokens", max_tokens)):
            if value < 1:
                raise InvalidRequest(f"{name} is {value}; must be at least 1", name)
        self.max_requests = max_requests
        self.max_tokens = max_tokens
        self.num_requests = 0
        self.num_tokens = 0
        self.num_refused = 0
        self._clock = clock
        self._mean_held = _MIN_RETRY

    def admit(self, num_requests: int = 1) -> Ticket:
        """A ticket for `num_requests`, to be released. Raises `Overloaded` if there is no room for them."""
        self._check_room(num_requests, self.num_requests, self.max_requests, "requests", "max_requests")
        self.num_requests += num_requests
        return Ticket(self, num_requests, self._clock())

    def retry_after(self) -> float:
        """Seconds until a place should be free: places come back at (in flight) / (mean time held)."""
        expected = self._mean_held / max(self.num_requests, 1)
        return min(max(math.ceil(expected), _MIN_RETRY), _MAX_RETRY)

    def _charge(self, num_tokens: int) -> None:
        self._check_room(num_tokens, self.num_tokens, self.max_tokens, "tokens", "prompt")
        self.num_tokens += num_tokens

    def _release(self, num_requests: int, num_tokens: int, begun: float) -> None:
        self.num_requests -= num_requests
        self.num_tokens -= num_tokens
        self._mean_held += _SMOOTHING * (self._clock() - begun - self._mean_held)

    def _check_room(self, wanted: int, used: int, limit: int, what: str, param: str) -> None:
        if used + wanted <= limit:
            return
        if wanted > limit:  # waiting would never help
            raise InvalidRequest(f"{wanted} {what} in one call; this server takes at most {limit}", param)
        self.num_refused += 1
        raise Overloaded(
            f"the server is full: {used} {what} in flight, {wanted} more wanted, at most {limit}",
            self.retry_after(),
        )


class Ticket:
    """A place in the house. Release it exactly when the request is over, on every path: `with` does."""

    def __init__(self, admission: Admission, num_requests: int, begun: float) -> None:
        self._admission: Admission | None = admission
        self._num_requests = num_requests
        self._num_tokens = 0
        self._begun = begun

    def charge(self, num_tokens: int) -> None:
        """Count tokens to this ticket. Raises `Overloaded`, having counted nothing, if there is no room."""
        if self._admission is not None:
            self._admission._charge(num_tokens)
            self._num_tokens += num_tokens

    def release(self) -> None:
        """Give the place back. Idempotent."""
        admission, self._admission = self._admission, None
        if admission is not None:
            admission._release(self._num_requests, self._num_tokens, self._begun)

    def __enter__(self) -> Ticket:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
