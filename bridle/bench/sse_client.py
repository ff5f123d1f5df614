"""An HTTP client for streams that takes little processor time, so that a benchmark measures the server and not the
client.

Each request has its own connection and protocol object, which finds events in the received bytes and does not parse
their JSON.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

_EVENT = b"data: {"
_END = b"data: [DONE]"
_USAGE = re.compile(rb'"completion_tokens":(\d+)')
_KEPT = 2_048  # bytes at the end of a stream, which contain the token counts


@dataclass(slots=True)
class Sample:
    """The result of one request. Times are in seconds. `event_times` are monotonic clock times of the events with text;
    the server may put several tokens into one event."""

    sent: float
    status: int = 0
    ended: float = 0.0
    is_complete: bool = False
    num_tokens: int = 0
    event_times: list[float] = field(default_factory=list)

    @property
    def first(self) -> float:
        """Return the seconds from sending the request to its first token."""
        return self.event_times[0] - self.sent

    @property
    def gaps(self) -> list[float]:
        """Return the seconds between consecutive events of a stream."""
        return [after - before for before, after in pairwise(self.event_times)]

    @property
    def pace(self) -> float:
        """Return the mean seconds per token after the first token."""
        return (self.event_times[-1] - self.event_times[0]) / max(self.num_tokens - 1, 1)


@dataclass(frozen=True, slots=True)
class ServerTarget:
    """Address of a server, and the API keys of its users."""

    host: str
    port: int
    keys: Sequence[str] = ()


async def complete(
    target: ServerTarget,
    prompt: Sequence[int],
    max_tokens: int,
    *,
    tenant: int = 0,
    drop_after: int | None = None,
    never_ends: bool = False,
    done: asyncio.Future[None] | None = None,
) -> Sample:
    """Stream one completion. With `drop_after`, the client closes the connection after that many tokens. With
    `never_ends`, no end token is sampled before `max_tokens`. Special tokens are shown as text, because tokens without
    text would look like one long pause. The client also closes the connection when the future `done` completes."""
    loop = asyncio.get_running_loop()
    sample = Sample(time.perf_counter())
    done = loop.create_future() if done is None else done
    request = _request(target, tenant, prompt, max_tokens, max_tokens if never_ends else 0)
    try:
        transport, _ = await loop.create_connection(
            lambda: _Reader(request, sample, drop_after, done), target.host, target.port
        )
    except OSError:
        sample.ended = time.perf_counter()
        return sample
    try:
        await done
    finally:
        sample.ended = time.perf_counter()
        transport.abort()
    return sample


def _request(target: ServerTarget, tenant: int, prompt: Sequence[int], max_tokens: int, min_tokens: int) -> bytes:
    options: dict[str, object] = {
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
        "ignore_eos": True,
    }
    if min_tokens:
        options |= {"min_tokens": min_tokens, "skip_special_tokens": False}
    body = json.dumps({"prompt": list(prompt), "max_tokens": max_tokens} | options).encode()
    key = f"Authorization: Bearer {target.keys[tenant]}\r\n" if target.keys else ""
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {target.host}\r\nContent-Type: application/json\r\n{key}"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


class _Reader(asyncio.Protocol):
    """Sends one HTTP request and records its answer. An event that is received in two parts counts once, when its
    second part is received."""

    def __init__(self, request: bytes, sample: Sample, drop_after: int | None, done: asyncio.Future[None]) -> None:
        self._request = request
        self._sample = sample
        self._drop_after = drop_after
        self._done = done
        self._end = b""

    def connection_made(self, transport: asyncio.WriteTransport) -> None:  # type: ignore[override]
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        sample = self._sample
        if not sample.status:
            sample.status = int(data[9:12])
        # The kept bytes are shorter than an event's mark, or counted already, so only marks that end in `data` are new.
        num_events = (self._end[1 - len(_EVENT) :] + data).count(_EVENT)
        self._end = (self._end + data)[-_KEPT:]
        sample.event_times += [time.perf_counter()] * num_events
        if _END in self._end:
            self._complete()
        elif self._drop_after is not None and len(sample.event_times) >= self._drop_after:
            self._finish()

    def _complete(self) -> None:
        """Record that the stream is complete. The last event of the stream has the token counts and no text."""
        if usage := _USAGE.search(self._end):
            self._sample.num_tokens = int(usage.group(1))
            del self._sample.event_times[-1:]
        self._sample.is_complete = True
        self._finish()

    def connection_lost(self, exc: Exception | None) -> None:
        self._finish()

    def _finish(self) -> None:
        if not self._done.done():
            self._done.set_result(None)


async def closed_loop(
    target: ServerTarget, prompts: Sequence[Sequence[int]], max_tokens: int, num_clients: int
) -> list[Sample]:
    """Run `num_clients` clients, each with one request at a time, until all prompts are answered."""
    waiting = list(reversed(prompts))
    samples: list[Sample] = []

    async def client() -> None:
        while waiting:
            samples.append(await complete(target, waiting.pop(), max_tokens))

    await asyncio.gather(*(client() for _ in range(num_clients)))
    return samples


async def open_loop(
    target: ServerTarget, prompts: Sequence[Sequence[int]], max_tokens: int, rate: float, seconds: float, seed: int = 0
) -> list[Sample]:
    """Send requests at random times (a Poisson process with `rate` requests per second), independent of the server's
    speed. Requests that still run 30 seconds after the last arrival are cancelled."""
    rng = random.Random(seed)
    tasks: list[asyncio.Task[Sample]] = []
    begin = due = time.perf_counter()
    while due < begin + seconds:
        due += rng.expovariate(rate)
        await asyncio.sleep(max(due - time.perf_counter(), 0))
        prompt = prompts[len(tasks) % len(prompts)]
        tasks.append(asyncio.create_task(complete(target, prompt, max_tokens)))
    done, late = await asyncio.wait(tasks, timeout=30)
    for task in late:
        task.cancel()
    await asyncio.gather(*late, return_exceptions=True)
    return [task.result() for task in done]
