"""Tests that the watchdog reports a step that hangs, and does not report a slow step."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from bridle.distributed.step_time_estimator import StepTimeEstimator
from bridle.distributed.watchdog import WatchedExecutor
from bridle.engine.interfaces import find_async
from bridle.engine.scheduling.step_plan import PlanRow, SampleBatch, StepPlan, StepResult
from bridle.errors import DeviceLost
from bridle.testing.async_executor import LateScriptedExecutor
from bridle.testing.scripted import ScriptedExecutor
from tests.waiting import PATIENCE


def plan(step: int) -> StepPlan:
    return StepPlan(step, [PlanRow(step, 0, 1, new_tokens=(1,), new_blocks=(step,), num_prompt=1)])


def test_a_stuck_step_is_told_once_and_others_are_not() -> None:
    told: list[str] = []
    is_told, may_go_on = threading.Event(), threading.Event()

    def note(reason: str) -> None:
        told.append(reason)
        is_told.set()

    def hang(running: StepPlan) -> None:
        if running.step == 3:
            may_go_on.wait(PATIENCE)

    executor = WatchedExecutor(ScriptedExecutor(on_forward=hang), note, StepTimeEstimator(least=0.05, first=0.05), 0.01)
    for step in (1, 2):
        executor.forward(plan(step))
        executor.sample(SampleBatch(step))
    stepping = threading.Thread(target=executor.forward, args=(plan(3),))
    stepping.start()
    assert is_told.wait(PATIENCE)
    may_go_on.set()
    stepping.join()
    executor.close()
    assert [reason for reason in told if reason.startswith("step 3 ")] == told[-1:]


def test_what_else_an_executor_can_do_is_there() -> None:
    inner = ScriptedExecutor()
    executor = WatchedExecutor(inner, print)
    assert executor.num_mirrors == 0 and executor.info is inner.info
    executor.close()
    assert inner.is_closed


def test_what_answers_late_is_watched_until_it_is_taken() -> None:
    told: list[str] = []
    is_told, may_go_on = threading.Event(), threading.Event()

    def note(reason: str) -> None:
        told.append(reason)
        is_told.set()

    class Hanging(LateScriptedExecutor):
        def get_result(self) -> StepResult:
            if self.num_forwards == 3:
                may_go_on.wait(PATIENCE)
            return super().get_result()

    executor = WatchedExecutor(Hanging(), note, StepTimeEstimator(least=0.05, first=0.05), 0.01)
    late = find_async(executor)
    assert late is not None
    for step in (1, 2):
        late.forward(plan(step))
        late.sample_async(SampleBatch(step))
        if step == 1:
            late.get_result()
    late.forward(plan(3))  # while step 2 is being drawn
    taking = threading.Thread(target=late.get_result)
    taking.start()
    assert is_told.wait(PATIENCE)
    may_go_on.set()
    taking.join()
    executor.close()
    assert told[0].startswith("step 2 ")


@pytest.mark.parametrize("faults", [{"faults": {0: DeviceLost("gone")}}, {"sample_faults": {0: DeviceLost("gone")}}])
@pytest.mark.parametrize("kind", [ScriptedExecutor, LateScriptedExecutor])
def test_a_device_that_is_lost_for_good_is_told(kind: type[ScriptedExecutor], faults: dict[str, Any]) -> None:
    told: list[str] = []
    executor = WatchedExecutor(kind(**faults), told.append)
    late = find_async(executor)

    def step() -> None:
        executor.forward(plan(1))
        if late is None:
            executor.sample(SampleBatch(1))
        else:
            late.sample_async(SampleBatch(1))
            late.get_result()

    with pytest.raises(DeviceLost):
        step()
    executor.close()
    assert told == ["the device is lost: gone"]
