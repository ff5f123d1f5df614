"""Priorities order waiting requests without starving any. Requests after their deadline end and free all resources."""

from __future__ import annotations

from itertools import groupby
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridle.config import EngineConfig
from bridle.engine.active_requests import Deadlines
from bridle.engine.control.decision import Decision
from bridle.engine.engine import Engine
from bridle.engine.scheduling.admission_order import admission_order, overtaken_levels
from bridle.engine.sequence import Sequence
from bridle.errors import DeadlineExceeded, InvalidRequest
from bridle.outputs import Finished, FinishReason, PromptEvent
from bridle.testing.clock import FakeClock
from bridle.testing.scripted import ScriptedExecutor
from tests.engine.support import make_request, make_sequence, scheduler_of
from tests.fakes.controller_runtime import FakeController, FakeControllerPool, Reply

SECONDS = 10.0
_AGES = st.lists(st.tuples(st.integers(-3, 3), st.floats(0, 100), st.integers(0, 5)), min_size=1, max_size=12)


def waiting(members: list[tuple[int, float, int]]) -> list[Sequence]:
    """Return sequences with these priorities, arrival times and turns, in the order of admission."""
    found = []
    for number, (priority, queued_at, turn) in enumerate(members):
        seq = make_sequence(number, [1], priority=priority, place=float(turn))
        seq.queue.queued_at = queued_at
        found.append(seq)
    return sorted(found, key=lambda seq: (seq.queue.level, seq.request.place, seq.id))


@given(_AGES)
def test_order_within_a_level_stays(members: list[tuple[int, float, int]]) -> None:
    queue = waiting(members)
    order = admission_order(queue, SECONDS)
    assert sorted(order, key=lambda seq: seq.id) == sorted(queue, key=lambda seq: seq.id)
    for level, group in groupby(queue, lambda seq: seq.queue.level):
        assert [seq for seq in order if seq.queue.level == level] == list(group)


@given(_AGES)
def test_nobody_is_passed_by_what_came_later_than_the_head_start(members: list[tuple[int, float, int]]) -> None:
    """A request of another level is not admitted before all requests of this level whose effective time is earlier."""
    order = admission_order(waiting(members), SECONDS)
    for place, seq in enumerate(order):
        ours = [other for other in order[place:] if other.queue.level == seq.queue.level]
        since = min(other.queue.queued_at or 0.0 for other in ours)
        for later in order[place + 1 :]:
            if later.queue.level != seq.queue.level:
                assert seq.queue.level * SECONDS + since <= later.queue.level * SECONDS + (later.queue.queued_at or 0.0)


def test_overtaken_levels_tell_who_is_behind() -> None:
    queue = waiting([(0, 0.0, 0), (2, 0.0, 0), (3, 0.0, 0)])
    order = queue[::-1]
    assert overtaken_levels(order) == [0, 0, 0]
    order[-1].control.is_suspended = True
    assert overtaken_levels(order)[:2] == [2, 2]
    alike = waiting([(1, 0.0, 0), (1, 1.0, 0)])
    assert overtaken_levels(alike) == [1, 1]


@given(st.integers(0, 1 << 40), st.integers(1, 4))
def test_the_lowest_level_never_starves(seed: int, priority: int) -> None:
    """A request of a low priority waits at most the time that its priority difference equals, plus the backlog."""
    random, clock = Random(seed), FakeClock()
    executor = ScriptedExecutor(8, 16, 4, clock=clock, device_time=lambda plan: 1.0)
    engine = Engine(executor, EngineConfig(max_num_seqs=1, priority_seconds=SECONDS), clock=clock)
    engine.add(make_request(id="low", max_tokens=1, priority=priority, place=1e9))
    began = clock()
    for number in range(200):
        for copy in range(random.choice([1, 1, 2])):  # more than can be served
            name = f"urgent-{number}-{copy}"
            engine.add(make_request(id=name, max_tokens=1, priority=random.choice([0, -1]), place=float(number)))
        if any(isinstance(event, Finished) and event.request_id == "low" for event in engine.step()):
            break
    assert "low" not in engine.request_ids
    # What came until the head start was over went first, and of that a third is more than could be served meanwhile.
    assert priority * SECONDS <= clock() - began <= 2 * (priority + 1) * SECONDS + 2
    assert not executor.violations


def test_urgent_requests_come_first_until_others_have_waited() -> None:
    clock = FakeClock()
    executor = ScriptedExecutor(8, 16, 4, clock=clock, device_time=lambda plan: 1.0)
    engine = Engine(executor, EngineConfig(max_num_seqs=1, priority_seconds=4.0), clock=clock)
    engine.add(make_request(id="low", max_tokens=1, priority=1))
    order: list[str] = []
    for number in range(8):
        engine.add(make_request(id=f"{number}", max_tokens=1))
        order += [event.request_id for event in engine.step() if isinstance(event, Finished)]
    assert order == ["0", "1", "2", "3", "4", "low", "5", "6"]


