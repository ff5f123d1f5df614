"""Tests of the adapter pool, which keeps adapters on device and host within two limits: loads, evictions and waits. No
request waits for the load of another request's adapter."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridle.engine import EngineStatistics
from bridle.errors import AdapterRefused, EngineClosed, ModelUnavailable, ShardUnavailable, UnknownAdapter
from bridle.lora import AdapterFiles, open_adapter
from bridle.lora.cache_policy import TURN_STEPS, CachedAdapter, Residency
from bridle.lora.layout import AdapterPlacement, IndexRange, make_layout
from bridle.lora.negative_cache import FAILURE_SECONDS
from tests.lora.kit import LAYERS, SECONDS, Bench, size_of, write_adapter


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> AdapterFiles:
    return open_adapter(write_adapter(tmp_path_factory.mktemp("adapter")))


@pytest.fixture
def bench(files: AdapterFiles) -> Iterator[Bench]:
    made = Bench(files, 2, 3)
    yield made
    made.pool.close()


def test_what_is_wanted_comes_in_the_background(bench: Bench) -> None:
    bench.device.gate.clear()
    bench.add("a", "b")
    assert bench.step("a") == set()
    assert bench.pool.status("a").state == "loading"
    assert bench.step("a", "b") == set()  # at once, however long the disk takes
    bench.device.gate.set()
    bench.step_until({"a", "b"}, "a", "b")
    assert bench.pool.status("a").state == "device"
    assert bench.pool.status("a").num_users == 1


def test_fetching_brings_to_the_host_only(bench: Bench) -> None:
    bench.add("a", use=False)
    assert bench.pool.status("a").state == "known"
    bench.pool.fetch("a").result(SECONDS)
    assert (bench.device.host, bench.device.device) == ({"a"}, set())
    assert bench.pool.status("a").state == "host"
    bench.pool.fetch("a").result(0)


def test_the_least_recently_used_leave_first(bench: Bench) -> None:
    bench.add("a", "b", "c")
    bench.step_until({"a"}, "a")
    bench.step_until({"b"}, "b")
    bench.step_until({"a"}, "a")
    bench.step_until({"c"}, "c")
    assert bench.device.device == {"a", "c"}
    bench.add("d")  # not before: while one leaves the host for it, the same cannot leave the device
    bench.step_until({"d"}, "d")
    assert bench.device.device == {"c", "d"}
    assert bench.device.most_on_device == 2
    assert bench.device.most_on_host <= 3


def test_more_than_fit_take_turns(bench: Bench) -> None:
    keys = ("a", "b", "c", "d", "e")
    bench.add(*keys)
    served = dict.fromkeys(keys, 0)
    end = time.monotonic() + SECONDS
    while min(served.values()) <= 2 * TURN_STEPS:
        assert time.monotonic() < end, served
        bench.changed.clear()
        for key in bench.step(*keys):
            served[key] += 1
        if not bench.device.device:
            bench.changed.wait(0.01)
    assert bench.device.most_on_device == 2


def test_what_fails_is_told_once_and_tried_again(bench: Bench) -> None:
    bench.device.fault = AdapterRefused("damaged", "source")
    bench.add("a", "b")
    failures = dict(bench.pool.take_failures())
    while len(failures) < 2:
        bench.changed.wait(0.01)
        fresh = bench.pool.take_failures()
        assert not fresh.keys() & failures.keys()
        failures |= fresh
    assert {key: str(error) for key, error in failures.items()} == {"a": "damaged", "b": "damaged"}
    assert bench.pool.take_failures() == {}
    assert (bench.pool.status("a").state, bench.pool.status("a").error) == ("failed", "damaged")
    with pytest.raises(AdapterRefused, match="damaged"):
        bench.pool.fetch("b").result(SECONDS)
    bench.device.fault = None
    bench.pool.leave("a")
    bench.clock.advance(FAILURE_SECONDS)
    bench.pool.open("a")  # another request tries again
    bench.step_until({"a"}, "a")


def test_what_failed_is_not_read_again_for_every_request(bench: Bench) -> None:
    bench.device.fault = AdapterRefused(f"{bench.files.folder}/adapter_model.safetensors is damaged", "source")
    bench.add("a#digest", use=False)
    with pytest.raises(AdapterRefused):
        bench.pool.fetch("a#digest").result(SECONDS)
    for _ in range(100):
        with pytest.raises(AdapterRefused, match=r"^a/adapter_model.safetensors is damaged$") as refusal:
            bench.pool.check_known("a#digest")
        assert refusal.value.param == "source"
        with pytest.raises(AdapterRefused, match="is damaged"):
            bench.pool.fetch("a#digest").result(0)
    bench.pool.open("a#digest")  # it had been checked a moment before it failed
    assert list(bench.pool.take_failures()) == ["a#digest"]
    assert bench.step("a#digest") == set()
    assert bench.device.num_reads == 1 and bench.pool.status("a#digest").state == "failed"


def test_what_was_mended_is_read_at_once(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path)
    bench = Bench(open_adapter(folder), 2, 3)
    bench.device.fault = AdapterRefused("damaged", "source")
    bench.add("a", use=False)
    with pytest.raises(AdapterRefused):
        bench.pool.fetch("a").result(SECONDS)
    bench.device.fault = None
    with pytest.raises(AdapterRefused):
        bench.pool.fetch("a").result(0)
    os.utime(folder / "adapter_model.safetensors", ns=(1, 1))
    bench.pool.check_known("a")
    bench.pool.fetch("a").result(SECONDS)
    assert bench.pool.status("a").state == "host" and bench.device.num_reads == 2
    bench.pool.close()


def test_what_is_added_anew_is_read_at_once(bench: Bench) -> None:
    bench.device.fault = AdapterRefused("damaged", "source")
    bench.add("a", use=False)
    with pytest.raises(AdapterRefused):
        bench.pool.fetch("a").result(SECONDS)
    bench.device.fault = None
    bench.pool.remove("a")
    bench.add("a", use=False)
    bench.pool.fetch("a").result(SECONDS)


def test_a_fault_of_ours_is_no_crash(bench: Bench) -> None:
    bench.device.fault = MemoryError("no room")
    bench.add("a")
    with pytest.raises(ModelUnavailable, match="MemoryError: no room") as caught:
        bench.pool.fetch("a").result(SECONDS)
    assert caught.value.retry_after == FAILURE_SECONDS
    bench.device.fault = None
    bench.clock.advance(FAILURE_SECONDS)
    bench.pool.fetch("a").result(SECONDS)


def test_a_lost_device_has_nothing_any_more(bench: Bench) -> None:
    bench.add("a")
    bench.step_until({"a"}, "a")
    bench.device.lose()
    assert bench.step("a") == set()
    bench.step_until({"a"}, "a")


def test_a_device_that_is_away_is_waited_for(bench: Bench) -> None:
    bench.device.fault = ShardUnavailable("away")
    bench.add("a")
    future = bench.pool.fetch("a")
    assert not bench.changed.wait(0.05)
    bench.device.fault = None
    future.result(SECONDS)


def test_what_is_removed_stays_for_those_who_use_it(bench: Bench) -> None:
    bench.add("a")
    bench.step_until({"a"}, "a")
    bench.pool.remove("a")
    with pytest.raises(UnknownAdapter):
        bench.pool.open("a")
    with pytest.raises(UnknownAdapter):
        bench.pool.check_known("a")
    assert bench.step("a") == {"a"}
    bench.changed.clear()
    bench.pool.leave("a")
    assert bench.changed.wait(SECONDS)
    assert (bench.device.host, bench.device.device) == (set(), set())
    assert bench.pool.status("a").state == "known"
    with pytest.raises(UnknownAdapter):
        bench.pool.fetch("a")
    bench.add("a")
    bench.step_until({"a"}, "a")


def test_closing_lets_nobody_wait(files: AdapterFiles) -> None:
    bench = Bench(files, 2, 3)
    bench.device.gate.clear()
    bench.add("a")
    future = bench.pool.fetch("a")
    threading.Timer(0.05, bench.device.gate.set).start()
    bench.pool.close()
    with pytest.raises(EngineClosed):
        future.result(0)
    with pytest.raises(EngineClosed):
        bench.pool.fetch("a")
    bench.pool.close()


def test_what_can_never_fit_is_refused_at_once(files: AdapterFiles, tmp_path: Path) -> None:
    bench = Bench(files, 1, 1)
    large = open_adapter(write_adapter(tmp_path, rank=16))
    with pytest.raises(AdapterRefused, match=f"needs {2 * size_of(files)} bytes on the device"):
        bench.pool.check(large)
    bench.pool.check(files)


@pytest.mark.parametrize("rank", [1, 7, 8, 9])
def test_what_is_counted_is_what_it_takes(rank: int, tmp_path: Path) -> None:
    """The bytes that the pool counts for an adapter equal its layout's size on the device, where ranks are padded."""
    files = open_adapter(write_adapter(tmp_path, rank=rank))
    places = {
        name: AdapterPlacement(
            number,
            IndexRange(0, layer.out_features),
            IndexRange(0, layer.in_features),
            IndexRange(0, layer.out_features),
        )
        for number, (name, layer) in enumerate(LAYERS.items())
    }
    assert size_of(files) == 4 * make_layout(files.shapes, places).num_values


