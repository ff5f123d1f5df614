"""The steps that `bridle bench shard` times are steps that an engine could ask for. Times are never asserted."""

from __future__ import annotations

import pytest

from bridle.testing.scripted import ScriptedExecutor
from dev.bench.grpc_echo import measure_echo
from dev.bench.shard import Decoding, _compare
from tests.distributed.kit import hosted


def make_executor() -> ScriptedExecutor:
    return ScriptedExecutor(vocab_size=64, num_blocks=200, block_size=16, record=True)


@pytest.mark.parametrize("is_masked", [False, True])
def test_steps_keep_the_contract(is_masked: bool) -> None:
    executor = make_executor()
    decoding = Decoding(executor, 3, is_masked)
    for _ in range(40):
        decoding.step()
    assert not executor.violations
    assert {row.mask is not None for batch in executor.batches for row in batch.rows} == {is_masked}


def test_here_and_there_are_compared() -> None:
    there = make_executor()
    with hosted(there) as host:
        remote = host.connect()
        figures = _compare(Decoding(make_executor(), 2, True), Decoding(remote, 2, True), num_steps=3)
        remote.close()
    assert set(figures) == {"local_milliseconds", "shard_milliseconds", "overhead_milliseconds"}
    assert not there.violations


def test_grpc_is_timed_by_itself() -> None:
    assert measure_echo(3) > 0
