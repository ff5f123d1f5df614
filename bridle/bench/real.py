"""Compares bridle with llama.cpp on real models: server start, prefill, and decoding for 1, 4 and 16 streams over HTTP.

Both servers run at the same time and are measured in turns. So other work on the machine affects both servers. While
one server is measured, the other is idle. `llama-bench`, which needs no server, is measured in the same turns, but only
for prefill and for one stream. Ratios are relative to the faster of llama-server and llama-bench. Prompts are random
tokens and differ each time, so that no prefix cache contains them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from bridle.bench.load import models, num_bytes, start, started_server
from bridle.bench.phases import MachineLimits, Phases
from bridle.bench.settings import BenchSettings
from bridle.bench.sse_client import ServerTarget, closed_loop
from bridle.errors import EngineClosed, InvalidRequest

if TYPE_CHECKING:
    from rich.console import Console

#: Numbers of streams, with the targets: this many times llama.cpp's tokens per second.
STREAMS = {1: 1.1, 4: 2.0, 16: 1.8}
_SLOTS, _CONTEXT = 16, 1024
FIRST_ID, NUM_IDS = 1_000, 20_000  # ordinary tokens of any vocabulary
_BUSY = 0.5  # with more runnable processes than this, the figures are affected by other programs
_START, _SPEED = "start", "speed"


@dataclass(frozen=True, slots=True)
class RealScale:
    """Sizes of the comparison. `prompt` is the length of the prompts for prefill, and `short` of the prompts for
    decoding; `written` is the number of generated tokens."""

    prompt: int
    short: int
    written: int
    num_rounds: int


_QUICK = RealScale(128, 8, 16, 1)
_FULL = RealScale(512, 16, 64, 5)


@dataclass(frozen=True, slots=True)
class RealRow:
    """One comparison. Values are tokens per second, or seconds for a server's start. `ratio` is bridle's speed divided
    by that of the faster llama.cpp program."""

    model: str
    measured: str
    bridle: float
    llama_server: float
    llama_bench: float | None
    ratio: float
    wanted: float | None = None


@dataclass(slots=True)
class Rates:
    """Measured rates of all rounds, by server."""

    by_server: dict[str, list[float]] = field(default_factory=dict)

    def note(self, server: str, rate: float) -> None:
        self.by_server.setdefault(server, []).append(rate)

    def row(self, model: str, measured: str, wanted: float | None) -> RealRow:
        mid = {server: round(median(rates), 1) for server, rates in self.by_server.items()}
        bench = mid.get("llama-bench")
        peer = max(mid["llama-server"], bench or 0.0)
        return RealRow(model, measured, mid["bridle"], mid["llama-server"], bench, _ratio(mid["bridle"], peer), wanted)


def guesses(settings: BenchSettings, limits: MachineLimits) -> Mapping[str, float]:
    """Return the estimated seconds of each part. Each model has two parts: server start and speed."""
    _check(settings)
    found, scale = {}, _scale(settings)
    for model in models(settings):
        size = num_bytes(model)
        steps = scale.written * len(STREAMS) * scale.num_rounds * 2
        found[_title(model, _START)] = limits.python(10.0) + 15e-9 * size
        found[_title(model, _SPEED)] = limits.python(10.0) + steps * 3 * size / limits.bandwidth
    return found


def measure(settings: BenchSettings, console: Console, phases: Phases) -> dict[str, Any]:
    """Measure one model after the other. A table is printed at the end."""
    rows, load = list[RealRow](), round(os.getloadavg()[0], 1)
    if load > _BUSY:
        console.print(
            f"The machine is busy (load {load}). llama.cpp's threads wait for each other, so that any other program "
            "slows it far more than its share: such ratios say nothing."
        )
    for model in models(settings):
        with tempfile.TemporaryDirectory(prefix="bridle-bench-") as folder:
            with phases.part(_title(model, _START)):
                rows.append(_starts(model, Path(folder), settings))
            with phases.part(_title(model, _SPEED)):
                rows += _speeds(model, Path(folder), settings)
    _print(rows, console)
    return {"load_before": load, "rows": [asdict(row) for row in rows]}


def _check(settings: BenchSettings) -> None:
    for name, path in (("llama_server", settings.llama_server), ("llama_bench", settings.llama_bench)):
        if path is None or not path.is_file():
            raise InvalidRequest(
                f"{name} is {str(path) if path else None!r}; `bridle bench real` runs this program of llama.cpp: "
                f"set --{name.replace('_', '-')} to its path",
                name,
            )


def _starts(model: str, folder: Path, settings: BenchSettings) -> RealRow:
    """Return the seconds until `/health` answers for a model that was loaded before."""
    start(model, "first", folder, settings)
    again, peer = start(model, "again", folder, settings), start(model, "llama-server", folder, settings)
    ratio = _ratio(peer.seconds, again.seconds)
    return RealRow(Path(model).name, "start, s", again.seconds, peer.seconds, None, ratio)


def _speeds(model: str, folder: Path, settings: BenchSettings) -> list[RealRow]:
    """Run all rounds with both servers; return a row for each quantity."""
    scale, rates = _scale(settings), {name: Rates() for name in ("prompt", *map(str, STREAMS))}
    with _servers(model, folder, settings) as servers:
        for number in range(scale.num_rounds + 1):  # the first one only warms up
            for name, server, rate in _round(model, servers, scale, settings, random.Random(number)):
                if number:
                    rates[name].note(server, rate)
    name = Path(model).name
    prompt = rates["prompt"].row(name, f"prompt of {scale.prompt}", None)
    return [prompt, *(rates[str(n)].row(name, f"{n} at once", wanted) for n, wanted in STREAMS.items())]


def _round(
    model: str, servers: Mapping[str, ServerTarget], scale: RealScale, settings: BenchSettings, rng: random.Random
) -> Iterator[tuple[str, str, float]]:
    """For each measurement, yield the measured quantity, the name of the program, and tokens per second."""
    order = list(servers)
    rng.shuffle(order)
    for server in order:
        yield "prompt", server, _rate(servers[server], [_ids(rng, scale.prompt)], 1, scale.prompt)
    for number in STREAMS:
        for server in order:
            prompts = [_ids(rng, scale.short) for _ in range(number)]
            yield str(number), server, _rate(servers[server], prompts, scale.written, scale.written)
    for name, rate in zip(("prompt", "1"), run_llama_bench(model, scale.prompt, scale.written, settings), strict=True):
        yield name, "llama-bench", rate


def _rate(target: ServerTarget, prompts: Sequence[Sequence[int]], max_tokens: int, counted: int) -> float:
    """Return the tokens per second: all prompts are sent at once, and each counts as `counted` tokens. Time runs from
    the first byte sent to the last byte read."""
    began = time.perf_counter()
    samples = asyncio.run(closed_loop(target, prompts, max_tokens, len(prompts)))
    seconds = time.perf_counter() - began
    if bad := [one for one in samples if not one.is_complete or one.num_tokens != max_tokens]:
        raise EngineClosed(
            f"{len(bad)} of {len(samples)} requests did not get {max_tokens} tokens: status {bad[0].status}"
        )
    return counted * len(prompts) / seconds


def run_llama_bench(model: str, num_prompt: int, num_written: int, settings: BenchSettings) -> tuple[float, float]:
    """Return the tokens per second of prefill and of decoding. Raises `EngineClosed` if the program fails."""
    command = [str(settings.llama_bench), "-m", model, "-p", str(num_prompt), "-n", str(num_written)]
    command += ["-r", "1", "-o", "json", *_threads(settings)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=3600)  # noqa: S603
    if done.returncode:
        raise EngineClosed(f"llama-bench failed: {done.stderr[-1000:]}")
    prompt, decoding = json.loads(done.stdout)
    return float(prompt["avg_ts"]), float(decoding["avg_ts"])


@contextlib.contextmanager
def _servers(model: str, folder: Path, settings: BenchSettings) -> Iterator[dict[str, ServerTarget]]:
    context = ("-c", str(_SLOTS * _CONTEXT), "-np", str(_SLOTS), "--no-webui")
    with (
        started_server(model, "again", folder, settings, "--control", "off") as own,
        started_server(model, "llama-server", folder, settings, *context) as peer,
    ):
        yield {"bridle": ServerTarget("127.0.0.1", own.port), "llama-server": ServerTarget("127.0.0.1", peer.port)}


def _threads(settings: BenchSettings) -> list[str]:
    return [] if settings.threads is None else ["-t", str(settings.threads)]


def _ids(rng: random.Random, number: int) -> list[int]:
    return [rng.randrange(FIRST_ID, FIRST_ID + NUM_IDS) for _ in range(number)]


def _scale(settings: BenchSettings) -> RealScale:
    return _QUICK if settings.quick else _FULL


def _ratio(value: float, peer: float) -> float:
    return round(value / peer, 2) if peer else 0.0


def _title(model: str, part: str) -> str:
    return f"{Path(model).name}, {part}"


def _print(rows: Sequence[RealRow], console: Console) -> None:
    from rich.table import Table

    table = Table("model", "measured", caption="tokens per second; `ratio` is to the faster peer")
    for name in ("bridle", "llama-server", "llama-bench", "ratio", "wanted"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*("" if value is None else str(value) for value in asdict(row).values()))
    console.print(table)
