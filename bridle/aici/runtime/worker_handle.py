"""The supervisor's handle of a worker process: messages, tenant, and the detection of stuck workers."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from concurrent.futures import Future
from typing import Any

from bridle.aici.runtime import messages as m
from bridle.aici.runtime.fork_server import Process
from bridle.aici.runtime.ring import PeerGone, Port, send_frame
from bridle.aici.runtime.storage import RequestState
from bridle.errors import ShardUnavailable


class WorkerHandle:
    """The supervisor's connection to a worker. The main thread uses `port`, side threads use `call` and `notify`."""

    def __init__(self, process: Process, port: Port, side: socket.socket, tenant: str) -> None:
        self.process = process
        self.port = port
        self.side = side
        self.tenant = tenant
        self.owner: RequestState | None = None  # the only request in this process, if it is not shared
        self.storage: socket.socket | None = None
        self.keys: set[int] = set()
        self.is_dead = False
        self._cpu_when_heard = 0.0
        self._cpu_when_seen, self._seen = 0.0, time.monotonic()
        self.calls: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()

    def call(self, rid: int, message: m.WorkerMessage, descriptors: list[int] | None = None) -> Future[Any]:
        """Send a message over the side socket. The future returns the reply and the file descriptors that came with
        it."""
        future: Future[Any] = Future()
        self.calls[rid] = future
        try:
            self._send(message, descriptors)
        except PeerGone as error:
            self.calls.pop(rid, None)
            future.set_exception(ShardUnavailable(f"Worker: {error}"))
        return future

    def notify(self, message: m.WorkerMessage) -> None:
        """Send a message without a reply. A dead worker is ignored."""
        with contextlib.suppress(PeerGone):
            self._send(message, None)

    def _send(self, message: m.WorkerMessage, descriptors: list[int] | None) -> None:
        data = m.encode(message)
        with self._lock:
            send_frame(self.side, data, descriptors)

    def note_asked(self) -> None:
        """Record that the worker was sent work."""
        self._cpu_when_seen, self._seen = self.process.cpu_seconds(), time.monotonic()

    def note_heard(self) -> None:
        """Record that the worker sent a message."""
        self._cpu_when_heard = self.process.cpu_seconds()

    def is_stuck(self, most: float, standstill: float) -> bool:
        """Return whether the worker has work but seems stuck. A worker is stuck if it used more than `most` seconds of
        processor time since its last message, or no processor time for `standstill` seconds. So a worker that waits for
        a busy machine does not count as stuck."""
        used, now = self.process.cpu_seconds(), time.monotonic()
        if used > self._cpu_when_seen:
            self._cpu_when_seen, self._seen = used, now
        return used - self._cpu_when_heard > most or now - self._seen > standstill

    def close(self) -> None:
        """Kill the process and close its connections. Idempotent."""
        self.is_dead = True
        if self.process.handle < 0:
            return
        self.process.kill()
        self.process.close()
        for sock in (self.side, self.port.bell, self.storage):
            if sock is not None:
                sock.close()
