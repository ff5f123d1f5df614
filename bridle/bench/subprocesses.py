"""Starts servers as child processes of a benchmark, reads their ports and metrics, and ends them.

A server ends with the benchmark, also if Ctrl-C or SIGTERM interrupts the benchmark.
"""

from __future__ import annotations

import contextlib
import re
import signal
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from bridle.errors import EngineClosed

_START_SECONDS = 600.0
_ADDRESS = re.compile(r"http://127\.0\.0\.1:(\d+)")


@contextlib.contextmanager
def unwinding() -> Iterator[None]:
    """Let SIGTERM raise an exception in this block, as Ctrl-C does, so that child processes are ended. This handling of
    SIGTERM works only in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def child_process(
    command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program until the block ends, with its output in `log`."""
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)  # noqa: S603
    try:
        yield process
    finally:
        end_process(process)


def announced_port(process: subprocess.Popen[bytes], log: Path) -> int:
    """Return the port that `bridle serve` prints when it starts. Raises `EngineClosed` if no port is printed."""
    deadline = time.monotonic() + _START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        if found := _ADDRESS.search(log.read_text()):
            return int(found.group(1))
        time.sleep(0.1)
    raise EngineClosed(f"the benchmarked server did not start: {log.read_text()[-2000:]}")


def free_port() -> int:
    """Return a port that is not in use now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def read_metrics(host: str, port: int, headers: Mapping[str, str] | None = None) -> Iterator[tuple[str, float]]:
    """Yield a server's metrics from `/metrics`: each name with its labels, and its value."""
    request = urllib.request.Request(f"http://{host}:{port}/metrics", headers=dict(headers or {}))
    with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
        lines = answer.read().decode().splitlines()
    for line in lines:
        if not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            yield name, float(value)


def end_process(process: subprocess.Popen[bytes], seconds: float = 60.0) -> None:
    """Ask a process to end, and kill it after `seconds`. An interrupt during the wait kills the process at once."""
    process.terminate()
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        pass
    finally:
        process.kill()  # has no effect on a process that has ended
        process.wait()
