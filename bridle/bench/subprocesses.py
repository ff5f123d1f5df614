"""Servers that run as child processes of a benchmark: the port that one announces, its metrics, its end."""

from __future__ import annotations

import re
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

from bridle.errors import EngineClosed

_START_SECONDS = 180.0
_ADDRESS = re.compile(r"http://127\.0\.0\.1:(\d+)")


def announced_port(process: subprocess.Popen[bytes], log: Path) -> int:
    """The port that `bridle serve` says it listens on, in its output. Raises `EngineClosed` if it does not."""
    deadline = time.monotonic() + _START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        if found := _ADDRESS.search(log.read_text()):
            return int(found.group(1))
        time.sleep(0.1)
    raise EngineClosed(f"the server did not come up: {log.read_text()[-2000:]}")


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def read_metrics(host: str, port: int, headers: Mapping[str, str] | None = None) -> Iterator[tuple[str, float]]:
    """A server's metrics at `/metrics`: names, with their labels, and values."""
    request = urllib.request.Request(f"http://{host}:{port}/metrics", headers=dict(headers or {}))
    with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
        lines = answer.read().decode().splitlines()
    for line in lines:
        if not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            yield name, float(value)


def end_process(process: subprocess.Popen[bytes], seconds: float = 60.0) -> None:
    """Ask a process to end, and kill it after `seconds`."""
    process.terminate()
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
