"""Tests of a store's threads: offered blocks are copied, the queue is bounded, and a load gives a correct prefix."""

from __future__ import annotations

import os
import threading
import time
from itertools import count
from pathlib import Path

import pytest

from bridle.kv_store import BlockStore, LoadedBlock, SegmentStore, background, readers
from bridle.testing.clock import FakeClock
from tests.kv_store.kit import BLOCK, LIMIT, block_of, found_in, key_of, loaded, offer, tag
from tests.waiting import PATIENCE, until


def opened(folder: Path, max_queued_bytes: int = 1 << 20) -> BlockStore:
    return BlockStore(SegmentStore(folder, "model", LIMIT), max_queued_bytes)


def test_what_is_offered_is_written_and_can_be_loaded(tmp_path: Path) -> None:
    target, changes = opened(tmp_path), threading.Event()
    target.on_change = changes.set
    assert all(offer(target, number) for number in range(6))
    assert target.flush(time.monotonic() + PATIENCE)
    assert loaded(target, range(6)) == {number: block_of(number) for number in range(6)}
    assert changes.wait(PATIENCE)
    assert (target.num_written, target.num_read, target.read_bytes) == (6, 6, 6 * BLOCK)
    assert target.count_present([key_of(number) for number in range(9)]) == 6
    target.close()
    assert found_in(SegmentStore(tmp_path, "model", LIMIT), range(9)) == set(range(6))


def test_a_load_ends_at_the_first_block_that_is_not_right(tmp_path: Path) -> None:
    target = opened(tmp_path)
    for number in range(6):
        offer(target, number)
    assert target.flush(time.monotonic() + PATIENCE)
    segment, position = target.store.index[key_of(3)]
    file = os.open(segment.path, os.O_WRONLY)
    os.pwrite(file, b"wrong", position + 500)
    os.close(file)
    assert loaded(target, range(6)) == {number: block_of(number) for number in range(3)}
    assert target.count_present([key_of(number) for number in range(6)]) == 3  # it is not tried again
    target.close()


def test_reading_rests_beside_others_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, rests, seconds = opened(tmp_path), list[float](), count(1)
    for number in range(6):
        offer(target, number)
    monkeypatch.setattr(readers.time, "thread_time", lambda: next(seconds))
    monkeypatch.setattr(target.readers, "rest", rests.append)
    assert set(loaded(target, range(6))) == set(range(6))
    assert not rests
    assert set(loaded(target, range(6), is_beside=True)) == set(range(6))
    assert rests == [readers.PACE] * 6
    target.close()


def test_a_full_queue_drops_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, going_on = opened(tmp_path, 2 * BLOCK), threading.Event()
    append = target.store.append

    def slow(key: bytes, tenant: bytes, block: bytes) -> bool:
        assert going_on.wait(PATIENCE)
        return append(key, tenant, block)

    monkeypatch.setattr(target.store, "append", slow)
    assert [offer(target, number) for number in (0, 1, 0, 2)] == [True, True, True, False]
    assert not target.flush(time.monotonic() + 0.01)
    assert target.num_dropped == 1
    assert target.count_present([key_of(number) for number in range(3)]) == 2
    assert loaded(target, range(3)) == {number: block_of(number) for number in range(2)}  # from the queue
    going_on.set()
    assert target.flush(time.monotonic() + PATIENCE)
    assert offer(target, 2)
    target.stop()  # writes what is queued
    assert target.num_written == 3
    assert not offer(target, 4)
    assert target.write(key_of(4), tag(""), block_of(4))
    target.close()
    assert found_in(SegmentStore(tmp_path, "model", LIMIT), range(9)) == {0, 1, 2, 4}


def test_more_than_a_disk_should_take_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    monkeypatch.setattr(background.time, "monotonic", clock)
    target = BlockStore(SegmentStore(tmp_path, "model", LIMIT), burst_bytes=2 * BLOCK)
    assert [offer(target, number) for number in range(4)] == [True, True, False, False]
    clock.advance(1.5 * BLOCK / background.RATE)
    assert [offer(target, number) for number in range(4)] == [True, True, True, False]
    clock.advance(60.0)
    assert [offer(target, number) for number in range(3, 7)] == [True, True, False, False]
    target.close()
    assert target.num_written == 5


def test_an_error_of_the_store_or_of_the_device_drops_blocks_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = opened(tmp_path)
    append = target.store.append
    monkeypatch.setattr(target.store, "append", lambda *given: 1 / 0)
    offer(target, 0)
    assert target.flush(time.monotonic() + PATIENCE)
    monkeypatch.setattr(target.store, "append", append)
    offer(target, 1)
    assert target.flush(time.monotonic() + PATIENCE)
    assert (target.num_written, target.num_dropped) == (1, 1)

    def refuse(data: memoryview) -> None:
        raise ValueError("no such block")

    load = target.load([LoadedBlock(key_of(1), BLOCK, refuse)])
    until(lambda: load.is_done, "the load")
    assert load.num_loaded == 0
    target.close()
