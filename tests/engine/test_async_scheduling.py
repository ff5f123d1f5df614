"""Tests of steps that start before the tokens of the previous step are known: no block is leaked, and the device does
not wait for the engine's work. `engine_properties` tests that no output changes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from random import Random

import pytest

from bridle.engine.control.decision import Decision, Splice, mask_of
from bridle.engine.interfaces import Answer, find_async
from bridle.engine.scheduling.step_plan import PlanRow, SampleBatch, SampleRow, StepPlan, placeholder_for_row
from bridle.errors import InternalError
from bridle.sampling import SamplingParams
from bridle.testing.async_executor import LateScriptedExecutor
from bridle.testing.scripted import ScriptedExecutor
from tests.engine.programs import VOCAB, always, script
from tests.engine.random_labs import KEEPINGS, LateLab, essence, random_lab, random_request
from tests.engine.support import Lab, check_against_reference, make_request, replay
from tests.fakes.controller_runtime import FakeController, Reply, View


@pytest.mark.few(3)
@pytest.mark.parametrize("seed", range(6))
def test_events_are_those_of_a_device_that_answers_at_once(seed: int) -> None:
    """Each client gets the same events in the same order."""
    told = []
    for kind in (Lab, LateLab):
        random = Random(seed)
        lab = random_lab(random, "paged", kind, num_blocks=200, max_num_batched_tokens=400, max_num_seqs=50)
        requests = [random_request(random, id=f"r{i}", n=1, trace=False, speculate=0) for i in range(8)]
        replays = lab.run(*requests)
        said = [[(one.said, one.stored) for one in replays_.outputs.values()] for replays_ in replays]
        told.append((essence(replay(lab.events), requests), said))
    assert told[0] == told[1]


# -- what it is for --------------------------------------------------------------------------------------------

SECONDS, HOST = 0.010, 0.004


def busy_lab(kind: type[Lab], **options: object) -> Lab:
    """Return a lab whose device takes 10 ms for a step."""
    return kind(num_blocks=200, device_time=lambda plan: SECONDS * bool(plan.rows), vocab_size=VOCAB, **options)


def seconds_of(lab: Lab, num_tokens: int, **fields: object) -> float:
    """Return the seconds that an output of `num_tokens` tokens takes. The host works 4 ms for each token."""

    def think(tokens: object, num_prompt: int) -> None:
        lab.clock.advance(HOST)

    began = lab.clock()
    output = lab.run_one(max_tokens=num_tokens, ignore_eos=True, stopping=(think,), **fields).first
    assert len(output.tokens) == num_tokens
    return lab.clock() - began


def test_what_the_host_does_costs_the_device_no_time() -> None:
    at_once, late = busy_lab(Lab), busy_lab(LateLab)
    assert seconds_of(at_once, 40) == pytest.approx(40 * (SECONDS + HOST), abs=HOST)
    assert seconds_of(late, 40) == pytest.approx(40 * SECONDS + HOST, abs=2 * HOST)
    assert isinstance(late.executor, LateScriptedExecutor)
    assert late.executor.num_ahead == 39  # the last one ends, as is known before
    assert late.executor.num_forwards == at_once.executor.num_forwards + 1 == 41  # one to forget what ended


def test_controllers_work_while_the_device_does() -> None:
    """Controllers in the engine's own thread also work while the device computes."""

    def seconds(lab: Lab) -> float:
        def think(view: View) -> Decision:
            lab.clock.advance(HOST)
            return Decision.sample(mask_of([len(view.tokens) % 8], VOCAB))

        began = lab.clock()
        got = lab.run_one(max_tokens=30, ignore_eos=True, controller=FakeController(think)).first
        assert got.tokens == [number % 8 for number in range(3, 33)]
        return lab.clock() - began

    assert seconds(busy_lab(Lab)) == pytest.approx(30 * (SECONDS + HOST), abs=HOST)
    assert seconds(busy_lab(LateLab)) == pytest.approx(30 * SECONDS + HOST, abs=2 * HOST)


def test_forced_tokens_in_a_row_cost_no_further_step() -> None:
    def forwards(kind: type[Lab]) -> int:
        lab = busy_lab(kind)
        force = script(*[Decision.sample(), Decision.splice(0, (1, 2, 3))] * 8)
        lab.run_one(max_tokens=32, ignore_eos=True, controller=FakeController(force))
        return lab.executor.num_forwards

    assert forwards(LateLab) <= forwards(Lab) + 1  # that the first one comes nobody can know


def test_a_splice_makes_a_step_wait_and_a_draw_does_not() -> None:
    lab = busy_lab(LateLab)
    assert isinstance(lab.executor, LateScriptedExecutor)
    force = script(*[Decision.sample(), Decision.splice(0, (1, 2, 3))] * 8)
    lab.run_one(max_tokens=32, ignore_eos=True, controller=FakeController(force))
    assert lab.executor.num_ahead == 1
    lab.run_one(max_tokens=32, ignore_eos=True, controller=FakeController(always(Decision.sample())))
    assert lab.executor.num_ahead == 32


@pytest.mark.parametrize("drafts", [0, 3])
def test_rows_with_drafts_wait(drafts: int) -> None:
    lab = busy_lab(LateLab)
    assert isinstance(lab.executor, LateScriptedExecutor)
    request = make_request((1, 2, 1, 2, 1, 2), max_tokens=12, ignore_eos=True, speculate=drafts)
    check_against_reference(lab, request, lab.run(request)[0])
    assert (lab.executor.num_ahead == 0) == bool(drafts)


