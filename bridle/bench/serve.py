"""What the HTTP server costs and how it bears load: the whole of `bridle serve`, driven over real connections.

1. Throughput of 16 clients that stream, beside the offline engine on the same requests. They take turns; the best of
   each counts.
2. More and more clients, faster and faster arrivals: time to the first token, between tokens, good requests a second.
3. Ten times as much as it can take, from ten users with keys, one of whom asks for half of it: how quickly it says no,
   what the admitted ones notice beside a server that is just full, and what share each user gets.
4. A thousand streams at once of which half are dropped, again and again: what the server holds after each round.

The server runs in a process of its own; the processor time of the clients, in this one, is reported beside.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import Coroutine, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from bridle.bench.checkpoints import Checkpoint, make_checkpoint
from bridle.bench.control_guests import write_tokenizer
from bridle.bench.engine import make_prompts
from bridle.bench.loads import Row, best, print_rows, quantile, served_shares, timed
from bridle.bench.peers import BridlePeer
from bridle.bench.serve_process import HttpServer, http_server
from bridle.bench.settings import Settings
from bridle.bench.sse_client import Sample, closed_loop, complete, open_loop

if TYPE_CHECKING:
    from rich.console import Console

T = TypeVar("T")
Prompts = Sequence[Sequence[int]]

_NUM_USERS = 10
_SIXTEEN = 16
_HOUSE = 64  # places for requests in the server that is overloaded; a quarter of them run
_KV_TOKENS = 1 << 16
_STREAM_TOKENS = 32  # of KV cache for a stream that is dropped: two blocks hold its prompt and its longest output
_COMMON = ("--control", "off", "--no-prefix-caching")


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured. `seconds` is the length of an overload, an open loop takes half of it."""

    max_tokens: int
    num_requests: int
    num_races: int
    concurrency: tuple[int, ...]
    shares: tuple[float, ...]
    seconds: float
    num_streams: int
    num_rounds: int


_QUICK = Scale(16, 48, 2, (1, 16), (0.9,), 8.0, 100, 3)
_FULL = Scale(32, 96, 3, (1, 4, 16, 64), (0.25, 0.5, 0.75, 0.9, 1.0, 1.25), 60.0, 1000, 4)


def measure(settings: Settings, console: Console) -> dict[str, Any]:
    """Run everything. Prints a table as it goes."""
    scale = _QUICK if settings.quick else _FULL
    name = (settings.model_sizes or (("20m",) if settings.quick else ("0.5b",)))[0]
    with tempfile.TemporaryDirectory(prefix="bridle-bench-") as folder:
        checkpoint = make_checkpoint(name, Path(folder))
        write_tokenizer(checkpoint.path, checkpoint.vocab_size)
        bench = _Bench(checkpoint, settings.threads, Path(folder), scale, console)
        report = {"model": name, **bench.sweep(), "overload": bench.overload(), "dropping": bench.drop()}
    return report


