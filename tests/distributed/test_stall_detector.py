"""Tests that a process that waits on a busy machine is not reported as hung."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue

import pytest

from bridle.distributed import group, link, replica_link, stall_detector
from bridle.distributed.group import Members
from bridle.distributed.link import Timings
from bridle.distributed.replica_link import _read
from bridle.distributed.replica_messages import HEADER
from bridle.distributed.stall_detector import is_held_up
from bridle.testing.scripted import ScriptedExecutor
from tests.distributed.kit import IDLE, hosted
from tests.waiting import PATIENCE, until


@pytest.fixture
def busy() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        yield process
        process.kill()


def test_who_wants_a_processor_is_held_up_and_who_is_stopped_is_not(busy: subprocess.Popen[bytes]) -> None:
    until(lambda: is_held_up(busy.pid))
    busy.send_signal(signal.SIGSTOP)
    until(lambda: not is_held_up(busy.pid))
    busy.send_signal(signal.SIGCONT)
    until(lambda: is_held_up(busy.pid))


def test_who_waits_for_something_is_not_held_up() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        until(lambda: not is_held_up(process.pid))
        process.kill()
    assert not is_held_up(process.pid) and not is_held_up(0)  # it is gone


def test_a_name_may_look_like_a_state(tmp_path: Path) -> None:
    (tmp_path / "stat").write_text("7 (a) R (b) S 1 7 7")
    assert stall_detector.state(tmp_path / "stat") == "S"
    assert stall_detector.state(tmp_path / "gone") == ""


def once_held_up(monkeypatch: pytest.MonkeyPatch, module: object) -> list[int]:
    """Report the first checked process as delayed once. Returns the list of checked process ids."""
    asked: list[int] = []
    monkeypatch.setattr(module, "is_held_up", lambda pid: asked.append(pid) or len(asked) == 1)
    return asked


def test_a_late_replica_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = once_held_up(monkeypatch, replica_link)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(0.01)
        monkeypatch.setattr(replica_link, "is_held_up", lambda pid: asked.append(pid) or theirs.send(b"late") == 4)
        assert _read(ours, HEADER.size, 7) == b"late" and asked == [7]
        once_held_up(monkeypatch, replica_link)
        with pytest.raises(TimeoutError):
            _read(ours, HEADER.size, 7)


def test_a_late_replica_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_link, "HELD_UP_SECONDS", 0.05)
    monkeypatch.setattr(replica_link, "is_held_up", lambda pid: True)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(0.01)
        with pytest.raises(TimeoutError):
            _read(ours, HEADER.size, 7)


def test_a_late_rank_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "SILENCE_SECONDS", 0.5)
    asked: SimpleQueue[int] = SimpleQueue()
    monkeypatch.setattr(group, "is_held_up", lambda pid: asked.put(pid) or asked.qsize() < 3)
    lost: SimpleQueue[str] = SimpleQueue()
    members = Members([[sys.executable, "-c", IDLE]], on_loss=lost.put)
    try:
        members.wait()
        os.kill(members.pids[0], signal.SIGSTOP)
        assert "no sign of life from rank 1" in lost.get(timeout=PATIENCE)
        assert asked.qsize() == 3
    finally:
        members.close()


def test_a_late_shard_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(link, "is_held_up", lambda pid: asked.append(pid) or len(asked) < 3)
    with hosted(ScriptedExecutor()) as host:
        timings = Timings(beat=0.01, patience=1e-9, max_missed=1, connect=PATIENCE, held_up=PATIENCE)
        found = link.ShardLink(host.address, None, timings)
        found.watch()  # until the link is lost
        assert asked == [os.getpid()] * 3 and "no sign of life" in found.reason
        found.close()


def test_a_shard_of_another_machine_has_no_process_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "is_held_up", lambda pid: pytest.fail("a process of this machine was looked at"))
    with hosted(ScriptedExecutor()) as host:
        found = link.ShardLink(host.address, None, Timings(beat=0.01, patience=1e-9, connect=PATIENCE))
        found.address = "elsewhere:8000"
        found.watch()
        found.close()
