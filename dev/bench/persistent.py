"""Measures the time to the first token of a long prompt: computed, from memory, and from disk after a restart, beside
llama-server with its files of slots.

Both servers run alone, one after the other, with a KV cache that holds the prompt. `disk` is the first request after a
restart with warm file caches of the system; of llama-server it includes the call that restores the slot. `gap` is the
time between the tokens of another stream while blocks are read from disk, over that of a stream alone.
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
from statistics import mean
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
#: From disk at most this share of computing, at the longest prompt.
WANTED = 0.05
_BESIDE = 192  # tokens of the stream beside a prompt that is read
_STREAM_SECONDS = 0.3  # for which the stream runs alone
_OTHER = 2_000  # tokens of that prompt
_SPARE = 1_024


@dataclass(frozen=True, slots=True)
class PersistentRow:
    """Seconds to the first token of one prompt on one server."""

    model: str
    server: str
    num_tokens: int
    computed: float
    memory: float
    disk: float
    gap: float | None = None

    @property
    def share(self) -> float:
        """From disk, as a share of computing."""
        return self.disk / self.computed


def guesses(settings: BenchSettings, limits: MachineLimits) -> Mapping[str, float]:
    """A part for each model, server and prompt."""
    return {_title(*part): limits.python(30.0) + 4e-12 * num_bytes(part[0]) * part[2] for part in parts_of(settings)}


def measure(settings: BenchSettings, console: Console, phases: Phases) -> dict[str, Any]:
    """Measure each model in turn. Prints a table at the end."""
    rows = []
    load = round(os.getloadavg()[0], 1)
    for model, server, length in parts_of(settings):
        run, title = measure_own if server == "bridle" else _peer, _title(model, server, length)
        with tempfile.TemporaryDirectory(prefix="bridle-bench-") as folder, phases.part(title):
            rows.append(run(model, Path(folder), length, settings))
    _print(rows, console)
    return {"load_before": load, "rows": [asdict(row) | {"share": round(row.share, 4)} for row in rows]}


def measure_own(model: str, folder: Path, length: int, settings: BenchSettings) -> PersistentRow:
    """Measure bridle: the second server begins with what the first one has stored."""
    store = ("--kv-store", str(folder / "kv"), "--kv-store-bytes", "16GiB")
    options = ("--control", "off", "--max-batch-total-tokens", str(length + _OTHER + _SPARE), *store)
    prompt, other = _prompt(length, 1), _prompt(min(length, _OTHER), 2)
    with started_server(model, "first", folder, settings, *options) as server:
        _first(server, _prompt(32, 3))
        length = min(length, _context(server) - 2 * _BESIDE)
        prompt = prompt[:length]
        computed, memory = _first(server, prompt), _first(server, prompt)
        _first(server, other)
    with started_server(model, "again", folder, settings, *options) as server:
        _first(server, _prompt(32, 4))
        disk = _first(server, prompt)
        gap = asyncio.run(_gap(server, other))
    return PersistentRow(Path(model).name, "bridle", length, computed, memory, disk, gap)


async def _gap(server: StartedServer, prompt: Sequence[int]) -> float:
    """Return how much longer the gaps of a stream are while `prompt` is read from disk than while the same request
    finds it in memory, within the time from its beginning that the disk takes. A request by itself costs the stream
    some time: its tokens are checked, hashed and computed."""
    sent, taken, times = await _beside(server, prompt)
    disk = _mean_gap(times, sent, sent + taken)
    sent, _, times = await _beside(server, prompt)
    return disk / _mean_gap(times, sent, sent + taken)


async def _beside(server: StartedServer, prompt: Sequence[int]) -> tuple[float, float, list[float]]:
    """Send `prompt` beside a stream. Returns when, the seconds to its first token, and the times of the stream."""
    target = ServerTarget("127.0.0.1", server.port)
    stream = asyncio.create_task(complete(target, _prompt(16, 6), _BESIDE, never_ends=True))
    await asyncio.sleep(_STREAM_SECONDS)
    read = _checked(await complete(target, prompt, 1))
    return read.sent, read.event_times[0] - read.sent, list((await stream).event_times)


def _mean_gap(times: Sequence[float], begin: float, end: float) -> float:
    return mean([b - a for a, b in pairwise(times) if b >= begin and a <= end])


def _peer(model: str, folder: Path, length: int, settings: BenchSettings) -> PersistentRow:
    """Measure llama-server: a slot is saved, and restored after a restart."""
    options = ("-np", "1", "-c", str(length + _SPARE), "--slot-save-path", str(folder), "--no-webui")
    with started_server(model, "llama-server", folder, settings, *options) as server:
        _first(server, _prompt(32, 3))
        length = min(length, _slot_context(server) - 2 * _BESIDE)
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
    """Models, servers and lengths of prompts, as far as the settings choose them."""
    servers = ("bridle",) if settings.llama_server is None else ("bridle", "llama-server")
    found = product(models(settings), servers, _QUICK_LENGTHS if settings.quick else _LENGTHS)
    return [part for part in found if not settings.parts or any(text in _title(*part) for text in settings.parts)]


def _title(model: str, server: str, length: int) -> str:
    return f"{Path(model).name}, {server}, {length} tokens"


def _print(rows: Sequence[PersistentRow], console: Console) -> None:
    from rich.table import Table

    table = Table("model", "server", caption=f"seconds to the first token; wanted: disk / computed <= {WANTED:.0%}")
    for name in ("tokens", "computed", "memory", "disk", "disk / computed", "gap"):
        table.add_column(name, justify="right")
    for row in rows:
        times = [f"{seconds:.2f}" for seconds in (row.computed, row.memory, row.disk)]
        gap = "" if row.gap is None else f"{row.gap:.2f}"
        table.add_row(row.model, row.server, str(row.num_tokens), *times, f"{row.share:.1%}", gap)
    console.print(table)
