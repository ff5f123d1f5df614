"""Tests that the KV pool gets the requested size, or its share of the memory that the largest step leaves free."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bridle.cgroups import memory_room
from bridle.config import EngineConfig, ModelConfig
from bridle.engine.scheduling.step_plan import StepPlan
from bridle.errors import InternalError, InvalidRequest, OutOfBlocks
from bridle.model import kv_profiling, memory
from bridle.model.kv_budget import CACHED_CONTEXTS, MOST_CONTEXTS
from bridle.model.kv_profiling import PoolNeeds, fit_pool
from bridle.model.loading import load_executor
from bridle.testing.scripted import ScriptedExecutor
from tests.fakes import tiny_checkpoints

CPU = torch.device("cpu")
BLOCK_BYTES = 1_000
NEEDS = PoolNeeds(
    ModelConfig(), CPU, 16, BLOCK_BYTES, max_model_len=64, step_tokens=32, step_seqs=20, weight_bytes=100 * BLOCK_BYTES
)


class Pools:
    """A fake loader that makes executors over pools, and records the pools' sizes and the steps that ran."""

    def __init__(self, fault: Exception | None = None) -> None:
        self.sizes: list[int] = []
        self.steps: list[tuple[int, StepPlan]] = []  # with the size of the pool
        self._fault = fault

    def __call__(self, num_blocks: int) -> Any:
        self.sizes.append(num_blocks)
        return _Trial(num_blocks, lambda plan: self._note(num_blocks, plan))

    def _note(self, num_blocks: int, plan: StepPlan) -> None:
        self.steps.append((num_blocks, plan))
        if self._fault is not None:
            raise self._fault


