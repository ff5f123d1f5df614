"""Compares the router's continuous batching with no batching and with static batches, and measures the effect of each
setting.

The same requests arrive in each run, as a Poisson process with short and long prompts and outputs. Each run starts
`bridle serve` with other flags. The variant `one at a time` has batches of one request. Static batches are those of a
client without a router. Such a client gathers a number of requests, sends them together, and sends the next batch only
when all of them are answered. The time to a request's first token begins at its arrival, and includes any wait.
Requests arrive at the highest rate that the first variant's flags can sustain; this rate is measured in the same run.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from bridle.bench.checkpoints import BenchCheckpoint, make_checkpoint, planned_checkpoint
from bridle.bench.control_guests import write_tokenizer
from bridle.bench.load_report import Row, print_rows, timed
from bridle.bench.phases import MachineLimits, Phases
from bridle.bench.serve_process import HttpServer, http_server
from bridle.bench.settings import BenchSettings
from bridle.bench.sse_client import Sample, ServerTarget, complete

if TYPE_CHECKING:
    from rich.console import Console

T = TypeVar("T")

_COMMON = ("--control", "off", "--no-prefix-caching")
#: Shortest and longest prompt and output of each kind of request, and the number of requests of that kind in ten.
_KINDS = (((16, 64), (24, 64), 5), ((16, 64), (4, 12), 2), ((256, 512), (8, 32), 3))
_LOAD = 0.8  # share of the capacity of continuous batching
_CLIENTS = 8  # clients that measure the capacity
_CAPACITY = "what continuous batching can bear"
_START_SECONDS = 9.0  # for the start and the end of a server


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that arrives `at` seconds after the start, or later if it has to wait."""

    at: float
    prompt: tuple[int, ...]
    max_tokens: int


#: Sends requests to a server, each with its arrival time, and waits for all answers.
Delivery = Callable[[ServerTarget, Sequence[Arrival]], Coroutine[Any, Any, list[Sample]]]


@dataclass(frozen=True, slots=True)
class Variant:
    """One variant of serving the requests."""

    name: str
    flags: tuple[str, ...]
    deliver: Delivery


def measure(settings: BenchSettings, console: Console, phases: Phases) -> dict[str, Any]:
    """Serve the same arrivals with every variant, and print a table."""
    name, num_requests = _chosen(settings)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="bridle-bench-") as folder:
        checkpoint = make_checkpoint(name, Path(folder))
        write_tokenizer(checkpoint.path, checkpoint.vocab_size)
        requests = make_arrivals(num_requests, checkpoint.vocab_size)
        bench = _Bench(checkpoint, Path(folder), settings.threads)
        with phases.part(_CAPACITY):
            capacity = bench.run((), partial(_find_capacity, requests=requests))
        arrivals = [replace(each, at=each.at / (_LOAD * capacity)) for each in requests]
        console.print(f"{name}: {capacity:.2f} requests/s at most, {_LOAD * capacity:.2f} arrive")
        for variant in variants(_static_size(settings)):
            with phases.part(variant.name):
                rows.append(bench.run(variant.flags, partial(_measure, variant=variant, arrivals=arrivals)))
            console.print(f"{variant.name}: {rows[-1].tokens_per_second:.1f} tokens/s")
    print_rows(rows, console)
    return {"model": name, "capacity": capacity, "rate": _LOAD * capacity, "rows": [asdict(row) for row in rows]}


def _chosen(settings: BenchSettings) -> tuple[str, int]:
    """Return the model, and the number of requests that arrive."""
    name = (settings.model_sizes or (("20m",) if settings.quick else ("0.5b",)))[0]
    return name, 10 if settings.quick else 30


def _static_size(settings: BenchSettings) -> int:
    return (settings.batches or (8,))[0]


def guesses(settings: BenchSettings, limits: MachineLimits) -> dict[str, float]:
    """Return the estimated seconds of each variant: the server's start, and the requests at no more than its highest
    rate."""
    name, num_requests = _chosen(settings)
    checkpoint = planned_checkpoint(name)
    requests = make_arrivals(num_requests, checkpoint.vocab_size)
    num_steps = sum(each.max_tokens for each in requests)
    num_tokens = sum(len(each.prompt) for each in requests) + num_steps
    least = limits.seconds(checkpoint, num_tokens, num_steps / _CLIENTS)
    start = limits.python(_START_SECONDS)
    return {_CAPACITY: start + least} | {each.name: start + least / _LOAD for each in variants(_static_size(settings))}


