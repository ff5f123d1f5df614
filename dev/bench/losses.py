"""Measures the effects on clients when a process of `bridle serve` is lost. Processes are killed (kill -9) or stopped
(SIGSTOP) many times during streams.

The server runs over HTTP with the demo model, with one of three settings: one shard, a group of two ranks, or two
replicas. For each loss, the benchmark measures when clients received the event `resuming` that they had requested, and
when readiness ended and returned. The benchmark also measures the longest pause of a stream. Afterwards it checks for
leaks and damage: KV blocks, memory, file descriptors, and wrong texts.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from bridle.bench.phases import MachineLimits, Phases
from bridle.bench.settings import BenchSettings
from bridle.bench.subprocesses import announced_port, child_process, read_metrics
from dev.bench.loss_streams import Readiness, StreamCrowd

if TYPE_CHECKING:
    from rich.console import Console

#: Maximum seconds of any wait.
PATIENCE = 180.0
_MAX_TOKENS = 80
#: Rough seconds for `MachineLimits.python`: a server's start and end, a client's wait for its text among others, and
#: the recovery from a loss.
_START_SECONDS, _STREAM_SECONDS, _LOSS_SECONDS = 15.0, 0.05, 10.0
#: Events that a stream must receive after a loss, more than can have been in transit.
_MANY = 5


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting of the server whose processes are lost. The words `victims` identify processes by their command lines.
    The oldest `num_victims` of them are killed in turn, because a younger process is on standby. If there are several
    such processes, the remaining ones take over."""

    name: str
    arguments: tuple[str, ...]
    victims: str
    num_victims: int = 1


SETTINGS = (
    Setting("one shard", ("--isolate-model",), "bridle shard"),
    Setting("group of two, rank 1", ("--shards", "2"), "--rank 1"),
    Setting("two replicas", ("--replicas", "2"), "bridle.launch.replica_process", num_victims=2),
)


@dataclass(slots=True)
class Loss:
    """One loss, with times in seconds after the loss. `told` (clients were informed) and `unready` are None if nothing
    has to be reported. `gone_on` is when the last stream had text again, and `after_ready` is the same time counted
    from the return of readiness. `usual` is the longest pause of a stream just before the loss, which is long on a busy
    machine."""

    how: str
    usual: float
    told: float | None
    unready: float | None
    ready: float | None
    gone_on: float
    after_ready: float | None


@dataclass(slots=True)
class LossOutcome:
    """Outcome of all losses of one server. `before` and `after` are states of the idle server before and after the
    losses."""

    setting: str
    streams: int
    losses: list[Loss] = field(default_factory=list)
    before: dict[str, float] = field(default_factory=dict)
    after: dict[str, float] = field(default_factory=dict)
    complete: int = 0
    different: int = 0
    faults: list[str] = field(default_factory=list)


def measure(settings: BenchSettings, console: Console, phases: Phases) -> dict[str, Any]:
    """Measure twenty losses of each setting, of which every fourth is a stopped process; with `quick` only two
    losses."""
    num_streams, hows = _num_streams(settings), how_to_lose(_num_losses(settings))
    found = []
    for setting in SETTINGS:
        with phases.part(setting.name):
            found.append(run(setting, num_streams, hows, settings.threads))
        _print(found[-1], console)
    return {"settings": [asdict(each) for each in found]}


def guesses(settings: BenchSettings, limits: MachineLimits) -> dict[str, float]:
    """Return the estimated seconds of each setting: the server's start, undisturbed texts of all clients, and
    losses."""
    undisturbed = _START_SECONDS + 3 * _num_streams(settings) * _STREAM_SECONDS
    each = limits.python(
        undisturbed + _num_losses(settings) * (_LOSS_SECONDS + _num_streams(settings) * _STREAM_SECONDS)
    )
    return {setting.name: each for setting in SETTINGS}


def _num_streams(settings: BenchSettings) -> int:
    return (settings.batches or ((10,) if settings.quick else (100,)))[0]


def _num_losses(settings: BenchSettings) -> int:
    return 2 if settings.quick else 20


def how_to_lose(count: int) -> list[signal.Signals]:
    """Return the signals that cause `count` losses. Every fourth loss is a stopped process, or every second if there
    are only two losses."""
    return [
        signal.SIGSTOP if number % min(count, 4) == min(count, 4) - 1 else signal.SIGKILL for number in range(count)
    ]


def run(setting: Setting, num_streams: int, hows: Sequence[signal.Signals], threads: int | None = None) -> LossOutcome:
    """Start the server and the streams, and lose processes. Raises `TimeoutError` if an awaited event does not
    occur."""
    with serving(setting, threads) as service:
        return asyncio.run(_drive(service, num_streams, hows))


async def _drive(service: Service, num_streams: int, hows: Sequence[signal.Signals]) -> LossOutcome:
    found = LossOutcome(service.setting.name, num_streams)
    crowd, readiness = StreamCrowd(service.address, num_streams, _MAX_TOKENS), Readiness(service.address)
    crowd.start()
    await crowd.wait(lambda client: client.num_complete > 0, PATIENCE)  # undisturbed, to learn the expected texts
    await crowd.stop()
    found.before = await service.settled()
    crowd.start()
    for number, how in enumerate(hows):
        began = time.perf_counter()
        await crowd.wait(lambda client, began=began: client.after(began) > _MANY, PATIENCE)  # type: ignore[misc]
        usual = max(client.longest_gap(began) for client in crowd.clients)
        found.losses.append(await _lose(service, crowd, readiness, number, how, usual))
    await crowd.wait(lambda client: client.num_complete > 1, PATIENCE)
    await crowd.stop()
    found.after = await service.settled(found.before["children"])
    readiness.stop()
    found.complete = sum(client.num_complete for client in crowd.clients)
    found.different = sum(client.num_different for client in crowd.clients)
    found.faults = list(crowd.faults)
    return found


