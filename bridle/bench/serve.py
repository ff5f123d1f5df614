"""What the HTTP server costs and how it bears load: the whole of `bridle serve`, driven over real connections.

1. Throughput of 16 clients that stream, beside the offline engine on the same requests.
2. More and more clients, faster and faster arrivals: time to the first token, between tokens, share within limits.
3. Ten times as much as it can take, from ten users with keys, one of whom asks for half of it: how quickly it says no,
   what the admitted ones notice, and what share each user gets.
4. A thousand streams of which half are dropped: blocks, memory and descriptors before and after.

The server runs in a process of its own; the processor time of the client, in this one, is reported beside.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import quantiles
from typing import TYPE_CHECKING, Any

import psutil

from bridle.bench.checkpoints import Checkpoint, make_checkpoint
from bridle.bench.control_guests import write_tokenizer
from bridle.bench.engine import make_prompts
from bridle.bench.peers import BridlePeer
from bridle.bench.settings import Settings
from bridle.bench.sse_client import Sample, Target, closed_loop, complete, open_loop
from bridle.errors import EngineClosed
from bridle.service.keys import KeyStore

if TYPE_CHECKING:
    from rich.console import Console

_NUM_USERS = 10
_FIRST_LIMIT, _GAP_LIMIT = 2.0, 0.2  # seconds; a request within both counts as good


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured."""

    max_tokens: int
    num_requests: int
    concurrency: tuple[int, ...]
    seconds: float
    num_streams: int


@dataclass(slots=True)
class Row:
    """One load. Latencies in seconds; `client_cpu` is that of this process, in cores."""

    load: str
    requests: int
    refused: int
    tokens_per_second: float
    requests_per_second: float
    good_share: float
    first_p50: float
    first_p99: float
    gap_p50: float
    gap_p99: float
    client_cpu: float


def measure(settings: Settings, console: Console) -> dict[str, Any]:
    """Run everything against one server. Prints a table as it goes."""
    quick = settings.quick
    scale = Scale(16, 32, (1, 16), 5.0, 100) if quick else Scale(32, 96, (1, 4, 16, 64), 30.0, 1000)
    name = (settings.model_sizes or (("20m",) if quick else ("0.5b",)))[0]
    with tempfile.TemporaryDirectory(prefix="bridle-bench-") as folder:
        checkpoint = make_checkpoint(name, Path(folder))
        write_tokenizer(checkpoint.path, checkpoint.vocab_size)
        prompts = make_prompts(scale.num_requests, checkpoint.vocab_size)
        offline = _offline(checkpoint, settings, prompts, scale)
        console.print(f"{name}: offline engine, 16 at once: {offline:.1f} tokens/s")
        with _server(checkpoint, settings, Path(folder)) as (target, process):
            report = asyncio.run(_drive(target, process, prompts, scale, console))
    sixteen = next(row for row in report["rows"] if row["load"] == "16 clients")
    share = sixteen["tokens_per_second"] / offline
    console.print(f"over HTTP with 16 clients: {share:.0%} of the offline engine")
    return {"model": name, "offline_tokens_per_second": offline, "share_of_offline": share, **report}