def variants(static_size: int) -> list[Variant]:
    """Return three ways to form batches, then variants that each change one setting."""
    ways = [
        Variant("continuous", (), as_they_come),
        Variant("one at a time", ("--max-batch-size", "1"), as_they_come),
        Variant(f"static batches of {static_size}", (), partial(in_batches, size=static_size)),
    ]
    return ways + [Variant(" ".join(flags), flags, as_they_come) for flags in _KNOBS]


_KNOBS = (
    ("--max-batch-prefill-tokens", "32"),
    ("--max-batch-prefill-tokens", "1024"),
    ("--max-waiting-tokens", "4"),
    ("--max-waiting-tokens", "20"),
    ("--max-waiting-tokens", "20", "--waiting-served-ratio", "0.5"),
    ("--no-chunked-prefill",),
    ("--no-chunked-prefill", "--waiting-served-ratio", "2"),
    ("--max-batch-size", "3"),
    ("--max-batch-total-tokens", "768", "--max-total-tokens", "576"),
    ("--max-concurrent-requests", "4"),
    ("--max-input-tokens", "128"),
    ("--max-total-tokens", "256"),
)


def make_arrivals(count: int, vocab_size: int, *, seed: int = 0) -> list[Arrival]:
    """Return requests of all kinds, one per second on average, always the same ones for the same arguments."""
    rng = random.Random(seed)
    kinds = [kind for *kind, share in _KINDS for _ in range(share)]
    chosen = [kinds[number % len(kinds)] for number in range(count)]
    rng.shuffle(chosen)
    times = accumulate(rng.expovariate(1.0) for _ in range(count))
    return [
        Arrival(at, tuple(rng.randrange(3, vocab_size) for _ in range(rng.randint(*prompt))), rng.randint(*output))
        for at, (prompt, output) in zip(times, chosen, strict=True)
    ]


# -- how they reach the server -------------------------------------------------------------------------------------


async def as_they_come(target: ServerTarget, arrivals: Sequence[Arrival]) -> list[Sample]:
    """Send each request at its arrival time, independent of other requests."""
    begin = time.perf_counter()

    async def one(arrival: Arrival) -> Sample:
        await _until(begin + arrival.at)
        return await complete(target, arrival.prompt, arrival.max_tokens)

    return list(await asyncio.gather(*map(one, arrivals)))


async def in_batches(target: ServerTarget, arrivals: Sequence[Arrival], *, size: int) -> list[Sample]:
    """Send a full batch once its last request has arrived and the previous batch is answered."""
    begin = time.perf_counter()
    samples: list[Sample] = []
    for first in range(0, len(arrivals), size):
        batch = arrivals[first : first + size]
        await _until(begin + batch[-1].at)
        done = await asyncio.gather(*(complete(target, each.prompt, each.max_tokens) for each in batch))
        for arrival, sample in zip(batch, done, strict=True):
            sample.sent = begin + arrival.at
        samples += done
    return samples


async def _until(due: float) -> None:
    await asyncio.sleep(max(due - time.perf_counter(), 0))


# -- one server ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Bench:
    checkpoint: BenchCheckpoint
    folder: Path
    threads: int | None

    def run(self, flags: Sequence[str], use: Callable[[HttpServer], Coroutine[Any, Any, T]]) -> T:
        """Call `use` with a server that has these flags; return its result."""
        with http_server(self.checkpoint.path, self.folder, *_COMMON, *flags, threads=self.threads) as server:
            return asyncio.run(use(server))


async def _find_capacity(server: HttpServer, requests: Sequence[Arrival]) -> float:
    """Return the requests per second if every client always has a next request."""
    waiting = list(reversed(requests))

    async def client() -> None:
        while waiting:
            request = waiting.pop()
            await complete(server.target, request.prompt, request.max_tokens)

    begin = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(_CLIENTS)))
    return len(requests) / (time.perf_counter() - begin)


async def _measure(server: HttpServer, variant: Variant, arrivals: Sequence[Arrival]) -> Row:
    await complete(server.target, (5, 6, 7), 2)  # make now what would be made lazily
    row, _ = await timed(variant.name, server, variant.deliver(server.target, arrivals))
    return row
