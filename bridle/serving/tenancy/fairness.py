"""The order of service: start-time fair queueing between tenants (Goyal, Vin and Cheng, 1996).

Every request gets a place, and the engine takes waiting requests in order of their places. A tenant's next place comes
after the work that its earlier requests asked for, divided by its weight. A tenant that was idle starts where service
is now: it neither saves up places nor waits behind those that others have piled up. Work is counted in tokens. The
length of an output is guessed from earlier ones, and corrected when the output is over.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

_MAX_TENANTS = 4_096  # for these the end of the last place is remembered
_FIRST_GUESS = 128.0  # tokens of output
_SMOOTHING = 0.05


@dataclass(frozen=True, slots=True)
class QueuePlace:
    """A place in the order of service: requests with a smaller `start` are taken first."""

    tenant: str
    start: float
    weight: float
    guess: float  # the number of output tokens that the place was charged for


class FairQueue:
    """Hands out places. For use by one thread or event loop."""

    def __init__(self) -> None:
        self._ends: OrderedDict[str, float] = OrderedDict()
        self._reached = 0.0
        self._guess = _FIRST_GUESS
        self._num_done = 0

    def enqueue(self, tenant: str, num_prompt: int, weight: float = 1.0, max_output: int | None = None) -> QueuePlace:
        """The place of a request with `num_prompt` prompt tokens, which asks for `max_output` tokens at most. A tenant
        of weight 2 gets twice the service.

        A guess that is too high delays the tenant's places that are taken before the correction. So `max_output` bounds
        the guess.
        """
        guess = self._guess if max_output is None else min(self._guess, max_output)
        place = QueuePlace(tenant, max(self._reached, self._ends.get(tenant, 0.0)), weight, guess)
        self._move(tenant, place.start + (num_prompt + place.guess) / weight)
        return place

    def done(self, place: QueuePlace, num_output: int | None) -> None:
        """Note that the request of this place is over, after `num_output` tokens (None: it never ran, or the number is
        not known)."""
        self._reached = max(self._reached, place.start)
        if num_output is None:
            return
        self._num_done += 1
        self._guess += max(_SMOOTHING, 1 / self._num_done) * (num_output - self._guess)
        if place.tenant in self._ends:
            self._move(place.tenant, self._ends[place.tenant] + (num_output - place.guess) / place.weight)

    def _move(self, tenant: str, end: float) -> None:
        self._ends[tenant] = end
        self._ends.move_to_end(tenant)
        if len(self._ends) > _MAX_TENANTS:
            self._ends.popitem(last=False)
