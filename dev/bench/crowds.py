"""Benchmark of overload and attacks: inter-token latency of other users' streams, late health checks, memory that is
not released.

Five scenes run over `bridle serve demo`. Each scene is measured in one run, first alone and then with malicious
clients, so that both can be compared on a busy machine. Malicious and measuring clients are one process on the server's
machine. This process uses processor time that remote clients would not use.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridle.bench.phases import MachineLimits, Phases
from bridle.bench.serve_process import HttpServer, http_server
from bridle.bench.settings import BenchSettings
from bridle.bench.sse_client import Sample, complete
from bridle.errors import EngineClosed
from bridle.lmtp.client import Client
from dev.bench.crowd_clients import (
    FRAMES,
    Asker,
    ClientCrowd,
    CrowdTally,
    Flooder,
    HalfSent,
    Silent,
    ask,
    ask_health,
    http_request,
    stream_again_and_again,
)
from dev.bench.crowd_constraints import constrained_bodies, hostile_constraints, ordinary_constraint
from dev.bench.crowd_figures import Report, print_report

if TYPE_CHECKING:
    from rich.console import Console

CROWD = 100
NEIGHBOURS = 4
USERS = 3  # users who overload a server; the neighbours have a separate key
PLACES = 12  # capacity of the overloaded server
ORDINARY = 100
_PERIOD = 0.05  # seconds between two health probes
_NEIGHBOUR_TOKENS = 64
_REST_SECONDS = 10.0
_SETTLING = 1.0
_PROMPT = [5, 6, 7]
#: Rough seconds for `MachineLimits.python`: a server's start and end, the cleanup after slow readers, a round of
#: readers that disconnect, and all constraints.
_START_SECONDS, _CLEARING_SECONDS, _ROUND_SECONDS, _CONSTRAINTS_SECONDS = 9.0, 8.0, 6.0, 30.0


def measure(settings: BenchSettings, console: Console, phases: Phases) -> dict[str, Any]:
    """Run every scene, and print tables."""
    report = Report()
    seconds, slow_seconds, rounds = _scale(settings)
    with _server(settings) as server:
        with phases.part("flood"):
            asyncio.run(_flood(server, report, seconds))
        with phases.part("slow"):
            asyncio.run(_slow(server, report, slow_seconds))
        with phases.part("dropped"):
            asyncio.run(_dropped(server, report, rounds))
    with (
        phases.part("overload"),
        _server(settings, "--max-requests", str(PLACES), num_users=USERS + 1) as server,
    ):
        asyncio.run(_overload(server, report, seconds))
    with phases.part("constraints"), _server(settings) as server:
        asyncio.run(_constraints(server, report))
    print_report(report, console)
    return asdict(report)


def guesses(settings: BenchSettings, limits: MachineLimits) -> dict[str, float]:
    """Estimate the seconds of each scene: most of them last a fixed time, without and with malicious clients."""
    seconds, slow_seconds, rounds = _scale(settings)
    start = limits.python(_START_SECONDS)
    return {
        "flood": start + 2 * seconds + _SETTLING + _REST_SECONDS,
        "slow": 2 * slow_seconds + limits.python(_CLEARING_SECONDS),
        "dropped": limits.python(rounds * _ROUND_SECONDS),
        "overload": start + 2 * seconds,
        "constraints": start + limits.python(_CONSTRAINTS_SECONDS),
    }


def _scale(settings: BenchSettings) -> tuple[float, float, int]:
    """Return the seconds of a scene, the seconds of the scene with slow readers, and the number of rounds of
    disconnecting readers."""
    return (3.0, 3.0, 3) if settings.quick else (20.0, 40.0, 10)


@contextlib.contextmanager
def _server(settings: BenchSettings, *options: str, num_users: int = 0) -> Iterator[HttpServer]:
    with (
        tempfile.TemporaryDirectory(prefix="bridle-bench-") as folder,
        http_server(
            "demo", Path(folder), "--kv-memory", "256MiB", "--control", "off", *options,
            num_users=num_users, threads=settings.threads,
        ) as server,
    ):  # fmt: skip
        yield server


def resident(server: HttpServer) -> float:
    """Return the resident memory of the server in MiB."""
    return server.process.memory_info().rss / 2**20


def settle(server: HttpServer, seconds: float = 120.0) -> None:
    """Wait until the server runs no request. Raises `EngineClosed` if requests continue to run."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        metrics = server.metrics()
        if metrics["bridle_http_in_flight"] == 0 and metrics["tgi_batch_current_size"] == 0:
            return
        time.sleep(0.1)
    raise EngineClosed(f"requests still run {seconds:g} seconds after their clients left")


