"""Tests that streams continue on another replica when their replica is killed or stopped, and that a lost replica is
restarted."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from bridle.config import EngineConfig
from bridle.distributed import replica_link
from bridle.errors import InvalidRequest
from bridle.launch.replicas import LaunchedReplicas, ReplicaLoader, load_replicated
from bridle.outputs import FinishReason
from bridle.serving.controller_runtime import ControlSettings
from tests.launch.kit import Crowd, children_of, expected, num_descriptors, requests
from tests.waiting import PATIENCE

COMMAND = [sys.executable, "-m", "tests.launch.scripted_replica"]


@pytest.fixture
def replicas(monkeypatch: pytest.MonkeyPatch) -> Iterator[LaunchedReplicas]:
    monkeypatch.setattr(replica_link, "SILENCE_SECONDS", 4.0)  # longer than one that runs may wait for a processor
    made = LaunchedReplicas([COMMAND] * 2, start_timeout=PATIENCE)
    yield made
    made.close()
    assert not children_of(COMMAND[-1])  # other children are of fixtures that start them at any time


def lose(replicas: LaunchedReplicas, number: int, how: signal.Signals, crowd: Crowd) -> None:
    """Send a signal to a replica's process; return when its loss was noticed and every unfinished stream has
    resumed."""
    before, pid = replicas.num_losses, replicas.children[number].pid
    if pid is not None:
        os.kill(pid, how)
    while replicas.num_losses == before and not crowd.is_over and pid is not None:
        assert crowd.wait(1), "nobody goes on"
    assert crowd.wait_each(), "not everybody goes on"


def check_streams(crowd: Crowd, made: list[object]) -> None:
    crowd.join()
    for reader, outputs in zip(crowd.readers, expected(made), strict=True):  # type: ignore[arg-type]
        assert reader.reasons == {FinishReason.LENGTH}, reader.events[-1]
        assert reader.outputs == outputs


STOPPED = pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)  # found as `test_loss.py` finds a shard that stopped


@pytest.mark.few(1)
@pytest.mark.parametrize("how", [signal.SIGKILL, STOPPED], ids=["killed", "stopped"])
def test_streams_go_on_at_the_other_replica(replicas: LaunchedReplicas, how: signal.Signals) -> None:
    made = requests(12, 400)  # so many that they are not over before a replica is missed
    crowd = Crowd(replicas, made)
    assert crowd.wait(200)
    lose(replicas, 0, how, crowd)
    assert replicas.is_healthy
    check_streams(crowd, list(made))
    assert replicas.num_losses >= 1


def test_the_next_replica_has_as_many_blocks(replicas: LaunchedReplicas) -> None:
    """A restarted replica gets as many KV blocks as before, although less memory is free while other replicas run."""
    assert [child.command[-2:] for child in replicas.children] == [["--num-blocks", str(1 << 15)]] * 2


@pytest.mark.slow
def test_a_replica_that_does_not_come_up_is_started_again(replicas: LaunchedReplicas) -> None:
    child = replicas.children[0]
    replicas.start_timeout = 0.0  # nobody is as quick as that
    child.kill()
    with child.changed:
        assert child.changed.wait_for(lambda: child.num_ends > 1, PATIENCE)
    assert replicas.is_healthy
    replicas.start_timeout = 60.0
    with replicas.changed:
        assert replicas.changed.wait_for(lambda: replicas.num_up == 2, PATIENCE)


@pytest.mark.slow
def test_twenty_losses_under_a_hundred_streams(replicas: LaunchedReplicas) -> None:
    Crowd(replicas, requests(100, 5)).join()
    descriptors, memory = num_descriptors(), psutil.Process().memory_info().rss
    made = requests(100, 300, max_n=1)  # those with several outputs would begin again twenty times
    crowd = Crowd(replicas, made)
    for number in range(20):
        assert crowd.wait(100)
        with replicas.changed:  # the other one is there to take over
            replicas.changed.wait_for(lambda: replicas.num_up == 2, PATIENCE)
        lose(replicas, number % 2, signal.SIGSTOP if number % 5 == 4 else signal.SIGKILL, crowd)
    check_streams(crowd, list(made))
    assert num_descriptors() <= descriptors + 4
    assert psutil.Process().memory_info().rss < memory + (64 << 20)


def test_what_replicas_cannot_do_is_refused() -> None:
    from bridle.config import ModelConfig

    with pytest.raises(InvalidRequest, match="each replica has its own; set replicas to 1"):
        ReplicaLoader(2, 0, EngineConfig(), ControlSettings(trace=Path("trace.jsonl")))
    with pytest.raises(InvalidRequest, match="replicas is 0"):
        load_replicated(ModelConfig(), EngineConfig(), 0)