async def _drive(
    target: Target, process: psutil.Process, prompts: Sequence[Sequence[int]], scale: Scale, console: Console
) -> dict[str, Any]:
    await closed_loop(target, prompts[:2], 2, 1)  # whatever is made lazily is made now
    rows = []
    for num_clients in scale.concurrency:
        used = prompts[: max(scale.num_requests * num_clients // 16, 4)]
        rows.append(await _timed(f"{num_clients} clients", closed_loop(target, used, scale.max_tokens, num_clients)))
    capacity = max(row.requests_per_second for row in rows)
    for part in (0.5, 0.9):
        load = open_loop(target, prompts, scale.max_tokens, part * capacity, scale.seconds)
        rows.append(await _timed(f"{part:.0%} of capacity", load))
    overload = open_loop(target, prompts, scale.max_tokens, 10 * capacity, scale.seconds, _weights())
    samples: list[Sample] = []
    rows.append(await _timed("10 times capacity", overload, samples))
    _print(rows, console)
    fairness = _fairness(samples)
    console.print(
        f"10 times capacity: refusals take {fairness['refusal_p99'] * 1000:.0f} ms (p99); the least served of "
        f"{_NUM_USERS} users got {fairness['least_share']:.0%} of a fair share"
    )
    leak = await _dropping(target, process, prompts, scale)
    console.print(f"{scale.num_streams} streams, half of them dropped: {leak}")
    return {"rows": [asdict(row) for row in rows], "fairness": fairness, "dropping": leak}


def _weights() -> list[float]:
    """The first user asks for half of everything."""
    return [0.5] + [0.5 / (_NUM_USERS - 1)] * (_NUM_USERS - 1)


async def _timed(load: str, running: Any, samples: list[Sample] | None = None) -> Row:
    cpu, begin = time.process_time(), time.perf_counter()
    found: list[Sample] = await running
    seconds = time.perf_counter() - begin
    cpu = time.process_time() - cpu
    if samples is not None:
        samples += found
    done = [each for each in found if each.is_complete]
    gaps = [gap for each in done for gap in each.gaps]
    firsts = [each.first for each in done]
    good = [each for each in done if each.first <= _FIRST_LIMIT and max(each.gaps, default=0.0) <= _GAP_LIMIT]
    return Row(
        load=load,
        requests=len(found),
        refused=sum(each.status == 429 for each in found),
        tokens_per_second=sum(each.num_tokens for each in found) / seconds,
        requests_per_second=len(done) / seconds,
        good_share=len(good) / max(len(done), 1),
        first_p50=_quantile(firsts, 50),
        first_p99=_quantile(firsts, 99),
        gap_p50=_quantile(gaps, 50),
        gap_p99=_quantile(gaps, 99),
        client_cpu=cpu / seconds,
    )


def _fairness(samples: Sequence[Sample]) -> dict[str, Any]:
    """How quick refusals were, and how evenly the users were served."""
    refusals = [each.ended - each.sent for each in samples if each.status == 429]
    served = [sum(s.num_tokens for s in samples if s.tenant == user) for user in range(_NUM_USERS)]
    fair = sum(served) / _NUM_USERS
    return {
        "refusal_p99": _quantile(refusals, 99),
        "tokens_by_user": served,
        "least_share": min(served) / fair if fair else 0.0,
    }


async def _dropping(
    target: Target, process: psutil.Process, prompts: Sequence[Sequence[int]], scale: Scale
) -> dict[str, Any]:
    """Rounds of streams, half of which their client leaves at a random token; the first round is not counted."""
    rng = random.Random(0)
    states = []
    for _ in range(3):
        drops = [rng.randint(1, scale.max_tokens) if number % 2 else None for number in range(scale.num_streams)]
        users = len(target.keys)
        await asyncio.gather(
            *(
                complete(target, prompts[n % len(prompts)], scale.max_tokens, tenant=n % users, drop_after=drop)
                for n, drop in enumerate(drops)
            )
        )
        states.append(await _settled(target, process))
    return {"before": states[0], "after": states[-1]}


async def _settled(target: Target, process: psutil.Process) -> dict[str, float]:
    """The server's state once nothing runs any more."""
    while True:
        metrics = await asyncio.to_thread(_metrics, target)
        if metrics["bridle_http_in_flight"] == 0 and metrics["tgi_batch_current_size"] == 0:
            break
        await asyncio.sleep(0.1)
    return {
        "kv_tokens_in_use": metrics["tgi_batch_current_max_tokens"],
        "memory_mib": process.memory_info().rss / 2**20,
        "descriptors": process.num_fds(),
    }


def _metrics(target: Target) -> dict[str, float]:
    request = urllib.request.Request(
        f"http://{target.host}:{target.port}/metrics", headers={"Authorization": f"Bearer {target.keys[0]}"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
        lines = answer.read().decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs if "{" not in name}


# -- the two that are compared -------------------------------------------------------------------------------


def _offline(checkpoint: Checkpoint, settings: Settings, prompts: Sequence[Sequence[int]], scale: Scale) -> float:
    """Tokens per second of the engine alone, 16 requests at once."""
    peer = BridlePeer(checkpoint, num_threads=settings.threads, max_num_seqs=16)
    try:
        peer.generate(prompts[:2], 2)
        run = peer.generate(prompts, scale.max_tokens)
    finally:
        peer.close()
    return len(prompts) * scale.max_tokens / run.seconds


@contextlib.contextmanager
def _server(checkpoint: Checkpoint, settings: Settings, folder: Path) -> Iterator[tuple[Target, psutil.Process]]:
    """`bridle serve` with ten users, in a process of its own."""
    keys_file, log = folder / "keys.db", folder / "server.log"
    with contextlib.closing(KeyStore(keys_file)) as store:
        keys = [store.add(f"user{number}") for number in range(_NUM_USERS)]
    command = [sys.executable, "-m", "bridle", "serve", str(checkpoint.path), "--port", "0", "--keys", str(keys_file)]
    command += ["--log-format", "json", "--control", "off", "--no-prefix-caching", "--max-requests", "128"]
    if settings.threads is not None:
        command += ["--num-threads", str(settings.threads)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)  # noqa: S603
    try:
        yield Target("127.0.0.1", _port(process, log), keys), psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(60)


def _port(process: subprocess.Popen[bytes], log: Path) -> int:
    """The port that the server says it listens on."""
    while process.poll() is None:
        if found := re.search(r"http://127\.0\.0\.1:(\d+)", log.read_text()):
            return int(found.group(1))
        time.sleep(0.1)
    raise EngineClosed(f"the server did not come up: {log.read_text()[-2000:]}")


# -- figures -------------------------------------------------------------------------------------------------


def _quantile(values: Sequence[float], percent: int) -> float:
    if len(values) < 2:
        return values[0] if values else 0.0
    return quantiles(values, n=100, method="inclusive")[percent - 1]


def _print(rows: Sequence[Row], console: Console) -> None:
    from rich.table import Table

    table = Table("load", "requests", "refused", "tok/s", "req/s", "good", "first p50/p99", "gap p50/p99", "client CPU")
    for row in rows:
        table.add_row(
            row.load,
            str(row.requests),
            str(row.refused),
            f"{row.tokens_per_second:.1f}",
            f"{row.requests_per_second:.2f}",
            f"{row.good_share:.0%}",
            f"{row.first_p50 * 1000:.0f} / {row.first_p99 * 1000:.0f} ms",
            f"{row.gap_p50 * 1000:.1f} / {row.gap_p99 * 1000:.1f} ms",
            f"{row.client_cpu:.2f}",
        )
    console.print(table)
