"""Benchmark of the HTTP server: `bridle serve` in its own process, with clients over real connections.

1. The first part measures the throughput of 16 streaming clients, compared with the offline engine on the same
requests. Server and engine take turns, and the best run of each counts.
2. Two further parts increase the number of clients and the arrival rate. All parts measure time to first token, time
between tokens, and good requests per second.

The server runs in a separate process. The processor time of the clients is reported separately; the clients run in this
process.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Coroutine, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from bridle.bench.baselines import BridlePeer
from bridle.bench.checkpoints import BenchCheckpoint, make_checkpoint, planned_checkpoint
from bridle.bench.control_guests import write_tokenizer
from bridle.bench.engine import make_prompts
from bridle.bench.load_report import Row, best, print_rows, timed
from bridle.bench.phases import MachineLimits, Phases
from bridle.bench.serve_process import HttpServer, http_server
from bridle.bench.settings import BenchSettings
from bridle.bench.sse_client import closed_loop, open_loop

if TYPE_CHECKING:
    from rich.console import Console

T = TypeVar("T")
Prompts = Sequence[Sequence[int]]

_SIXTEEN = 16
_KV_TOKENS = 1 << 16
_RACE = "16 clients, and the offline engine"
_COMMON = ("--control", "off", "--no-prefix-caching")


@dataclass(frozen=True, slots=True)
class LoadScale:
    """Sizes and durations of the measurement. `seconds` is the duration of a part with an arrival rate."""

    max_tokens: int
    num_requests: int
    num_races: int
    concurrency: tuple[int, ...]
    shares: tuple[float, ...]
    seconds: float


_QUICK = LoadScale(16, 48, 2, (1, 16), (0.9,), 4.0)
_FULL = LoadScale(32, 96, 3, (1, 4, 16, 64), (0.25, 0.5, 0.75, 0.9, 1.0, 1.25), 30.0)


def measure(settings: BenchSettings, console: Console, phases: Phases) -> dict[str, Any]:
    """Run all parts, and print a table after each part."""
    scale, name = _chosen(settings)
    with tempfile.TemporaryDirectory(prefix="bridle-bench-") as folder:
        checkpoint = make_checkpoint(name, Path(folder))
        write_tokenizer(checkpoint.path, checkpoint.vocab_size)
        bench = _Bench(checkpoint, settings.threads, Path(folder), scale, console, phases)
        return {"model": name, **bench.sweep()}


def _chosen(settings: BenchSettings) -> tuple[LoadScale, str]:
    """Return the sizes of the measurement, and the name of the model."""
    name = (settings.model_sizes or (("20m",) if settings.quick else ("0.5b",)))[0]
    return _QUICK if settings.quick else _FULL, name


def _prompts(checkpoint: BenchCheckpoint, scale: LoadScale) -> Prompts:
    return make_prompts(scale.num_requests, checkpoint.vocab_size)


def _used(prompts: Prompts, num_clients: int) -> Prompts:
    """Return the prompts for a part with `num_clients` clients. Fewer clients get fewer prompts, because they finish
    fewer prompts in the same time."""
    return prompts[: max(len(prompts) * num_clients // _SIXTEEN, 4)]


def guesses(settings: BenchSettings, limits: MachineLimits) -> dict[str, float]:
    """Return the estimated seconds of each part: the time to compute prompts, and the time of steps with one sequence
    per client. Parts with an arrival rate have a fixed duration."""
    scale, name = _chosen(settings)
    checkpoint = planned_checkpoint(name)
    prompts = _prompts(checkpoint, scale)

    def closed(num_clients: int) -> float:
        used = _used(prompts, num_clients)
        num_tokens = sum(map(len, used)) + len(used) * scale.max_tokens
        return limits.seconds(checkpoint, num_tokens, scale.max_tokens * len(used) // num_clients)

    found = {_RACE: 2 * scale.num_races * closed(_SIXTEEN)}
    found |= {f"{number} clients": closed(number) for number in scale.concurrency if number != _SIXTEEN}
    return found | {f"{share:.0%} of capacity": scale.seconds for share in scale.shares}


@dataclass(frozen=True, slots=True)
class _Bench:
    """The benchmark of the server with one checkpoint."""

    checkpoint: BenchCheckpoint
    threads: int | None
    folder: Path
    scale: LoadScale
    console: Console
    phases: Phases

    @property
    def prompts(self) -> Prompts:
        return _prompts(self.checkpoint, self.scale)

    def sweep(self) -> dict[str, Any]:
        """Measure 16 clients against the offline engine, then other numbers of clients, then arrival rates."""
        room = ("--kv-memory", str(self.checkpoint.token_bytes * _KV_TOKENS))
        with http_server(self.checkpoint.path, self.folder, *_COMMON, *room, threads=self.threads) as server:
            with self.phases.part(_RACE):
                offline, sixteen = self._race(server)
            share = sixteen.tokens_per_second / offline
            self.console.print(
                f"{self.checkpoint.name}: offline engine, 16 at once: {offline:.1f} tokens/s; over HTTP with 16 "
                f"clients: {sixteen.tokens_per_second:.1f} tokens/s, {share:.0%} of it"
            )
            rows = run(self._loads(server, sixteen))
        print_rows(rows, self.console)
        return {"offline_tokens_per_second": offline, "share_of_offline": share, "rows": [asdict(row) for row in rows]}

    def _race(self, server: HttpServer) -> tuple[float, Row]:
        prompts, num_new = self.prompts, self.scale.max_tokens
        peer = BridlePeer(self.checkpoint, num_threads=self.threads, max_num_seqs=_SIXTEEN)
        offline, rows = [], []
        try:
            peer.generate(prompts[:2], 2)  # make now what would be made lazily
            run(closed_loop(server.target, prompts[:2], 2, 1))
            for _ in range(self.scale.num_races):
                offline.append(len(prompts) * num_new / peer.generate(prompts, num_new).seconds)
                load = closed_loop(server.target, prompts, num_new, _SIXTEEN)
                rows.append(run(timed("16 clients", server, load))[0])
        finally:
            peer.close()
        return max(offline), best(rows)

    async def _loads(self, server: HttpServer, sixteen: Row) -> list[Row]:
        prompts, scale = self.prompts, self.scale
        rows = []
        for num_clients in scale.concurrency:
            if num_clients == _SIXTEEN:
                rows.append(sixteen)
                continue
            load = closed_loop(server.target, _used(prompts, num_clients), scale.max_tokens, num_clients)
            with self.phases.part(name := f"{num_clients} clients"):
                rows.append((await timed(name, server, load))[0])
        capacity = max(row.requests_per_second for row in rows)
        for share in scale.shares:
            load = open_loop(server.target, prompts, scale.max_tokens, share * capacity, scale.seconds)
            with self.phases.part(name := f"{share:.0%} of capacity"):
                rows.append((await timed(name, server, load))[0])
        return rows


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run the clients on the fastest event loop that is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(work)
    return uvloop.run(work)
