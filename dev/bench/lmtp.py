"""LMTP as LMQL uses it: bridle's server compared with LMQL's own, on the same weights, one after the other.

Each stream imitates one LMQL query. A stream has a shared prompt, some tokens of its own, and then short GENERATE
messages. Each GENERATE continues after the few tokens of the previous GENERATE that were used. Some GENERATE messages
have a mask. Nothing is cancelled, and all messages are those that LMQL 0.7.3 sends. Only used tokens count for the
speed. The benchmark also measures the time to each GENERATE's first token, and the SCORE messages per second, which are
sent in bursts. Each measurement begins with prompts that no server has seen before.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, AsyncExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridle.bench.checkpoints import BenchCheckpoint, make_checkpoint, planned_checkpoint
from bridle.bench.phases import MachineLimits, Phases
from bridle.bench.settings import BenchSettings
from dev.bench.lmql import VERSION, lmql_python
from dev.bench.lmtp_servers import bridle_server, genuine_server
from tests.fakes.tiny_checkpoints import save_tokenizer

if TYPE_CHECKING:
    from rich.console import Console

    from bridle.lmtp import Client

_STREAMS = (1, 8, 64)
_MAX_TOKENS = 16  # LMQL's chunk size
_MAX_USED = 8
_NUM_ALLOWED = 32
_BURST = 4
_NUM_SCORED = 4
_SCORE_PROMPT = 64  # LMQL's server keeps logits of whole prompts for 32 requests at once: gigabytes
_OWN_TOKENS = 8
_SERVERS = ("lmql", "bridle")
_START_SECONDS = {"lmql": 20.0, "bridle": 9.0}  # of a server's start and end


@dataclass(frozen=True, slots=True)
class LmtpWorkload:
    """Workload of each stream."""

    num_shared: int = 256
    num_rounds: int = 4
    num_bursts: int = 2


_QUICK = LmtpWorkload(num_rounds=2, num_bursts=1)


@dataclass(slots=True)
class LmtpFigure:
    """Result of one server with `streams` simultaneous queries. `ratio` and `score_ratio` are relative to LMQL's
    server. `same` is the share of streams that got the same tokens from both servers."""

    model: str
    server: str
    streams: int
    tokens_per_second: float
    first_token_median: float
    first_token_p95: float
    scores_per_second: float
    outputs: list[list[int]] = field(repr=False)
    ratio: float = 1.0
    score_ratio: float = 1.0
    same: float = 1.0


def measure(settings: BenchSettings, console: Console, phases: Phases) -> dict[str, Any]:
    """Return figures for each model size, server and number of streams."""
    workload = _workload(settings)
    python = lmql_python(settings.lmql)
    figures: list[LmtpFigure] = []
    for name in _sizes(settings):
        with tempfile.TemporaryDirectory(prefix="bridle-bench-") as folder:
            checkpoint = make_checkpoint(name, Path(folder))
            save_tokenizer(checkpoint.path)  # any tokenizer, because no text is generated
            found = _measure_model(checkpoint, settings, workload, python, phases)
        compare(found)
        _print_table(console, name, found)
        figures += found
    rows = [{key: value for key, value in asdict(figure).items() if key != "outputs"} for figure in figures]
    threads = {} if settings.threads is None else {"threads": settings.threads}
    return {"lmql": VERSION, **threads, "workload": asdict(workload), "figures": rows}


def guesses(settings: BenchSettings, limits: MachineLimits) -> dict[str, float]:
    """Return the estimated seconds of each model and server. A query reads its prompt, samples the used tokens of each
    GENERATE and tokens that arrive too late, and scores texts. LMQL's server reads the whole text again for each
    message, one message after the other."""
    lmql_python(settings.lmql)
    workload, found = _workload(settings), {}
    for checkpoint in map(planned_checkpoint, _sizes(settings)):
        for server in _SERVERS:
            seconds = limits.python(_START_SECONDS[server])
            for streams in settings.batches or _STREAMS:
                drawn = workload.num_rounds * _MAX_TOKENS
                calls = streams * (workload.num_rounds if server == "lmql" else 1)
                scored = streams * workload.num_bursts * _BURST * _NUM_SCORED * _SCORE_PROMPT
                num_tokens = calls * (workload.num_shared + drawn / 2) + scored
                seconds += limits.seconds(checkpoint, num_tokens, drawn * (streams / 4 if server == "lmql" else 1))
            found[f"{checkpoint.name}, {server}"] = seconds
    return found


def _workload(settings: BenchSettings) -> LmtpWorkload:
    return _QUICK if settings.quick else LmtpWorkload()


def _sizes(settings: BenchSettings) -> tuple[str, ...]:
    return settings.model_sizes or (("20m",) if settings.quick else ("0.5b",))


def _measure_model(
    checkpoint: BenchCheckpoint, settings: BenchSettings, workload: LmtpWorkload, python: Path, phases: Phases
) -> list[LmtpFigure]:
    servers: dict[str, Callable[[], AbstractContextManager[str]]] = {
        "lmql": lambda: genuine_server(python, checkpoint.path, settings.threads),
        "bridle": lambda: bridle_server(checkpoint.path, settings.threads),
    }
    figures = []
    for name, start in servers.items():
        with phases.part(f"{checkpoint.name}, {name}"), start() as endpoint:
            for streams in settings.batches or _STREAMS:
                load = Load(endpoint, checkpoint, workload, streams)
                figures.append(asyncio.run(load.run(name)))
    return figures


class Load:
    """The queries of one measurement. The same seed makes the same queries for both servers."""

    def __init__(self, endpoint: str, checkpoint: BenchCheckpoint, workload: LmtpWorkload, streams: int) -> None:
        self._endpoint = endpoint
        self._checkpoint = checkpoint
        self._workload = workload
        self._num_streams = streams
        self._random = random.Random(streams)
        self._first_tokens: list[float] = []

    async def run(self, server: str) -> LmtpFigure:
        """Run all queries at once, then all bursts of SCORE messages."""
        from bridle.lmtp import Client

        shared = self._tokens(self._workload.num_shared)
        async with AsyncExitStack() as stack:
            clients = [  # LMQL opens a connection for each query
                await stack.enter_async_context(Client(self._endpoint, str(self._checkpoint.path), plain=True))
                for _ in range(self._num_streams)
            ]
            for client in clients:
                await client.connect()
            queries = [Query(client, shared + self._tokens(_OWN_TOKENS), self._random.random()) for client in clients]
            begin = time.perf_counter()
            outputs = await asyncio.gather(*(self._query(query) for query in queries))
            generated = time.perf_counter() - begin
            for query in queries:
                for stream in query.streams:  # unused streams must not delay the next measurement
                    await stream.read()
            begin = time.perf_counter()
            await asyncio.gather(*(self._bursts(query) for query in queries))
            scored = time.perf_counter() - begin
        times = sorted(self._first_tokens)
        return LmtpFigure(
            model=self._checkpoint.name,
            server=server,
            streams=self._num_streams,
            tokens_per_second=sum(map(len, outputs)) / generated,
            first_token_median=times[len(times) // 2],
            first_token_p95=times[len(times) * 95 // 100],
            scores_per_second=self._num_streams * self._workload.num_bursts * _BURST / scored,
            outputs=outputs,
        )

    async def _query(self, query: Query) -> list[int]:
        choice = random.Random(query.seed)
        used: list[int] = []
        for number in range(self._workload.num_rounds):
            allowed = choice.sample(range(3, self._checkpoint.vocab_size), _NUM_ALLOWED) if number % 2 else []
            wanted = choice.randint(1, _MAX_USED)
            begin = time.perf_counter()
            stream = await query.client.generate(
                query.prompt + used, max_tokens=_MAX_TOKENS, logit_bias=dict.fromkeys(allowed, 100.0)
            )
            query.streams.append(stream)  # LMQL never tells a server that it no longer needs a stream
            for position in range(wanted):
                token = await anext(stream)
                if position == 0:
                    self._first_tokens.append(time.perf_counter() - begin)
                assert token.token is not None
                used.append(token.token)
                if token.finish_reason is not None:
                    break
        return used

    async def _bursts(self, query: Query) -> None:
        choice = random.Random(query.seed)
        for _ in range(self._workload.num_bursts):
            scored = [choice.choices(range(3, self._checkpoint.vocab_size), k=_NUM_SCORED) for _ in range(_BURST)]
            await asyncio.gather(*(query.client.score(query.prompt[:_SCORE_PROMPT], each) for each in scored))

    def _tokens(self, count: int) -> list[int]:
        return self._random.choices(range(3, self._checkpoint.vocab_size), k=count)


@dataclass(slots=True)
class Query:
    """One query as LMQL would run it. `streams` keeps references to the streams, because the client cancels streams
    without references.
    """

    client: Client
    prompt: list[int]
    seed: float
    streams: list[Any] = field(default_factory=list)


def compare(figures: list[LmtpFigure]) -> None:
    """Set the ratios of each figure relative to LMQL's server with the same number of streams."""
    genuine = {figure.streams: figure for figure in figures if figure.server == "lmql"}
    for figure in figures:
        base = genuine[figure.streams]
        figure.ratio = figure.tokens_per_second / base.tokens_per_second
        figure.score_ratio = figure.scores_per_second / base.scores_per_second
        pairs = list(zip(figure.outputs, base.outputs, strict=True))
        figure.same = sum(ours == theirs for ours, theirs in pairs) / len(pairs)


def _print_table(console: Console, name: str, figures: list[LmtpFigure]) -> None:
    from rich.table import Table

    table = Table(title=f"{name}: LMTP, beside the server of LMQL {VERSION}")
    for heading in ("streams", "", "tok/s", "x", "first ms", "p95 ms", "SCORE/s", "x", "same"):
        table.add_column(heading, justify="left" if not heading else "right")
    for figure in sorted(figures, key=lambda figure: (figure.streams, figure.server != "lmql")):
        table.add_row(
            str(figure.streams),
            figure.server,
            f"{figure.tokens_per_second:.1f}",
            f"{figure.ratio:.2f}",
            f"{1e3 * figure.first_token_median:.0f}",
            f"{1e3 * figure.first_token_p95:.0f}",
            f"{figure.scores_per_second:.1f}",
            f"{figure.score_ratio:.2f}",
            f"{figure.same:.0%}",
            end_section=figure.server == "bridle",
        )
    console.print(table)
