"""Runs a server under mixed traffic for minutes, while its processes are killed or stopped, and its resources are
reduced.

Requests come over several APIs, with grammars, scripts, tools, images, an adapter, abandoned streams and invalid
bodies. Every few seconds, a round disturbs the server in one of these ways:

* a process of the model, of the controllers or of the front end is lost (kill -9), or stopped and continued;
* disk space is reduced (writes fail as on a full disk), or file descriptors are;
* look-ups of image hosts become slow, or the clock is wrong.

After each round the server must give the correct answers again. Memory, file descriptors, threads, processes, shared
memory and temporary files are sampled after the rounds. A slope over the second half of the samples shows a leak.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import http.client
import io
import itertools
import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil

from bridle.bench.phases import MachineLimits, Phases
from bridle.bench.settings import BenchSettings
from bridle.bench.subprocesses import announced_port, child_process
from bridle.lora import LayerShape
from bridle.model import resolve_model
from dev.bench.adapters import make_adapters
from dev.bench.soaked_server import Faults

if TYPE_CHECKING:
    from rich.console import Console

_PATIENCE = 180.0
#: Seconds of traffic before each round.
_PAUSE = 2.0
_CLIENTS = 4
#: An image host that cannot be resolved, and the seconds of a look-up.
_IMAGE_HOST, _NAME_SECONDS = "images.invalid", 3.0
#: Maximum descriptors of a starved server: fewer than it has open.
_FEW_DESCRIPTORS = 8
_PROBE = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
_SCRIPT = "async def main():\n    await aici.gen_text(max_tokens=4)\n\nimport pyaici.server as aici\naici.start(main())"
_TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}
_SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}


def requests(number: int) -> tuple[str, dict[str, Any]]:
    """Return the path and the body of request `number`, which chooses the API."""
    chat = {"model": "demo", "messages": [{"role": "user", "content": f"Number {number}?"}], "max_tokens": 12}
    shape = {"type": "json_schema", "json_schema": {"name": "n", "schema": _SCHEMA}}
    kinds: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", _PROBE | {"prompt": f"{number} times: " + "once upon a time. " * (number % 20)}),
        ("/v1/chat/completions", chat),
        ("/v1/chat/completions", chat | {"response_format": shape, "max_tokens": 24}),
        ("/v1/messages", chat),
        ("/v1/responses", {"model": "demo", "input": f"Story {number}", "max_output_tokens": 12}),
        ("/api/generate", {"model": "demo", "prompt": "Hello", "stream": False, "options": {"num_predict": 8}}),
        ("/generate", {"inputs": "Hello", "parameters": {"max_new_tokens": 8}}),
        ("/v1/completions", _PROBE | {"controller": "pyctrl", "controller_arg": _SCRIPT}),
        ("/v1/completions", _PROBE | {"regex": f"[a-z]{{{1 + number % 9}}}"}),
        ("/v1/run", {"controller": "none", "controller_arg": "", "prompt": "Hello", "max_tokens": 8}),
        ("/v1/completions", _PROBE | {"model": "random"}),
        ("/v1/chat/completions", chat | {"tools": [_TOOL], "tool_choice": ("auto", "required")[number % 2]}),
        ("/v1/chat/completions", {"model": "demo-sees", "messages": [_seen(_picture(number % 7))], "max_tokens": 4}),
        ("/v1/completions", _PROBE | {"max_tokens": -number}),
        ("/v1/chat/completions", {"model": "demo", "messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
    ]
    return kinds[number % len(kinds)]


def _seen(url: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}


@cache
def _picture(number: int) -> str:
    """Return a small image as a URL."""
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (32, 32), (36 * number, 80, 120)).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def _adapter(folder: Path) -> Path:
    """Write a random adapter for the demo model."""
    from safetensors import safe_open

    with safe_open(resolve_model("demo") / "model.safetensors", "np") as weights:
        names = list(weights.keys())
        shapes = {name.removesuffix(".weight"): weights.get_slice(name).get_shape() for name in names}
    layers = {name: LayerShape(shape[1], shape[0]) for name, shape in shapes.items() if len(shape) == 2}
    return make_adapters(folder, layers, "q and v", 1)[0]


@dataclass(slots=True)
class SoakOutcome:
    """The findings of one soak run. `samples` are the server's states after each round; `slopes` are changes per minute
    over the second half of the samples. `recovery` has, for each kind of round, the seconds until the answers were
    correct again."""

    rounds: Counter[str] = field(default_factory=Counter)
    statuses: Counter[str] = field(default_factory=Counter)
    recovery: dict[str, list[float]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    samples: list[dict[str, float]] = field(default_factory=list)
    slopes: dict[str, float] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)


class SoakedServer:
    """A running `bridle serve` with a shard, controllers, a KV store and a state file."""

    def __init__(self, process: psutil.Process, port: int, folder: Path, faults: Faults) -> None:
        self.process, self.port, self.folder, self.faults = process, port, folder, faults

    def children(self, words: str) -> list[psutil.Process]:
        """Return the running child processes that have `words` in their command lines."""
        found = []
        for child in self.process.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if words in " ".join(child.cmdline()) and child.status() != psutil.STATUS_ZOMBIE:
                    found.append(child)
        return found

    def sample(self) -> dict[str, float]:
        """Return a sample of the server and its child processes."""
        processes = [self.process, *self.process.children(recursive=True)]
        own = [each for each in Path("/dev/shm").iterdir() if f"-{self.process.pid}-" in each.name]  # noqa: S108
        with contextlib.suppress(psutil.Error):
            return {
                "time": time.monotonic(),
                "server_mib": self.process.memory_info().rss / 2**20,
                "all_mib": sum(map(_resident_bytes, processes)) / 2**20,
                "descriptors": self.process.num_fds(),
                "threads": self.process.num_threads(),
                "processes": len(processes),
                "shared_memory": len(own),
                "temporary_files": len(list(self.folder.iterdir())),
            }
        return {}


def _resident_bytes(process: psutil.Process) -> int:
    """Return the resident memory of a process; 0 for a process that has ended meanwhile."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return int(process.memory_info().rss)
    return 0