async def _lose(
    service: Service, crowd: StreamCrowd, readiness: Readiness, number: int, how: signal.Signals, usual: float
) -> Loss:
    """Kill or stop one process; return when all streams have resumed and all processes are running again."""
    victim = service.victims()[number % service.setting.num_victims]
    began = time.perf_counter()
    victim.send_signal(how)
    if service.setting.num_victims > 1:
        await asyncio.to_thread(psutil.wait_procs, [victim], PATIENCE)  # a hung process is killed once it is noticed
        noticed = time.perf_counter()
        await crowd.wait(lambda client: client.after(noticed) > _MANY, PATIENCE)
        gone_on = max(client.longest_gap(began) for client in crowd.clients)
        await service.whole()
        return Loss(how.name, usual, None, None, None, gone_on, None)
    streams = {client: client.stream for client in crowd.clients if client.stream is not None}
    unready = await readiness.wait(False, began, PATIENCE)
    ready = await readiness.wait(True, unready, PATIENCE)
    await crowd.wait(lambda client: client.after(ready) > 0, PATIENCE)
    # A stream whose last events were in transit needs no report, however late the client reads them.
    held = [client for client, stream in streams.items() if client.stream_after(ready) == stream]
    told = [next((each for each in client.resumed if each > began), None) for client in held if client.is_told]
    last = max((client.next_after(ready) for client in held), default=ready)
    return Loss(
        how.name,
        usual,
        max((each for each in told if each is not None), default=began) - began if None not in told else None,
        unready - began,
        ready - began,
        last - began,
        last - ready,
    )


class Service:
    """A running `bridle serve` and its child processes."""

    def __init__(self, setting: Setting, process: psutil.Process, port: int) -> None:
        self.setting = setting
        self.address = ("127.0.0.1", port)
        self._process = process
        self._num_blocks = self._metrics()["bridle_engine_blocks"]

    def victims(self) -> list[psutil.Process]:
        """Return the processes that may be killed now, the oldest first."""
        found = []
        for child in self._process.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if self.setting.victims in " ".join(child.cmdline()) and child.status() != psutil.STATUS_ZOMBIE:
                    found.append(child)
        return sorted(found, key=lambda child: child.create_time())

    async def whole(self) -> None:
        """Wait until every replica is running again."""
        async with asyncio.timeout(PATIENCE):
            while (await asyncio.to_thread(self._metrics))["bridle_engine_blocks"] < self._num_blocks:  # noqa: ASYNC110
                await asyncio.sleep(0.1)

    async def settled(self, num_children: float = 0) -> dict[str, float]:
        """Wait until no request runs and all processes are ready; return the server's state. At least `num_children`
        processes must run, because standby processes start seconds after the others."""
        await self.whole()
        async with asyncio.timeout(PATIENCE):
            while True:
                metrics = await asyncio.to_thread(self._metrics)
                is_idle = metrics["bridle_http_in_flight"] == metrics["bridle_engine_running"] == 0
                is_free = metrics["bridle_engine_free_blocks"] == metrics["bridle_engine_blocks"]
                if is_idle and is_free and len(self._process.children(recursive=True)) >= num_children:
                    break
                await asyncio.sleep(0.1)
        return {
            "blocks_in_use": metrics["bridle_engine_blocks"] - metrics["bridle_engine_free_blocks"],
            "memory_mib": self._process.memory_info().rss / 2**20,
            "descriptors": self._process.num_fds(),
            "threads": self._process.num_threads(),
            "children": len(self._process.children(recursive=True)),
        }

    def _metrics(self) -> dict[str, float]:
        return {name.partition("{")[0]: value for name, value in read_metrics(*self.address)}


@contextlib.contextmanager
def serving(setting: Setting, threads: int | None = None) -> Iterator[Service]:
    """Run `bridle serve` with the demo model, in a separate process."""
    command = [sys.executable, "-m", "bridle", "serve", "demo", "--port", "0", "--control", "off"]
    command += [*setting.arguments, *(("--num-threads", str(threads)) if threads else ())]
    with tempfile.TemporaryDirectory(prefix="bridle-bench-") as folder:
        log = Path(folder) / "server.log"
        with child_process(command, log) as process:
            try:
                yield Service(setting, psutil.Process(process.pid), announced_port(process, log))
            except BaseException:
                lines = log.read_text().splitlines(keepends=True)
                sys.stderr.write("".join(line for line in lines if '"event": "request"' not in line)[-8000:])
                raise


def _print(found: LossOutcome, console: Console) -> None:
    from rich.table import Table

    table = Table(title=f"{found.setting}, {found.streams} streams, {len(found.losses)} losses; seconds after the loss")
    for heading in (
        "",
        "losses",
        "pause before",
        "told",
        "not ready",
        "ready",
        "last stream goes on",
        "after readiness",
    ):
        table.add_column(heading, justify="left" if not heading else "right")
    for how in sorted({loss.how for loss in found.losses}):
        losses = [loss for loss in found.losses if loss.how == how]
        columns = ("usual", "told", "unready", "ready", "gone_on", "after_ready")
        table.add_row(how, str(len(losses)), *(_range([getattr(loss, name) for loss in losses]) for name in columns))
    console.print(table)
    console.print(
        f"{found.complete} texts, {found.different} other than undisturbed, {len(found.faults)} broken; "
        f"before {found.before}, after {found.after}"
    )


def _range(values: Sequence[float | None]) -> str:
    known = sorted(value for value in values if value is not None)
    return f"{known[len(known) // 2]:.2f} ({known[0]:.2f} to {known[-1]:.2f})" if known else "-"