def test_what_has_waited_is_not_preempted_at_once() -> None:
    """A request that has waited rises to the level of the requests that it overtook, and its turn decides among
    them."""
    clock = FakeClock()
    executor = ScriptedExecutor(8, 16, 4, clock=clock, device_time=lambda plan: 1.0)
    engine = Engine(executor, EngineConfig(max_num_seqs=2, priority_seconds=4.0), clock=clock)
    engine.add(make_request(id="low", max_tokens=3, priority=1))
    engine.add(make_request(id="0", max_tokens=1))
    engine.step()  # room for both
    (low,) = [seq for seq in scheduler_of(engine).running.values() if seq.request.id == "low"]
    assert low.queue.level == 1
    scheduler_of(engine).preempt(low)
    clock.wait_until(clock() + 10.0)
    for number in range(1, 4):
        engine.add(make_request(id=f"{number}", max_tokens=1))
    engine.step()
    assert low.queue.level == 0 and low.id in scheduler_of(engine).running


# -- deadlines -----------------------------------------------------------------------------------------------


def deadline_engine(num_blocks: int = 16, **options: object) -> tuple[Engine, FakeClock]:
    clock = FakeClock()
    pool = FakeControllerPool(clock)
    executor = ScriptedExecutor(8, num_blocks, 4, clock=clock, device_time=lambda plan: 1.0)
    return Engine(executor, EngineConfig(**options), pools=[pool], clock=clock), clock  # type: ignore[arg-type]


def ended(engine: Engine, request_id: str) -> Finished:
    """Run steps until the request ends, and return its last event."""
    for _ in range(50):
        for event in engine.step():
            if isinstance(event, Finished) and event.request_id == request_id and event.is_last:
                return event
    raise AssertionError(f"{request_id} goes on")


def test_a_passed_deadline_frees_all_blocks_and_says_how_far_it_came() -> None:
    engine, clock = deadline_engine()
    engine.add(make_request(id="late", max_tokens=40, n=3, deadline=clock() + 5.5))
    engine.step()
    assert engine.statistics().num_free_blocks < 16
    event = ended(engine, "late")
    assert event.reason is FinishReason.DEADLINE and isinstance(event.error, DeadlineExceeded)
    assert "deadline passed 0.500 s ago, after 6 tokens of output" in str(event.error)
    assert engine.statistics().num_free_blocks == 16
    assert not engine.request_ids
    engine.check_integrity()


def test_a_deadline_passes_while_a_request_waits() -> None:
    engine, clock = deadline_engine(max_num_seqs=1)
    engine.add(make_request(id="first", max_tokens=20))
    engine.add(make_request(id="second", max_tokens=20, deadline=clock() + 2.5))
    assert "while it waited for room" in str(ended(engine, "second").error)
    assert ended(engine, "first").reason is FinishReason.LENGTH


def test_a_deadline_passes_while_a_controller_is_made() -> None:
    engine, clock = deadline_engine()
    never = FakeController(lambda view: Decision.sample(), open_delay=None)
    engine.add(make_request(id="late", controller=never, deadline=clock() + 1.0))
    clock.wait_until(clock() + 2.0)
    assert "while its controller was being made" in str(ended(engine, "late").error)
    engine.step()
    assert not engine.has_work


def test_a_deadline_means_the_request_that_had_it() -> None:
    """An id may be used again after its request has ended. The first request's deadline does not end the second
    request."""
    engine, clock = deadline_engine()
    engine.add(make_request(id="same", max_tokens=1, deadline=clock() + 4.0))
    assert ended(engine, "same").reason is FinishReason.LENGTH
    engine.add(make_request(id="same", max_tokens=20))
    assert ended(engine, "same").reason is FinishReason.LENGTH


@given(st.lists(st.tuples(st.sampled_from("adp"), st.integers(0, 9), st.integers(0, 50)), max_size=300))
def test_deadlines_are_a_dictionary_in_order_of_time(steps: list[tuple[str, int, int]]) -> None:
    deadlines, known = Deadlines(), dict[str, float]()
    for verb, number, time in steps:
        name = str(number)
        if verb == "a":
            deadlines.add(name, float(time))
            known[name] = float(time)
        elif verb == "d":
            deadlines.drop(name)
            known.pop(name, None)
        else:
            due = sorted((when, name) for name, when in known.items() if when <= time)
            assert list(deadlines.pop_due(time)) == [(name, time - when) for when, name in due]
            known = {name: when for name, when in known.items() if when > time}
        assert len(deadlines) <= 2 * len(known) + 66


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), 1e9])
def test_a_level_is_worth_some_time(seconds: float) -> None:
    with pytest.raises(InvalidRequest, match="priority_seconds"):
        EngineConfig(priority_seconds=seconds)


def test_time_that_controllers_take_is_told() -> None:
    """The events report the time to start a controller, and the time for which the controller delayed its output."""
    engine, clock = deadline_engine()
    slow = FakeController(lambda view: Reply(Decision.sample(), delay=5.0 if view.num_asks == 1 else 0.0), open_delay=3)
    engine.add(make_request(id="plain", max_tokens=2))
    engine.add(make_request(id="slow", controller=slow, max_tokens=3))
    events = []
    for _ in range(20):
        clock.wait_until(clock() + 0.5)
        engine._steering.pools[0].settle()  # type: ignore[attr-defined]
        events += engine.step()
    opened = {event.request_id: event.opening for event in events if isinstance(event, PromptEvent)}
    held = {event.request_id: event.held for event in events if isinstance(event, Finished)}
    assert opened["plain"] == held["plain"] == 0.0
    assert 3.0 <= opened["slow"] < 5.0
    assert 3.0 <= held["slow"] <= 6.0