@contextlib.contextmanager
def serving(arguments: tuple[str, ...]) -> Iterator[SoakedServer]:
    """Run a server whose temporary files are in a separate folder."""
    with tempfile.TemporaryDirectory(prefix="bridle-soak-") as name:
        folder, scratch = Path(name), Path(name) / "tmp"
        scratch.mkdir()
        faults = Faults(folder / "faults")
        command = [sys.executable, "-m", "dev.bench.soaked_server", str(folder / "faults"), "demo", "demo-sees"]
        command += ["--port", "0", "--log-format", "json", "--front-ends", "2", "--allow-image-host", _IMAGE_HOST]
        command += ["--adapter", f"random={_adapter(folder / 'adapter')}"]
        command += ["--state-db", str(folder / "state.db"), "--control-store", str(folder / "controllers")]
        command += [*arguments] if arguments else ["--kv-store", str(folder / "kv")]  # shards have no store
        log = folder / "server.log"
        with child_process(command, log, os.environ | {"TMPDIR": str(scratch)}) as process:
            try:
                yield SoakedServer(psutil.Process(process.pid), announced_port(process, log), scratch, faults)
            except BaseException:
                sys.stderr.write(log.read_text(errors="replace")[-4_000:])
                raise


# -- rounds ----------------------------------------------------------------------------------------------------


async def _kill(server: SoakedServer, words: str, how: signal.Signals) -> None:
    victims = server.children(words)
    if victims:
        victim = random.choice(victims)
        with contextlib.suppress(psutil.Error):
            victim.send_signal(how)
            if how is signal.SIGSTOP:
                await asyncio.sleep(0.5)
                victim.send_signal(signal.SIGCONT)


async def _stop_server(server: SoakedServer) -> None:
    server.process.suspend()
    await asyncio.sleep(0.5)
    server.process.resume()


async def _starve(server: SoakedServer, what: int, few: int) -> None:
    """Reduce a resource limit of the server for some seconds."""
    before = resource.prlimit(server.process.pid, what)
    resource.prlimit(server.process.pid, what, (few, before[1]))
    await asyncio.sleep(2 * _PAUSE)
    resource.prlimit(server.process.pid, what, before)


