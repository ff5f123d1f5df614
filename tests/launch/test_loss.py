"""Tests that every stream continues at its position when its shard is killed or stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from types import SimpleNamespace

import psutil
import pytest

from bridle.config import ModelConfig
from bridle.engine import AsyncEngine, Engine, Request
from bridle.errors import ShardUnavailable, UnsupportedFeature
from bridle.launch import launcher
from bridle.launch.launcher import LaunchedShard, shard_arguments
from bridle.launch.sockets import make_socket_folder
from bridle.launch.supervised_process import describe
from bridle.outputs import Finished, FinishReason
from bridle.sampling import SamplingParams
from tests.launch.kit import ROOT, Crowd, Reader, await_spare, expected, launch, num_descriptors, requests
from tests.launch.scripted_shard import DEADLY_TOKEN
from tests.owners import child_ids
from tests.waiting import PATIENCE, until


@pytest.fixture
def shard() -> Iterator[LaunchedShard]:
    made = launch()
    yield made
    made.close()
    assert not psutil.pid_exists(made.child.pid or -1)


def lose(shard: LaunchedShard, how: signal.Signals, crowd: Crowd) -> None:
    """Send a signal to the shard's process; return when every unfinished stream has resumed."""
    before = shard.num_losses
    assert shard.child.pid is not None
    os.kill(shard.child.pid, how)
    while shard.num_losses == before and not crowd.is_over:
        time.sleep(0.005)
    assert crowd.wait_each(), "not everybody goes on"


def check_streams(crowd: Crowd, made: list[Request]) -> None:
    crowd.join()
    for reader, request, outputs in zip(crowd.readers, made, expected(made), strict=True):
        assert reader.reasons == {FinishReason.LENGTH}
        assert reader.outputs == outputs
        assert request.tell_resuming or not reader.num_resuming


def check_nothing_left(engine: AsyncEngine) -> None:
    statistics = engine.statistics()
    assert statistics.num_free_blocks == statistics.num_blocks
    assert statistics.num_running == statistics.num_waiting == 0


@pytest.mark.few(1)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_streams_survive_the_loss_of_their_shard(shard: LaunchedShard, how: signal.Signals) -> None:
    made = requests(10, 400)  # so many that they are not over before the shard is lost
    with AsyncEngine(Engine(shard)) as engine:
        crowd = Crowd(engine, made)
        assert crowd.wait(200)
        lose(shard, how, crowd)
        check_streams(crowd, made)
        check_nothing_left(engine)
        assert engine.is_healthy
    assert all(reader.num_resuming for reader in crowd.readers[::2])


@pytest.mark.slow  # `test_warm_standby.py` has the same with small processes
def test_the_shard_that_stands_by_takes_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bridle.launch.warm_standby.PAUSE_SECONDS", 0.0)
    before, made = child_ids(), requests(10, 400)
    shard = launch(stands_by=True)
    with AsyncEngine(Engine(shard)) as engine:
        Crowd(engine, requests(1, 3)).join()  # the next one stands by once the first has computed
        spare = await_spare(shard.child)
        crowd = Crowd(engine, made)
        assert crowd.wait(200)
        lose(shard, signal.SIGKILL, crowd)
        until(lambda: shard.child.pid == spare)
        check_streams(crowd, made)
        check_nothing_left(engine)
    assert child_ids() <= before


@pytest.mark.slow
def test_twenty_losses_under_a_hundred_streams(shard: LaunchedShard) -> None:
    made = requests(100, 300)
    with AsyncEngine(Engine(shard)) as engine:
        warm = Crowd(engine, requests(100, 5))
        warm.join()
        descriptors, memory = num_descriptors(), psutil.Process().memory_info().rss
        crowd = Crowd(engine, made)
        for number in range(20):
            assert crowd.wait(100)
            lose(shard, signal.SIGSTOP if number % 4 == 3 else signal.SIGKILL, crowd)
        check_streams(crowd, made)
        check_nothing_left(engine)
        assert shard.num_losses >= 20
        assert num_descriptors() <= descriptors + 4
        assert psutil.Process().memory_info().rss < memory + (64 << 20)


def test_readiness_says_the_truth(shard: LaunchedShard) -> None:
    changes: list[bool] = []
    engine = AsyncEngine(Engine(shard))
    wake = shard.on_change

    def note() -> None:
        changes.append(engine.is_healthy)
        wake()

    shard.on_change = note
    with engine:
        assert engine.is_healthy
        shard.child.kill()
        (reader,) = Crowd(engine, requests(1, 3)).readers  # waits for the shard
        reader.join(PATIENCE)
        assert reader.reasons == {FinishReason.LENGTH}
    assert changes[:2] == [False, True]


