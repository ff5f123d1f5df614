"""Tests of the order of turns: no waiting while the event loop has time, then users in turn, and never more than the
share."""

from __future__ import annotations

import asyncio
from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridle.errors import InvalidRequest, ProtocolError
from bridle.serving.tenancy.loop_throttle import (
    BURST,
    MAX_AT_ONCE,
    MAX_DEBT,
    SHARE,
    SLICE,
    LoopThrottle,
    RateBudget,
)
from bridle.testing.clock import FakeClock as Clock


async def drain(turns: LoopThrottle, clock: Clock) -> None:
    """Let time pass until every user has had a turn."""
    loop = asyncio.get_running_loop()
    real = loop.call_later
    loop.call_later = lambda seconds, call, *arguments: (  # type: ignore[method-assign]
        clock.advance(seconds),
        loop.call_soon(call, *arguments),
    )[1]
    try:
        while turns.num_waiting:  # noqa: ASYNC110 - that is what is waited for
            await asyncio.sleep(0)
    finally:
        loop.call_later = real  # type: ignore[method-assign]


def test_nobody_waits_while_there_is_time() -> None:
    heard: list[int] = []
    turns = LoopThrottle(clock=Clock())
    for number in range(3):
        turns.schedule("ann", lambda number=number: heard.append(number))  # type: ignore[misc]
    assert heard == [0, 1, 2] and turns.num_waiting == 0


@pytest.mark.parametrize("spent", [0.0, BURST + 0.0001], ids=["share left", "share spent"])
def test_a_turn_ends_before_the_next_and_the_loop_goes_on_between(spent: float) -> None:
    """Turns end even if time is always left, as on a busy machine, whose clock runs while almost no work is charged."""
    num_turns = 3_000  # more than Python nests calls

    async def main() -> None:
        clock = Clock()
        turns = LoopThrottle(clock=clock)
        turns.charge(spent)
        began: list[int] = []  # with each turn, how often the loop had done other work
        num_others = num_open = 0
        is_nested = False

        def go_on() -> None:
            nonlocal num_open, is_nested
            is_nested = is_nested or num_open > 0
            num_open += 1
            began.append(num_others)
            clock.advance(1.0)
            if len(began) < num_turns and not is_nested:
                turns.schedule("ann", go_on)
            num_open -= 1

        turns.schedule("ann", go_on)
        while len(began) < num_turns and not is_nested:
            clock.advance(1.0)
            await asyncio.sleep(0)
            num_others += 1
        assert not is_nested
        assert len(set(began)) > num_turns / 2

    asyncio.run(main())


@pytest.mark.parametrize(("cost", "num_at_once"), [(SLICE / 20, MAX_AT_ONCE), (SLICE / 3.5, 3), (2 * SLICE, 1)])
def test_cheap_turns_are_given_together(cost: float, num_at_once: int) -> None:
    async def main() -> list[int]:
        clock, began, num_others = Clock(), list[int](), 0
        turns = LoopThrottle(clock=clock)
        turns.charge(2 * MAX_DEBT)  # nobody goes on at once
        for _ in range(200):
            turns.charge(cost)
        for number in range(50):
            turns.schedule(f"user {number}", lambda: began.append(num_others))
        while turns.num_waiting:
            clock.advance(1.0)
            await asyncio.sleep(0)
            num_others += 1
        return began

    began = asyncio.run(main())
    assert max(began.count(turn) for turn in began) == num_at_once


def test_a_hundred_connections_of_one_user_are_one_user() -> None:
    async def main() -> list[str]:
        clock = Clock()
        heard: list[str] = []
        turns = LoopThrottle(clock=clock)
        turns.charge(1.0)
        for user in ["many"] * 100 + ["one"]:
            turns.schedule(user, lambda user=user: heard.append(user))  # type: ignore[misc]
        await drain(turns, clock)
        return heard

    assert asyncio.run(main()).index("one") == 1


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=30))
def test_users_alternate_and_each_ones_connections_keep_their_order(asked: list[str]) -> None:
    async def main() -> list[tuple[str, int]]:
        clock = Clock()
        heard: list[tuple[str, int]] = []
        turns = LoopThrottle(clock=clock)
        turns.charge(1.0)
        for number, user in enumerate(asked):
            turns.schedule(user, lambda who=(user, number): heard.append(who))  # type: ignore[misc]
        await drain(turns, clock)
        return heard

    heard = asyncio.run(main())
    assert sorted(heard) == sorted((user, number) for number, user in enumerate(asked))
    for user in set(asked):
        numbers = [number for other, number in heard if other == user]
        assert numbers == sorted(numbers)
    told = 0
    for user, group in groupby(heard, key=lambda who: who[0]):
        run = len(list(group))  # several turns in a row only where nobody else waits
        assert run == 1 or {other for other, _ in heard[told:]} == {user}
        told += run


