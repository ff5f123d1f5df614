"""Tests that a standby process takes the place of a serving process that ended, and that no process remains."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bridle.distributed.child_process import child_environment
from bridle.launch.supervised_process import SupervisedProcess
from bridle.logs import log_variables
from tests.launch.kit import await_spare
from tests.owners import child_ids
from tests.waiting import PATIENCE, until

#: Waits for the word, says that it goes on, and does nothing more.
PROGRAM = """
import os, signal, sys
from bridle.launch.warm_standby import wait_for_activation
wait_for_activation()
with open(sys.argv[1], "w") as pipe:
    pipe.write(f"{os.getpid()} {os.environ.get('BRIDLE_TOLD', '')}\\n")
signal.pause()
"""


class Worker:
    """A supervised process with a standby, and the pipe through which each process reports when it continues."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.told = ""  # what the last one found in its environment
        self._pipe = os.fdopen(os.open(path, os.O_RDWR), "rb", buffering=0)  # ours as well, so that it has no end
        self.child = SupervisedProcess("worker", [sys.executable, "-c", PROGRAM, str(path)], stands_by=True)

    def await_next(self) -> int:
        """Return the id of the process that continues next."""
        assert select.select([self._pipe], [], [], 60)[0], "nobody goes on"
        pid, _, self.told = self._pipe.readline().decode().rstrip("\n").partition(" ")
        with self.child.changed:  # it may be quicker than who let it go
            assert self.child.pid == int(pid)
        return int(pid)

    @property
    def is_quiet(self) -> bool:
        return not select.select([self._pipe], [], [], 0)[0]

    def close(self) -> None:
        self.child.close()
        self._pipe.close()


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bridle.launch.warm_standby.PAUSE_SECONDS", 0.0)


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    before = child_ids()
    made = Worker(tmp_path / "pipe")
    yield made
    made.close()
    until(lambda: child_ids() <= before, "the end of the worker's processes")


def prove(worker: Worker) -> int:
    """Tell the supervisor that the running process works; return the id of the new standby process."""
    assert worker.child.pid is not None
    worker.child.prove(worker.child.pid)
    return await_spare(worker.child)


def test_who_stands_by_takes_the_place_of_who_ended(worker: Worker) -> None:
    first = worker.await_next()
    worker.child.keep()
    assert worker.child.spare is not None
    assert worker.child.spare.pid is None, "it has proven nothing yet"
    second = prove(worker)
    assert worker.is_quiet
    os.kill(first, signal.SIGKILL)
    assert worker.await_next() == second
    assert worker.child.spare.pid is None, "nor has this one"
    third = prove(worker)
    os.kill(second, signal.SIGKILL)
    assert worker.await_next() == third


def test_it_comes_after_those_who_were_waiting(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bridle.launch.warm_standby.PAUSE_SECONDS", 600.0)
    first = worker.await_next()
    worker.child.keep()
    worker.child.prove(first)
    os.kill(first, signal.SIGKILL)
    second = worker.await_next()
    assert worker.child.spare is not None
    assert worker.child.spare.pid is None
    monkeypatch.setattr("bridle.launch.warm_standby.PAUSE_SECONDS", 0.0)
    assert prove(worker) != second


def test_the_next_ones_are_told_more(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """A supervisor's variable overrides the user's variable in the child process only."""
    first = worker.await_next()
    worker.child.keep()
    monkeypatch.setenv("BRIDLE_TOLD", "by the user")
    spare = prove(worker)
    worker.child.environment = {"BRIDLE_TOLD": "by us"}
    for lost, told in ((first, ""), (spare, "by us")):
        os.kill(lost, signal.SIGKILL)
        worker.await_next()
        assert worker.told == told


def test_one_that_ended_by_itself_is_not_counted_on(worker: Worker) -> None:
    first = worker.await_next()
    worker.child.keep()
    spare = prove(worker)
    os.kill(spare, signal.SIGKILL)
    os.waitid(os.P_PID, spare, os.WEXITED | os.WNOWAIT)
    os.kill(first, signal.SIGKILL)
    assert worker.await_next() not in (first, spare)


def test_without_the_word_it_ends() -> None:
    command = [
        sys.executable,
        "-c",
        "from bridle.launch.warm_standby import wait_for_activation; wait_for_activation(); print('went on')",
    ]
    for told, said in ((b"", b""), (b"\n", b"went on\n")):
        done = subprocess.run(command, input=told, stdout=subprocess.PIPE, check=True, timeout=PATIENCE)
        assert done.stdout == said


def test_children_are_told_by_their_command_line_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child process gets no settings from environment variables, since the command line may have reset a flag to its
    default. The log format of the child is that of this process."""
    monkeypatch.setattr("bridle.logs.shown", {"BRIDLE_LOG_FORMAT": "json", "BRIDLE_LOG_LEVEL": "info"})
    monkeypatch.setenv("BRIDLE_LOG_FORMAT", "console")
    monkeypatch.setenv("BRIDLE_DTYPE", "bfloat16")
    monkeypatch.setenv("BRIDLE_CONFIG", "settings.yaml")
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    environment = child_environment()
    assert {name: value for name, value in environment.items() if name.startswith("BRIDLE_")} == log_variables()
    assert environment["BRIDLE_LOG_FORMAT"] == "json"
    assert environment["OTEL_TRACES_EXPORTER"] == "none"
    assert environment["PATH"] == os.environ["PATH"]
