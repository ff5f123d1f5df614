"""Clients that continue to stream while a server process that computes their outputs is killed. The clients record the
arrival time of each token, and the final text.

Each client requests the same text again and again. So each process loss interrupts a stream, and texts during losses
can be compared with earlier texts. The clients use little processor time: they search bytes as they arrive, and parse
them when a stream has ended.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from itertools import pairwise

_EVENT = b'data: {"id"'
_RESUMING = b'"resuming":true'
_LIMIT = 1 << 20
_PAUSE_SECONDS = 0.2


class StreamingClient:
    """One client. `times` are the arrival times of events with text, and `resumed` the times at which the server
    reported a loss. `faults` describe the client's failed streams."""

    def __init__(self, address: tuple[str, int], number: int, max_tokens: int, note: Callable[[], None]) -> None:
        self.is_told = number % 2 == 0
        self.times: list[float] = []
        self.resumed: list[float] = []
        self.faults: list[str] = []
        self.num_complete = self.num_different = 0
        self.stream: int | None = None  # number of the stream that has begun to receive text
        self._num_streams = 0
        self._streams: list[int] = []  # the stream of each of `times`
        self._address = address
        self._body = _body(number, max_tokens, self.is_told)
        self._max_tokens = max_tokens
        self._expected: str | None = None
        self._note = note

    async def run(self) -> None:
        """Send requests repeatedly."""
        while True:
            try:
                self._judge(await self._ask())
            except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError) as error:
                self.faults.append(f"the stream broke: {error!r}")
                await asyncio.sleep(_PAUSE_SECONDS)
            self._note()

    async def _ask(self) -> bytes:
        reader, writer = await asyncio.open_connection(*self._address, limit=_LIMIT)
        try:
            writer.write(_head("POST /v1/completions", self._address[0], len(self._body)) + self._body)
            head = await reader.readuntil(b"\r\n\r\n")
            if not head.startswith(b"HTTP/1.1 200"):
                raise ValueError(head.splitlines()[0].decode())
            self._num_streams += 1
            return await self._read(reader)
        finally:
            self.stream = None
            writer.transport.abort()

    async def _read(self, reader: asyncio.StreamReader) -> bytes:
        parts: list[bytes] = []
        while size := int(await reader.readline(), 16):
            chunk = await reader.readexactly(size + 2)
            now = time.perf_counter()
            num_resuming = chunk.count(_RESUMING)
            self.resumed += [now] * bool(num_resuming)
            if chunk.count(_EVENT) > num_resuming:
                self.stream = self._num_streams
                self.times.append(now)
                self._streams.append(self.stream)
            parts.append(chunk[:-2])
            self._note()
        return b"".join(parts)

    def _judge(self, data: bytes) -> None:
        """Compare a whole answer with the client's first answer."""
        lines = [line.removeprefix(b"data: ") for line in data.splitlines() if line.startswith(b"data: ")]
        items = [json.loads(line) for line in lines if line != b"[DONE]"]
        errors = [item["error"] for item in items if "error" in item]
        usage = [item["usage"]["completion_tokens"] for item in items if item.get("usage")]
        text = "".join(choice.get("text", "") for item in items for choice in item.get("choices", ()))
        if errors or usage[-1:] != [self._max_tokens]:
            self.faults.append(f"{errors[:1] or usage[-1:]} after {len(text)} characters")
            return
        self.num_complete += 1
        if self._expected is None:
            self._expected = text
        self.num_different += text != self._expected

    def after(self, moment: float) -> int:
        """Return the number of recent events with text after `moment`."""
        return sum(each > moment for each in self.times[-64:])

    def next_after(self, moment: float) -> float:
        """Return the arrival time of the first event with text after `moment`."""
        return next(each for each in self.times if each > moment)

    def stream_after(self, moment: float) -> int:
        """Return the number of the stream to which the first event with text after `moment` belongs."""
        return self._streams[self.times.index(self.next_after(moment))]

    def longest_gap(self, moment: float) -> float:
        """Return the longest pause between two events with text of one stream that ended after `moment`."""
        events = pairwise(zip(self.times, self._streams, strict=True))
        gaps = (after - before for (before, one), (after, other) in events if one == other and after > moment)
        return max(gaps, default=0.0)


class StreamCrowd:
    """Many streaming clients at once, in the event loop that starts them. The clients' texts have at least `max_tokens`
    tokens."""

    def __init__(self, address: tuple[str, int], count: int, max_tokens: int) -> None:
        self._news = asyncio.Event()
        # different lengths, so that the clients do not send their next requests at the same time
        lengths = [max_tokens + max_tokens // 8 * (number % 8) for number in range(count)]
        self.clients = [
            StreamingClient(address, number, length, self._news.set) for number, length in enumerate(lengths)
        ]
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start all clients."""
        self._tasks = [asyncio.create_task(client.run()) for client in self.clients]

    async def stop(self) -> None:
        """Disconnect all clients in the middle of their streams."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def wait(self, condition: Callable[[StreamingClient], bool], seconds: float) -> None:
        """Wait until the condition holds for every client. Raises `TimeoutError`."""
        async with asyncio.timeout(seconds):
            while not all(map(condition, self.clients)):
                self._news.clear()
                await self._news.wait()

    @property
    def faults(self) -> Sequence[str]:
        return [fault for client in self.clients for fault in client.faults]


class Readiness:
    """Requests `/health/ready` many times per second. `changes` are pairs of a time and the server's answer from that
    time on."""

    def __init__(self, address: tuple[str, int], period: float = 0.05) -> None:
        self._address = address
        self._period = period
        self.changes: list[tuple[float, bool]] = []
        self._changed = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            is_ready = await self._look()
            if not self.changes or self.changes[-1][1] != is_ready:
                self.changes.append((time.perf_counter(), is_ready))
                self._changed.set()
            await asyncio.sleep(self._period)

    async def _look(self) -> bool:
        reader, writer = await asyncio.open_connection(*self._address)
        try:
            writer.write(_head("GET /health/ready", self._address[0], 0))
            return (await reader.readline()).split(b" ")[1] == b"200"
        finally:
            writer.transport.abort()

    async def wait(self, is_ready: bool, since: float, seconds: float) -> float:
        """Return the first time after `since` at which the server gave the answer `is_ready`. Raises `TimeoutError`."""
        async with asyncio.timeout(seconds):
            while True:
                for moment, said in self.changes:
                    if moment > since and said == is_ready:
                        return moment
                self._changed.clear()
                await self._changed.wait()

    def stop(self) -> None:
        self._task.cancel()


def _body(number: int, max_tokens: int, is_told: bool) -> bytes:
    options = {"include_usage": True, "include_resuming": is_told}
    body = {"prompt": f"Story number {number}: once upon a time", "max_tokens": max_tokens, "seed": number}
    return json.dumps(
        body
        | {"temperature": float(number % 3 == 0), "min_tokens": max_tokens, "stream": True, "stream_options": options}
    ).encode()


def _head(request: str, host: str, length: int) -> bytes:
    return (
        f"{request} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {length}\r\nConnection: close\r\n\r\n"
    ).encode()
