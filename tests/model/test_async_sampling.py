"""Tests of the executor with asynchronous results, on a CPU: the host knows tokens only after it reads the result."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from bridle.config import ModelConfig
from bridle.engine import AsyncEngine, Engine, Request
from bridle.engine.interfaces import find_async
from bridle.engine.scheduling.step_plan import (
    PlanRow,
    SampleBatch,
    SampleRow,
    StepPlan,
    StepResult,
    placeholder_for_row,
)
from bridle.errors import DeviceLost, InternalError
from bridle.model import executor as executor_module
from bridle.model.async_sampling import AsyncSampling
from bridle.model.loading import load_executor
from bridle.model.sequence_state import CachedRequestState
from bridle.sampling import SamplingParams
from tests.conftest import IS_FULL
from tests.covering import covering
from tests.fakes import tiny_checkpoints
from tests.model.loaded_adapters import Drawing, LateHere, load_late
from tests.model.oracle import _oracle, check_run, run

GREEDY = SamplingParams(temperature=0.0)
CPU = torch.device("cpu")


@pytest.mark.parametrize(("family", "has_tokens"), covering(["llama", "gpt2"], [True, False]))
def test_every_token_of_steps_launched_ahead_is_the_oracles(family: str, has_tokens: bool) -> None:
    path, made = tiny_checkpoints.cached_checkpoint(family), []

    def load(config: ModelConfig) -> LateHere:
        made.append(load_late(config, has_tokens=has_tokens))
        return made[-1]

    for seed in range(3 if IS_FULL else 2):
        check_run(_oracle(family, path), *run(path, random.Random(seed), 300, load))
    assert sum(executor.num_named for executor in made) > 20


@pytest.fixture
def executor() -> LateHere:
    return load_late(
        ModelConfig(str(tiny_checkpoints.cached_checkpoint("llama")), dtype="float32", num_blocks=16, block_size=4)
    )


def drawn(executor: LateHere) -> LateHere:
    """Return the executor after sampling for sequence 0, which has three tokens, without reading the result."""
    executor.forward(StepPlan(1, [PlanRow(0, 0, 3, new_tokens=(1, 2, 3), new_blocks=(0,), num_prompt=3)]))
    executor.sample_async(SampleBatch(1, [SampleRow(0, 0, GREEDY)]))
    return executor


def test_a_mirror_has_the_token_once_it_is_taken(executor: LateHere) -> None:
    drawn(executor).forward(StepPlan(2, [PlanRow(0, 3, 1, 1, 3, (placeholder_for_row(0),), 1, (), 3)]))
    assert executor.history(SampleRow(0, 0, GREEDY))[0] == [1, 2, 3, -1]
    (token,) = executor.get_result().tokens
    assert executor.history(SampleRow(0, 0, GREEDY))[0] == [1, 2, 3, token]
    assert executor.await_forward(0.0)


@pytest.mark.parametrize("tokens", [(placeholder_for_row(1),), (placeholder_for_row(0), 5)])
def test_names_of_nothing_are_refused(executor: LateHere, tokens: tuple[int, ...]) -> None:
    row = PlanRow(0, 3, len(tokens), 1, 3, tokens, 1, (1,), 3)
    with pytest.raises(InternalError, match="gets token id -"):
        drawn(executor).forward(StepPlan(2, [row]))
    executor.get_result()
    with pytest.raises(InternalError, match="gets token id -1"):
        executor.forward(StepPlan(2, [PlanRow(0, 3, 1, 1, 3, (placeholder_for_row(0),), 1, (), 3)]))


def test_draws_are_taken_one_after_the_other(executor: LateHere) -> None:
    with pytest.raises(InternalError, match="before the last sampled tokens were read"):
        drawn(executor).sample_async(SampleBatch(1))
    executor.get_result()
    with pytest.raises(InternalError, match="no sampling was started"):
        executor.get_result()
    drawn_again = [SampleBatch(1, [SampleRow(0, 0, GREEDY)]), SampleBatch(1)]
    for batch in drawn_again:
        executor.sample_async(batch)
        assert len(executor.get_result().tokens) == len(batch.rows)


def test_a_cpu_answers_at_once() -> None:
    path = tiny_checkpoints.cached_checkpoint("llama")
    assert find_async(load_executor(ModelConfig(str(path), num_blocks=4, block_size=4))) is None


def test_where_nothing_could_be_drawn_any_token_is_computed() -> None:
    draws, mirror = AsyncSampling(CPU), CachedRequestState()
    draws.start(Drawing(StepResult(1, [7, -1]), has_tokens=True))
    ids = torch.tensor([[5, placeholder_for_row(1), placeholder_for_row(0)]])
    assert draws.fill(ids).tolist() == [[5, 0, 7]]
    mirror.tokens = [3, placeholder_for_row(1)]
    assert draws.note_names([PlanRow(0, 1, 1, new_tokens=(placeholder_for_row(1),))], [mirror])
    draws.take()
    assert mirror.tokens == [3, 0]


# -- a device that fails for good --------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["forward", "take"])
def test_a_device_that_fails_for_good_ends_the_engine(
    executor: LateHere, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """After a permanent error of the device, waiting and new requests get the error, and health reports it."""

    def fail(*args: Any) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(executor_module, "is_sound", lambda device: False)
    monkeypatch.setattr(
        executor.runner if part == "forward" else executor.async_sampling, {"forward": "run"}.get(part, part), fail
    )
    with AsyncEngine(Engine(executor)) as engine:
        stream = engine.submit(Request("a", (1, 2, 3), SamplingParams(max_tokens=5)))
        with pytest.raises(DeviceLost, match="illegal memory access"):
            for _ in stream:
                pass
        assert not engine.is_healthy
        with pytest.raises(DeviceLost, match="failed, and cpu with it"):
            engine.submit(Request("b", (1,)))


def test_an_error_of_a_sound_device_ends_one_request_alone(executor: LateHere, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(executor.async_sampling, "take", fail)
        with pytest.raises(InternalError, match="sampling of step 1 failed on cpu"):
            drawn(executor).get_result()
    executor.reset()
    assert len(drawn(executor).get_result().tokens) == 1