async def _jump(server: SoakedServer) -> None:
    """Set the server's wall clock wrong by up to a day, and then right again."""
    server.faults.set(clock_seconds=random.uniform(-86_400, 86_400))
    await asyncio.sleep(_PAUSE)
    server.faults.set()


async def _slow_names(server: SoakedServer) -> None:
    """Make the server's name look-ups take seconds, and then fail."""
    server.faults.set(name_seconds=_NAME_SECONDS)
    body = {"model": "demo-sees", "messages": [_seen(f"http://{_IMAGE_HOST}/a.png")], "max_tokens": 1}
    status, _ = await asyncio.to_thread(_send, server.port, "/v1/chat/completions", body)
    server.faults.set()
    if status < 400:
        raise AssertionError(f"an image was there (status {status}) without a name service")


#: The resource that each round takes away.
ROUNDS: dict[str, Callable[[SoakedServer], Any]] = {
    "kill -9 of a controller process": lambda server: _kill(server, "bridle.aici.runtime", signal.SIGKILL),
    "stop of a controller process": lambda server: _kill(server, "bridle.aici.runtime", signal.SIGSTOP),
    "kill -9 of the shard": lambda server: _kill(server, "bridle shard", signal.SIGKILL),
    "stop of the shard": lambda server: _kill(server, "bridle shard", signal.SIGSTOP),
    "kill -9 of any child": lambda server: _kill(server, "", signal.SIGKILL),
    "stop of the server": _stop_server,
    "kill -9 of a front end": lambda server: _kill(server, "bridle.http.writers", signal.SIGKILL),
    "stop of a front end": lambda server: _kill(server, "bridle.http.writers", signal.SIGSTOP),
    "clock jump": _jump,
    "slow name service": _slow_names,
    "full disk": lambda server: _starve(server, resource.RLIMIT_FSIZE, 0),
    "no descriptors": lambda server: _starve(server, resource.RLIMIT_NOFILE, _FEW_DESCRIPTORS),
}