# -- who is watched ------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Watched:
    """Observations of a server, complete when `watching` ends. `own` are delays of the benchmark process itself, which
    the server does not cause."""

    late: list[float] = field(default_factory=list)
    own: list[float] = field(default_factory=list)
    streams: list[Sample] = field(default_factory=list)
    peak: float = 0.0

    @property
    def gaps(self) -> list[float]:
        """The inter-token latencies of the streams."""
        return [gap for stream in self.streams for gap in stream.gaps]


@contextlib.asynccontextmanager
async def watching(server: HttpServer, num_streams: int = 0, tenant: int = 0) -> AsyncIterator[Watched]:
    """Within the block, request `/health`, run streams, and record the server's memory."""
    over, seen = asyncio.Event(), Watched()
    health = asyncio.create_task(ask_health(server.target, over, _PERIOD))
    streams = [
        asyncio.create_task(stream_again_and_again(server.target, over, _NEIGHBOUR_TOKENS, tenant))
        for _ in range(num_streams)
    ]
    memory = asyncio.create_task(_look(server, over, seen))
    try:
        yield seen
    finally:
        over.set()
        seen.late, _ = await asyncio.gather(health, memory)
        seen.streams = [sample for samples in await asyncio.gather(*streams) for sample in samples]


async def _look(server: HttpServer, over: asyncio.Event, seen: Watched) -> None:
    """Record the server's memory, and the delay of each recording."""
    while not over.is_set():
        seen.peak = max(seen.peak, resident(server))
        begin = time.perf_counter()
        try:
            await asyncio.wait_for(over.wait(), _PERIOD)
        except TimeoutError:
            seen.own.append(max(time.perf_counter() - begin - _PERIOD, 0.0))
    seen.peak = max(seen.peak, resident(server))


def _tell(report: Report, scene: str, beside: str, seen: Watched) -> None:
    if seen.streams:
        report.took(scene, beside, "first token", [each.first for each in seen.streams if each.event_times])
        report.took(scene, beside, "gap between tokens", seen.gaps)
    report.took(scene, beside, "/health, after it was due", seen.late)
    report.took(scene, beside, "who asks, late by itself", seen.own)


# -- scenes --------------------------------------------------------------------------------------------------


async def _flood(server: HttpServer, report: Report, seconds: float) -> None:
    """Measure streams while other connections send frames as fast as the server reads them."""
    async with watching(server, NEIGHBOURS) as seen:
        await asyncio.sleep(seconds)
    _tell(report, "flood", "nobody", seen)
    report.held("flood", "before", resident(server))
    tally = CrowdTally()
    crowd = ClientCrowd(
        server.target, CROWD, lambda number: Flooder(server.target, tally, FRAMES[number % len(FRAMES)])
    )  # fmt: skip
    async with crowd:
        await asyncio.sleep(_SETTLING)
        async with watching(server, NEIGHBOURS) as seen:
            await asyncio.sleep(seconds)
    _tell(report, "flood", f"{CROWD} that send frames", seen)
    report.held("flood", "peak", seen.peak)
    await asyncio.sleep(_REST_SECONDS)
    report.held("flood", f"{_REST_SECONDS:g} s later", resident(server))
    report.counted("flood", "bytes of frames", tally.frame_bytes)
    report.counted("flood", "connections", tally.num_opened)