def test_deadlines_pass_and_cancels_work_while_the_shard_is_away(shard: LaunchedShard) -> None:
    with AsyncEngine(Engine(shard)) as engine:
        crowd = Crowd(engine, requests(2, 4000))
        assert crowd.wait(10)
        shard.child.pauses = (3600.0,)  # it is not started again
        shard.child._is_kept = False
        shard.child.kill()
        sampling = SamplingParams(max_tokens=5)
        late = Reader(engine.submit(Request("late", (1, 2), sampling, deadline=time.monotonic() + 0.2)))
        late.join(PATIENCE)
        assert late.reasons == {FinishReason.DEADLINE}
        for reader in crowd.readers:
            reader.stream.cancel()
        crowd.join()
        assert all(reader.reasons == {FinishReason.CANCELLED} for reader in crowd.readers)


def test_a_request_that_kills_its_shard_ends_alone(shard: LaunchedShard) -> None:
    made = requests(4, 150)
    shard.child.pauses = (0.0,)
    with AsyncEngine(Engine(shard)) as engine:
        crowd = Crowd(engine, made)
        assert crowd.wait(20)
        deadly = Reader(engine.submit(Request("deadly", (1, DEADLY_TOKEN), SamplingParams(max_tokens=5))))
        deadly.join(PATIENCE)
        assert deadly.reasons == {FinishReason.ERROR}
        (event,) = [event for event in deadly.events if isinstance(event, Finished)]
        assert isinstance(event.error, ShardUnavailable)
        check_streams(crowd, made)


# -- starting and ending -----------------------------------------------------------------------------------------


def test_a_shard_that_does_not_start_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    before = child_ids()
    with pytest.raises(ShardUnavailable, match="ended while it started, exit status 1; see its log above"):
        launch("--fail")
    assert child_ids() <= before
    assert "no such model" in capfd.readouterr().err


def test_shards_die_with_their_parent() -> None:
    program = textwrap.dedent("""
        import os, signal
        from tests.launch.kit import launch
        shard = launch()
        print(shard.child.pid, flush=True)
        signal.pause()
    """)
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, cwd=ROOT)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    child = psutil.Process(pid)
    os.kill(pid, signal.SIGSTOP)  # it cannot notice by itself
    parent.kill()
    parent.wait()
    parent.stdout.close()
    psutil.wait_procs([child], timeout=PATIENCE)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_folders_of_the_dead_are_swept() -> None:
    folder = make_socket_folder()
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    stale = folder.with_name(f"bridle-{gone.pid}-abc_1")
    stale.mkdir()
    (stale / "group").touch()  # where ranks meet
    other = folder.with_name(f"bridle-{gone.pid}-abc_2")
    other.mkdir()
    (other / "precious").write_text("")
    again = make_socket_folder()
    try:
        assert not stale.exists()
        assert other.exists(), "a folder with anything but sockets is not ours"
        assert folder.exists()
        assert folder.stat().st_mode & 0o077 == 0
    finally:
        (other / "precious").unlink()
        for path in (folder, other, again):
            path.rmdir()


def test_exit_statuses_in_words() -> None:
    assert describe(3) == "exit status 3"
    assert describe(-9) == "killed by SIGKILL"
    assert describe(-200) == "killed by signal 200"


def test_a_model_is_loaded_there_as_it_would_be_here() -> None:
    config = ModelConfig("demo", revision="x", quantization="int8", num_blocks=7, tokenizer="other")
    wanted = ["demo", "--revision", "x", "--quantization", "int8", "--num-blocks", "7"]
    assert shard_arguments(config) == wanted


class _Unwanted(Exception):
    """Raised when a caller stops waiting for a model."""


def test_a_shard_that_nobody_wants_any_more_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    class Shard(SimpleNamespace):
        def close(self) -> None:
            closed.append(self)

    def report(what: str, share: float) -> None:
        if what == "ready":
            raise _Unwanted

    closed: list[Shard] = []
    monkeypatch.setattr(launcher, "LaunchedShard", lambda *args, **options: Shard())
    with pytest.raises(_Unwanted):
        launcher.launch_shard(ModelConfig(num_blocks=4), report)
    assert len(closed) == 1


def test_own_samplers_stay_here() -> None:
    from bridle.launch.launcher import launch_shard

    with pytest.raises(UnsupportedFeature, match="a custom sampler"):
        launch_shard(ModelConfig(), sampler=lambda logits, batch, history: None)  # type: ignore[arg-type, return-value]
