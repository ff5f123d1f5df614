"""Tests that tasks with much data to write let other tasks run in between."""

from __future__ import annotations

import asyncio

import pytest

from bridle.serving.tenancy.loop_pace import SLICE, LoopPace
from bridle.testing.clock import FakeClock


@pytest.mark.parametrize(("cost", "at_once"), [(SLICE / 100, 20), (SLICE / 2.5, 3), (2 * SLICE, 1)])
def test_tasks_that_take_long_are_spread_over_rounds(cost: float, at_once: int) -> None:
    async def main() -> list[tuple[int, int]]:
        clock, num_rounds, done = FakeClock(), 0, list[tuple[int, int]]()
        pace = LoopPace(clock)

        async def write(number: int) -> None:
            await pace.wait()
            clock.advance(cost)
            done.append((number, num_rounds))

        tasks = [asyncio.create_task(write(number)) for number in range(20)]
        while len(done) < len(tasks):
            await asyncio.sleep(0)
            num_rounds += 1
        return done

    done = asyncio.run(main())
    assert [number for number, _ in done] == list(range(20))
    rounds = [turn for _, turn in done]
    assert max(rounds.count(turn) for turn in rounds) == at_once


def test_a_loop_that_ended_within_a_round_holds_up_no_other() -> None:
    clock = FakeClock()
    pace = LoopPace(clock)

    async def main() -> None:
        await asyncio.wait_for(pace.wait(), 10)
        clock.advance(2 * SLICE)

    for _ in range(2):
        loop = asyncio.new_event_loop()
        loop.run_until_complete(main())
        loop.close()
