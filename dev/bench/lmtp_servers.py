"""Runs the two LMTP servers that are compared, as programs: `bridle serve-model` and `lmql serve-model`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from bridle.bench.subprocesses import end_process
from bridle.errors import BridleError, ShardUnavailable

_START_SECONDS = 600.0


@contextlib.contextmanager
def bridle_server(model: Path, threads: int | None) -> Iterator[str]:
    """Run bridle's server with the checkpoint `model`; yield its `HOST:PORT`."""
    command = [sys.executable, "-m", "bridle", "serve-model", str(model)]
    with running(command, model, threads) as endpoint:
        yield endpoint


@contextlib.contextmanager
def genuine_server(python: Path, model: Path, threads: int | None) -> Iterator[str]:
    """Run LMQL's own server, with its transformers backend, with the checkpoint `model`; yield its `HOST:PORT`."""
    command = [str(python), "-m", "lmql.cli", "serve-model", str(model), "--static"]
    with running(command, model, threads) as endpoint:
        yield endpoint


@contextlib.contextmanager
def running(command: Sequence[str], model: Path, threads: int | None) -> Iterator[str]:
    """Start a server and wait until it has generated a token; end it afterwards."""
    port = _free_port()
    command = [*command, "--host", "localhost", "--port", str(port)]
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(  # noqa: S603
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=_environment(threads)
        )
        try:
            endpoint = f"localhost:{port}"
            try:
                asyncio.run(_first_token(endpoint, str(model), process))
            except (BridleError, TimeoutError) as error:
                output.seek(0, os.SEEK_END)
                output.seek(max(0, output.tell() - 2000))
                last = output.read().decode(errors="replace")
                raise ShardUnavailable(f"{' '.join(command)} did not come up ({error}): {last}") from error
            yield endpoint
        finally:
            end_process(process, 10)


def _environment(threads: int | None) -> Mapping[str, str]:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if threads is not None:
        environment |= {"OMP_NUM_THREADS": str(threads), "BRIDLE_NUM_THREADS": str(threads)}
    return environment


async def _first_token(endpoint: str, model: str, process: subprocess.Popen[bytes]) -> None:
    """Send requests until the server listens, then wait for a token; raise an error if the server process has ended."""
    from bridle.errors import ConnectionLost
    from bridle.lmtp import Client, RetryPolicy

    async with asyncio.timeout(_START_SECONDS):
        while True:
            try:
                async with Client(endpoint, model, patience=RetryPolicy(connect_attempts=1), plain=True) as client:
                    await (await client.generate([5, 6, 7], max_tokens=1)).read()
                    return
            except ConnectionLost:
                if process.poll() is not None:
                    raise
                await asyncio.sleep(0.2)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port: int = probe.getsockname()[1]
        return port
