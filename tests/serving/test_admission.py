"""Tests of admission: requests and tokens in flight are limited, and every request slot is freed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridle.errors import InvalidRequest, Overloaded
from bridle.serving import Admission


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_requests_are_bounded() -> None:
    admission = Admission(max_requests=2)
    first, second = admission.admit(), admission.admit()
    with pytest.raises(Overloaded, match="2 requests are in flight, and this call wants 1 more; at most 2"):
        admission.admit()
    first.release()
    first.release()
    assert admission.num_requests == 1
    with admission.admit():
        assert admission.num_requests == 2
    second.release()
    assert (admission.num_requests, admission.num_tokens, admission.num_refused) == (0, 0, 1)


def test_tokens_are_bounded_and_a_refused_charge_counts_nothing() -> None:
    admission = Admission(max_tokens=100)
    with admission.admit() as first:
        first.charge(60)
        with admission.admit() as second:
            with pytest.raises(Overloaded, match="60 tokens are in flight, and this call wants 41 more; at most 100"):
                second.charge(41)
            second.charge(40)
        assert admission.num_tokens == 60
    assert admission.num_tokens == 0
    first.charge(10)
    assert admission.num_tokens == 0


def test_what_can_never_fit_is_the_callers_error() -> None:
    admission = Admission(max_requests=4, max_tokens=100)
    with pytest.raises(InvalidRequest, match="the body has 5 requests; this server accepts at most 4"):
        admission.admit(5)
    with admission.admit(2) as ticket:
        ticket.charge(60)
        with pytest.raises(InvalidRequest, match="the body has 120 tokens"):
            ticket.charge(60)
    with admission.admit() as ticket, pytest.raises(InvalidRequest, match="the body has 101 tokens"):
        ticket.charge(101)


def test_retry_after_follows_how_long_requests_take() -> None:
    clock = Clock()
    admission = Admission(max_requests=1, clock=clock)
    for _ in range(200):
        with admission.admit():
            clock.now += 20.0
    ticket = admission.admit()
    with pytest.raises(Overloaded) as refusal:
        admission.admit()
    assert 15.0 <= refusal.value.retry_after <= 20.0
    ticket.release()
    for _ in range(200):
        with admission.admit():
            clock.now += 100_000.0
    assert admission.retry_after() == 60.0


@pytest.mark.parametrize("limits", [{"max_requests": 0}, {"max_tokens": -1}])
def test_limits_are_positive(limits: dict[str, int]) -> None:
    with pytest.raises(InvalidRequest, match="must be at least 1"):
        Admission(**limits)


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 60), st.booleans()), max_size=40))
def test_counts_are_the_sum_over_open_tickets(steps: list[tuple[int, int, bool]]) -> None:
    admission = Admission(max_requests=8, max_tokens=100)
    held = []
    for num_requests, num_tokens, is_released in steps:
        try:
            ticket = admission.admit(num_requests)
        except Overloaded:
            assert sum(requests for _, requests, _ in held) + num_requests > 8
            continue
        charged = 0
        try:
            ticket.charge(num_tokens)
            charged = num_tokens
        except Overloaded:
            assert sum(tokens for _, _, tokens in held) + num_tokens > 100
        held.append((ticket, num_requests, charged))
        if is_released:
            held.pop(0)[0].release()
        assert admission.num_requests == sum(requests for _, requests, _ in held) <= 8
        assert admission.num_tokens == sum(tokens for _, _, tokens in held) <= 100
    for ticket, _, _ in held:
        ticket.release()
    assert (admission.num_requests, admission.num_tokens) == (0, 0)