@dataclass(frozen=True, slots=True)
class _Bench:
    """The parts of the benchmark, each with servers of its own."""

    checkpoint: Checkpoint
    threads: int | None
    folder: Path
    scale: Scale
    console: Console

    @property
    def prompts(self) -> Prompts:
        return make_prompts(self.scale.num_requests, self.checkpoint.vocab_size)

    def _server(self, *options: str, num_users: int = 0, num_tokens: int = _KV_TOKENS) -> Any:
        room = ("--kv-memory", str(self.checkpoint.token_bytes * num_tokens))
        return http_server(
            self.checkpoint.path, self.folder, *_COMMON, *room, *options, num_users=num_users, threads=self.threads
        )

    # -- offline, concurrency, rates -------------------------------------------------------------------------

    def sweep(self) -> dict[str, Any]:
        """Sixteen clients beside the offline engine, then other numbers of clients, then rates of arrival."""
        with self._server() as server:
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
            peer.generate(prompts[:2], 2)  # whatever is made lazily is made now
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
            used = prompts[: max(len(prompts) * num_clients // _SIXTEEN, 4)]
            load = closed_loop(server.target, used, scale.max_tokens, num_clients)
            rows.append((await timed(f"{num_clients} clients", server, load))[0])
        capacity = max(row.requests_per_second for row in rows)
        for share in scale.shares:
            load = open_loop(server.target, prompts, scale.max_tokens, share * capacity, scale.seconds / 2)
            rows.append((await timed(f"{share:.0%} of capacity", server, load))[0])
        return rows

    # -- overload --------------------------------------------------------------------------------------------

    def overload(self) -> dict[str, Any]:
        """Ten times as much as a full house takes, beside a house that is just full."""
        options = ("--max-requests", str(_HOUSE), "--max-num-seqs", str(_HOUSE // 4))
        with self._server(*options, num_users=_NUM_USERS) as server:
            return run(self._overload(server))

    async def _overload(self, server: HttpServer) -> dict[str, Any]:
        target, prompts, scale = server.target, self.prompts, self.scale
        # Admission keeps some places for users who have none: a full house is what it leaves to the others.
        num_clients = _HOUSE * 3 // 4
        used = [prompts[number % len(prompts)] for number in range(max(len(prompts), 4 * num_clients))]
        await closed_loop(target, prompts[:2], 2, 1)
        full, _ = await timed("full house", server, closed_loop(target, used, scale.max_tokens, num_clients))
        begin = time.perf_counter()
        rate = 10 * full.requests_per_second
        load = open_loop(target, prompts, scale.max_tokens, rate, scale.seconds, _weights())
        row, samples = await timed("10 times as much", server, load)
        print_rows([full, row], self.console)
        shares = served_shares(samples, _NUM_USERS, begin, begin + scale.seconds)
        found: dict[str, Any] = {
            "rows": [asdict(full), asdict(row)],
            "gap_p99_ratio": row.gap_p99 / full.gap_p99 if full.gap_p99 else 0.0,
            "refusal_p99": quantile(_refusals(samples), 99),
            "shares": shares,
            "least_share": min(shares),
        }
        self.console.print(
            f"10 times as much: the p99 between tokens is {found['gap_p99_ratio']:.2f} of a full house's; refusals "
            f"take {found['refusal_p99'] * 1000:.0f} ms (p99); the least served of {_NUM_USERS} users got "
            f"{found['least_share']:.0%} of a fair share"
        )
        return found

    # -- streams that are dropped ----------------------------------------------------------------------------

    def drop(self) -> list[dict[str, Any]]:
        """What the server holds after each round of streams. Its KV cache has room for one round and not much more:
        memory that was never written is not held, and would look like a leak when it comes to that later."""
        num_streams = self.scale.num_streams + 8
        options = ("--max-requests", str(num_streams), "--max-num-seqs", str(num_streams))
        with self._server(*options, num_tokens=num_streams * _STREAM_TOKENS) as server:
            run(closed_loop(server.target, self.prompts[:2], 2, 1))
            states = [asdict(server.settle())]
            rng = random.Random(0)
            for number in range(self.scale.num_rounds):
                samples = run(self._dropping(server, rng))
                states.append(asdict(server.settle()))
                complete, failed = (sum(test(each) for each in samples) for test in (_is_complete, _is_failed))
                self.console.print(
                    f"round {number + 1}: {len(samples)} streams, {complete} read to the end, {failed} failed; then "
                    + ", ".join(f"{name} {value:.0f}" for name, value in states[-1].items())
                )
        return states

    async def _dropping(self, server: HttpServer, rng: random.Random) -> list[Sample]:
        """All streams at once, half of which their client leaves at a random token."""
        max_tokens = self.scale.max_tokens // 2
        drops = [rng.randint(1, max_tokens - 1) if n % 2 else None for n in range(self.scale.num_streams)]
        prompts = [[rng.randrange(3, self.checkpoint.vocab_size) for _ in range(4)] for _ in drops]
        streams = (
            complete(server.target, prompt, max_tokens, drop_after=drop)
            for prompt, drop in zip(prompts, drops, strict=True)
        )
        return await asyncio.gather(*streams)


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run clients on the cheapest event loop there is."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(work)
    return uvloop.run(work)


def _weights() -> list[float]:
    """The first user asks for half of everything."""
    return [0.5] + [0.5 / (_NUM_USERS - 1)] * (_NUM_USERS - 1)


def _refusals(samples: Sequence[Sample]) -> list[float]:
    return [each.ended - each.sent for each in samples if each.status == 429]


def _is_complete(sample: Sample) -> bool:
    return sample.is_complete


def _is_failed(sample: Sample) -> bool:
    return sample.status != 200
