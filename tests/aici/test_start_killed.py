"""Tests of an engine that is killed at any moment of its runtime's start: both processes end, and leak no resource."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from bridle.aici.client import RuntimeConfig, RuntimeProcess
from tests.conftest import IS_FULL
from tests.waiting import PATIENCE, until

#: An engine: `moment` is the call of a function before which it ends itself by signal `number` (0: never).
ENGINE = """
import os, sys
from bridle.aici.client import RuntimeConfig, RuntimeProcess

tokenizer, store, moment, number = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
config = RuntimeConfig(tokenizer, extra_args=("--store", store), json_size=1, mask_size=1)
count = 0


def look(frame, event, argument):
    global count
    count += event in ("call", "c_call")
    if count == moment:
        os.kill(os.getpid(), number)


print("begun", flush=True)
if moment:
    sys.setprofile(look)
process = RuntimeProcess(config)
sys.setprofile(None)
print(count, flush=True)
sys.stdin.read()
"""


class Engine:
    """The engine program above, in its own process."""

    def __init__(self, tokenizer: Path, store: Path, moment: int = 0, number: int = 0) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", ENGINE, str(tokenizer), str(store), str(moment), str(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None and self.process.stdout.readline() == "begun\n"
        self._told: Future[str] = Future()
        self._reader = threading.Thread(target=lambda: self._told.set_result(self.process.stdout.readline()))  # type: ignore[union-attr]
        self._reader.start()

    @property
    def is_over(self) -> bool:
        """Return whether the runtime has started, or has ended before its start."""
        return self._told.done()

    def num_calls(self) -> int:
        """Return the number of function calls in the engine during a complete start."""
        return int(self._told.result())

    @property
    def names(self) -> list[str]:
        return [name for name in os.listdir("/dev/shm") if f"bridle-{self.process.pid}-" in name]

    def runtime(self) -> list[int]:
        """Return the processes of this engine's runtime, found by their shared memory prefix."""
        prefix, found = f"/bridle-{self.process.pid}-".encode(), []
        for entry in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if prefix in Path(f"/proc/{entry}/cmdline").read_bytes():
                    found.append(int(entry))
        return found

    def cpu_of_the_runtime(self) -> float:
        """Return the processor time of the runtime, in seconds."""
        with contextlib.suppress(psutil.Error):
            return sum(sum(child.cpu_times()[:2]) for child in psutil.Process(self.process.pid).children())
        return 0.0

    def check_nothing_is_left(self) -> None:
        until(lambda: not self.runtime())
        assert self.names == []

    def close(self) -> None:
        self.process.kill()
        self._reader.join()
        self.process.communicate()


def a_whole_start(tokenizer: Path, store: Path) -> tuple[int, float]:
    """Return the engine's function calls and the runtime's processor time for a complete start."""
    engine = Engine(tokenizer, store, moment=-1)
    try:
        return engine.num_calls(), engine.cpu_of_the_runtime()
    finally:
        engine.close()
        engine.check_nothing_is_left()


def end_at_a_call(tokenizer: Path, store: Path, moment: int, number: int) -> None:
    engine = Engine(tokenizer, store, moment, number)
    try:
        until(lambda: engine.is_over)
        engine.process.send_signal(number)  # if it got by with fewer calls
        assert engine.process.wait(PATIENCE) == -number
        engine.check_nothing_is_left()
    finally:
        engine.close()


def end_once_the_runtime_had(seconds: float, tokenizer: Path, store: Path, number: int) -> None:
    """Kill the engine when the runtime has used a given processor time, or has started before."""
    engine = Engine(tokenizer, store)
    try:
        until(lambda: engine.cpu_of_the_runtime() >= seconds or engine.is_over)
        engine.process.send_signal(number)
        assert engine.process.wait(PATIENCE) == -number
        engine.check_nothing_is_left()
    finally:
        engine.close()


SIGNALS = (signal.SIGTERM, signal.SIGKILL)


@pytest.mark.parametrize("shift", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_an_engine_that_ends_at_any_moment_of_the_start_leaves_nothing(
    tokenizer: Path, store: Path, shift: int
) -> None:
    """The moments cover the whole start, half of them in the engine's code and half in the runtime's. The signals
    alternate."""
    calls, seconds = a_whole_start(tokenizer, store)
    assert calls > 100 and seconds > 0
    half = 10 if IS_FULL else 3
    with ThreadPoolExecutor(4) as threads:
        done: list[Future[None]] = []
        for number in range(half):
            sent, share = SIGNALS[(number + shift) % 2], number / (half - 1)
            done.append(threads.submit(end_at_a_call, tokenizer, store, 1 + int(share * (calls - 1)), sent))
            done.append(threads.submit(end_once_the_runtime_had, 0.72 * share * seconds, tokenizer, store, sent))
        for each in done:
            each.result()


def test_many_threads_may_look_whether_the_engine_lives() -> None:
    program = (
        "import os, threading; from bridle.aici.runtime.parent_watch import ParentWatch\n"
        "line, failed = ParentWatch(os.getppid(), is_piped=True), []\n"
        "def look():\n"
        "    try:\n"
        "        for _ in range(20000): assert line.holds()\n"
        "    except BaseException as error: failed.append(error)\n"
        "threads = [threading.Thread(target=look) for _ in range(4)]\n"
        "[each.start() for each in threads]; [each.join() for each in threads]; print(failed)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.read() == "[]\n"
    process.communicate()


def test_what_cannot_be_created_leaves_no_runtime(tokenizer: Path, store: Path) -> None:
    before = set(os.listdir("/dev/shm"))
    config = RuntimeConfig(str(tokenizer), extra_args=("--store", str(store)), json_size=1, mask_size=-1)
    with pytest.raises((OSError, ValueError)):
        RuntimeProcess(config)
    assert {name for name in os.listdir("/dev/shm") if f"bridle-{os.getpid()}-" in name} <= before
