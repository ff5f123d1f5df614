"""Limits how many requests and tokens a server has accepted at the same time, and refuses further requests.

With a bounded queue, a request is answered or refused quickly. With an unbounded queue, every request is answered late.
A front end takes a ticket before it works on a request, charges the ticket with tokens when they are counted, and
releases it afterwards. This module uses no engine. The limits cover every request that the process has accepted,
whether it waits or runs.

If several users share a server, no single user can fill it. A user may occupy at most four times as many places as are
still free. So there is always room for another user. `rate_limit` limits the requests and tokens of a user per minute.

`FairQueue` decides the order of requests, by start-time fair queueing between tenants (Goyal et al., 1996). Every
request gets a place in this order, and the engine serves waiting requests in the order of their places. The next place
of a tenant comes after the work that its earlier requests asked for, divided by the tenant's weight. A tenant that was
idle starts at the place that is served now. So a tenant that was idle neither saves up service nor waits for other
tenants to catch up. Work is counted in tokens. The length of an output is estimated from earlier outputs. The estimate
is corrected when the output has ended.
"""

from __future__ import annotations

import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from bridle.errors import InvalidRequest, Overloaded
from bridle.serving.tenancy.rate_limit import NO_LIMITS, RateLimiter, UserLimits

_SMOOTHING = 0.1  # weight of the newest sample in the mean time for which a ticket is held
_MIN_RETRY = 1.0  # seconds
_MAX_RETRY = 60.0
_GREED = 4  # places that one user may hold for each free one
_MAX_TENANTS = 4_096  # number of tenants whose last place is remembered
_FIRST_GUESS = 128.0  # first estimate of an output's length in tokens
_GUESS_SMOOTHING = 0.05


