"""Shards in this process, for any executor, each on its own unix socket."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import grpc

from bridle.distributed.link import Timings
from bridle.distributed.remote_executor import ShardExecutor
from bridle.distributed.shard import SERVICE, Shard, start_shard
from bridle.engine.engine import Engine
from bridle.engine.interfaces import Executor
from bridle.engine.request import Request
from bridle.errors import ShardUnavailable
from bridle.outputs import Finished, TokenEvent
from tests.waiting import PATIENCE

#: Nothing here is given up because the machine is busy.
PATIENT = Timings(patience=PATIENCE, connect=PATIENCE, least_step=PATIENCE)


class Host:
    """A shard whose executor can be replaced between two routers. A lost device is available again at once, as in a new
    process."""

    def __init__(self, executor: Executor, address: str) -> None:
        self.shard = Shard(executor, on_device_lost=self._find_again)
        self.server, self.address = start_shard(self.shard, address)

    def connect(self, executor: Executor | None = None, **options: Any) -> ShardExecutor:
        """Return a router's connection to the shard, through `executor` if given."""
        if executor is not None:
            self.shard.executor = executor
        return ShardExecutor(self.address, **{"timings": PATIENT, **options})

    def _find_again(self, error: ShardUnavailable) -> None:
        self.shard.is_lost = False

    def wait_free(self) -> None:
        """Wait until the previous router has disconnected."""
        with self.shard.taken:
            pass

    def stop(self) -> None:
        self.server.stop(grace=0).wait()


@contextlib.contextmanager
def hosted(executor: Executor) -> Iterator[Host]:
    """Serve `executor` as a shard, and yield the shard."""
    with tempfile.TemporaryDirectory(prefix="bridle-test-") as folder:
        host = Host(executor, f"unix:{Path(folder) / 'shard.sock'}")
        try:
            yield host
        finally:
            host.stop()


@contextlib.contextmanager
def channel_to(host: Host) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(host.address) as channel:
        yield channel


def ask(host: Host, method: str, request: Any, reply: Any) -> Any:
    """Return a shard's answer to a status request of an operator."""
    with channel_to(host) as channel:
        call = channel.unary_unary(f"/{SERVICE}/{method}", type(request).SerializeToString, reply.FromString)
        return call(request, timeout=PATIENCE)


#: The tokens of each output, by its request and number.
Said = dict[tuple[str, int], list[int]]


def said_by(engine: Engine, wanted: Iterable[Request]) -> Said:
    """Return the tokens of requests that start together. The test fails if a request fails."""
    for request in wanted:
        engine.add(request)
    found: Said = {}
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, TokenEvent):
                found.setdefault((event.request_id, event.index), []).append(event.token)
            elif isinstance(event, Finished):
                assert event.error is None, event.error
    return found


#: A rank that shows signs of life and does nothing else, until rank 0 is gone.
IDLE = "import sys; from bridle.distributed.group import beat; beat(sys.stdout.buffer); sys.stdin.read()"
