"""A client of streaming HTTP that costs little, so that a benchmark measures the server and not its own client.

One coroutine per request over its own connection; it looks for events in the bytes and parses none of them.
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

_EVENT = b'data: {"id"'
_USAGE = re.compile(rb'"completion_tokens":(\d+)')
_LIMIT = 1 << 20


@dataclass(slots=True)
class Sample:
    """What became of one request. Times are seconds; `event_times` are points of the monotonic clock, one for each
    event with text (a server may put several tokens into one)."""

    sent: float
    status: int = 0
    tenant: int = 0
    ended: float = 0.0
    is_complete: bool = False
    num_tokens: int = 0
    event_times: list[float] = field(default_factory=list)

    @property
    def first(self) -> float:
        """From sending to the first token."""
        return self.event_times[0] - self.sent

    @property
    def gaps(self) -> list[float]:
        """Between one event and the next."""
        return [after - before for before, after in pairwise(self.event_times)]


@dataclass(frozen=True, slots=True)
class Target:
    """A server, and the keys of its users."""

    host: str
    port: int
    keys: Sequence[str] = ()


async def complete(
    target: Target, prompt: Sequence[int], max_tokens: int, *, tenant: int = 0, drop_after: int | None = None
) -> Sample:
    """Stream one completion. With `drop_after`, go away after so many tokens, without a word."""
    options = {"stream": True, "stream_options": {"include_usage": True}, "temperature": 0, "ignore_eos": True}
    body = json.dumps({"prompt": list(prompt), "max_tokens": max_tokens} | options).encode()
    sample = Sample(time.perf_counter(), tenant=tenant)
    try:
        reader, writer = await asyncio.open_connection(target.host, target.port, limit=_LIMIT)
    except OSError:
        sample.ended = time.perf_counter()
        return sample
    try:
        writer.write(_head(target, tenant, len(body)) + body)
        await _read(reader, sample, drop_after)
    except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        pass
    finally:
        sample.ended = time.perf_counter()
        writer.transport.abort()
    return sample


def _head(target: Target, tenant: int, length: int) -> bytes:
    key = f"Authorization: Bearer {target.keys[tenant]}\r\n" if target.keys else ""
    return (
        f"POST /v1/completions HTTP/1.1\r\nHost: {target.host}\r\nContent-Type: application/json\r\n{key}"
        f"Content-Length: {length}\r\nConnection: close\r\n\r\n"
    ).encode()


async def _read(reader: asyncio.StreamReader, sample: Sample, drop_after: int | None) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    sample.status = int(head.split(b" ", 2)[1])
    while sample.status == 200:
        size = int(await reader.readline(), 16)
        if size == 0:
            return
        chunk = await reader.readexactly(size + 2)
        num_events = chunk.count(_EVENT)
        if usage := _USAGE.search(chunk):
            sample.num_tokens = int(usage.group(1))
            num_events -= 1
        sample.event_times += [time.perf_counter()] * num_events
        sample.is_complete = sample.is_complete or b"[DONE]" in chunk
        if drop_after is not None and len(sample.event_times) >= drop_after:
            return


async def closed_loop(
    target: Target, prompts: Sequence[Sequence[int]], max_tokens: int, num_clients: int
) -> list[Sample]:
    """`num_clients` clients, each with one request at a time, until all prompts are through."""
    waiting = list(reversed(prompts))
    samples: list[Sample] = []

    async def client() -> None:
        while waiting:
            samples.append(await complete(target, waiting.pop(), max_tokens))

    await asyncio.gather(*(client() for _ in range(num_clients)))
    return samples


async def open_loop(
    target: Target,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    rate: float,
    seconds: float,
    weights: Sequence[float] = (1.0,),
    seed: int = 0,
) -> list[Sample]:
    """Requests arrive as a Poisson process of `rate` a second, whatever the server does; tenant i sends the share
    `weights[i]` of them. What still runs half a minute after the last one is given up."""
    rng = random.Random(seed)
    tasks: list[asyncio.Task[Sample]] = []
    begin = due = time.perf_counter()
    while due < begin + seconds:
        due += rng.expovariate(rate)
        await asyncio.sleep(max(due - time.perf_counter(), 0))
        (tenant,) = rng.choices(range(len(weights)), weights)
        prompt = prompts[len(tasks) % len(prompts)]
        tasks.append(asyncio.create_task(complete(target, prompt, max_tokens, tenant=tenant)))
    done, late = await asyncio.wait(tasks, timeout=30)
    for task in late:
        task.cancel()
    await asyncio.gather(*late, return_exceptions=True)
    return [task.result() for task in done]
