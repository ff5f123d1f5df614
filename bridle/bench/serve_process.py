"""Runs `bridle serve` in a separate process, and measures that process."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from bridle.bench.sse_client import ServerTarget
from bridle.bench.subprocesses import announced_port, child_process, read_metrics
from bridle.serving.tenancy.keys import KeyStore


@dataclass(frozen=True, slots=True)
class HttpServer:
    """A running server process."""

    target: ServerTarget
    process: psutil.Process

    @property
    def cpu_seconds(self) -> float:
        """Return the processor seconds that all threads of the server have used."""
        tasks = Path(f"/proc/{self.process.pid}/task")
        if tasks.is_dir():  # Linux reports nanoseconds, other systems hundredths of a second
            return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks.iterdir()) / 1e9
        times = self.process.cpu_times()
        return float(times.user + times.system)

    def metrics(self) -> dict[str, float]:
        """Return the server's metrics that have no labels, by name."""
        headers = {"Authorization": f"Bearer {self.target.keys[0]}"} if self.target.keys else {}
        pairs = read_metrics(self.target.host, self.target.port, headers)
        return {name: value for name, value in pairs if "{" not in name}


@contextlib.contextmanager
def http_server(
    model: str | Path, folder: Path, *options: str, num_users: int = 0, threads: int | None = None
) -> Iterator[HttpServer]:
    """Serve `model` with further command-line `options`, to `num_users` users with API keys (0: without keys). The
    server's files go into `folder`."""
    command = [sys.executable, "-m", "bridle", "serve", str(model), "--port", "0", "--log-format", "json", *options]
    keys: Sequence[str] = ()
    if num_users:
        keys_file = folder / "keys.db"
        with contextlib.closing(KeyStore(keys_file)) as store:
            keys = [store.add(f"user{time.monotonic_ns()}-{number}") for number in range(num_users)]
        command += ["--keys", str(keys_file)]
    if threads is not None:
        command += ["--num-threads", str(threads)]
    log = folder / "server.log"
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with child_process(command, log, environment) as process:
        yield HttpServer(ServerTarget("127.0.0.1", announced_port(process, log), keys), psutil.Process(process.pid))
