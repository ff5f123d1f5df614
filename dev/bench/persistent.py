"""Measures the time to the first token of a long prompt whose KV is computed, found in memory, or read from disk after
a restart. The baseline is llama-server with its slot files.

Both servers run alone, one after the other, with a KV cache that is large enough for the prompt. `disk` is the first
request after a restart, while the system's file cache still has the files. For llama-server it includes the request
that restores the slot. `gap` is the effect on another stream when blocks are read from disk, relative to blocks found
in memory. `gap` has two ratios: one of the mean inter-token latency, and one of the 99th percentile.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise, product
from pathlib import Path
from statistics import mean, quantiles
from typing import TYPE_CHECKING, Any

from bridle.bench.load import StartedServer, models, num_bytes, started_server
from bridle.bench.phases import MachineLimits, Phases
from bridle.bench.real import FIRST_ID, NUM_IDS
from bridle.bench.settings import BenchSettings
from bridle.bench.sse_client import Sample, ServerTarget, complete
from bridle.errors import EngineClosed

if TYPE_CHECKING:
    from rich.console import Console

_LENGTHS, _QUICK_LENGTHS = (2_000, 10_000), (500,)
#: Target for the longest prompt: the time from disk as a share of the time to compute.
WANTED = 0.05
_BESIDE = 960  # maximum tokens of the stream that runs while a prompt is read
_STREAM_SECONDS = 0.3  # for which the stream runs alone
_OTHER, _NUM_OTHERS = 2_000, 6  # tokens of each prompt that is read during a stream, and their number
_SPARE = 1_024
_REST = 384  # tokens of a context that prompts leave free


@dataclass(frozen=True, slots=True)
class PersistentRow:
    """Seconds to the first token of one prompt on one server."""

    model: str
    server: str
    num_tokens: int
    computed: float
    memory: float
    disk: float
    gap: float | None = None  # mean
    gap_p99: float | None = None

    @property
    def share(self) -> float:
        """The time from disk as a share of the time to compute."""
        return self.disk / self.computed


def guesses(settings: BenchSettings, limits: MachineLimits) -> Mapping[str, float]:
    """Return the estimated seconds of each part; a part is a model, a server and a prompt length."""
    return {_title(*part): limits.python(30.0) + 4e-12 * num_bytes(part[0]) * part[2] for part in parts_of(settings)}


def measure(settings: BenchSettings, console: Console, phases: Phases) -> dict[str, Any]:
    """Measure each part in turn. Prints a table at the end."""
    rows = []
    load = round(os.getloadavg()[0], 1)
    for model, server, length in parts_of(settings):
        run, title = measure_own if server == "bridle" else _peer, _title(model, server, length)
        with tempfile.TemporaryDirectory(prefix="bridle-bench-") as folder, phases.part(title):
            rows.append(run(model, Path(folder), length, settings))
    _print(rows, console)
    return {"load_before": load, "rows": [asdict(row) | {"share": round(row.share, 4)} for row in rows]}


def measure_own(model: str, folder: Path, length: int, settings: BenchSettings) -> PersistentRow:
    """Measure bridle: the second server process starts with the KV store of the first one."""
    store = ("--kv-store", str(folder / "kv"), "--kv-store-bytes", "16GiB")
    options = ("--control", "off", "--max-batch-total-tokens", str(length + _OTHER + _SPARE), *store)
    prompt, others = _prompt(length, 1), [_prompt(min(length, _OTHER), 10 + number) for number in range(_NUM_OTHERS)]
    with started_server(model, "first", folder, settings, *options) as server:
        _first(server, _prompt(32, 3))
        length = min(length, _context(server) - _REST)
        prompt = prompt[:length]
        computed, memory = _first(server, prompt), _first(server, prompt)
        for other in others:
            _first(server, other)
    with started_server(model, "again", folder, settings, *options) as server:
        _first(server, _prompt(32, 4))
        disk = _first(server, prompt)
        gaps = asyncio.run(_gaps(server, others))
    return PersistentRow(Path(model).name, "bridle", length, computed, memory, disk, *gaps)


async def _gaps(server: StartedServer, prompts: Sequence[Sequence[int]]) -> tuple[float, float]:
    """Return the mean and the 99th percentile of a stream's inter-token latency while prompts are read from disk. Both
    are relative to prompts found in memory. Only latencies during a request from disk count. A request from memory
    delays the stream as well, because its tokens are checked, hashed and computed."""
    disk, memory = list[float](), list[float]()
    for prompt in prompts:
        gaps, seconds = await _beside(server, prompt)
        disk += gaps
        memory += (await _beside(server, prompt, seconds))[0]
    return mean(disk) / mean(memory), quantiles(disk, n=100)[-1] / quantiles(memory, n=100)[-1]


async def _beside(server: StartedServer, prompt: Sequence[int], seconds: float = 0.0) -> tuple[list[float], float]:
    """Send `prompt` while a stream runs. Returns the stream's inter-token latencies until the first token after
    `prompt`, or for `seconds` if that is longer. Also returns the seconds until that token."""
    target, is_over = ServerTarget("127.0.0.1", server.port), asyncio.get_running_loop().create_future()
    stream = asyncio.create_task(complete(target, _prompt(16, 6), _BESIDE, never_ends=True, done=is_over))
    await asyncio.sleep(_STREAM_SECONDS)
    read = _checked(await complete(target, prompt, 1))
    taken = max(read.event_times[0] - read.sent, seconds)
    await asyncio.sleep(read.sent + taken - time.perf_counter())
    if not is_over.done():
        is_over.set_result(None)
    times = (await stream).event_times
    return [b - a for a, b in pairwise(times) if b >= read.sent and a <= read.sent + taken], taken


def _peer(model: str, folder: Path, length: int, settings: BenchSettings) -> PersistentRow:
    """Measure llama-server: a slot is saved to a file, and restored after a restart."""
    options = ("-np", "1", "-c", str(length + _SPARE), "--slot-save-path", str(folder), "--no-webui")
    with started_server(model, "llama-server", folder, settings, *options) as server:
        _first(server, _prompt(32, 3))
        length = min(length, _slot_context(server) - _REST)
        prompt = _prompt(length, 1)
        computed, memory = _first(server, prompt), _first(server, prompt)
        _slot(server, "save")
    with started_server(model, "llama-server", folder, settings, *options) as server:
        _first(server, _prompt(32, 4))
        began = time.perf_counter()
        _slot(server, "restore")
        disk = time.perf_counter() - began + _first(server, prompt)
    return PersistentRow(Path(model).name, "llama-server", length, computed, memory, disk)


def _first(server: StartedServer, prompt: Sequence[int]) -> float:
    """Return the seconds to the first token after a prompt."""
    return _checked(asyncio.run(complete(ServerTarget("127.0.0.1", server.port), prompt, 1))).first


def _checked(sample: Sample) -> Sample:
    if not sample.event_times:
        raise EngineClosed(f"a prompt got no token: status {sample.status}")
    return sample


def _context(server: StartedServer) -> int:
    (model,) = _call(server, "/v1/models")["data"]
    return int(model["max_model_len"])


def _slot_context(server: StartedServer) -> int:
    return int(_call(server, "/props")["default_generation_settings"]["n_ctx"])


def _slot(server: StartedServer, action: str) -> None:
    _call(server, f"/slots/0?action={action}", {"filename": "slot.bin"})


def _call(server: StartedServer, path: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.port}{path}", data, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as answer:  # noqa: S310
        return json.load(answer)


def _prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(FIRST_ID, FIRST_ID + NUM_IDS) for _ in range(length)]


def parts_of(settings: BenchSettings) -> list[tuple[str, str, int]]:
    """Return the combinations of model, server and prompt length that the settings select."""
    servers = ("bridle",) if settings.llama_server is None else ("bridle", "llama-server")
    found = product(models(settings), servers, _QUICK_LENGTHS if settings.quick else _LENGTHS)
    return [part for part in found if not settings.parts or any(text in _title(*part) for text in settings.parts)]


def _title(model: str, server: str, length: int) -> str:
    return f"{Path(model).name}, {server}, {length} tokens"


def _print(rows: Sequence[PersistentRow], console: Console) -> None:
    from rich.table import Table

    table = Table("model", "server", caption=f"seconds to the first token; wanted: disk / computed <= {WANTED:.0%}")
    for name in ("tokens", "computed", "memory", "disk", "disk / computed", "gap", "p99 gap"):
        table.add_column(name, justify="right")
    for row in rows:
        times = [f"{seconds:.2f}" for seconds in (row.computed, row.memory, row.disk)]
        gaps = ["" if gap is None else f"{gap:.2f}" for gap in (row.gap, row.gap_p99)]
        table.add_row(row.model, row.server, str(row.num_tokens), *times, f"{row.share:.1%}", *gaps)
    console.print(table)
