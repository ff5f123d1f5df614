"""Measures the time from a server's start to its answer on `/health` and to its first generated answer, for a new and a
cached model. If its path is given, llama.cpp's server is measured too. The benchmark reports seconds, processor
seconds, memory, and the cost of an idle server.

The first request is sent as soon as `/health` answers. So work that a server delays until the first request counts too.
Memory and idle time are measured after the server's work in the background has ended. Processor time and memory include
all processes that the server starts. Memory that processes share is counted once, if the system reports it (Linux). The
peak memory of the server's main process is reported too.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from bridle.bench.phases import MachineLimits, Phases
from bridle.bench.settings import BenchSettings
from bridle.bench.subprocesses import child_process, free_port
from bridle.errors import EngineClosed, InvalidRequest

if TYPE_CHECKING:
    from rich.console import Console

_LOOK_SECONDS = 0.02  # pause between two requests of `/health`
IDLE_SECONDS = {True: 2.0, False: 20.0}  # by `quick`
_MOST_SECONDS = 600.0
#: A server has settled once it uses less than this share of a core for the seconds in `SETTLED_SECONDS`, by `quick`.
#: bridle's control runtime begins to read a tokenizer after five seconds. A server that never settles is measured after
#: the maximum time.
_SETTLED_SHARE, _MOST_SETTLING = 0.05, 60.0
SETTLED_SECONDS = {True: 0.5, False: 6.0}
#: Requests for one token: a chat, and a plain prompt for models without a chat template.
_ASKED = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1},
    "/v1/completions": {"prompt": "Hello", "max_tokens": 1},
}
_WAYS = ("first", "again")


@dataclass(frozen=True, slots=True)
class LoadFigures:
    """Figures of one start of a server. `seconds` and `cpu_seconds` end when `/health` answers. `first_token_seconds`
    ends when the first request is answered, which is sent as soon as `/health` answers. `peak_mb` is the peak memory of
    the server's main process; `memory_mb` is the memory of all its processes at the end."""

    model: str
    server: str
    seconds: float
    first_token_seconds: float
    cpu_seconds: float
    peak_mb: int
    memory_mb: int
    idle_percent: float


def guesses(settings: BenchSettings, limits: MachineLimits) -> Mapping[str, float]:
    """Return the estimated seconds of each part; a part is one start of a server."""
    idle = IDLE_SECONDS[settings.quick] + SETTLED_SECONDS[settings.quick]
    found = {}
    for model in models(settings):
        size = num_bytes(model)
        for way in _servers(settings):
            found[_title(model, way)] = idle + limits.python(3.0) + (10e-9 if way == "first" else 1e-9) * size
    return found


def measure(settings: BenchSettings, console: Console, phases: Phases) -> dict[str, Any]:
    """Start each server, one after the other. A table is printed at the end."""
    rows = []
    for model in models(settings):
        with tempfile.TemporaryDirectory(prefix="bridle-bench-") as folder:
            for way in _servers(settings):
                with phases.part(_title(model, way)):
                    rows.append(start(model, way, Path(folder), settings))
    _print(rows, console)
    return {"rows": [asdict(row) for row in rows]}


def models(settings: BenchSettings) -> Sequence[str]:
    """Return the models whose loading is measured. Raises `InvalidRequest` if no model is given."""
    if not settings.models:
        raise InvalidRequest(
            "this benchmark needs a model: --load-model FILE.gguf or --load-model FOLDER", "load_model"
        )
    if settings.llama_server is not None and not settings.llama_server.is_file():
        raise InvalidRequest(f"llama_server is {str(settings.llama_server)!r}; there is no such file", "llama_server")
    return settings.models


def num_bytes(model: str) -> int:
    """Return the size of a model's files in bytes; 0 for a model without a path."""
    path = Path(model).expanduser()
    files = [path] if path.is_file() else list(path.glob("*.safetensors"))
    return sum(file.stat().st_size for file in files)


@dataclass(frozen=True, slots=True)
class StartedServer:
    """A server that answers, and the seconds from its start to its first answer on `/health`."""

    process: psutil.Process
    port: int
    seconds: float
    began: float  # by `time.perf_counter`