@given(st.lists(st.floats(0.0001, 0.05), min_size=1, max_size=40))
def test_what_is_spent_stays_within_the_share(costs: list[float]) -> None:
    async def main() -> None:
        clock = Clock()
        begun = clock()
        turns = LoopThrottle(share=0.25, burst=0.005, clock=clock)
        spent: list[float] = []

        def work(cost: float) -> None:
            allowed = 0.25 * (clock() - begun) + 0.005
            assert sum(spent) <= allowed + 1e-9  # what is over at most once is the piece of work itself
            spent.append(cost)
            turns.charge(cost)

        for cost in costs:
            turns.schedule("ann", lambda cost=cost: work(cost))  # type: ignore[misc]
        await drain(turns, clock)
        assert spent == costs

    asyncio.run(main())


def test_who_leaves_while_it_waits_keeps_nobody_else() -> None:
    async def main() -> None:
        clock = Clock()
        turns = LoopThrottle(clock=clock)
        turns.charge(1.0)
        waits = [asyncio.create_task(turns.wait(user)) for user in "ab"]
        await asyncio.sleep(0)
        waits[0].cancel()
        await drain(turns, clock)
        await waits[1]
        assert waits[0].cancelled()

    asyncio.run(main())


def test_what_a_flood_has_cost_is_not_owed_for_as_long_again() -> None:
    async def main() -> float:
        clock = Clock()
        turns = LoopThrottle(clock=clock)
        for _ in range(600):  # a minute of refusals, each to a connection that is new
            clock.advance(0.1)
            turns.charge(0.1)
        end = clock()
        waits = [asyncio.create_task(turns.wait("ann"))]
        await asyncio.sleep(0)
        await drain(turns, clock)
        await waits[0]
        return clock() - end

    assert asyncio.run(main()) <= MAX_DEBT / SHARE + 0.01


def test_a_flood_that_goes_on_puts_no_turn_off_for_ever() -> None:
    async def main() -> int:
        clock, heard = Clock(), list[str]()
        turns = LoopThrottle(clock=clock)
        turns.charge(1.0)
        turns.schedule("ann", lambda: heard.append("ann"))
        loop, num_waits = asyncio.get_running_loop(), 0
        real = loop.call_later

        def call_later(seconds: float, call: object, *arguments: object) -> object:
            nonlocal num_waits
            num_waits += 1
            clock.advance(seconds)
            turns.charge(seconds)  # by others, meanwhile
            return loop.call_soon(call, *arguments)  # type: ignore[arg-type]

        loop.call_later = call_later  # type: ignore[method-assign,assignment]
        try:
            while turns.num_waiting and num_waits < 10:  # noqa: ASYNC110 - that is what is waited for
                await asyncio.sleep(0)
        finally:
            loop.call_later = real  # type: ignore[method-assign]
        assert heard == ["ann"]
        return num_waits

    assert asyncio.run(main()) == 1


def test_who_leaves_is_no_longer_in_the_queue() -> None:
    async def main() -> None:
        clock, heard = Clock(), list[int]()
        turns = LoopThrottle(clock=clock)
        turns.charge(1.0)
        calls = [lambda number=number: heard.append(number) for number in range(3)]  # type: ignore[misc]
        for call in calls:
            turns.schedule("ann", call)
        wait = asyncio.create_task(turns.wait("bob"))
        await asyncio.sleep(0)
        assert turns.num_waiting == 4
        wait.cancel()
        await asyncio.gather(wait, return_exceptions=True)
        turns.leave("ann", calls[1])
        turns.leave("ann", calls[1])
        assert turns.num_waiting == 2
        await drain(turns, clock)
        assert heard == [0, 2]
        turns.leave("ann", calls[0])

    asyncio.run(main())


@pytest.mark.parametrize("share", [0.0, -1.0, 1.5, float("nan")])
def test_a_share_is_one(share: float) -> None:
    with pytest.raises(InvalidRequest, match="share"):
        LoopThrottle(share)


@given(st.lists(st.tuples(st.integers(1, 20), st.floats(0, 3)), max_size=60), st.integers(1, 50), st.floats(0.1, 20))
def test_an_allowance_lets_through_what_fits_at_once_and_what_came_in_since(
    takes: list[tuple[int, float]], most: int, rate: float
) -> None:
    clock = Clock()
    allowance, taken = RateBudget(most, rate, clock), [(clock(), 0)]
    for number, pause in takes:
        clock.advance(pause)
        taken.append((clock(), number))
        # The most that any stretch of time up to now asks for beyond what it brings in.
        excess = max(
            sum(count for _, count in taken[begin:]) - rate * (clock() - taken[begin][0]) for begin in range(len(taken))
        )
        if abs(excess - most) < 1e-6:
            return  # rounding decides
        if excess > most:
            with pytest.raises(ProtocolError, match=f"too many pings: at most {most} at once"):
                allowance.charge("pings", number)
            return
        allowance.charge("pings", number)
