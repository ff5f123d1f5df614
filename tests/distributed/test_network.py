"""Tests that streams continue with the same tokens if the network between a router and its shard is slow, fails or goes
silent."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest

from bridle.distributed.link import Timings
from bridle.distributed.remote_executor import ShardExecutor
from bridle.engine import AsyncEngine, Engine
from bridle.outputs import FinishReason
from tests.distributed.kit import PATIENT, Host
from tests.launch.kit import Crowd, expected, requests
from tests.launch.scripted_shard import make_executor, on_forward
from tests.waiting import PATIENCE

#: Silence is noticed quickly; a busy machine at worst loses a link too many.
QUICK = Timings(beat=0.05, patience=1.0, connect=1.0)
_NOW = struct.pack("ii", 1, 0)  # a socket that is closed resets its connection


class Proxy:
    """A proxy that forwards data to `address` with a delay of `delay` seconds, unless it is stopped."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self.delay = 0.0
        self._target = host, int(port)
        self._flows = threading.Event()
        self._flows.set()
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def reset(self) -> None:
        """Reset every connection."""
        with self._lock:
            broken, self._sockets = self._sockets, []
        for each in broken:
            with contextlib.suppress(OSError):
                each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NOW)
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def stall(self) -> None:
        """Silently stop forwarding data."""
        self._flows.clear()

    def flow(self) -> None:
        self._flows.set()

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)  # ends its thread's waiting
        self._server.close()
        self.flow()
        self.reset()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it is closed
            while True:
                near, _ = self._server.accept()
                far = socket.create_connection(self._target)
                with self._lock:
                    self._sockets += [near, far]
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=self._pass_on, args=(source, sink), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                time.sleep(self.delay)
                self._flows.wait()
                sink.sendall(data)
            sink.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    host = Host(make_executor(on_forward=on_forward), "127.0.0.1:0")
    made = Proxy(host.address)
    yield made
    made.close()
    host.stop()


@contextlib.contextmanager
def streaming(proxy: Proxy, num_tokens: int, timings: Timings) -> Iterator[tuple[ShardExecutor, Crowd]]:
    """Run streams through the proxy. In the end they must have the same output as without the proxy."""
    made = requests(8, num_tokens)
    executor = ShardExecutor(proxy.address, timings=timings)
    with AsyncEngine(Engine(executor)) as engine:
        crowd = Crowd(engine, made)
        yield executor, crowd
        crowd.join()
        for reader, outputs in zip(crowd.readers, expected(made), strict=True):
            assert reader.reasons == {FinishReason.LENGTH}
            assert reader.outputs == outputs
        statistics = engine.statistics()
        assert statistics.num_free_blocks == statistics.num_blocks


def test_a_slow_network_costs_time_and_no_token(proxy: Proxy) -> None:
    proxy.delay = 0.003
    with streaming(proxy, 20, PATIENT) as (executor, _):
        pass
    assert executor.num_losses == 0


def test_connections_that_break_off_are_made_anew(proxy: Proxy) -> None:
    with streaming(proxy, 80, PATIENT) as (executor, crowd):
        for _ in range(3):
            assert crowd.wait(100)
            proxy.reset()
    assert executor.num_losses >= 2


def test_a_network_that_goes_silent_is_noticed(proxy: Proxy) -> None:
    lost = threading.Event()
    with streaming(proxy, 60, QUICK) as (executor, crowd):
        change = executor.on_change

        def note() -> None:
            lost.set()
            change()

        executor.on_change = note
        assert crowd.wait(100)
        proxy.stall()
        assert lost.wait(PATIENCE)
        assert not executor.is_up
        proxy.flow()
    assert executor.num_losses >= 1
