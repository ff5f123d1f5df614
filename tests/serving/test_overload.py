"""For one minute of fake time, a server gets ten times the requests that it can run. Every user gets at least 80 % of a
fair share, and so does a user who sends half of all requests."""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator
from itertools import count

import pytest

from bridle.errors import Overloaded
from bridle.serving import Admission, Ticket

_USERS, _SECONDS, _WARM, _SERVICE = 10, 60.0, 10.0, 3.2
_PROMPT, _OUTPUT = 80, 32


class House:
    """A fake server with `num_places` request slots. It serves `num_seats` requests at once, in the order of
    admission."""

    def __init__(self, num_places: int, num_seats: int, seed: int) -> None:
        self.now = 0.0
        self.served = [0] * _USERS
        self._rng = random.Random(seed)
        self._admission = Admission(num_places, clock=lambda: self.now, is_shared=True)
        self._num_seats = num_seats
        self._rate = 10 * num_seats / _SERVICE
        self._numbers = count()
        self._events: list[tuple[float, int, Ticket | None]] = [(0.0, -1, None)]
        self._waiting: list[tuple[float, int, Ticket]] = []
        self._num_running = 0

    def run(self) -> list[float]:
        """Return each user's share, relative to a fair share."""
        for ticket in self._moments():
            if ticket is None:
                self._arrive()
            else:
                self._finish(ticket)
            while self._waiting and self._num_running < self._num_seats:
                self._num_running += 1
                self._at(_SERVICE * self._rng.uniform(0.9, 1.1), heapq.heappop(self._waiting)[2])
        return [each * _USERS / sum(self.served) for each in self.served]

    def _moments(self) -> Iterator[Ticket | None]:
        """Yield arrivals (None) and finished requests, until the time is up."""
        while self._events[0][0] <= _SECONDS:
            self.now, _, ticket = heapq.heappop(self._events)
            yield ticket

    def _at(self, seconds: float, ticket: Ticket | None) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._numbers), ticket))

    def _arrive(self) -> None:
        self._at(self._rng.expovariate(self._rate), None)
        user = 0 if self._rng.random() < 0.5 else self._rng.randrange(1, _USERS)
        try:
            ticket = self._admission.admit(user=str(user))
        except Overloaded:
            return
        heapq.heappush(self._waiting, (ticket.charge(_PROMPT, _OUTPUT), next(self._numbers), ticket))

    def _finish(self, ticket: Ticket) -> None:
        self._num_running -= 1
        ticket.num_output = _OUTPUT
        ticket.release()
        self.served[int(ticket.user)] += self.now >= _WARM


@pytest.mark.few(4)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("num_places", "num_seats"), [(32, 16), (64, 16), (128, 16), (128, 64), (128, 128)])
def test_each_user_gets_a_fair_share_of_an_overloaded_house(num_places: int, num_seats: int, seed: int) -> None:
    assert min(House(num_places, num_seats, seed).run()) >= 0.8
