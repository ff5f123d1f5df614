"""Tickets that let a client open one connection if it cannot send its API key, such as a web page that opens a
WebSocket.

Proxies log URLs, so a URL must not contain a key. A URL may contain a ticket, which is valid only once and for a few
seconds. This module does not use HTTP. Only one thread or event loop may use the tickets.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from bridle.errors import Overloaded
from bridle.serving.tenancy.keys import Identity

#: Number of seconds for which a ticket is valid.
TICKET_SECONDS = 30.0
#: Maximum number of unused tickets, of one user and of all users.
MAX_PER_USER = 32
MAX_TICKETS = 8_192


class _Issued(NamedTuple):
    identity: Identity
    end: float


class SocketTickets:
    """The tickets that were issued and are not used yet. `clock` measures time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._issued: OrderedDict[str, _Issued] = OrderedDict()  # the oldest first
        self.held: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._issued)

    def issue(self, identity: Identity) -> str:
        """Create a ticket for this user. Raises `Overloaded` if there are too many unused tickets."""
        self._forget_old()
        if self.held[identity.user] >= MAX_PER_USER:
            raise self._full(f"user {identity.user!r} has {MAX_PER_USER} unused WebSocket tickets, which is the limit")
        if len(self._issued) >= MAX_TICKETS:
            raise self._full(f"the server has {MAX_TICKETS} unused WebSocket tickets, which is the limit")
        ticket = secrets.token_urlsafe(32)
        self._issued[ticket] = _Issued(identity, self._clock() + TICKET_SECONDS)
        self.held[identity.user] += 1
        return ticket

    def redeem(self, ticket: str) -> Identity | None:
        """Use up a ticket. Returns the user of the ticket, or None if the ticket is unknown, used or expired."""
        self._forget_old()
        issued = self._issued.pop(ticket, None)
        if issued is None:
            return None
        self._release(issued)
        return issued.identity

    def _forget_old(self) -> None:
        now = self._clock()
        while self._issued and next(iter(self._issued.values())).end <= now:
            self._release(self._issued.popitem(last=False)[1])

    def _release(self, issued: _Issued) -> None:
        user = issued.identity.user
        self.held[user] -= 1
        if not self.held[user]:
            del self.held[user]

    def _full(self, why: str) -> Overloaded:
        return Overloaded(f"{why}; one is free again after {TICKET_SECONDS:g} s at most", TICKET_SECONDS)