@KEEPINGS
def test_rows_in_vain_leave_nothing_behind(kv: str) -> None:
    """Outputs end with an unpredictable token, while other outputs continue in the freed blocks."""
    lab = busy_lab(LateLab, kv=kv, eos_token_ids=(5, 6, 7), max_num_seqs=3, max_num_batched_tokens=12)
    requests = [make_request((i, i + 1, i), max_tokens=20, seed=i, temperature=2.0) for i in range(9)]
    for request, got in zip(requests, lab.run(*requests), strict=True):
        check_against_reference(lab, request, got)
    assert isinstance(lab.executor, LateScriptedExecutor)
    in_vain = lab.executor.num_named - lab.engine.statistics().num_sampled_tokens + len(requests)
    assert in_vain > 0


@pytest.mark.parametrize("splice", [Splice(1, (9,)), Splice(2, (9, 9)), Splice(0, (9,)), Splice(3, ())])
@KEEPINGS
def test_a_token_that_is_replaced_was_computed_in_vain(kv: str, splice: Splice) -> None:
    def program(view: View) -> Decision:
        return Decision.sample(splices=[splice]) if view.num_asks in (5, 6, 11) else Decision.sample()

    lab = busy_lab(LateLab, kv=kv)
    request = make_request(max_tokens=24, ignore_eos=True, controller=FakeController(program), repetition_penalty=1.5)
    check_against_reference(lab, request, lab.run(request)[0])


# -- how long controllers may take -----------------------------------------------------------------------------


def run_slow_controller(kind: type[Lab], delay: float) -> int:
    """Return the number of late answers of a controller that needs `delay` seconds for each."""
    lab = busy_lab(kind, step_timeout=0.025)
    program = FakeController(lambda view: Reply(Decision.sample(), delay=delay))
    lab.run_one(max_tokens=8, ignore_eos=True, controller=program)
    return lab.engine.statistics().num_late_answers


def test_the_deadline_counts_from_the_end_of_the_forward() -> None:
    assert run_slow_controller(LateLab, SECONDS + 0.020) == 0
    assert run_slow_controller(Lab, SECONDS + 0.020) > 0
    assert run_slow_controller(LateLab, SECONDS + 0.030) > 0


def test_pools_are_waited_for_from_then_on_only() -> None:
    """A pool whose controllers have a time limit is asked to wait only after the device has finished."""
    lab = busy_lab(LateLab)
    waits: list[float] = []
    collect, device = lab.pool.collect, lab.executor.device

    def noted(seq_ids: Iterable[int], deadline: float | None) -> Mapping[int, Answer]:
        if deadline is not None:
            waits.append(lab.clock() - device.busy_until)
        return collect(seq_ids, deadline)

    lab.pool.collect = noted  # type: ignore[method-assign]
    program = FakeController(lambda view: Reply(Decision.sample(), delay=SECONDS + 0.003))
    lab.run_one(max_tokens=8, ignore_eos=True, controller=program)
    assert len(waits) == 8
    assert min(waits) == pytest.approx(0.0)


# -- the device that proves it ---------------------------------------------------------------------------------


def started() -> LateScriptedExecutor:
    executor = LateScriptedExecutor(8, 8, 4)
    executor.forward(StepPlan(1, [PlanRow(1, 0, 3, new_tokens=(1, 2, 3), new_blocks=(0,), num_prompt=3)]))
    return executor


def test_a_late_device_computes_what_it_drew() -> None:
    executor, at_once = started(), ScriptedExecutor(8, 8, 4)
    at_once.forward(StepPlan(1, [PlanRow(1, 0, 3, new_tokens=(1, 2, 3), new_blocks=(0,), num_prompt=3)]))
    greedy = SamplingParams(temperature=0.0)
    executor.sample_async(SampleBatch(1, [SampleRow(1, 0, greedy)]))
    (token,) = at_once.sample(SampleBatch(1, [SampleRow(1, 0, greedy)])).tokens
    executor.forward(StepPlan(2, [PlanRow(1, 3, 1, 1, 3, (placeholder_for_row(0),), 1, (), 3)]))
    at_once.forward(StepPlan(2, [PlanRow(1, 3, 1, 1, 3, (token,), 1, (), 3)]))
    assert executor.get_result().tokens == [token]
    row = SampleRow(1, 0, greedy)
    assert executor.sample(SampleBatch(2, [row])).tokens == at_once.sample(SampleBatch(2, [row])).tokens


def test_a_late_device_refuses_what_comes_in_another_order() -> None:
    with pytest.raises(InternalError, match="nothing was drawn"):
        started().get_result()
    executor = started()
    executor.sample_async(SampleBatch(1))
    with pytest.raises(InternalError, match="another one was not taken"):
        executor.sample_async(SampleBatch(1))
    executor.get_result()
    with pytest.raises(InternalError, match="names tokens that were taken"):
        executor.forward(StepPlan(2, [PlanRow(1, 3, 1, 1, 3, (placeholder_for_row(0),), 1, (), 3)]))


def test_only_those_that_say_so_answer_late() -> None:
    assert find_async(ScriptedExecutor()) is None
    executor = LateScriptedExecutor()
    assert find_async(executor) is executor