@contextlib.contextmanager
def started_server(
    model: str, way: str, folder: Path, settings: BenchSettings, *options: str
) -> Iterator[StartedServer]:
    """Run a server with further command-line `options` until the block ends. The folder `folder` is the server's
    cache."""
    port, log = free_port(), folder / f"{way}.log"
    command = [sys.executable, "-m", "bridle", "serve", model, "--port", str(port), *options]
    if way == "llama-server":
        command = [str(settings.llama_server), "-m", model, "--port", str(port), *options]
    if settings.threads is not None:
        command += ["-t" if way == "llama-server" else "--num-threads", str(settings.threads)]
    environment = os.environ | {"BRIDLE_CACHE": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}
    began = time.perf_counter()
    with child_process(command, log, environment) as child:
        process = psutil.Process(child.pid)
        _await_health(process, port, log)
        yield StartedServer(process, port, time.perf_counter() - began, began)


def start(model: str, way: str, folder: Path, settings: BenchSettings) -> LoadFigures:
    """Start a server and end it again. For the `first` start, the cache in `folder` is empty; later starts use the
    cache that the first start filled."""
    with started_server(model, way, folder, settings) as server:
        process = server.process
        cpu = _cpu_seconds(process)
        _await_token(server.port)
        answered = time.perf_counter() - server.began
        _await_settled(process, SETTLED_SECONDS[settings.quick])
        share = 100 * _share_of_core(process, IDLE_SECONDS[settings.quick])
        peak, memory = _peak(process), _memory(process)
    seconds, answered, cpu = (round(value, 2) for value in (server.seconds, answered, cpu))
    return LoadFigures(Path(model).name, way, seconds, answered, cpu, peak, memory, round(share, 2))


def _await_health(process: psutil.Process, port: int, log: Path) -> None:
    deadline = time.monotonic() + _MOST_SECONDS
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            time.sleep(_LOOK_SECONDS)
    raise EngineClosed(f"the benchmarked server did not start: {log.read_text(errors='replace')[-2000:]}")


def _await_token(port: int) -> None:
    """Request one token. Raises `EngineClosed` if the server does not start."""
    for path, body in _ASKED.items():
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=_MOST_SECONDS) as answer:  # noqa: S310
                answer.read()
                return
        except urllib.error.HTTPError as error:
            refused = error.read().decode(errors="replace")
    raise EngineClosed(f"the benchmarked server answered a request for one token with an error: {refused[:500]}")


def _await_settled(process: psutil.Process, seconds: float) -> None:
    """Wait until a server has finished its background work after its first answer."""
    deadline = time.monotonic() + _MOST_SETTLING
    while _share_of_core(process, seconds) > _SETTLED_SHARE and time.monotonic() < deadline:
        pass


def _share_of_core(process: psutil.Process, seconds: float) -> float:
    before = _cpu_seconds(process)
    time.sleep(seconds)
    return (_cpu_seconds(process) - before) / seconds


def _family(process: psutil.Process) -> list[psutil.Process]:
    return [process, *process.children(recursive=True)]


def _cpu_seconds(process: psutil.Process) -> float:
    total = 0.0
    for one in _family(process):
        with contextlib.suppress(psutil.Error):
            times = one.cpu_times()
            total += times.user + times.system
    return total


def _memory(process: psutil.Process) -> int:
    """Return the memory of all processes in MB, with shared memory counted once."""
    total = 0
    for one in _family(process):
        with contextlib.suppress(psutil.Error):
            found = one.memory_full_info()
            total += getattr(found, "pss", found.rss)
    return total >> 20


def _peak(process: psutil.Process) -> int:
    """Return the peak memory of the process in MB, or its current memory if the system does not report the peak."""
    status = Path(f"/proc/{process.pid}/status")
    lines = status.read_text().splitlines() if status.is_file() else []
    peaks = [int(line.split()[1]) for line in lines if line.startswith("VmHWM:")]
    return peaks[0] >> 10 if peaks else process.memory_info().rss >> 20


def _servers(settings: BenchSettings) -> Sequence[str]:
    return _WAYS if settings.llama_server is None else (*_WAYS, "llama-server")


def _title(model: str, way: str) -> str:
    return f"{Path(model).name}, {way}"


def _print(rows: Sequence[LoadFigures], console: Console) -> None:
    from rich.table import Table

    table = Table()
    for name in ("model", "server", "s to /health", "s to 1st token", "CPU s", "peak MB", "all MB", "idle %"):
        table.add_column(name, justify="left" if name in ("model", "server") else "right")
    for row in rows:
        table.add_row(*(str(value) for value in asdict(row).values()))
    console.print(table)
