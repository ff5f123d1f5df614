"""Tests of rows with and without adapters in one step of the CPU kernels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bridle.config import ModelConfig
from bridle.cpu_kernels.library import kernels
from bridle.engine.scheduling.step_plan import PlanRow, SampleBatch, StepPlan
from bridle.lora import AdapterPool, open_adapter, require_device
from bridle.model import load_executor
from tests.conftest import examples
from tests.fakes import tiny_checkpoints
from tests.lora.kit import write_adapter
from tests.waiting import PATIENCE

pytestmark = pytest.mark.skipif(kernels() is None, reason="no kernels for this machine")
BLOCK = 4


@pytest.fixture(scope="module", params=[("llama", "none"), ("llama", "int8"), ("gemma2", "none"), ("granite", "q8_0")])
def adapted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Yield an executor that computes steps in the CPU kernels, with two adapters loaded."""
    family, quantization = request.param
    path = tiny_checkpoints.cached_checkpoint(family, head_dim=16, hidden_size=64)
    executor = load_executor(ModelConfig(str(path), num_blocks=64, block_size=BLOCK, quantization=quantization))
    assert executor.runner is not None and executor.runner.lowered is not None and executor.runner.lowered.native
    device = require_device(executor)
    pool = AdapterPool(device, item_size=4, device_memory=1 << 30, host_memory=1 << 30)
    for number, targets in enumerate((("q_proj", "down_proj"), ("o_proj", "gate_proj", "v_proj"))):
        folder = tmp_path_factory.mktemp("adapter")
        files = open_adapter(write_adapter(folder, device.layers, targets=targets, rank=4, seed=number))
        pool.check(files)
        pool.add(str(number), files)
        pool.fetch(str(number)).result(PATIENCE)
        device.place(str(number))
    yield executor
    pool.close()
    executor.close()


def step_logits(executor: Any, rows: Sequence[tuple[list[int], str | None]]) -> list[torch.Tensor]:
    """Return the logits [len(tokens), V] of each row with its adapter, all computed in one step."""
    planned, block = [], 0
    for number, (tokens, adapter) in enumerate(rows):
        size, blocks = len(tokens), tuple(range(block, block - (-len(tokens) // BLOCK)))
        block += len(blocks)
        planned.append(PlanRow(number, 0, size, size, new_tokens=tuple(tokens), new_blocks=blocks, adapter=adapter))
    executor.reset()
    executor.forward(StepPlan(1, planned))
    executor.sample(SampleBatch(1))
    return list(executor.logits.clone().split([len(tokens) for tokens, _ in rows]))


@settings(max_examples=examples(15), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shapes=st.lists(st.tuples(st.integers(1, 17), st.sampled_from([None, "0", "1"])), min_size=2, max_size=7))
def test_rows_without_an_adapter_keep_their_bits_beside_rows_with_one(
    adapted: Any, shapes: list[tuple[int, str | None]]
) -> None:
    """Rows without an adapter have the same bits in a step with adapters, which calls the kernels part by part."""
    rows = [([(7 * i + 31 * at) % 240 + 12 for i in range(size)], key) for at, (size, key) in enumerate(shapes)]
    mixed = step_logits(adapted, rows)
    for have, (tokens, key) in zip(mixed, rows, strict=True):
        (alone,) = step_logits(adapted, [(tokens, None)])
        assert torch.equal(have, alone) == (key is None), "an adapter changes its own row, and no other"
