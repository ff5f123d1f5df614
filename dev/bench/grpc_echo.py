"""A measurement of gRPC alone between two processes, for `bridle bench shard`. It is the lower bound of a step on a
shard.

Each round trip sends messages of the same sizes as a step of 64 rows: two to the server over a stream, and one back.
Nothing is encoded or computed.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import grpc

from bridle.bench.subprocesses import end_process
from bridle.distributed.address import make_server_options, open_channel

#: Bytes of a plan, of its rows and of the sampled tokens.
_PLAN, _ROWS, _TOKENS = b"p" * 665, b"r" * 784, b"t" * 70
_START_SECONDS = 30.0


def measure_echo(num_rounds: int) -> float:
    """Return the median milliseconds from the first message to the reply."""
    with tempfile.TemporaryDirectory(prefix="bridle-bench-") as folder:
        address = f"unix:{folder}/echo.sock"
        process = subprocess.Popen([sys.executable, "-m", __name__, address])  # noqa: S603
        try:
            return 1e3 * statistics.median(_round_trips(address, num_rounds))
        finally:
            end_process(process)


def _round_trips(address: str, count: int) -> list[float]:
    outbox: SimpleQueue[bytes | None] = SimpleQueue()
    seconds = []
    with open_channel(address, None) as channel:
        grpc.channel_ready_future(channel).result(_START_SECONDS)
        replies = channel.stream_stream("/echo/Steps")(iter(outbox.get, None))
        for _ in range(count):
            began = time.perf_counter()
            outbox.put(_PLAN)
            outbox.put(_ROWS)
            next(replies)
            seconds.append(time.perf_counter() - began)
        outbox.put(None)
    return seconds


def _steps(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
    for data in requests:
        if data == _ROWS:
            yield _TOKENS


def _serve(address: str) -> None:
    server = grpc.server(ThreadPoolExecutor(2), options=make_server_options())
    handlers: dict[str, Any] = {"Steps": grpc.stream_stream_rpc_method_handler(_steps)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("echo", handlers),))
    server.add_insecure_port(address)
    server.start()
    server.wait_for_termination()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("address")
    _serve(parser.parse_args().address)
