"""Limits how many requests and tokens a user may ask for per minute. Each user has token buckets, which fill as time
passes.

A full bucket holds the allowance of one minute. A request is subtracted when it arrives. Tokens are subtracted when
their number is known: the tokens of a prompt at once, the tokens of an output at its end. So a bucket can be negative.
A negative bucket refuses requests until it is positive again.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from bridle.errors import InvalidRequest, Overloaded

#: Priorities of requests are from -MAX_PRIORITY, served first, to MAX_PRIORITY, served last.
MAX_PRIORITY = 100
_MINUTE = 60.0
_MAX_USERS = 4_096  # number of users whose buckets are remembered; other users have full buckets


@dataclass(frozen=True, slots=True)
class UserLimits:
    """Limits of a user; None means no limit. `weight` is the user's share when the engine is busy. `most_urgent` is the
    smallest permitted priority (smaller ones are served first)."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    weight: float = 1.0
    most_urgent: int = 0

    def __post_init__(self) -> None:
        for name in ("requests_per_minute", "tokens_per_minute"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidRequest(f"{name} is {value}; must be at least 1", name)
        if not 0.01 <= self.weight <= 100:
            raise InvalidRequest(f"weight is {self.weight}; must be between 0.01 and 100", "weight")
        if not -MAX_PRIORITY <= self.most_urgent <= MAX_PRIORITY:
            raise InvalidRequest(
                f"most_urgent is {self.most_urgent}; must be between -{MAX_PRIORITY} and {MAX_PRIORITY}", "most_urgent"
            )


NO_LIMITS = UserLimits()


class RateLimiter:
    """The token buckets of all users. Only one thread or event loop may use the buckets."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: OrderedDict[tuple[str, str], _Bucket] = OrderedDict()

    def look(self, user: str, limits: UserLimits, num_requests: int) -> None:
        """Raise `Overloaded` if a bucket of the user holds too little for `num_requests` requests. The call does not
        change the buckets."""
        self._wait_for(user, "tokens", limits.tokens_per_minute, 0)
        self._wait_for(user, "requests", limits.requests_per_minute, num_requests)

    def spend(self, user: str, what: str, per_minute: int | None, amount: float) -> None:
        """Subtract `amount` from the bucket, even if the bucket holds less."""
        if per_minute is not None:
            self._bucket(user, what, per_minute).level -= amount

    def _wait_for(self, user: str, what: str, per_minute: int | None, amount: int) -> None:
        if per_minute is None:
            return
        if amount > per_minute:  # waiting would never help
            raise InvalidRequest(
                f"the body has {amount} {what}; user {user!r} may have at most {per_minute} per minute"
            )
        level = self._bucket(user, what, per_minute).level
        missing = amount - level
        if missing > 0 or level <= 0:
            seconds = math.ceil(max(missing, 1.0) * _MINUTE / per_minute)
            raise Overloaded(
                f"user {user!r} has used up the limit of {per_minute} {what} per minute; try again in {seconds} s",
                seconds,
            )

    def _bucket(self, user: str, what: str, per_minute: int) -> _Bucket:
        now = self._clock()
        bucket = self._buckets.setdefault((user, what), _Bucket(per_minute, now))
        self._buckets.move_to_end((user, what))
        if len(self._buckets) > _MAX_USERS:
            self._buckets.popitem(last=False)
        bucket.fill(now, per_minute)
        return bucket


@dataclass(slots=True)
class _Bucket:
    level: float
    filled_at: float

    def fill(self, now: float, per_minute: int) -> None:
        self.level = min(self.level + (now - self.filled_at) * per_minute / _MINUTE, per_minute)
        self.filled_at = now
