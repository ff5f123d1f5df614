"""Processor time of the front end, per streamed token and per request, over a device that computes nothing.

The server is `bridle serve` in a separate process. The server's main thread is the front end: HTTP, chat templates, and
the conversion of tokens to events. The engine's thread does the other work. With `--front-ends`, further processes
write the streams. All figures are processor time, because other work on the machine affects it little. Clients stream
short and long answers; the difference between both is the cost of tokens. The device's steps are long enough for the
server to keep up, so nearly every token is a separate event.

If a model is given, the benchmark also measures `llama-server`. llama-server's threads do not separate HTTP from the
model. The model has one small layer, so the sum of llama-server's threads corresponds to bridle's two threads together.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from bridle.bench.load import models, started_server
from bridle.bench.phases import MachineLimits, Phases
from bridle.bench.settings import BenchSettings
from bridle.bench.subprocesses import announced_port, child_process
from dev.bench.engine_pace import pace_of_server, step_seconds_alone

if TYPE_CHECKING:
    from rich.console import Console

_BATCHES = (1, 64, 256)
_SHORT = 16
#: Maximum seconds of processor time for one token on a slow machine, which determine the device's pace.
_TOKEN_SECONDS, _STEP_SECONDS = 100e-6, 1e-3
#: Paths, with the fields of a body in addition to its length, and the mark of an event with text. TGI's streams need
#: log-probabilities, which the device does not have.
_APIS: dict[str, tuple[str, dict[str, Any], bytes]] = {
    "completions": ("/v1/completions", {"prompt": "Hello", "ignore_eos": True}, b'"text":'),
    "chat": ("/v1/chat/completions", {"ignore_eos": True}, b'"content":'),
    "responses": ("/v1/responses", {"input": "Hello", "store": False}, b"data: "),
    "messages": ("/v1/messages", {}, b'"text_delta"'),
    "ollama": ("/api/generate", {"prompt": "Hello", "model": "instant"}, b'"response":'),
}
_MESSAGES = {"messages": [{"role": "user", "content": "Hello"}]}


@dataclass(slots=True)
class FrontendFigure:
    """Figures of one API with `streams` simultaneous streams. Values are microseconds of processor time: of the front
    end's thread, of the engine's thread, and of all processes that write streams. Engine steps are timed with and
    without the front end."""

    api: str
    streams: int
    token_microseconds: float
    engine_token_microseconds: float
    writer_token_microseconds: float
    request_microseconds: float
    events_per_token: float
    step_milliseconds: float
    step_milliseconds_alone: float

    @property
    def tokens_per_second(self) -> float:
        """The tokens per second that one processor core can stream in the front end's thread."""
        return 1e6 / max(self.token_microseconds, 1e-3)


def measure(settings: BenchSettings, console: Console, phases: Phases) -> dict[str, Any]:
    """Measure each API with each number of streams; with `--llama-server` also llama-server. Prints a table."""
    figures = []
    for batch in settings.batches or _BATCHES:
        device_seconds, num_tokens = max(_STEP_SECONDS, batch * _TOKEN_SECONDS), _num_tokens(settings, batch)
        with phases.part(f"engine alone, {batch} streams"):
            alone = 1e3 * step_seconds_alone(device_seconds, batch, num_tokens)
        with instant_server(device_seconds, settings.front_ends) as (port, pid):
            for api in _chosen(settings):
                with phases.part(f"{api}, {batch} streams"):
                    figures.append(_measure(port, pid, api, batch, num_tokens))
                    figures[-1].step_milliseconds_alone = alone
        if settings.llama_server is not None:
            with phases.part(f"llama-server, {batch} streams"):
                figures.append(_measure_peer(settings, batch))
    _print_table(console, figures)
    return {"figures": [asdict(each) | {"tokens_per_second": each.tokens_per_second} for each in figures]}


def guesses(settings: BenchSettings, limits: MachineLimits) -> dict[str, float]:
    """Return the estimated seconds of each part: the steps of the fake device, and the requests."""
    seconds: dict[str, float] = {}
    for batch in settings.batches or _BATCHES:
        steps = 2 * (_num_tokens(settings, batch) + 2 * _SHORT)
        wait = steps * max(_STEP_SECONDS, batch * _TOKEN_SECONDS) + limits.python(batch * 3 * 5e-3)
        peer = ["llama-server"] if settings.llama_server is not None else []
        seconds |= {f"{name}, {batch} streams": wait for name in ("engine alone", *_chosen(settings), *peer)}
    return seconds


def _chosen(settings: BenchSettings) -> list[str]:
    return [api for api in _APIS if not settings.parts or any(part in api for part in settings.parts)]


def _num_tokens(settings: BenchSettings, batch: int) -> int:
    """Return the number of tokens of a long answer."""
    tokens = 2_000 if batch == 1 else 400
    return tokens // 4 if settings.quick else tokens


