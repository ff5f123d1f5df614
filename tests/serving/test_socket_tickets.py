"""Tests of tickets for WebSockets: each ticket is valid once, for its user, for a short time. The number of tickets is
limited."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridle.errors import Overloaded
from bridle.serving.tenancy.keys import Identity
from bridle.serving.tenancy.socket_tickets import MAX_PER_USER, MAX_TICKETS, TICKET_SECONDS, SocketTickets
from bridle.testing.clock import FakeClock

ANN = Identity("ann", False)


def test_a_ticket_is_used_once() -> None:
    tickets = SocketTickets(FakeClock())
    first, second = tickets.issue(ANN), tickets.issue(Identity("bob", True))
    assert first != second and len(first) > 40
    assert tickets.redeem(first) == ANN and tickets.redeem(first) is None
    assert tickets.redeem(second) == Identity("bob", True)
    assert tickets.redeem("") is None and len(tickets) == 0


def test_a_ticket_ends_after_its_time() -> None:
    clock = FakeClock()
    tickets = SocketTickets(clock)
    early = tickets.issue(ANN)
    clock.advance(TICKET_SECONDS / 2)
    late = tickets.issue(ANN)
    clock.advance(TICKET_SECONDS / 2)
    assert tickets.redeem(early) is None and tickets.redeem(late) == ANN


def test_a_user_cannot_take_what_others_need() -> None:
    clock = FakeClock()
    tickets = SocketTickets(clock)
    held = [tickets.issue(ANN) for _ in range(MAX_PER_USER)]
    with pytest.raises(Overloaded, match="'ann' has 32 unused WebSocket tickets"):
        tickets.issue(ANN)
    tickets.issue(Identity("bob", False))
    tickets.redeem(held[0])
    tickets.issue(ANN)
    clock.advance(TICKET_SECONDS)
    tickets.issue(ANN)
    assert len(tickets) == 1


def test_all_together_are_bounded() -> None:
    clock = FakeClock()
    tickets = SocketTickets(clock)
    for number in range(MAX_TICKETS):
        tickets.issue(Identity(f"u{number % (MAX_TICKETS // MAX_PER_USER)}", False))
    with pytest.raises(Overloaded, match="the limit"):
        tickets.issue(ANN)
    clock.advance(TICKET_SECONDS)
    assert tickets.redeem(tickets.issue(ANN)) == ANN
    assert not tickets.held


@given(st.lists(st.tuples(st.sampled_from("ab"), st.floats(0, 20), st.booleans()), max_size=80))
def test_what_is_counted_is_what_is_there(steps: list[tuple[str, float, bool]]) -> None:
    clock, known = FakeClock(), list[tuple[str, str, float]]()
    tickets = SocketTickets(clock)
    for user, pause, is_used in steps:
        clock.advance(pause)
        known = [each for each in known if each[2] > clock()]
        if is_used and known:
            owner, ticket, _ = known.pop(0)
            assert tickets.redeem(ticket) == Identity(owner, False)
        elif sum(owner == user for owner, _, _ in known) < MAX_PER_USER:
            known.append((user, tickets.issue(Identity(user, False)), clock() + TICKET_SECONDS))
        tickets._forget_old()
        assert len(tickets) == len(known) == tickets.held.total()
