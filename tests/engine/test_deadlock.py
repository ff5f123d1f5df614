"""Tests of deadlock detection: no output that can continue is in a deadlock, and deadlocks are reported soon."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import cycle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridle.engine.control.deadlock import DeadlockWatch
from bridle.engine.control.decision import Branch, Decision
from bridle.engine.sequence import Sequence
from bridle.errors import ControllerDeadlock
from bridle.outputs import FinishReason
from tests.engine.programs import error_of
from tests.engine.support import Lab, make_request, make_sequence
from tests.fakes.controller_runtime import View

Action = tuple[str, str]


@dataclass
class Actor:
    """An output whose controller does one action in each call: set a variable, wait for one, sample, or do nothing."""

    seq: Sequence
    actions: list[Action]
    variables: dict[str, int]
    waits: tuple[str, int] | None = None
    answer: Decision | None = None
    is_over: bool = False
    delays: list[int] = field(default_factory=list)

    @property
    def is_blocked(self) -> bool:
        return self.waits is not None and self.variables.get(self.waits[0], 0) <= self.waits[1]

    def call(self) -> Decision:
        """Call the controller like the control runtime, which does not call a waiting controller."""
        if self.is_blocked:
            return Decision.wait((self.waits,)) if self.waits else Decision.wait()
        self.waits = None
        while self.actions:
            kind, name = self.actions.pop(0)
            if kind == "set":
                self.variables[name] = self.variables.get(name, 0) + 1
            elif kind == "wait":
                self.waits = (name, self.variables.get(name, 0) if name == "z" else 0)
                return Decision.wait((self.waits,)) if self.is_blocked else Decision.wait(())
            elif kind == "draw":
                return Decision.sample()
            else:
                return Decision.splice()
        return Decision.stop()


_actions = st.lists(st.tuples(st.sampled_from(["set", "wait", "draw", "rest"]), st.sampled_from("xyz")), max_size=5)


def test_an_answer_from_before_another_output_ended_is_no_deadlock() -> None:
    watch = DeadlockWatch(max_turns=10_000)
    request = make_request(controller=object())
    waiter, setter = make_sequence(0, (1,)), make_sequence(1, (1,))
    for seq in (waiter, setter):
        seq.request = request
        watch.add(seq)
    waits = Decision.wait((("y", 0),))
    watch.next_round()
    waiter.control.asked_round = watch.round
    assert watch.note_decision(waiter, waits) is None
    watch.next_round()
    waiter.control.asked_round = watch.round
    # it answered before the other sets the variable, and is heard after it has ended
    watch.drop(setter)
    assert watch.note_decision(waiter, waits) is None
    watch.next_round()
    waiter.control.asked_round = watch.round
    assert watch.note_decision(waiter, waits) is not None


@given(st.lists(_actions, min_size=1, max_size=4), st.lists(st.integers(0, 3), max_size=60), st.randoms())
def test_found_if_and_only_if_nobody_can_go_on(programs: list[list[Action]], delays: list[int], random: object) -> None:
    watch = DeadlockWatch(max_turns=10_000)
    request = make_request(controller=object())
    variables: dict[str, int] = {}
    actors: list[Actor] = []
    for number, actions in enumerate(programs):
        seq = make_sequence(number, (1,))
        seq.request, seq.index = request, number
        watch.add(seq)
        actors.append(Actor(seq, list(actions), variables))
    under_way: list[tuple[int, int, Actor, Decision]] = []  # (heard in round, order, who, what)
    for turn in range(200):
        watch.next_round()
        asked = [actor for actor in actors if not actor.is_over and actor.answer is None]
        random.shuffle(asked)  # type: ignore[attr-defined]
        for actor in asked:
            actor.seq.control.asked_round = watch.round
            actor.answer = actor.call()
            delay = delays.pop() if delays else 0
            under_way.append((turn + delay, len(under_way), actor, actor.answer))
        due = sorted((item for item in under_way if item[0] <= turn), key=lambda item: item[:2])
        under_way = [item for item in under_way if item[0] > turn]
        for _, _, actor, decision in due:
            actor.answer = None
            if decision.is_stop:
                actor.is_over = True
                watch.drop(actor.seq)
            elif watch.note_decision(actor.seq, decision) is not None:
                live = [actor for actor in actors if not actor.is_over]
                assert live and all(actor.is_blocked for actor in live)
                return
    assert all(actor.is_over for actor in actors), "they are stuck, and it was not found"


def waiting(*names: str) -> Decision:
    return Decision.wait(tuple((name, 0) for name in names))


@pytest.mark.parametrize("names", [("x",), ("x", "y")])
def test_branches_that_all_wait_are_a_deadlock(names: tuple[str, ...]) -> None:
    def program(view: View) -> Decision:
        if view.num_asks == 0:
            return Decision.fork([Branch() for _ in names])
        return waiting(names[bool(view.path)])

    lab = Lab()
    got, other = lab.run(make_request(controller=program), make_request(max_tokens=30))
    for output in got.outputs.values():
        error = error_of(output)
        assert isinstance(error, ControllerDeadlock)
        for index, name in enumerate(names):
            assert f"output {index} waits for variable '{name}'" in str(error)
    assert other.first.reason is FinishReason.LENGTH
    assert lab.num_steps < 60


def test_an_output_that_goes_on_keeps_the_others_waiting() -> None:
    def program(view: View) -> Decision:
        if view.num_asks == 0:
            return Decision.fork([Branch(), Branch()])
        return waiting("x") if view.path else Decision.sample()

    lab = Lab(max_idle_steps=5_000)
    got = lab.run_one(controller=program, max_tokens=90)
    assert got.first.reason is FinishReason.LENGTH and len(got.first.tokens) == 90
    assert isinstance(error_of(got.by_path[0,]), ControllerDeadlock)  # but not once it is alone


def test_what_time_may_end_is_no_deadlock() -> None:
    def program(view: View) -> Decision:
        return Decision.wait() if view.num_asks < 200 else Decision.sample()

    assert Lab(max_noops=20).run_one(controller=program, max_tokens=3).first.reason is FinishReason.LENGTH


def test_doing_nothing_together_is_bounded() -> None:
    def program(view: View) -> Decision:
        if view.num_asks == 0:
            return Decision.fork([Branch(), Branch()])
        return Decision.splice() if view.path else waiting("x")

    got = Lab(max_noops=20).run_one(controller=program)
    for output in got.outputs.values():
        assert isinstance(error_of(output), ControllerDeadlock) and "21 turns in a row; at most 20" in str(
            error_of(output)
        )


@given(st.lists(st.integers(1, 50), min_size=1, max_size=20), st.integers(1, 3))
def test_doing_nothing_is_given_up_after_a_second_however_slow_steps_are(millis: list[int], num_outputs: int) -> None:
    """The second is measured by the engine's clock. Each output has had a thousand calls, whether a step takes 1 ms or
    50 ms."""
    now = [0.0]
    watch = DeadlockWatch(1_000, lambda: now[0])
    request = make_request(controller=object())
    outputs = [make_sequence(number, (1,)) for number in range(num_outputs)]
    for seq in outputs:
        seq.request = request
        watch.add(seq)
    had = [0] * num_outputs
    for duration in cycle(millis):
        now[0] += duration / 1000
        watch.next_round()
        verdicts = []
        for number, seq in enumerate(outputs):
            turns = watch.turns_due(seq)
            seq.control.asked_round = watch.round
            had[number] += turns
            verdicts.append(watch.note_decision(seq, Decision.splice(), turns))
        if any(verdicts):
            break
        assert max(had) <= 1_000 and now[0] < 1.2
    assert min(had) == 1_001 and now[0] > 0.999


def test_an_output_that_goes_on_is_asked_once_in_a_step_and_so_are_the_others() -> None:
    watch = DeadlockWatch(1_000, iter(float(second) for second in range(100)).__next__)
    request = make_request(controller=object())
    rests, draws = make_sequence(0, (1,)), make_sequence(1, (1,))
    for seq in (rests, draws):
        seq.request = request
        watch.add(seq)
    for _ in range(5):
        assert watch.note_decision(rests, Decision.splice()) is None
        assert watch.note_decision(draws, Decision.sample()) is None
        assert watch.turns_due(rests) == watch.turns_due(draws) == 1
