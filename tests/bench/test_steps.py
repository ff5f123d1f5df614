"""Steps are told apart by what they compute. Times are never asserted."""

from __future__ import annotations

from bridle.engine import Engine
from bridle.testing.scripted import ScriptedExecutor
from dev.bench.steps import NotedExecutor, fastest, run_batch
from dev.simulation.cost import StepSize


def test_every_step_is_noted_with_its_size() -> None:
    executor = NotedExecutor(ScriptedExecutor(num_blocks=64, block_size=4))
    engine = Engine(executor)
    steps = run_batch(engine, executor, [(1, 2, 3), (4, 5)], 3)
    assert [size for size, _ in steps] == [StepSize(2, 5, 5), StepSize(2, 2, 7), StepSize(2, 2, 9)]
    assert all(seconds > 0 for _, seconds in steps)
    engine.close()


def test_what_disturbs_a_step_is_left_out() -> None:
    one, other = StepSize(1, 1, 1), StepSize(2, 2, 2)
    assert fastest([[(one, 1.0), (other, 5.0)], [(one, 2.0), (other, 3.0)]]) == [(one, 1.0), (other, 3.0)]