class _Trial(ScriptedExecutor):
    def __init__(self, num_blocks: int, on_forward: Any) -> None:
        super().__init__(num_blocks=num_blocks, block_size=16, max_model_len=64, on_forward=on_forward)

    def _compare(self, *args: object) -> None:
        """Compare nothing, as this executor's test plans have KV of no sequence."""

    @contextmanager
    def trying(self, num_blocks: int) -> Iterator[None]:
        """Yield at once, as this executor has no layers and no KV to clear."""
        yield


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Replace the measurements of memory; return the free bytes and the bytes of the largest step, which tests may
    change."""
    sizes = {"free": 100 * BLOCK_BYTES, "step": 20 * BLOCK_BYTES}
    monkeypatch.setattr(kv_profiling, "free_memory", lambda device: sizes["free"])
    monkeypatch.setattr(kv_profiling, "run_with_peak", lambda device, run: (run(), sizes["step"]))
    return sizes


# -- as measured -------------------------------------------------------------------------------------------------


def test_the_pool_gets_its_share_of_what_the_largest_step_leaves(machine: dict[str, int]) -> None:
    pools = Pools()
    assert fit_pool(NEEDS, pools) == 40  # half of 100 - 20 blocks
    trial, nothing, pool = pools.sizes
    assert (nothing, pool) == (1, 40)
    assert {size for size, _ in pools.steps} == {trial}
    machine["step"] = 60 * BLOCK_BYTES
    assert fit_pool(NEEDS, Pools()) == 20


def test_graphs_are_left_their_room(machine: dict[str, int], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    pools = Pools()

    def measured(info: Any) -> int:
        assert info.num_blocks == pools.sizes[-1], "in the trial pool"
        assert len(pools.sizes) == 1
        return 10 * BLOCK_BYTES

    assert fit_pool(NEEDS, pools, measured) == 35  # half of 100 - 20 - 10 blocks
    assert "CUDA graphs take 10000 bytes, and the KV cache holds" in caplog.text


def test_the_step_that_is_run_is_the_largest(machine: dict[str, int]) -> None:
    pools = Pools()
    fit_pool(replace(NEEDS, step_seqs=4), pools)
    ((_, plan),) = pools.steps
    assert [row.num_scheduled for row in plan.rows] == [32, 1, 1, 1]
    assert plan.rows[0].start == 32  # up to the end of the longest context


def test_nobody_needs_more_than_so_many_contexts(machine: dict[str, int]) -> None:
    machine["free"] = 10**9
    assert fit_pool(NEEDS, Pools()) == 20 * 4
    assert fit_pool(replace(NEEDS, step_seqs=4), Pools()) == CACHED_CONTEXTS * 4
    assert fit_pool(replace(NEEDS, step_seqs=256), Pools()) == MOST_CONTEXTS * 4


def test_a_small_model_leaves_the_machine_to_others(machine: dict[str, int], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="bridle")
    machine |= {"free": 820 * BLOCK_BYTES, "step": 20 * BLOCK_BYTES}
    toy = replace(NEEDS, step_seqs=256, weight_bytes=30 * BLOCK_BYTES)
    assert fit_pool(toy, Pools()) == 50
    assert "holds 800 tokens in 50000 bytes: a sixteenth of what is free; set kv_memory (--kv-memory)" in caplog.text
    assert fit_pool(replace(toy, weight_bytes=70 * BLOCK_BYTES, config=ModelConfig(warm_up=False)), Pools()) == 70
    assert "holds 1120 tokens in 70000 bytes: as much as the weights; set kv_memory" in caplog.text


def test_processes_of_one_machine_divide_it(machine: dict[str, int]) -> None:
    assert fit_pool(replace(NEEDS, config=ModelConfig(num_sharers=2)), Pools()) == 20


def test_several_models_have_a_bound_each(machine: dict[str, int]) -> None:
    assert fit_pool(replace(NEEDS, config=ModelConfig(max_kv_memory=7 * BLOCK_BYTES)), Pools()) == 7


def test_what_is_set_aside_for_adapters_is_not_for_the_pool(machine: dict[str, int]) -> None:
    aside = ModelConfig(reserved_memory=30 * BLOCK_BYTES)
    assert fit_pool(replace(NEEDS, config=aside), Pools()) == 25  # half of 100 - 20 - 30 blocks
    assert fit_pool(replace(NEEDS, config=replace(aside, warm_up=False)), Pools()) == 35
    shared = replace(aside, num_sharers=2, reserved_memory=10 * BLOCK_BYTES)
    assert fit_pool(replace(NEEDS, config=shared), Pools()) == 15  # of 100 - 20 - 2 * 10, half of a half


def test_without_a_warm_up_nothing_runs(machine: dict[str, int]) -> None:
    pools = Pools()
    assert fit_pool(replace(NEEDS, config=ModelConfig(warm_up=False)), pools) == 50
    assert not pools.steps


# -- as asked for ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "num_blocks"),
    [
        ({"num_blocks": 9}, 9),
        ({"kv_tokens": 100}, 7),  # rounded up
        ({"kv_memory": 5_500}, 5),
        ({"num_blocks": 9, "kv_tokens": 100, "kv_memory": 5_500}, 9),
    ],
)
def test_what_was_asked_for_wins_over_what_is_measured(
    settings: dict[str, int], num_blocks: int, machine: dict[str, int]
) -> None:
    pools = Pools()
    assert fit_pool(replace(NEEDS, config=ModelConfig(**settings)), pools) == num_blocks  # type: ignore[arg-type]
    assert pools.sizes == [num_blocks]
    assert bool(pools.steps) is ("num_blocks" not in settings)  # the step has to fit all the same


def test_one_that_is_started_again_leaves_its_own_part_alone(machine: dict[str, int]) -> None:
    """A restarted process subtracts only its own reserved memory, as the other processes have allocated theirs by
    then."""
    again = ModelConfig(num_blocks=9, num_sharers=2, reserved_memory=48 * BLOCK_BYTES)
    assert fit_pool(replace(NEEDS, config=again), Pools()) == 9
    machine["free"] = 56 * BLOCK_BYTES
    with pytest.raises(OutOfBlocks, match="num_blocks 9 needs"):
        fit_pool(replace(NEEDS, config=again), Pools())


# -- refused -----------------------------------------------------------------------------------------------------


def test_a_pool_that_cannot_hold_one_request_is_refused(machine: dict[str, int]) -> None:
    machine["step"] = 97 * BLOCK_BYTES  # leaves one block
    with pytest.raises(OutOfBlocks, match=r"holds 16 tokens .* but a request of 64 tokens needs"):
        fit_pool(replace(NEEDS, config=ModelConfig(max_model_len=64)), Pools())
    with pytest.raises(InvalidRequest, match="holds 32 tokens") as caught:
        fit_pool(replace(NEEDS, config=ModelConfig(max_model_len=64, kv_tokens=30)), Pools())
    assert caught.value.param == "max_batch_total_tokens"


def test_adapters_that_leave_no_room_are_named(machine: dict[str, int]) -> None:
    aside = ModelConfig(reserved_memory=90 * BLOCK_BYTES, max_model_len=64)
    with pytest.raises(OutOfBlocks, match="or lower adapter_memory and adapter_host_memory: 90000 bytes are for adapt"):
        fit_pool(replace(NEEDS, config=aside), Pools())
    for asked in ({"num_blocks": 11}, {"kv_tokens": 170}, {"kv_memory": 10_500}):
        with pytest.raises(OutOfBlocks, match="has 100000 bytes free, of which 90000 bytes are for adapters"):
            fit_pool(replace(NEEDS, config=replace(aside, **asked)), Pools())  # type: ignore[arg-type]
    assert fit_pool(replace(NEEDS, config=replace(aside, num_blocks=10)), Pools()) == 10


def test_a_step_that_does_not_fit_is_told_with_what_to_lower(machine: dict[str, int]) -> None:
    fault = InternalError("step 1 failed")
    fault.__cause__ = torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(OutOfBlocks, match="32 prompt tokens with 20 sequences: lower max_batch_prefill_tokens"):
        fit_pool(NEEDS, Pools(fault))


def test_other_faults_of_the_step_stay_what_they_are(machine: dict[str, int]) -> None:
    with pytest.raises(InternalError, match="shapes"):
        fit_pool(NEEDS, Pools(InternalError("shapes do not match")))


# -- for an engine -----------------------------------------------------------------------------------------------


def test_a_model_has_room_for_what_its_engine_will_ask() -> None:
    engine = EngineConfig(
        max_batch_prefill_tokens=99, max_num_seqs=7, max_batch_total_tokens=4_000, max_total_tokens=300
    )
    sized = ModelConfig("m").sized_for(engine)
    assert (sized.step_tokens, sized.step_seqs, sized.kv_tokens, sized.max_model_len) == (99, 7, 4_000, 300)
    own = ModelConfig("m", max_model_len=200, kv_memory=5).sized_for(engine)
    assert (own.kv_tokens, own.kv_memory, own.max_model_len) == (None, 5, 200)


def test_whole_prompts_need_steps_that_hold_them() -> None:
    whole = EngineConfig(chunked_prefill=False, max_input_tokens=3_000)
    assert ModelConfig().sized_for(whole).step_tokens == 3_000
    assert ModelConfig().sized_for(EngineConfig(chunked_prefill=False)).step_tokens == 1_024


def test_a_real_model_is_sized_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="bridle")
    path = str(tiny_checkpoints.cached_checkpoint("llama"))
    executor = load_executor(ModelConfig(path, block_size=4, max_model_len=64, step_tokens=16, step_seqs=3))
    info = executor.info
    assert (info.num_blocks, info.max_num_batched_tokens, info.max_num_seqs) == (8 * 16, 16, 3)
    assert "the largest step (16 prompt tokens, 3 sequences) takes" in caplog.text
    assert "the KV cache holds 512 tokens" in caplog.text
    executor.close()


# -- what there is -----------------------------------------------------------------------------------------------


def test_the_peak_is_what_was_taken_for_a_while() -> None:
    size = 64 << 20

    def take() -> int:
        torch.ones(size, dtype=torch.uint8)
        return 5

    result, peak = memory.run_with_peak(CPU, take)
    assert result == 5
    assert size // 2 < peak < 8 * size
    kept: list[torch.Tensor] = []
    _, peak = memory.run_with_peak(CPU, lambda: kept.append(torch.ones(size, dtype=torch.uint8)))
    assert peak < size // 2  # what stays is not free afterwards, and is not counted twice


def test_a_control_group_bounds_what_is_free(tmp_path: Path) -> None:
    outer = tmp_path / "service"
    inner = outer / "app"
    inner.mkdir(parents=True)
    for folder, limit, usage in ((outer, "5000", 3_000), (inner, "max", 1_000)):
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{usage}\n")
        (folder / "memory.stat").write_text("anon 900\ninactive_file 400\n")
    membership = tmp_path / "membership"
    membership.write_text("0::/service/app\n")
    assert memory_room(tmp_path, membership) == 2_400
    membership.write_text("0::/elsewhere\n")
    assert memory_room(tmp_path, membership) is None
    assert memory_room(tmp_path, tmp_path / "nothing") is None


def test_a_control_group_of_the_first_version_counts_too(tmp_path: Path) -> None:
    group = tmp_path / "memory" / "box"
    group.mkdir(parents=True)
    (group / "memory.limit_in_bytes").write_text("9000")
    (group / "memory.usage_in_bytes").write_text("8000")
    (group / "memory.stat").write_text("total_inactive_file 500\n")
    membership = tmp_path / "membership"
    membership.write_text("9:name=systemd:/\n4:memory:/box\n0::/\n")
    assert memory_room(tmp_path, membership) == 1_500
