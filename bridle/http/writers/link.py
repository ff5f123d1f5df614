"""The server's end of the channel to one writer process. All orders of one iteration of the event loop are sent in one
frame."""

from __future__ import annotations

import asyncio
import os
import socket
from collections import deque
from itertools import count
from typing import Protocol

from bridle.http.writers.frames import MAX_DESCRIPTORS, FrameReader, Orders, Reports, frame

#: While more than this many bytes wait for a process, its connections do not write.
MAX_QUEUED = 1 << 20
_MAX_READ = 1 << 16


class Connection(Protocol):
    """Interface, for `WriterLink`, of a connection whose data a writer process sends."""

    def fill(self, is_full: bool) -> None:
        """Record whether much data waits for the client."""

    def settle(self) -> None:
        """React to a change of the link: its channel is full, or can accept data again."""

    def finish(self) -> None:
        """Close the connection after all data was written and the writer process has closed its descriptor."""

    def lose(self) -> None:
        """Close the connection at once, because it is broken or the writer process has ended."""


class WriterLink:
    """The channel to one writer process, used only in the event loop. The future `ended` is done when the process has
    ended, or after `shut`. When `ended` is done, all connections of the process are closed. `is_answering` says whether
    the last ping was answered."""

    def __init__(self, channel: socket.socket) -> None:
        channel.setblocking(False)
        self._channel = channel
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self.is_stalled = False
        self.is_answering = True
        self._has_answered = self._is_blocked = False
        self._transports: dict[int, Connection] = {}
        self._numbers = count()
        self._orders, self._descriptors = Orders(), list[int]()
        self._is_scheduled = False
        self._queue: deque[tuple[memoryview, list[int]]] = deque()
        self._num_queued = 0
        self._frames = FrameReader(Reports)
        self._loop.add_reader(channel.fileno(), self._read)

    @property
    def is_up(self) -> bool:
        """Return whether the process has answered its first ping and runs."""
        return self._has_answered and not self.ended.done()

    @property
    def has_room(self) -> bool:
        """Return whether the process runs, and reads its orders fast enough."""
        return self.is_up and not self.is_stalled

    @property
    def num_connections(self) -> int:
        return len(self._transports)

    # -- methods for transports --------------------------------------------------------------------------------

    def open(self, transport: Connection, descriptor: int) -> int:
        """Send a connection to the process. Returns the number of the connection."""
        if len(self._descriptors) == MAX_DESCRIPTORS:
            self._flush()
        number = next(self._numbers)
        self._descriptors.append(os.dup(descriptor))  # numbers of closed descriptors are soon reused
        self._orders.opened.append(number)
        self._transports[number] = transport
        self._schedule()
        return number

    def write(self, number: int, data: bytes) -> None:
        self._orders.targets.append(number)
        self._orders.parts.append(data)
        if not self._is_scheduled:
            self._schedule()

    def end(self, number: int) -> None:
        """End the data of a connection: the client gets the data written so far, then the end of the stream."""
        self._orders.ended.append(number)
        self._schedule()

    def close(self, number: int) -> None:
        """Close a connection after the data written so far."""
        if number in self._transports:
            self._orders.closed.append(number)
            self._schedule()

    def drop(self, number: int) -> None:
        """Close a connection at once."""
        if self._transports.pop(number, None) is not None:
            self._orders.dropped.append(number)
            self._schedule()

    # -- pings and end of the process --------------------------------------------------------------------------

    def ping(self) -> None:
        """Send a ping, which the writer process must answer."""
        self.is_answering = False
        self._orders.ping = True
        self._schedule()

    def shut(self) -> None:
        """Close the channel, which ends the process and its connections. Idempotent."""
        if self.ended.done():
            return
        self._loop.remove_reader(self._channel.fileno())
        self._block(False)
        self._channel.close()
        for descriptors in (self._descriptors, *(descriptors for _, descriptors in self._queue)):
            _close_all(descriptors)
        self._queue.clear()
        self.ended.set_result(None)
        transports, self._transports = self._transports, {}
        for transport in transports.values():
            transport.lose()

    # -- the channel -------------------------------------------------------------------------------------------

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Put all pending orders into one frame, and send the frame."""
        self._is_scheduled = False
        if self.ended.done():
            return
        data = memoryview(frame(self._orders))
        is_first = not self._queue
        self._queue.append((data, self._descriptors))
        self._num_queued += len(data)
        self._orders, self._descriptors = Orders(), []
        if is_first:
            self._send()
        if self._num_queued > MAX_QUEUED:
            self._stall(True)

    def _send(self) -> None:
        """Send frames until the channel is full. Further frames are sent when the channel can accept data again."""
        while self._queue:
            data, descriptors = self._queue.popleft()
            try:
                sent = socket.send_fds(self._channel, [data], descriptors) if descriptors else self._channel.send(data)
            except BlockingIOError:
                self._queue.appendleft((data, descriptors))
                self._block(True)
                return
            except OSError:
                self._queue.appendleft((data, descriptors))
                self.shut()
                return
            _close_all(descriptors)
            self._num_queued -= sent
            if sent < len(data):
                self._queue.appendleft((data[sent:], []))
        self._block(False)
        self._stall(False)

    def _block(self, is_blocked: bool) -> None:
        if is_blocked and not self._is_blocked:
            self._loop.add_writer(self._channel.fileno(), self._send)
        elif self._is_blocked and not is_blocked:
            self._loop.remove_writer(self._channel.fileno())
        self._is_blocked = is_blocked

    def _stall(self, is_stalled: bool) -> None:
        if is_stalled != self.is_stalled:
            self.is_stalled = is_stalled
            for transport in [*self._transports.values()]:
                transport.settle()

    def _read(self) -> None:
        try:
            data = self._channel.recv(_MAX_READ)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.shut()
        for reports in self._frames.feed(data):
            self._note(reports)

    def _note(self, reports: Reports) -> None:
        if reports.pong:
            self.is_answering = self._has_answered = True
        for is_full, numbers in ((True, reports.full), (False, reports.ready)):
            for number in numbers:
                if (transport := self._transports.get(number)) is not None:
                    transport.fill(is_full)
        for number in reports.closed:
            if (transport := self._transports.pop(number, None)) is not None:
                transport.finish()
        for number in reports.lost:
            if (transport := self._transports.pop(number, None)) is not None:
                transport.lose()


def _close_all(descriptors: list[int]) -> None:
    while descriptors:
        os.close(descriptors.pop())
