"""Tests of host memory for a device's blocks: it is bounded, evicts the least recently used blocks, and keeps blocks
during a read."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridle.kv_store import BlockStore, HostMemory, NoDisk, SegmentStore, background, host_memory
from bridle.kv_store.records import copy_block
from tests.kv_store.kit import BLOCK, LIMIT, block_of, key_of, loaded, offer, tag
from tests.waiting import PATIENCE


def allocate(num_bytes: int) -> memoryview:
    return memoryview(bytearray(num_bytes))


def put(memory: HostMemory, number: int, size: int = BLOCK) -> bool:
    fill = partial(copy_block, block_of(number, size))
    return memory.put(key_of(number), tag(""), size, fill) is not None


def found(memory: HostMemory, number: int, size: int = BLOCK) -> bool:
    with memory.lend(key_of(number), size) as lent:
        assert lent is None or bytes(lent) == block_of(number, size)
        return lent is not None


@given(seed=st.integers(0, 1 << 30), limit=st.integers(0, 9 * BLOCK), piece=st.sampled_from([1, 2 * BLOCK, 1 << 20]))
def test_what_is_found_is_right_and_memory_is_bounded(seed: int, limit: int, piece: int) -> None:
    """Random blocks and states of two sizes are stored. The last stored block is present, unless no block fits."""
    random, taken = Random(seed), []

    def counted(num_bytes: int) -> memoryview:
        taken.append(num_bytes)
        return allocate(num_bytes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_memory, "PIECE_BYTES", piece)
        memory = HostMemory(limit, counted)
        for _ in range(60):
            number = random.randrange(20)
            size = BLOCK if number % 4 else 700
            if random.random() < 0.5:
                assert put(memory, number, size) == found(memory, number, size)
            else:
                found(memory, number, size)
            assert sum(taken) == memory.num_bytes <= limit


def test_the_least_recently_used_goes_first_and_none_that_is_read() -> None:
    memory = HostMemory(3 * BLOCK, allocate)
    assert all(put(memory, number) for number in range(3))
    assert found(memory, 0)
    with memory.lend(key_of(1), BLOCK) as lent:
        assert put(memory, 3)
        assert put(memory, 4)
        assert lent is not None
        assert bytes(lent) == block_of(1)
    assert [found(memory, number) for number in range(5)] == [False, True, False, True, True]
    assert (memory.num_evicted, len(memory)) == (2, 3)


def test_a_block_whose_copy_fails_takes_no_room() -> None:
    memory = HostMemory(BLOCK, allocate)
    with pytest.raises(ZeroDivisionError):
        memory.put(key_of(0), tag(""), BLOCK, lambda memory: 1 / 0)  # type: ignore[arg-type,return-value]
    assert put(memory, 1)
    assert not found(memory, 0)


def test_a_machine_without_more_memory_keeps_what_it_has() -> None:
    def refuse(num_bytes: int) -> memoryview:
        raise RuntimeError("no memory can be pinned")

    memory = HostMemory(BLOCK, refuse)
    assert not put(memory, 0)
    assert memory.limit == 0


def test_blocks_are_read_from_memory_and_written_to_the_disk_at_its_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "RATE", 0)  # only what may be written at once
    memory = HostMemory(5 * BLOCK, allocate)
    target = BlockStore(SegmentStore(tmp_path, "model", LIMIT), 1 << 20, 2 * BLOCK, memory)
    assert all(offer(target, number) for number in range(7))
    assert target.flush(time.monotonic() + PATIENCE)
    assert [target.has(key_of(number)) for number in range(7)] == [True] * 7
    assert (len(memory), len(target.store), target.num_dropped) == (5, 2, 0)
    assert loaded(target, range(7)) == {number: block_of(number) for number in range(7)}
    assert memory.num_read == 5
    target.close()


def test_memory_alone_keeps_what_it_has_room_for() -> None:
    target = BlockStore(NoDisk("root"), memory=HostMemory(2 * BLOCK, allocate))
    assert all(offer(target, number) for number in range(3))
    assert target.flush(time.monotonic() + PATIENCE)
    assert [target.has(key_of(number)) for number in range(3)] == [False, True, True]
    assert loaded(target, range(1, 3)) == {number: block_of(number) for number in (1, 2)}
    assert not target.is_lasting
    target.close()
