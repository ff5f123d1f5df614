"""Tests of virtual time, the time that a step takes in it, and the prefix cache of simulated engines."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridle.engine.scheduling.step_plan import PlanRow, StepPlan
from bridle.errors import InternalError, InvalidRequest
from dev.simulation.cost import SimulatedStepCost, StepSize, fit
from dev.simulation.quick_cache import Chain, Hold, QuickCache
from dev.simulation.timeline import Timeline


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 5)), max_size=20))
def test_calls_come_in_order_of_their_moments(planned: list[tuple[float, float]]) -> None:
    timeline, seen = Timeline(), list[tuple[float, int, bool]]()

    def call(number: int, again: float | None) -> None:
        seen.append((timeline.now, number, again is None))
        if again is not None:
            timeline.after(again, call, number, None)

    for number, (moment, again) in enumerate(planned):
        timeline.at(moment, call, number, again)
    timeline.run()
    assert [moment for moment, _, _ in seen] == sorted(moment for moment, _, _ in seen)
    assert len(seen) == timeline.num_calls == 2 * len(planned)
    firsts = [(moment, number) for moment, number, is_second in seen if not is_second]
    assert firsts == sorted((moment, number) for number, (moment, _) in enumerate(planned))


def test_the_past_is_over() -> None:
    timeline = Timeline()
    timeline.at(2.0, lambda: timeline.at(1.0, timeline.stop))
    with pytest.raises(InternalError, match=r"at 1\.000000 s, and it is 2\.000000 s"):
        timeline.run()


def test_what_is_left_waits_for_ever() -> None:
    timeline, seen = Timeline(), list[int]()
    timeline.at(1.0, timeline.stop)
    timeline.at(2.0, seen.append, 1)
    timeline.run()
    assert (timeline(), seen) == (1.0, [])


def some_steps(cost: SimulatedStepCost, noise: float = 0.0) -> list[tuple[StepSize, float]]:
    random = Random(0)
    steps = []
    for _ in range(60):
        rows = random.randrange(1, 60)
        size = StepSize(rows, rows + random.choice((0, 0, 200, 500)), rows * random.randrange(50, 1_000))
        seconds = cost.seconds(size.rows, size.tokens, size.context)
        steps.append((size, seconds * (1 + noise * random.uniform(-1, 1))))
    return steps


def test_a_plan_is_measured_by_what_it_computes() -> None:
    plan = StepPlan(1, [PlanRow(0, start=10, num_scheduled=1), PlanRow(1, start=0, num_scheduled=30)])
    assert StepSize.of(plan) == StepSize(rows=2, tokens=31, context=41)


@pytest.mark.parametrize("cost", [SimulatedStepCost(0.01, 2e-4, 1e-4, 1e-7), SimulatedStepCost(0.02, 0.0, 1e-4, 0.0)])
def test_the_cost_is_found_again(cost: SimulatedStepCost) -> None:
    found = fit(some_steps(cost))
    for name in SimulatedStepCost.__slots__:
        assert getattr(found, name) == pytest.approx(getattr(cost, name), rel=1e-6, abs=1e-12)
    assert found.error(some_steps(cost)) < 1e-9


def test_no_part_is_negative_whatever_was_measured() -> None:
    steps = [(StepSize(rows, rows, 100 * rows), 1.0 / rows) for rows in range(1, 20)]
    assert min(getattr(fit(steps), name) for name in SimulatedStepCost.__slots__) >= 0
    noisy = fit(some_steps(SimulatedStepCost(0.01, 2e-4, 1e-4, 1e-7), noise=0.2))
    assert noisy.base == pytest.approx(0.01, rel=0.5)
    with pytest.raises(InvalidRequest, match="0 steps were measured"):
        fit([])


def test_what_one_has_computed_the_next_one_finds() -> None:
    cache = QuickCache(100)
    one = cache.take((("system", 10), ("a", 5)), 17)
    assert cache.num_found((("system", 10),)) == 0
    cache.fill(one, (("system", 10), ("a", 6)))
    assert (cache.num_held, one.num_own) == (17, 1)
    other = cache.take((("system", 10), ("b", 3)), 15)
    assert (other.num_found, cache.num_held) == (10, 22)
    cache.release(one)
    assert (cache.num_held, cache.num_kept) == (15, 6)
    assert cache.num_found((("system", 10), ("a", 8))) == 16


def test_the_oldest_goes_first_and_from_its_end() -> None:
    cache = QuickCache(20)
    for name in "ab":
        hold = cache.take(((name, 10),), 10)
        cache.fill(hold, ((name, 10),))
        cache.release(hold)
    hold = cache.take((("c", 3),), 3)
    assert [cache.num_found(((name, 10),)) for name in "ab"] == [7, 10]
    assert not cache.has_room((("d", 18),), 18)
    assert cache.has_room((("b", 10),), 17)
    assert not cache.has_room((("b", 10),), 18)


@given(st.integers(0, 10_000))
def test_blocks_are_neither_made_nor_lost(seed: int) -> None:
    random, cache, holds = Random(seed), QuickCache(60), list[tuple[Hold, Chain]]()
    for _ in range(80):
        if holds and random.random() < 0.45:
            hold, chain = holds.pop(random.randrange(len(holds)))
            if random.random() < 0.8:
                cache.fill(hold, chain)
            cache.release(hold)
        else:
            chain = ((f"system {random.randrange(3)}", 6), (f"chat {random.randrange(9)}", random.randrange(8)))
            num_blocks = sum(length for _, length in chain) + random.randrange(4)
            if cache.has_room(chain, num_blocks):
                holds.append((cache.take(chain, num_blocks), chain))
        used = {key for hold, _ in holds for key, _ in hold.chain}
        parts = cache._parts
        own = sum(hold.num_own for hold, _ in holds)
        assert cache.num_held == own + sum(parts[key].num_blocks for key in used)
        assert cache.num_kept == sum(part.num_blocks for key, part in parts.items() if key not in used)
        assert cache.num_held + cache.num_kept <= cache.num_blocks
        assert min([hold.num_own for hold, _ in holds], default=0) >= 0
