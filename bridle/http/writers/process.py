"""A writer process, which writes streams to clients: `python -m bridle.http.writers.process PARENT`.

The standard input of the process is a socket, over which the server sends connections and data for the clients. The
server reads from clients and handles requests; this process only writes. The process ends when the server ends.
"""

from __future__ import annotations

import contextlib
import selectors
import signal
import socket
import sys
from array import array
from collections import deque

from bridle import os_sandbox
from bridle.distributed.child_process import die_with_parent
from bridle.http.writers.frames import MAX_DESCRIPTORS, FrameReader, Orders, Reports, frame

#: A connection is full when more than `_HIGH` bytes wait for its client, and ready again below `_LOW`, as in asyncio.
_HIGH, _LOW = 64 << 10, 16 << 10
_MAX_READ = 1 << 18  # bytes read from the server at once
_DESCRIPTOR_BYTES = array("i").itemsize


class _Client:
    """One connection, and the bytes that are queued until its client reads."""

    __slots__ = ("is_closing", "is_ending", "is_full", "is_waiting", "number", "rest", "sock")

    def __init__(self, number: int, descriptor: int) -> None:
        self.number = number
        # The address family does not matter here, and reading it fails if the client has disconnected. The descriptor
        # is non-blocking.
        self.sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM, fileno=descriptor)
        self.rest = bytearray()
        self.is_full = self.is_waiting = self.is_ending = self.is_closing = False


class Writer:
    """Writes the data that arrives over `channel` to clients, until the channel ends."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._selector = selectors.DefaultSelector()
        self._selector.register(channel, selectors.EVENT_READ)
        self._frames = FrameReader(Orders)
        self._descriptors: deque[int] = deque()
        self._clients: dict[int, _Client] = {}
        self._changed: set[_Client] = set()  # clients that became full or ready
        self._reports = Reports()
        self._has_news = False

    def run(self) -> None:
        """Write until the server closes the channel."""
        is_open = True
        while is_open:
            for key, _ in self._selector.select():
                if key.data is None:
                    is_open = self._take_orders()
                elif key.data.number in self._clients:  # else the client was dropped just now
                    self._flush(key.data)
            if self._has_news:
                self._tell()

    def _tell(self) -> None:
        """Send the pending reports: the current state of each changed connection."""
        reports, self._reports, self._has_news = self._reports, Reports(), False
        for client in self._changed:
            (reports.full if client.is_full else reports.ready).append(client.number)
        self._changed.clear()
        self._channel.sendall(frame(reports))

    def _take_orders(self) -> bool:
        """Read all orders that the server has sent so far, and write the data of each connection in one call. Returns
        whether the channel is still open."""
        space = socket.CMSG_SPACE(MAX_DESCRIPTORS * _DESCRIPTOR_BYTES)
        data, extras, flags, _ = self._channel.recvmsg(_MAX_READ, space)
        for _, _, content in extras:
            self._descriptors.extend(array("i", content[: len(content) - len(content) % _DESCRIPTOR_BYTES]))
        if flags & socket.MSG_CTRUNC:
            raise OSError("a message came without its file descriptors: too many files are open")
        touched: dict[_Client, None] = {}
        for orders in self._frames.feed(data):
            self._follow(orders, touched)
        for client in touched:
            (self._watch if client.is_waiting else self._flush)(client)
        return bool(data)

    def _follow(self, orders: Orders, touched: dict[_Client, None]) -> None:
        for number in orders.opened:
            self._clients[number] = _Client(number, self._descriptors.popleft())
        for number, part in zip(orders.targets, orders.parts, strict=True):
            if (client := self._clients.get(number)) is not None:  # else the client was lost meanwhile
                client.rest += part
                touched[client] = None
        for is_closing, numbers in ((False, orders.ended), (True, orders.closed)):
            for number in numbers:
                if (client := self._clients.get(number)) is not None:
                    client.is_ending, client.is_closing = True, is_closing
                    touched[client] = None
        for number in orders.dropped:
            if (client := self._clients.get(number)) is not None:
                touched.pop(client, None)
                self._forget(client)
        if orders.ping:
            self._reports.pong = self._has_news = True

    def _flush(self, client: _Client) -> None:
        """Send as much of a client's queued data as the kernel accepts."""
        try:
            if client.rest:
                del client.rest[: client.sock.send(client.rest)]
        except BlockingIOError:
            pass
        except OSError:
            self._forget(client, self._reports.lost)
            return
        self._watch(client)
        if client.is_ending and not client.rest:
            self._end(client)

    def _watch(self, client: _Client) -> None:
        """Wait for a connection to be writable while data is queued. Report if much data is queued."""
        is_waiting = bool(client.rest)
        if is_waiting != client.is_waiting:
            client.is_waiting = is_waiting
            if is_waiting:
                self._selector.register(client.sock, selectors.EVENT_WRITE, client)
            else:
                self._selector.unregister(client.sock)
        is_full = len(client.rest) > (_LOW if client.is_full else _HIGH)
        if is_full != client.is_full:
            client.is_full, self._has_news = is_full, True
            self._changed.add(client)

    def _end(self, client: _Client) -> None:
        """Shut down or close a connection whose data was all sent."""
        client.is_ending = False
        if client.is_closing:
            self._forget(client, self._reports.closed)
        else:
            with contextlib.suppress(OSError):  # the client has disconnected
                client.sock.shutdown(socket.SHUT_WR)

    def _forget(self, client: _Client, told: list[int] | None = None) -> None:
        """Close this process's descriptor of the connection; the server has a descriptor of its own. The connection is
        added to `told`, a list for the next report."""
        if told is not None:
            told.append(client.number)
            self._has_news = True
        self._changed.discard(client)
        if client.is_waiting:
            self._selector.unregister(client.sock)
        del self._clients[client.number]
        client.sock.close()


def main() -> None:
    """Run the writer process until the server ends. SIGINT and SIGTERM are ignored, because the server finishes running
    requests before it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    die_with_parent(int(sys.argv[1]))
    os_sandbox.enter()
    with contextlib.suppress(ConnectionError), socket.socket(fileno=0) as channel:
        Writer(channel).run()


if __name__ == "__main__":
    main()
