"""Tests that turns are fair between tenants, limits hold in any minute, and no tenant can fill the server alone."""

from __future__ import annotations

import heapq
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridle.engine.request import Request
from bridle.errors import InvalidRequest, Overloaded
from bridle.serving import Admission
from bridle.serving.tenancy.admission import FairQueue, QueuePlace
from bridle.serving.tenancy.keys import KeyStore
from bridle.serving.tenancy.rate_limit import RateLimiter, UserLimits


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def _serve(costs: dict[str, list[int]], weights: dict[str, float], num_served: int) -> Counter[str]:
    """Return the tokens of each tenant after `num_served` requests. All requests arrive at once, and are served one
    after the other in the order of admission."""
    queue = FairQueue()
    waiting: list[tuple[float, int, QueuePlace, int]] = []
    longest = max(map(len, costs.values()))
    for number in range(longest):
        for tenant, sizes in costs.items():
            if number < len(sizes):
                turn = queue.enqueue(tenant, sizes[number], weights[tenant])
                heapq.heappush(waiting, (turn.start, len(waiting), turn, sizes[number]))
    got: Counter[str] = Counter()
    for _ in range(min(num_served, len(waiting))):
        _, _, turn, size = heapq.heappop(waiting)
        got[turn.tenant] += size + 128
    return got


@given(st.lists(st.integers(1, 500), min_size=2, max_size=6), st.integers(10, 60))
def test_every_tenant_gets_its_share_whatever_the_size_of_its_requests(sizes: list[int], rounds: int) -> None:
    costs = {f"t{i}": [size] * 500 for i, size in enumerate(sizes)}
    got = _serve(costs, dict.fromkeys(costs, 1.0), rounds * len(sizes))
    largest = max(sizes) + 128
    assert max(got.values()) - min(got.get(tenant, 0) for tenant in costs) <= 2 * largest


def test_a_tenant_of_twice_the_weight_gets_twice_as_much() -> None:
    got = _serve({"a": [72] * 300, "b": [72] * 300}, {"a": 1.0, "b": 2.0}, 150)
    assert got["b"] == pytest.approx(2 * got["a"], rel=0.1)


def test_a_newcomer_does_not_wait_behind_what_others_have_piled_up() -> None:
    queue = FairQueue()
    piled = [queue.enqueue("greedy", 100) for _ in range(100)]
    queue.done(piled[0], 50)
    newcomer = queue.enqueue("modest", 100)
    assert sum(turn.start < newcomer.start for turn in piled) <= 2


def test_idling_saves_up_nothing() -> None:
    queue = FairQueue()
    first = queue.enqueue("idle", 10)
    queue.done(first, 10)
    for _ in range(50):
        queue.done(queue.enqueue("busy", 1000), 1000)
    late = queue.enqueue("idle", 10)
    busy = queue.enqueue("busy", 1000)
    assert late.start >= busy.start - 2 * 2000


def test_what_an_output_really_took_is_put_right() -> None:
    queue = FairQueue()
    turn = queue.enqueue("a", 10)
    queue.done(turn, 4000)
    assert queue.enqueue("a", 10).start == 4010
    other = queue.enqueue("b", 10)
    queue.done(other, None)  # never ran: what was guessed stays
    assert queue.enqueue("b", 10).start == 10 + other.guess


def test_the_house_is_never_filled_by_one_user() -> None:
    admission = Admission(max_requests=100, is_shared=True)
    tickets = [admission.admit(1, "greedy") for _ in range(80)]
    with pytest.raises(
        Overloaded, match="'greedy' has 80 requests in flight and wants 1 more; the last 20 free places"
    ):
        admission.admit(1, "greedy")
    for user in ("a", "b", "c"):
        tickets.append(admission.admit(1, user))
    for ticket in tickets:
        ticket.release()
    assert admission.num_requests == 0
    alone = Admission(max_requests=10)
    assert len([alone.admit() for _ in range(10)]) == 10


def test_one_large_call_does_not_fill_the_house_either() -> None:
    admission = Admission(max_requests=100, is_shared=True)
    with pytest.raises(InvalidRequest, match="the body has 81 requests; a user of this server may have at most 80"):
        admission.admit(81, "greedy")
    with admission.admit(80, "greedy"), admission.admit(1, "modest"):
        assert admission.num_requests == 81
    with Admission(max_requests=1, is_shared=True).admit(1, "anybody"):
        pass


def test_requests_carry_their_turn_and_are_settled() -> None:
    admission = Admission()
    requests = []
    for user in ("a", "a", "b"):
        with admission.admit(1, user) as ticket:
            requests.append(Request(user, (1, 2, 3), place=ticket.charge(3)))
            ticket.num_output = 5
            assert ticket.num_output == 5
    assert requests[0].place == 0 and requests[1].place > 0
    assert requests[2].place < requests[1].place + 10


def test_requests_and_tokens_per_minute_are_bounded() -> None:
    clock = Clock()
    rates = RateLimiter(clock)
    limits = UserLimits(requests_per_minute=3, tokens_per_minute=100)
    for _ in range(3):
        take(rates, "u", limits, 1)
    with pytest.raises(Overloaded, match="3 requests per minute") as full:
        take(rates, "u", limits, 1)
    assert full.value.retry_after == 20
    take(rates, "other", limits, 1)
    clock.now += 20
    take(rates, "u", limits, 1)
    rates.spend("u", "tokens", 100, 150)
    clock.now += 25
    with pytest.raises(Overloaded, match="100 tokens per minute"):
        take(rates, "u", limits, 1)
    clock.now += 10
    take(rates, "u", limits, 1)
    with pytest.raises(InvalidRequest, match="may have at most 3 per minute"):
        take(rates, "u", limits, 4)


def test_limits_are_checked_and_kept_with_the_keys(tmp_path: Path) -> None:
    store = KeyStore(tmp_path / "keys.db")
    key = store.add("ann")
    plain = store.find(key)
    assert plain is not None and plain.limits == UserLimits()
    store.set_limits("ann", UserLimits(5, None, 2.0))
    limited = store.find(key)
    assert limited is not None and limited.limits == UserLimits(5, None, 2.0)
    with pytest.raises(InvalidRequest, match="the user 'bob' has no API key"):
        store.set_limits("bob", UserLimits())
    for bad in ({"requests_per_minute": 0}, {"tokens_per_minute": -1}, {"weight": float("nan")}):
        with pytest.raises(InvalidRequest):
            UserLimits(**bad)  # type: ignore[arg-type]
    store.close()


def take(rates: RateLimiter, user: str, limits: UserLimits, num_requests: int) -> None:
    """Take requests from a user's token buckets, like admission."""
    rates.look(user, limits, num_requests)
    rates.spend(user, "requests", limits.requests_per_minute, num_requests)