def _send(port: int, path: str, body: dict[str, Any], leaves: bool = False) -> tuple[int, bytes]:
    """Post a body; return the status and the answer. A client that `leaves` reads only the first line of the answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_PATIENCE)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.readline() if leaves else answer.read()
    finally:
        connection.close()


async def _probe(port: int) -> list[str] | None:
    """Return the server's answers to two fixed requests, without and with a controller; None if an answer is
    missing."""
    texts = []
    for fields in ({}, {"controller": "pyctrl", "controller_arg": _SCRIPT}):
        with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
            status, answer = await asyncio.to_thread(_send, port, "/v1/completions", _PROBE | fields)
            texts += [str(json.loads(answer)["choices"][0]["text"])] if status == 200 else []
    return texts if len(texts) == 2 else None


async def _until_right(port: int, right: list[str] | None, found: SoakOutcome) -> float:
    """Wait until the server gives the answers `right` (None: any answers). Return the seconds of the wait."""
    began = time.monotonic()
    while time.monotonic() - began < _PATIENCE:
        texts = await _probe(port)
        if texts is not None and right in (None, texts):
            return time.monotonic() - began
        found.wrong += texts or ()
        await asyncio.sleep(0.05)
    raise TimeoutError(f"no right answer within {_PATIENCE:g} s")


async def _traffic(port: int, numbers: Iterator[int], found: SoakOutcome) -> None:
    """Send requests one after the other. In every eighth request the client disconnects during its stream."""
    for number in numbers:
        path, body = requests(number)
        leaves = number % 8 == 0 and path.startswith("/v1/c")
        body |= {"stream": True, "max_tokens": 50} if leaves else {}
        try:
            status, _ = await asyncio.to_thread(_send, port, path, body, leaves)
            found.statuses["left" if leaves else str(status)] += 1
        except (OSError, http.client.HTTPException) as error:
            found.statuses[type(error).__name__] += 1
            await asyncio.sleep(0.1)


async def drive(server: SoakedServer, seconds: float, names: list[str]) -> SoakOutcome:
    """Send traffic and run rounds for `seconds`; run every kind of round at least once."""
    found, numbers, end = SoakOutcome(), itertools.count(), time.monotonic() + seconds
    port = server.port
    await _until_right(port, None, found)  # the script's interpreter is then compiled
    right = await _probe(port)
    traffic = [asyncio.create_task(_traffic(port, numbers, found)) for _ in range(_CLIENTS)]
    for number in itertools.count():
        if number >= len(names) and time.monotonic() > end:
            break
        await asyncio.sleep(_PAUSE)
        name = names[number % len(names)]
        await ROUNDS[name](server)
        found.recovery.setdefault(name, []).append(await _until_right(port, right, found))
        found.rounds[name] += 1
        found.samples.append(server.sample())
    for task in traffic:
        task.cancel()
    await asyncio.gather(*traffic, return_exceptions=True)
    found.slopes = slopes(found.samples)
    return found


def slopes(samples: list[dict[str, float]]) -> dict[str, float]:
    """Return the change per minute of each value over the second half of the samples, by least squares."""
    half = [sample for sample in samples[len(samples) // 2 :] if sample]
    if len(half) < 3:
        return {}
    minutes = np.array([sample["time"] for sample in half]) / 60
    names = [name for name in half[0] if name != "time"]
    return {name: float(np.polyfit(minutes, [sample[name] for sample in half], 1)[0]) for name in names}


def soak(seconds: float, names: list[str], arguments: tuple[str, ...] = ()) -> SoakOutcome:
    """Start a server, run traffic and rounds, and end the server. `left` names the processes and the shared memory that
    remain after the server has ended."""
    before = {path.name for path in Path("/dev/shm").iterdir()}  # noqa: S108
    with serving(arguments) as server:
        found = asyncio.run(drive(server, seconds, names))
        children = server.process.children(recursive=True)
    _, alive = psutil.wait_procs(children, 20)
    own = f"-{server.process.pid}-"
    found.left = [f"process {child.pid}" for child in alive]
    found.left += [path.name for path in Path("/dev/shm").iterdir() if own in path.name and path.name not in before]  # noqa: S108
    return found


#: Settings of the server, with their flags.
SETTINGS = {"model in the server": (), "model in a shard": ("--isolate-model",)}


def guesses(settings: BenchSettings, limits: MachineLimits) -> dict[str, float]:
    """Return the estimated seconds of each setting."""
    return {name: _seconds(settings) + limits.python(20.0) for name in SETTINGS}


def _seconds(settings: BenchSettings) -> float:
    return 60.0 * (settings.minutes or (0.5 if settings.quick else 10.0)) / len(SETTINGS)


def measure(settings: BenchSettings, console: Console, phases: Phases) -> dict[str, Any]:
    """Soak a server in each setting for `--minutes`, by default 10."""
    report = {}
    for setting, arguments in SETTINGS.items():
        with phases.part(setting):
            found = soak(_seconds(settings), [name for name in ROUNDS if arguments or "shard" not in name], arguments)
        console.print(setting)
        print_outcome(found, console)
        report[setting] = figures(found)
    return report


def figures(found: SoakOutcome) -> dict[str, Any]:
    """Return the findings of a run as plain data for JSON. Counters are converted first, because `asdict` would count
    their pairs."""
    return asdict(found) | {"rounds": dict(found.rounds), "statuses": dict(found.statuses)}


def print_outcome(found: SoakOutcome, console: Console) -> None:
    """Print rounds with their recovery times, and the suspected leaks."""
    from rich.table import Table

    table = Table("round", "times", "recovery, median s", "longest s")
    for name, seconds in found.recovery.items():
        table.add_row(name, str(len(seconds)), f"{np.median(seconds):.2f}", f"{max(seconds):.2f}")
    console.print(table)
    console.print(f"{sum(found.rounds.values())} rounds, requests by status {dict(found.statuses)}")
    console.print(f"wrong answers {found.wrong[:5]}, left behind {found.left}")
    for name, slope in found.slopes.items():
        first, last = found.samples[len(found.samples) // 2][name], found.samples[-1][name]
        console.print(f"{name:16} {first:10.1f} -> {last:10.1f}, {slope:+8.2f} a minute")