@given(st.data())
def test_books_stay_within_their_memory(files: AdapterFiles, data: st.DataObject) -> None:
    """After any order of steps, reads and placements, both memories are within their limits, and a step's adapters
    stay."""
    size, num = files.num_bytes, 6
    books = Residency(data.draw(st.integers(1, 4)) * size, data.draw(st.integers(1, 4)) * size)
    for number in range(num):
        key = str(number)
        books.known[key] = CachedAdapter(key, files, size * data.draw(st.integers(1, 1)))
    available: set[str] = set()
    for _ in range(data.draw(st.integers(1, 60))):
        action = data.draw(st.sampled_from(["step", "read", "place", "lose"]))
        if action == "step":
            keys = data.draw(st.lists(st.sampled_from(sorted(books.known)), unique=True))
            available = books.begin_step(keys)
        elif action == "lose" and data.draw(st.booleans()):
            books.lose_everything()
            available = set()
        elif action == "read" and (held := books.next_to_read()) is not None:
            leavers = books.leavers_of_host(held.host_bytes)
            for other in leavers or ():
                del books.on_host[other.key]
            if leavers is not None:
                books.on_host[held.key] = held
        elif action == "place" and (held := books.next_to_place()) is not None:
            leavers = books.leavers_of_device(held.device_bytes)
            for other in leavers or ():
                assert other.key not in available, "the step under way may use it"
                del books.on_device[other.key]
            if leavers is not None:
                books.note_placed(held)
        assert sum(held.device_bytes for held in books.on_device.values()) <= books.device_memory
        assert sum(held.host_bytes for held in books.on_host.values()) <= books.host_memory


def test_what_came_and_went_is_counted(bench: Bench) -> None:
    """The pool counts reads, placements and evictions with two adapters' memory on the device and three adapters' on
    the host."""
    for number, key in enumerate("abcde"):
        bench.add(key)
        bench.step_until({key}, key)
        counts = bench.pool.counts()
        assert counts["num_adapter_reads"] == counts["num_adapter_placements"] == number + 1
    assert counts == {
        "num_adapters": 5,
        "num_adapters_on_host": 3,
        "num_adapters_on_device": 2,
        "num_adapter_reads": 5,
        "num_adapter_placements": 5,
        "num_adapter_host_evictions": 2,
        "num_adapter_device_evictions": 3,
    }
    assert counts.keys() <= {field.name for field in fields(EngineStatistics)}
    bench.pool.remove("a")
    assert bench.pool.counts()["num_adapters"] == 4
