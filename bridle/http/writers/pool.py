"""Manages the writer processes of a server: starts and restarts them, and chooses a process for each connection."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import structlog
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from bridle import os_sandbox
from bridle.distributed.child_process import child_environment
from bridle.http.writers.link import WriterLink
from bridle.http.writers.transport import WriterTransport

_log: structlog.stdlib.BoundLogger = structlog.get_logger("bridle.serve")
#: Seconds before a process is restarted, by the number of early ends in a row; the last value repeats.
_PAUSES = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
_EARLY = 30.0  # seconds
#: A process that does not answer pings for that many seconds is killed.
PING_SECONDS = 15.0
_EXIT_SECONDS = 5.0


@dataclass(slots=True)
class Writer:
    """One writer process, which is restarted when it ends. `link` is None while the process does not run."""

    number: int
    link: WriterLink | None = None
    pid: int | None = None
    num_restarts: int = 0

    @property
    def is_up(self) -> bool:
        return self.link is not None and self.link.is_up

    @property
    def num_connections(self) -> int:
        return 0 if self.link is None else self.link.num_connections

    async def keep(self, ping_seconds: float) -> None:
        """Run the process, and restart it whenever it ends, until this task is cancelled."""
        loop, num_early = asyncio.get_running_loop(), 0
        while True:
            born = loop.time()
            try:
                status = await self._live(ping_seconds)
                reason = os_sandbox.explain_end(status) or f"exit status {status}"
            except OSError as error:
                reason = str(error)
            num_early = num_early + 1 if loop.time() - born < _EARLY else 1
            pause = _PAUSES[min(num_early, len(_PAUSES)) - 1]
            _log.error(
                "a front-end process ended and will be restarted",
                number=self.number,
                reason=reason,
                restart_seconds=pause,
            )
            await asyncio.sleep(pause)
            self.num_restarts += 1

    async def _live(self, ping_seconds: float) -> int:
        """Run the writer process once. Returns the process's exit status."""
        process, channel = _start()
        self.link = link = WriterLink(channel)
        self.pid = process.pid
        try:
            while not link.ended.done() and link.is_answering:
                link.ping()
                await asyncio.wait([link.ended], timeout=ping_seconds)
        finally:
            self.link = self.pid = None
            link.shut()
            status = await asyncio.shield(asyncio.to_thread(_end, process))
        return status


def _start() -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a writer process. Returns the process and the server's end of its channel. The process gets its own
    session, so that Ctrl-C in a terminal does not reach it."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "bridle.http.writers.process", str(os.getpid())]
    with theirs:
        try:
            process = subprocess.Popen(  # noqa: S603
                command, stdin=theirs.fileno(), env=child_environment(), start_new_session=True
            )
        except OSError:
            ours.close()
            raise
    return process, ours


def _end(process: subprocess.Popen[bytes]) -> int:
    """Wait for a process whose channel has ended, and kill the process if it does not end."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(_EXIT_SECONDS)
    process.kill()
    return process.wait()


class WriterPool:
    """A pool of `num_writers` writer processes. While no writer process runs, the server writes streams itself."""

    def __init__(self, num_writers: int, ping_seconds: float = PING_SECONDS) -> None:
        self.writers = [Writer(number) for number in range(1, num_writers + 1)]
        self._ping_seconds = ping_seconds

    async def run(self) -> None:
        """Keep the processes running until this task is cancelled."""
        async with asyncio.TaskGroup() as group:
            for writer in self.writers:
                group.create_task(writer.keep(self._ping_seconds))

    def take(self, plain: asyncio.Transport, protocol: asyncio.Protocol) -> WriterTransport | None:
        """Give a connection to the process with the fewest connections. Returns the connection's new transport. Returns
        None if no process can accept data, if the connection still has bytes to write, or if the limit of open files is
        reached."""
        links = [writer.link for writer in self.writers if writer.link is not None and writer.link.has_room]
        if not links or plain.is_closing() or plain.get_write_buffer_size():
            return None
        with contextlib.suppress(OSError):
            return WriterTransport(plain, protocol, min(links, key=lambda link: link.num_connections))
        return None

    def status(self) -> list[dict[str, Any]]:
        """Return the state of each writer process, for admins."""
        return [
            {
                "pid": writer.pid,
                "is_up": writer.is_up,
                "connections": writer.num_connections,
                "restarts": writer.num_restarts,
            }
            for writer in self.writers
        ]

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of all writer processes."""
        labels = ["process"]
        up = GaugeMetricFamily("bridle_front_end_up", "1 if the front-end process runs, else 0.", labels=labels)
        busy = GaugeMetricFamily("bridle_front_end_connections", "Connections of the front-end process.", labels=labels)
        restarts = CounterMetricFamily("bridle_front_end_restarts", "Restarts of the front-end process.", labels=labels)
        for writer in self.writers:
            name = [str(writer.number)]
            up.add_metric(name, float(writer.is_up))
            busy.add_metric(name, writer.num_connections)
            restarts.add_metric(name, writer.num_restarts)
        yield from (up, busy, restarts)
