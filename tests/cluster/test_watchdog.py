"""A step that hangs is told, one that takes its time is not."""

from __future__ import annotations

import threading

from bridle.cluster.pace import Pace
from bridle.cluster.watchdog import WatchedExecutor
from bridle.engine.plan import PlanRow, SampleBatch, StepPlan
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

    executor = WatchedExecutor(ScriptedExecutor(on_forward=hang), note, Pace(least=0.05, first=0.05), 0.01)
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
