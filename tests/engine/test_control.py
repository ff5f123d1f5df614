"""Tests of controllers that wait, are late, fail, start and end. They delay only their own sequences."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from bridle.engine.control.decision import Branch, Decision, Splice, mask_of
from bridle.engine.interfaces import StoredValue
from bridle.errors import ControllerError, ControllerTimeout, ControllerTrap, DeadlineExceeded, InvalidRequest
from bridle.outputs import FinishReason, Log, Stored, TokenEvent
from tests.engine.programs import always, error_of, script
from tests.engine.support import Lab, check_against_reference, make_request
from tests.fakes.controller_runtime import FakeController, Reply, View

# -- steering draws --------------------------------------------------------------------------------------------


def test_masks_and_biases_hold_for_one_draw() -> None:
    program = script(
        Decision.sample(mask_of([7], 32)),
        Decision.sample(bias=[(9, 1_000.0)]),
        Decision.sample(bias=[(token, float("-inf")) for token in range(31)]),
    )
    lab = Lab()
    request = make_request((1, 2, 3), controller=program, max_tokens=6)
    (got,) = lab.run(request)
    assert got.first.tokens[:3] == [7, 9, 31]
    check_against_reference(lab, request, got)


def test_sampling_overrides_hold_for_one_draw() -> None:
    from bridle.sampling import SamplingParams

    lab = Lab()
    greedy = Decision.sample(sampling=SamplingParams(temperature=0.0))
    request = make_request((1, 2, 3), controller=script(greedy), seed=3, max_tokens=12, logprobs=1)
    (got,) = lab.run(request)
    check_against_reference(lab, request, got)
    best = Lab().run_one((1, 2, 3), temperature=0.0, max_tokens=12).first.tokens
    assert got.first.tokens[0] == best[0]
    assert got.first.tokens != best
    assert all(logprob is not None and len(logprob.top) == 1 for logprob in got.first.logprobs)


@pytest.mark.parametrize("asked", [None, 1])
def test_a_controller_sees_the_candidates_of_a_draw(asked: int | None) -> None:
    """The candidates are computed after mask and bias, even if the sampled token is rolled back. The client gets only
    the candidates that it requested."""
    seen: list[object] = []

    def program(view: View) -> Decision:
        seen.append(view.candidates)
        if view.num_asks == 0:
            return Decision.sample(mask_of([7, 9], 32), bias=[(9, 5.0)], top_logprobs=2)
        if view.num_asks == 1:
            return Decision.sample(mask_of([7], 32), splices=[Splice(1, ())], top_logprobs=1)
        return Decision.sample() if view.num_asks == 2 else Decision.stop()

    (got,) = Lab().run(make_request((1, 2, 3), controller=FakeController(program), logprobs=asked))
    assert len(got.first.tokens) == 2
    first, second = seen[1], seen[2]
    assert isinstance(first, tuple) and isinstance(second, tuple) and seen[0] is seen[3] is None
    assert len(first) == 2 and len(second) == 1
    if asked is None:  # else the client's own view of the distribution holds, which knows no masks
        assert {token for token, _ in first} == {7, 9} and second == ((7, 0.0),)
    tops = [None if logprob is None else len(logprob.top) for logprob in got.first.logprobs]
    assert not any(tops) if asked is None else tops == [1, 1]


def test_candidates_are_bounded() -> None:
    (got,) = Lab().run(make_request((1, 2, 3), controller=script(Decision.sample(top_logprobs=101))))
    assert "top_logprobs is 101; must be between 0 and 100" in str(error_of(got.first))


def test_nothing_left_to_draw_ends_that_request_only() -> None:
    lab = Lab()
    forbid = Decision.sample(mask_of([3], 32), bias=[(3, float("-inf"))])
    bystander = make_request((1, 2, 3), max_tokens=5)
    got, other = lab.run(make_request((1, 2, 3), controller=script(Decision.sample(), forbid)), bystander)
    check_against_reference(lab, bystander, other)
    assert isinstance(error_of(got.first), ControllerError)
    assert "no token can be drawn" in str(error_of(got.first))
    assert len(got.first.tokens) == 1


def test_nothing_left_without_a_controller_is_the_requests_fault() -> None:
    lab = Lab()
    got = lab.run_one(logit_bias={token: float("-inf") for token in range(32)})
    error = error_of(got.first)
    assert isinstance(error, InvalidRequest)
    assert error.param == "logit_bias"


def test_stop_ends_one_branch_with_its_reason() -> None:
    def program(view: View) -> Decision:
        if view.num_asks == 0:
            return Decision.fork([Branch(), Branch()])
        return Decision.stop("done") if view.path and view.num_asks == 2 else Decision.sample()

    lab = Lab()
    request = make_request(controller=program, max_tokens=5)
    (got,) = lab.run(request)
    check_against_reference(lab, request, got)
    child = got.by_path[0,]
    assert (child.reason, len(child.tokens)) == (FinishReason.CONTROLLER, 2)
    assert child.finished is not None
    assert child.finished.stop == "done"
    assert got.first.reason is FinishReason.LENGTH


# -- waiting and being late ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv", ["paged", "sequences"])
def test_waiting_computes_nothing(kv: str) -> None:
    def program(view: View) -> Decision:
        return Decision.wait() if view.num_asks < 30 and len(view.tokens) == 5 else Decision.sample()

    lab = Lab(kv=kv, record=True)
    waiting, plain = make_request(controller=program, max_tokens=4), make_request((4, 5, 6), max_tokens=40)
    got, other = lab.run(waiting, plain)
    check_against_reference(lab, waiting, got)
    check_against_reference(lab, plain, other)
    rows = [row for plan in lab.executor.plans for row in plan.rows if row.seq_id == 0]
    assert sum(row.num_scheduled for row in rows) == 3 + 3  # the wait was known before planning
    steps = [i for i, plan in enumerate(lab.executor.plans) if 0 in {row.seq_id for row in plan.rows}]
    assert steps[:2] == [0, 1]
    assert steps[2] > 25


def test_waiting_for_ever_is_bounded() -> None:
    lab = Lab(max_idle_steps=50)
    got, other = lab.run(make_request(controller=always(Decision.wait())), make_request(max_tokens=100))
    assert isinstance(error_of(got.first), ControllerTimeout)
    assert other.first.reason is FinishReason.LENGTH
    assert lab.num_steps < 200


def test_never_answering_is_bounded() -> None:
    lab = Lab(max_idle_steps=50)
    got, other = lab.run(make_request(controller=lambda view: Reply(delay=None)), make_request(max_tokens=9))
    assert isinstance(error_of(got.first), ControllerTimeout)
    assert other.first.reason is FinishReason.LENGTH


def test_an_endless_wait_in_a_branch_ends_that_branch() -> None:
    def program(view: View) -> Decision:
        if view.num_asks == 0:
            return Decision.fork([Branch(), Branch()])
        return Decision.wait() if view.path else Decision.sample()

    lab = Lab(max_idle_steps=20)
    got = lab.run_one(controller=program, max_tokens=5)
    assert got.first.reason is FinishReason.LENGTH
    assert isinstance(error_of(got.by_path[0,]), ControllerTimeout)


def test_late_controllers_cost_their_own_sequence_only() -> None:
    slow = FakeController(lambda view: Reply(Decision.sample(), delay=0.5))
    lab = Lab(device_time=lambda plan: 0.01, record=True)
    late, plain = make_request(controller=slow, max_tokens=3), make_request((4, 5, 6), max_tokens=60)
    got, other = lab.run(late, plain)
    check_against_reference(lab, late, got)
    check_against_reference(lab, plain, other)
    of_plain = [len([row for row in plan.rows if row.seq_id == 1]) for plan in lab.executor.plans]
    assert of_plain[:60] == [1] * 60  # a token in every step
    assert lab.engine.statistics().num_late_answers == 3
    of_late = sum(row.num_scheduled for plan in lab.executor.plans for row in plan.rows if row.seq_id == 0)
    assert of_late == 3 + 2 + 3  # each late row runs its last token once more


def test_a_step_waits_for_controllers_no_longer_than_it_may() -> None:
    lab = Lab(step_timeout=0.025, device_time=lambda plan: 0.01)
    lab.engine.add(make_request(controller=lambda view: Reply(Decision.sample(), delay=0.02), max_tokens=2))
    began = lab.clock()
    lab.step()  # the answer was asked for before the forward pass and comes after it, in time
    assert [type(event) for event in lab.events][-1] is TokenEvent
    assert lab.clock() - began == pytest.approx(0.02)
    lab.drain()
    assert lab.engine.statistics().num_late_answers == 0


def test_answers_overlap_with_the_forward_pass() -> None:
    """A controller that answers within a forward pass costs no time."""

    def timed(controller: object) -> float:
        lab = Lab(device_time=lambda plan: 0.01)
        began = lab.clock()
        lab.run_one(controller=controller, max_tokens=20)
        return lab.clock() - began

    assert timed(None) == pytest.approx(0.2)
    assert timed(lambda view: Reply(Decision.sample(), delay=0.01)) == pytest.approx(0.2)
    assert timed(lambda view: Reply(Decision.sample(), delay=0.02)) == pytest.approx(0.4)


# -- failing ---------------------------------------------------------------------------------------------------


def explode(view: View) -> Decision:
    raise KeyError("oops")


@pytest.mark.parametrize("first", [True, False])
def test_an_exception_ends_its_own_request(first: bool) -> None:
    def program(view: View) -> Decision:
        return explode(view) if first or view.num_asks == 2 else Decision.sample()

    lab = Lab()
    bystander = make_request((7, 8), max_tokens=6, controller=always(Decision.sample()))
    got, other = lab.run(make_request(controller=program, max_tokens=6), bystander)
    check_against_reference(lab, bystander, other)
    assert isinstance(error_of(got.first), ControllerError)
    assert "oops" in str(error_of(got.first))
    assert len(got.first.tokens) == (0 if first else 2)


def test_the_kind_of_error_is_kept() -> None:
    lab = Lab()
    got = lab.run_one(controller=lambda view: Reply(error=ControllerTrap("out of fuel")))
    assert isinstance(error_of(got.first), ControllerTrap)


def test_an_error_in_one_branch_leaves_the_others() -> None:
    def program(view: View) -> Decision:
        if view.num_asks == 0:
            return Decision.fork([Branch(), Branch(), Branch()])
        if view.path and view.path[0][1] == 1:
            raise ValueError("branch 1")
        return Decision.sample()

    lab = Lab()
    got = lab.run_one(controller=program, max_tokens=4)
    assert [one.reason.value for one in got.outputs.values()] == ["length", "error", "length"]


# -- opening, logs, closing ------------------------------------------------------------------------------------


def test_a_controller_may_rewrite_the_prompt() -> None:
    lab = Lab()
    controller = FakeController(always(Decision.sample()), prompt=(9, 8, 7, 6))
    got = lab.run_one((1, 2), controller=controller, temperature=0.0, max_tokens=5)
    plain = Lab().run_one((9, 8, 7, 6), temperature=0.0, max_tokens=5)
    assert got.first.tokens == plain.first.tokens
    assert got.prompt is not None
    assert got.prompt.tokens == (9, 8, 7, 6)
    assert got.first.usage.prompt_tokens == 4


@pytest.mark.parametrize("prompt", [(99,), tuple(range(32)) * 9])
def test_a_rewritten_prompt_is_checked(prompt: tuple[int, ...]) -> None:
    lab = Lab()
    got = lab.run_one(controller=FakeController(always(Decision.sample()), prompt=prompt))
    assert got.first.reason is FinishReason.ERROR


def test_a_slow_opening_holds_up_nobody() -> None:
    lab = Lab(device_time=lambda plan: 0.01)
    slow = make_request(controller=FakeController(always(Decision.sample()), open_delay=0.3), max_tokens=2)
    plain = make_request((4, 5), max_tokens=50)
    got, other = lab.run(slow, plain)
    check_against_reference(lab, slow, got)
    check_against_reference(lab, plain, other)
    order = [event.request_id for event in lab.events if isinstance(event, TokenEvent)]
    assert 25 <= order.index(slow.id) <= 40


def test_a_failed_opening_ends_its_request() -> None:
    lab = Lab()
    controller = FakeController(always(Decision.sample()), open_error=ControllerError("no such module"))
    got = lab.run_one(controller=controller)
    assert str(error_of(got.first)) == "no such module"


def test_a_request_is_cancelled_while_its_controller_opens() -> None:
    lab = Lab()
    request = make_request(controller=FakeController(always(Decision.sample()), open_delay=None))
    lab.engine.add(request)
    lab.step()
    lab.engine.cancel(request.id)
    assert lab.drain()[request.id].first.reason is FinishReason.CANCELLED


def test_a_controller_that_no_pool_runs_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="no controller pool of this engine runs a str"):
        Lab().engine.add(make_request(controller="something"))


def test_logs_and_variables_arrive_in_order() -> None:
    def program(view: View) -> Reply:
        stored = (StoredValue("count", str(view.num_asks).encode()),)
        return Reply(Decision.sample(), log=f"{len(view.tokens)}\n", stored=stored)

    lab = Lab()
    got = lab.run_one(controller=program, max_tokens=3)
    assert got.first.logs == "3\n4\n5\n"
    assert got.first.stored == [("count", b"0"), ("count", b"1"), ("count", b"2")]
    kinds = [type(event) for event in lab.events if isinstance(event, (Log, Stored, TokenEvent))]
    assert kinds == [Log, Stored, TokenEvent] * 3


def test_every_output_says_its_last_words() -> None:
    lab = Lab()
    lab.run_one(controller=script(Decision.fork([Branch(), Branch()])), n=2, max_tokens=3)
    final = [ask for ask in lab.pool.asked if ask.final]
    assert sorted(ask.seq_id for ask in final) == [0, 1, 2, 3]
    assert all(len(ask.tokens) == 1 for ask in final)


def test_last_words_that_do_not_come_hold_up_nobody() -> None:
    lab = Lab()
    lab.pool.final_delay = None
    got = lab.run_one(controller=always(Decision.sample()), max_tokens=3)
    assert got.first.reason is FinishReason.LENGTH
    assert lab.clock() < 1_001.0


# -- deadlines -------------------------------------------------------------------------------------------------


def never_opening() -> FakeController:
    return FakeController(always(Decision.sample()), open_delay=None)


SLOW: dict[str, Callable[[], object]] = {
    "drawing": lambda: None,
    "waiting": lambda: always(Decision.wait()),
    "silent": lambda: lambda view: Reply(delay=None),
    "opening": never_opening,
}


@pytest.mark.parametrize("kind", SLOW)
def test_deadlines_hold_whatever_the_sequence_does(kind: str) -> None:
    lab = Lab(device_time=lambda plan: 1 / 128, num_blocks=100)
    deadline = lab.clock() + 0.5
    doomed = make_request(controller=SLOW[kind](), deadline=deadline, max_tokens=200)
    plain = make_request((4, 5), max_tokens=90)
    got, other = lab.run(doomed, plain)
    check_against_reference(lab, plain, other)
    assert got.first.reason is FinishReason.DEADLINE
    error = error_of(got.first)
    assert isinstance(error, DeadlineExceeded)
    assert "deadline passed" in str(error)
    assert len(got.first.tokens) == (64 if kind == "drawing" else 0)


def test_a_deadline_in_the_queue() -> None:
    lab = Lab(device_time=lambda plan: 0.01, max_num_seqs=1)
    first = make_request(max_tokens=100)
    queued = make_request(deadline=lab.clock() + 0.2)
    replays = lab.run(first, queued)
    assert replays[1].first.reason is FinishReason.DEADLINE
    assert replays[1].first.tokens == []
    assert replays[0].first.reason is FinishReason.LENGTH


def test_a_request_done_in_time_keeps_its_result() -> None:
    lab = Lab(device_time=lambda plan: 0.01)
    request = make_request(max_tokens=5, deadline=lab.clock() + 1.0)
    (got,) = lab.run(request)
    lab.clock.advance(5.0)
    lab.engine.step()
    check_against_reference(lab, request, got)