class Admission:
    """Counts the accepted requests and their tokens against two limits. Only one thread or event loop may use this
    object."""

    def __init__(
        self,
        max_requests: int = 512,
        max_tokens: int = 1 << 20,
        clock: Callable[[], float] = time.monotonic,
        *,
        is_shared: bool = False,
    ) -> None:
        """Create an admission without requests. With `is_shared`, users have separate identities, and no user may use
        all of the room."""
        for name, value in (("max_requests", max_requests), ("max_tokens", max_tokens)):
            if value < 1:
                raise InvalidRequest(f"{name} is {value}; must be at least 1", name)
        self.max_requests = max_requests
        self._max_tokens = max_tokens
        #: Returns the maximum prompt length of all loaded models; there is always room for one such prompt.
        self.longest_prompt: Callable[[], int] = lambda: 0
        self.num_requests = 0
        self.num_tokens = 0
        self.num_refused = 0
        self._clock = clock
        self._mean_held = _MIN_RETRY
        self._is_shared = is_shared
        self._held: Counter[str] = Counter()
        self._queue = FairQueue()
        self._rates = RateLimiter(clock)

    @property
    def max_tokens(self) -> int:
        """Return the maximum number of prompt tokens of all accepted requests together. A prompt that fits a model is
        always accepted if there are no other requests. So the limit is higher while a model with a longer context is
        loaded."""
        return max(self._max_tokens, self.longest_prompt())

    def admit(self, num_requests: int = 1, user: str = "", limits: UserLimits = NO_LIMITS) -> Ticket:
        """Return a ticket for `num_requests` requests of `user`. The caller must release the ticket. Raises
        `Overloaded` if there is no room for the requests, or if the user has reached a limit."""
        self.check(user, limits, num_requests)
        if limits is not NO_LIMITS:
            self._rates.spend(user, "requests", limits.requests_per_minute, num_requests)
        self.num_requests += num_requests
        self._held[user] += num_requests
        return Ticket(self, num_requests, self._clock(), user, limits)

    def check(self, user: str = "", limits: UserLimits = NO_LIMITS, num_requests: int = 1) -> None:
        """Raise the error that `admit` would raise, without taking a ticket. So a request can be refused before its
        body is read."""
        self._check_room(num_requests, self.num_requests, self.max_requests, "requests", "max_requests")
        if self._is_shared:
            self._check_share(num_requests, user)
        if limits is not NO_LIMITS:
            self._rates.look(user, limits, num_requests)

    def retry_after(self) -> float:
        """Return the estimated seconds until a place is free: the mean time of a ticket divided by the number of
        accepted requests."""
        expected = self._mean_held / max(self.num_requests, 1)
        return min(max(math.ceil(expected), _MIN_RETRY), _MAX_RETRY)

    def _spend(self, ticket: Ticket, num_tokens: int) -> None:
        self._rates.spend(ticket.user, "tokens", ticket.limits.tokens_per_minute, num_tokens)

    def _check_share(self, wanted: int, user: str) -> None:
        held, free = self._held[user], self.max_requests - self.num_requests
        if held + wanted == 1 or held + wanted <= _GREED * (free - wanted):
            return
        most = max(_GREED * self.max_requests // (_GREED + 1), 1)
        if wanted > most:  # waiting would never help
            raise InvalidRequest(
                f"the body has {wanted} requests; a user of this server may have at most {most} in flight",
                "max_requests",
            )
        self.num_refused += 1
        raise Overloaded(
            f"user {user!r} has {held} requests in flight and wants {wanted} more; the last {free} free places are "
            "kept for other users",
            self.retry_after(),
        )

    def _check_room(self, wanted: int, used: int, limit: int, what: str, param: str) -> None:
        if used + wanted <= limit:
            return
        if wanted > limit:  # waiting would never help
            raise InvalidRequest(f"the body has {wanted} {what}; this server accepts at most {limit}", param)
        self.num_refused += 1
        raise Overloaded(
            f"the server is full: {used} {what} are in flight, and this call wants {wanted} more; at most {limit}",
            self.retry_after(),
        )


@dataclass(slots=True, eq=False)
class Ticket:
    """A ticket: the place of a request among the accepted requests. The ticket must be released when the request has
    ended, in every case; a `with` block releases it.

    `places` has one entry for each charge. Set `num_output` to the number of generated tokens when it is known.
    """

    admission: Admission
    num_requests: int
    begun: float
    user: str
    limits: UserLimits
    num_tokens: int = 0
    num_output: int | None = None
    places: list[QueuePlace] = field(default_factory=list)
    is_released: bool = False

    def charge(self, num_tokens: int, most: int | None = None) -> float:
        """Charge the tokens of a prompt to this ticket. Returns the request's place in the order of service. The place
        also depends on `most`, the maximum number of output tokens. If there is no room for the tokens, nothing is
        charged and `Overloaded` is raised."""
        if self.is_released:
            return 0.0
        total = self.admission
        others = total.num_tokens - self.num_tokens
        total._check_room(self.num_tokens + num_tokens, others, total.max_tokens, "tokens", "prompt")
        total.num_tokens += num_tokens
        self.num_tokens += num_tokens
        if self.limits is not NO_LIMITS:
            total._spend(self, num_tokens)
        place = total._queue.enqueue(self.user, num_tokens, self.limits.weight, most)
        self.places.append(place)
        return place.start

    def release(self) -> None:
        """Release the places that this ticket occupies. Idempotent."""
        if self.is_released:
            return
        self.is_released = True
        total = self.admission
        total.num_requests -= self.num_requests
        total.num_tokens -= self.num_tokens
        total._held[self.user] -= self.num_requests
        if total._held[self.user] <= 0:
            del total._held[self.user]
        for place in self.places:
            total._queue.done(place, None if self.num_output is None else self.num_output // len(self.places))
        if self.limits is not NO_LIMITS:
            total._spend(self, self.num_output or 0)
        total._mean_held += _SMOOTHING * (total._clock() - self.begun - total._mean_held)

    def __enter__(self) -> Ticket:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.release()


@dataclass(frozen=True, slots=True)
class QueuePlace:
    """A place in the order of service. Requests with a smaller `start` are served first."""

    tenant: str
    start: float
    weight: float
    guess: float  # the number of output tokens that the place was charged for


class FairQueue:
    """Assigns places in the order of service. Only one thread or event loop may use this object."""

    def __init__(self) -> None:
        self._ends: OrderedDict[str, float] = OrderedDict()
        self._reached = 0.0
        self._guess = _FIRST_GUESS
        self._num_done = 0

    def enqueue(self, tenant: str, num_prompt: int, weight: float = 1.0, max_output: int | None = None) -> QueuePlace:
        """Return the place of a request that has `num_prompt` prompt tokens and asks for at most `max_output` output
        tokens. A tenant of weight 2 gets twice as much service as a tenant of weight 1.

        The length of the output is estimated first and corrected later. If the estimate is too high, the tenant's next
        requests are delayed until it is corrected. So the estimate is at most `max_output`.
        """
        guess = self._guess if max_output is None else min(self._guess, max_output)
        place = QueuePlace(tenant, max(self._reached, self._ends.get(tenant, 0.0)), weight, guess)
        self._move(tenant, place.start + (num_prompt + place.guess) / weight)
        return place

    def done(self, place: QueuePlace, num_output: int | None) -> None:
        """Record that the request with this place in the order of service has ended after `num_output` tokens. If
        `num_output` is None, the request never ran, or the number is unknown."""
        self._reached = max(self._reached, place.start)
        if num_output is None:
            return
        self._num_done += 1
        self._guess += max(_GUESS_SMOOTHING, 1 / self._num_done) * (num_output - self._guess)
        if place.tenant in self._ends:
            self._move(place.tenant, self._ends[place.tenant] + (num_output - place.guess) / place.weight)

    def _move(self, tenant: str, end: float) -> None:
        self._ends[tenant] = end
        self._ends.move_to_end(tenant)
        if len(self._ends) > _MAX_TENANTS:
            self._ends.popitem(last=False)