@contextmanager
def instant_server(step_seconds: float, front_ends: int = 1) -> Iterator[tuple[int, int]]:
    """Run a server whose steps take `step_seconds`; yield its port and process id."""
    command = [sys.executable, "-m", "dev.bench.instant_server", str(step_seconds), str(front_ends)]
    with tempfile.TemporaryDirectory(prefix="bridle-bench-") as folder:
        log = Path(folder, "server.log")
        with child_process(command, log) as process:
            yield announced_port(process, log), process.pid


def _measure(port: int, pid: int, api: str, batch: int, num_tokens: int) -> FrontendFigure:
    asyncio.run(_streams(port, api, batch, _SHORT))  # make now what would be made lazily
    short, _ = _timed(port, pid, api, batch, _SHORT)
    before = pace_of_server(port) if api in _APIS else None
    long, num_events = _timed(port, pid, api, batch, num_tokens)
    step = 0.0 if before is None else 1e3 * pace_of_server(port).per_step(before)
    more = batch * (num_tokens - _SHORT)
    token, engine, writers = (1e6 * (b - a) / more for a, b in zip(short, long, strict=True))
    request = max(1e6 * short[0] / batch - _SHORT * token, 0.0)
    return FrontendFigure(api, batch, token, engine, writers, request, num_events / (batch * num_tokens), step, 0.0)


def _measure_peer(settings: BenchSettings, batch: int) -> FrontendFigure:
    """Measure `llama-server` with one slot for each stream."""
    (model, *_), num_tokens = models(settings), _num_tokens(settings, batch)
    context = "-np", str(batch), "-c", str(batch * (num_tokens + 64))
    with (
        tempfile.TemporaryDirectory(prefix="bridle-bench-") as folder,
        started_server(model, "llama-server", Path(folder), settings, *context) as peer,
    ):
        return _measure(peer.port, peer.process.pid, "llama-server", batch, num_tokens)


def _timed(port: int, pid: int, api: str, batch: int, num_tokens: int) -> tuple[list[float], int]:
    """Return the processor seconds of some streams, as in `_cpu_seconds`, and their number of events."""
    before = _cpu_seconds(pid)
    num_events = asyncio.run(_streams(port, api, batch, num_tokens))
    return [b - a for a, b in zip(before, _cpu_seconds(pid), strict=True)], num_events


def _cpu_seconds(pid: int) -> tuple[float, float, float]:
    """Return the processor time so far of the main thread, of all other threads together, and of the processes that
    write streams."""
    used = _thread_seconds(pid)
    writers = [each.pid for each in psutil.Process(pid).children() if "bridle.http.writers.process" in each.cmdline()]
    return used[pid], sum(used.values()) - used[pid], sum(sum(_thread_seconds(each).values()) for each in writers)


def _thread_seconds(pid: int) -> dict[int, float]:
    tasks = {int(task.name): task for task in Path(f"/proc/{pid}/task").iterdir()}
    return {tid: int((task / "schedstat").read_text().split()[0]) / 1e9 for tid, task in tasks.items()}


async def _streams(port: int, api: str, batch: int, num_tokens: int) -> int:
    """Run `batch` streams at once; return the number of their events."""
    return sum(await asyncio.gather(*(_stream(port, api, num_tokens) for _ in range(batch))))


async def _stream(port: int, api: str, num_tokens: int) -> int:
    path, further, mark = _APIS.get(api) or _APIS["completions"]
    limit = {"responses": "max_output_tokens"}.get(api, "max_tokens")
    body: dict[str, Any] = {"model": "instant", "stream": True, **further}
    if api in ("chat", "messages"):
        body |= _MESSAGES
    if api == "ollama":
        body["options"] = {"num_predict": num_tokens}
    else:
        body[limit] = num_tokens
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    num_events = 0
    first = await reader.read(1 << 16)
    if not first.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(f"{api}: the server answered {first[:400]!r}")
    while first:
        num_events += first.count(mark)
        first = await reader.read(1 << 16)
    writer.close()
    return num_events


def _print_table(console: Console, figures: Sequence[FrontendFigure]) -> None:
    from rich.table import Table

    table = Table(title="processor time of the front end")
    columns = ["us per token", "tokens/s per core", "engine us per token", "writers us per token", "us per request"]
    for heading in ("API", "streams", *columns, "events per token", "ms per step", "alone"):
        table.add_column(heading, justify="left" if heading == "API" else "right")
    for each in figures:
        table.add_row(
            each.api,
            str(each.streams),
            f"{each.token_microseconds:.1f}",
            f"{each.tokens_per_second:,.0f}",
            f"{each.engine_token_microseconds:.1f}",
            f"{each.writer_token_microseconds:.1f}",
            f"{each.request_microseconds:.0f}",
            f"{each.events_per_token:.2f}",
            f"{each.step_milliseconds:.2f}",
            f"{each.step_milliseconds_alone:.2f}",
        )
    console.print(table)
