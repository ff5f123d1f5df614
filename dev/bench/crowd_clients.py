"""Clients of the overload benchmark: malicious clients, and clients that measure their effect on the server.

The malicious clients use little processor time. So one process runs a hundred of them and still measures the other
clients exactly. They send frames as fast as the server reads them, retry at once after a refusal, read no answers, or
send half a request. The messages of the clients are built once, and the clients do not parse answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from bridle.bench.sse_client import Sample, ServerTarget, complete

_BLOCK = 1 << 14
_SMALL = 4_096  # bytes that a connection buffers before its client reads
_PAUSE = 0.02
_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)


def http_request(target: ServerTarget, path: str, body: Mapping[str, Any] | None = None, tenant: int = 0) -> bytes:
    """Return the bytes of a request: a POST of JSON if there is a body, else a GET."""
    data = b"" if body is None else json.dumps(body).encode()
    lines = [f"{'GET' if body is None else 'POST'} {path} HTTP/1.1", f"Host: {target.host}"]
    if target.keys:
        lines.append(f"Authorization: Bearer {target.keys[tenant]}")
    if body is not None:
        lines += ["Content-Type: application/json", f"Content-Length: {len(data)}"]
    return "\r\n".join([*lines, "", ""]).encode() + data


# -- crowds --------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class CrowdTally:
    """Result of the malicious clients: bytes sent in frames, seconds until an answer by its status, and connections
    opened."""

    frame_bytes: int = 0
    answers: dict[int, list[float]] = field(default_factory=dict)
    num_opened: int = 0


class Member(asyncio.Protocol):
    """One malicious connection; `lost` is set when it is closed."""

    def __init__(self, tally: CrowdTally) -> None:
        self.lost = asyncio.Event()
        self._tally = tally

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        self._tally.num_opened += 1
        self.begin()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set()

    def begin(self) -> None:
        """Start the client's work; called when the connection is open."""
        raise NotImplementedError


class Flooder(Member):
    """Opens a WebSocket and sends frames as fast as the server reads them; answers are read and discarded."""

    def __init__(self, target: ServerTarget, tally: CrowdTally, frame: bytes) -> None:
        super().__init__(tally)
        self._target = target
        self._block = frame * (_BLOCK // len(frame))
        self._is_open = self._is_full = False

    def begin(self) -> None:
        # A small send buffer, because copying the kernel's default for a hundred floods would delay everything else in
        # this process.
        self._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BLOCK)
        self._transport.set_write_buffer_limits(high=_BLOCK)
        upgrade = b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
        key = b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
        self._transport.write(http_request(self._target, "/")[:-2] + upgrade + key)

    def data_received(self, data: bytes) -> None:
        if not self._is_open and data.startswith(b"HTTP/1.1 101"):
            self._is_open = True
            self._send()

    def pause_writing(self) -> None:
        self._is_full = True

    def resume_writing(self) -> None:
        self._is_full = False
        self._send()

    def _send(self) -> None:
        if self._is_full or self._transport.is_closing():
            return
        self._transport.write(self._block)
        self._tally.frame_bytes += len(self._block)
        if not self._is_full:
            asyncio.get_running_loop().call_soon(self._send)


#: Frames of a flood, masked with zeros: an empty text, an empty ping, a message of an unknown kind.
FRAMES = (b"\x81\x80\0\0\0\0", b"\x89\x80\0\0\0\0", b"\x81\x84\0\0\0\0NONE")


class Asker(Member):
    """Sends a request, and sends it again after each answer, whatever the answer is."""

    def __init__(self, request: bytes, tally: CrowdTally) -> None:
        super().__init__(tally)
        self._request = request

    def begin(self) -> None:
        self._got = b""
        self._asked = time.perf_counter()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._got += data
        head, end, body = self._got.partition(b"\r\n\r\n")
        length = _LENGTH.search(head)
        if not end or length is None or len(body) < int(length.group(1)):
            return
        self._tally.answers.setdefault(int(head[9:12]), []).append(time.perf_counter() - self._asked)
        self.begin()


class Silent(Member):
    """Sends data and reads no byte of the answer."""

    def __init__(self, request: bytes, tally: CrowdTally) -> None:
        super().__init__(tally)
        self._request = request

    def begin(self) -> None:
        # Before Python 3.11.5 a transport begins to read after this call, even if reading was paused before.
        asyncio.get_running_loop().call_soon(self._transport.pause_reading)
        self._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SMALL)
        self._transport.write(self._request)


class HalfSent(Member):
    """Sends the first half of a request and then nothing; it would read an answer."""

    def __init__(self, request: bytes, tally: CrowdTally) -> None:
        super().__init__(tally)
        self._request = request

    def begin(self) -> None:
        self._transport.write(self._request)


class ClientCrowd:
    """`count` malicious connections; `make` returns each connection by its number. A connection that the server closes
    is opened again."""

    def __init__(self, target: ServerTarget, count: int, make: Callable[[int], Member]) -> None:
        self._target = target
        self._count = count
        self._make = make
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._keep(number)) for number in range(self._count)]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _keep(self, number: int) -> None:
        loop = asyncio.get_running_loop()
        while True:
            member = self._make(number)
            try:
                transport, _ = await loop.create_connection(lambda: member, self._target.host, self._target.port)  # noqa: B023
            except OSError:
                await asyncio.sleep(_PAUSE)
                continue
            try:
                await member.lost.wait()
            finally:
                transport.abort()


# -- those beside them ---------------------------------------------------------------------------------------


async def ask(target: ServerTarget, path: str, body: Mapping[str, Any] | None = None) -> tuple[int, float, bytes]:
    """Return status, seconds and content of one answer, on a separate connection."""
    begin = time.perf_counter()
    reader, writer = await asyncio.open_connection(target.host, target.port)
    try:
        request = http_request(target, path, body)
        writer.write(request.replace(b"\r\n", b"\r\nConnection: close\r\n", 1))
        answer = await reader.read(-1)
    finally:
        writer.transport.abort()
    return int(answer[9:12] or 0), time.perf_counter() - begin, answer.partition(b"\r\n\r\n")[2]


async def stream_again_and_again(
    target: ServerTarget, over: asyncio.Event, max_tokens: int, tenant: int = 0
) -> list[Sample]:
    """Stream completions one after the other until `over` is set; the last completion is read to its end."""
    samples = []
    while not over.is_set():
        samples.append(await complete(target, [5, 6, 7], max_tokens, tenant=tenant, never_ends=True))
        if samples[-1].status != 200:
            await asyncio.sleep(_PAUSE)
    return samples


async def ask_health(target: ServerTarget, over: asyncio.Event, period: float) -> list[float]:
    """Request `/health` every `period` seconds on one connection; return the delay of each answer. While an answer is
    late, no further request is sent."""
    reader, writer = await asyncio.open_connection(target.host, target.port)
    late: list[float] = []
    begin = time.perf_counter()
    try:
        while not over.is_set():
            due = begin + len(late) * period
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), max(due - time.perf_counter(), 0) or 1e-6)
                break
            writer.write(http_request(target, "/health"))
            head = await reader.readuntil(b"\r\n\r\n")
            length = _LENGTH.search(head)
            await reader.readexactly(int(length.group(1)) if length else 0)
            late.append(time.perf_counter() - due)
    finally:
        writer.transport.abort()
    return late