async def _overload(server: HttpServer, report: Report, seconds: float) -> None:
    """Measure streams of one user while other users repeat refused requests at once."""
    async with watching(server, NEIGHBOURS, USERS) as seen:
        await asyncio.sleep(seconds)
    _tell(report, "overload", "nobody", seen)
    report.held("overload", "before", resident(server))
    tally, body = CrowdTally(), {"prompt": _PROMPT, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    requests = [http_request(server.target, "/v1/completions", body, tenant) for tenant in range(USERS)]
    crowd = ClientCrowd(server.target, CROWD, lambda number: Asker(requests[number % USERS], tally))
    async with watching(server, NEIGHBOURS, USERS) as seen, crowd:
        await asyncio.sleep(seconds)
    beside = f"{CROWD} that ask again"
    _tell(report, "overload", beside, seen)
    report.took("overload", beside, "refusal", tally.answers.get(429, []))
    report.held("overload", "peak", seen.peak)
    await asyncio.to_thread(settle, server)
    report.held("overload", "after", resident(server))
    for status, times in sorted(tally.answers.items()):
        report.counted("overload", f"status {status}", len(times))
    report.counted("overload", "streams refused", sum(stream.status == 429 for stream in seen.streams))


async def _slow(server: HttpServer, report: Report, seconds: float) -> None:
    """Measure short calls while other clients do not read their answers, or send half a request."""
    await _controls(server, report, "nobody", seconds)
    report.held("slow", "before", resident(server))
    tally, body = (
        CrowdTally(),
        {"prompt": _PROMPT, "max_tokens": 64, "stream": True, "logprobs": 100, "ignore_eos": True},
    )
    request = http_request(server.target, "/v1/completions", body)
    halves = (request[: len(request) // 3], request[: -len(request) // 8])  # cut within its head, and within its body
    async with (
        ClientCrowd(server.target, CROWD, lambda number: HalfSent(halves[number % 2], tally)),
        ClientCrowd(server.target, CROWD, lambda number: Silent(request, tally)),
    ):
        seen = await _controls(server, report, f"{CROWD} that do not read, {CROWD} that do not go on", seconds)
    report.held("slow", "peak", seen.peak)
    await asyncio.to_thread(settle, server)
    report.held("slow", "after", resident(server))
    report.counted("slow", "connections", tally.num_opened)


async def _controls(server: HttpServer, report: Report, beside: str, seconds: float) -> Watched:
    """Measure requests to three APIs in turns."""
    loop, target = asyncio.get_running_loop(), server.target
    calls: Mapping[str, Mapping[str, Any]] = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 8, "temperature": 0},
        "/v1/run": {"controller": "none", "controller_arg": "", "prompt": "a", "max_tokens": 8},
    }
    times: dict[str, list[float]] = {name: [] for name in (*calls, "LMTP")}
    async with watching(server) as seen, Client(f"http://{target.host}:{target.port}") as client:
        end = loop.time() + seconds
        while loop.time() < end:
            for path, body in calls.items():
                status, took, content = await ask(target, path, body)
                if status != 200:
                    report.counted("slow", f"{path} answered {status}: {content[:80]!r}", 1)
                times[path].append(took)
            begin = loop.time()
            await (await client.generate(_PROMPT, max_tokens=8)).read()
            times["LMTP"].append(loop.time() - begin)
    for name, values in times.items():
        report.took("slow", beside, name, values)
    _tell(report, "slow", beside, seen)
    return seen


async def _dropped(server: HttpServer, report: Report, rounds: int) -> None:
    """Measure memory after streams whose readers disconnect at random tokens."""
    rng = random.Random(0)
    await asyncio.to_thread(settle, server)
    report.held("dropped", "before", resident(server))
    for number in range(rounds):
        drops = [rng.randint(1, 32) for _ in range(CROWD)]
        streams = await asyncio.gather(*(complete(server.target, _PROMPT, 64, drop_after=drop) for drop in drops))
        await asyncio.to_thread(settle, server)
        report.held("dropped", f"after round {number + 1}", resident(server))
        report.counted("dropped", f"streams of round {number + 1}", sum(each.status == 200 for each in streams))


async def _constraints(server: HttpServer, report: Report) -> None:
    """Send malicious constraints to all routes; each round begins with another route, which compiles the constraint
    first."""
    for number in range(5):
        await _constrained(server, report, "an ordinary one", ordinary_constraint(-number - 1), number)
    report.held("constraints", "before", resident(server))
    async with watching(server) as seen:
        for number, (kind, constraint) in enumerate(hostile_constraints().items()):
            await _constrained(server, report, kind, constraint, number)
    _tell(report, "constraints", "hostile ones", seen)
    report.held("constraints", "peak", seen.peak)
    report.held("constraints", "after hostile ones", resident(server))
    for number in range(ORDINARY):
        await ask(server.target, "/generate", constrained_bodies(ordinary_constraint(number))["/generate"])
    report.held("constraints", f"after {ORDINARY} ordinary ones", resident(server))


async def _constrained(
    server: HttpServer, report: Report, kind: str, constraint: Mapping[str, Any], number: int
) -> None:
    bodies = list(constrained_bodies(constraint).items())
    first = number % len(bodies)
    times, statuses = [], []
    for path, body in bodies[first:] + bodies[:first]:
        status, took, _ = await ask(server.target, path, body)
        times.append(took)
        statuses.append(str(status))
    report.took("constraints", kind, f"answers: {' '.join(statuses)}", times)
