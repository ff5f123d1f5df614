"""Tests of KV of a device in host memory, with a device that answers late: tokens are unchanged, memory is limited, and
no step waits."""

from __future__ import annotations

import threading
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridle.config import EngineConfig
from bridle.engine.engine import Engine
from bridle.errors import InvalidRequest, ShardUnavailable
from bridle.kv_store import BlockStore, HostMemory, NoDisk, SegmentStore
from bridle.serving.models.kv_store import open_store
from bridle.testing.async_executor import LateCopy, LateScriptedExecutor
from bridle.testing.scripted import ScriptedExecutor
from tests.engine.programs import VOCAB
from tests.engine.random_labs import SEED
from tests.engine.store_lab import LIMIT, StoreLab, flood, num_cached, prompt_of, run_failing, run_random
from tests.engine.support import check_against_reference, make_request


class HostLab(StoreLab):
    """A lab whose device answers late, with host memory for KV. It also has a disk unless `is_memory_alone`."""

    Scripted = LateScriptedExecutor

    def __init__(self, folder: Path, *, host_bytes: int = 1 << 20, is_memory_alone: bool = False, **options: Any):
        self.host_bytes, self.is_memory_alone = host_bytes, is_memory_alone
        super().__init__(folder, **options)

    def make_one(self, config: EngineConfig) -> Engine:
        blocks = self.executor.kv_blocks
        assert hasattr(blocks, "allocate_host")
        self.memory = HostMemory(self.host_bytes, blocks.allocate_host)
        root = blocks.identity()
        disk = NoDisk(root) if self.is_memory_alone else SegmentStore(self.folder, root, self.limit)
        self.store = BlockStore(disk, memory=self.memory)
        executor, pools = self.connect(self.executor), self.pools
        return Engine(executor, config, pools=pools, decoder=self.decoder, clock=self.clock, store=self.store)


def test_what_was_evicted_is_read_from_the_host(tmp_path: Path) -> None:
    lab = HostLab(tmp_path, is_memory_alone=True)
    first = lab.run_one(prompt_of(1), max_tokens=4)
    flood(lab)
    lab.settle()
    again = lab.run_one(prompt_of(1), max_tokens=4)
    assert (again.first.tokens, num_cached(again)) == (first.first.tokens, 28)
    statistics = lab.engine.statistics()
    assert (statistics.num_host_reads, statistics.num_restored_tokens) == (7, 28)
    assert statistics.num_host_blocks >= 7
    assert statistics.num_host_bytes == lab.memory.num_bytes <= lab.host_bytes
    assert (statistics.num_stored_blocks, lab.engine.rest()) == (0, None)
    lab.engine.close()


@given(
    seed=SEED,
    host_bytes=st.sampled_from([64, 300, 2_000, 1 << 20]),
    disk=st.sampled_from([None, 0, 40_000, LIMIT]),
    waits=st.booleans(),
)
def test_tokens_are_the_same_whatever_memory_and_disk_do(
    tmp_path_factory: pytest.TempPathFactory, seed: int, host_bytes: int, disk: int | None, waits: bool
) -> None:
    folder, random = tmp_path_factory.mktemp("host"), Random(seed)
    options: dict[str, Any] = {
        "host_bytes": host_bytes,
        "is_memory_alone": disk is None,
        "limit": disk or 0,
        "vocab_size": VOCAB,
        "num_blocks": random.choice([12, 24, 64]),
        "num_states": random.choice([0, 1, 5, 40]),
    }
    for _ in range(2):
        faults = {random.randrange(40): ShardUnavailable("the device went away")} if random.random() < 0.3 else {}
        lab = HostLab(folder, faults=faults, **options)
        lab.waits = waits or bool(faults)
        try:
            if faults:
                run_failing(lab)
            else:
                run_random(lab, random, 6)
        finally:
            lab.engine.close()
        assert lab.memory.num_bytes <= host_bytes


def test_the_engine_waits_for_no_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other threads wait for copies to the host, and steps start before earlier steps are done."""
    threads: set[str] = set()
    copy_into = LateCopy.copy_into

    def noted(self: LateCopy, memory: memoryview) -> None:
        threads.add(threading.current_thread().name)
        copy_into(self, memory)

    monkeypatch.setattr(LateCopy, "copy_into", noted)
    lab = HostLab(tmp_path, is_memory_alone=True)
    for number in range(3):
        lab.run_one(prompt_of(number), max_tokens=9)
        flood(lab)
    lab.settle()
    assert threads
    assert all(name.startswith("bridle-kv-") for name in threads)
    assert isinstance(lab.executor, LateScriptedExecutor)
    assert lab.executor.num_ahead > 0
    lab.engine.close()


@pytest.mark.parametrize("num_states", [0, 8])
def test_no_other_tenant_finds_a_block_on_the_host(tmp_path: Path, num_states: int) -> None:
    lab = HostLab(tmp_path, is_memory_alone=True, num_states=num_states)
    lab.run_one(prompt_of(1), tenant="a", max_tokens=1)
    flood(lab)
    lab.settle()
    for other in ({"tenant": "b"}, {"tenant": "a", "adapter": "x"}):
        assert num_cached(lab.run_one(prompt_of(1), max_tokens=1, **other)) == 0
    lab.engine.close()


def test_what_the_host_held_is_on_the_disk_after_the_end(tmp_path: Path) -> None:
    """All blocks in host memory are on disk, even those that were delayed by the disk's rate limit."""
    lab = HostLab(tmp_path)
    lab.store.disk.take(1 << 30)
    want = lab.run_one(prompt_of(1), max_tokens=4)
    flood(lab)
    lab.settle()
    lab.engine.close()
    lab = HostLab(tmp_path)
    got = lab.run_one(prompt_of(1), max_tokens=4)
    assert (got.first.tokens, num_cached(got)) == (want.first.tokens, 28)
    lab.engine.close()


def test_blocks_of_a_lost_device_are_read_again(tmp_path: Path) -> None:
    lab = HostLab(tmp_path, is_memory_alone=True, faults={14: ShardUnavailable("the device went away")})
    lab.run_one(prompt_of(1), max_tokens=1)
    flood(lab)
    lab.settle()
    number = 0
    while not lab.engine.statistics().num_failed_steps:
        number += 1
        request = make_request([number], max_tokens=3)
        check_against_reference(lab, request, lab.run(request)[0])
    assert num_cached(lab.run_one(prompt_of(1), max_tokens=1)) == 28
    lab.engine.close()


def test_memory_of_the_host_is_for_devices() -> None:
    with pytest.raises(InvalidRequest, match=r"kv_host_bytes is 1024; .* a model on a GPU .* kv_memory"):
        open_store(ScriptedExecutor(), EngineConfig(kv_host_bytes=1024))
    with pytest.raises(InvalidRequest, match="kv_host_bytes is 8; must be at least 64"):
        open_store(LateScriptedExecutor(), EngineConfig(kv_host_bytes=8))
    with pytest.raises(InvalidRequest, match="kv_host_bytes is -1; must be at least 0"):
        EngineConfig(kv_host_bytes=-1)
    store = open_store(LateScriptedExecutor(), EngineConfig(kv_host_bytes=1024))
    assert store is not None
    assert store.host is not None
    assert not store.readers.pace  # what reads does not slow a GPU down
    store.close()
    assert open_store(LateScriptedExecutor(), EngineConfig(kv_store="auto")) is None  # on a GPU it is asked for
