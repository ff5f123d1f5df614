"""Tests that the supervisor ends only a worker that sends invalid bytes, and still reads from the other workers."""

from __future__ import annotations

import os
import select
import socket
import struct
from types import SimpleNamespace
from typing import Any

import pytest

from bridle.aici.runtime import messages as m
from bridle.aici.runtime.limits import RuntimeLimits
from bridle.aici.runtime.pool import WorkerPool
from bridle.aici.runtime.ring import send_frame
from bridle.aici.runtime.worker_handle import WorkerHandle
from bridle.errors import ShardUnavailable
from tests.waiting import PATIENCE


def add_worker(pool: WorkerPool) -> tuple[WorkerHandle, socket.socket]:
    """Add a fake worker that is only a socket. Returns its handle and the socket."""
    ours, theirs = socket.socketpair()
    process: Any = SimpleNamespace(handle=-1, cpu_seconds=lambda: 0.0)
    worker = WorkerHandle(process, SimpleNamespace(), ours, "ann")  # type: ignore[arg-type]
    pool.workers.append(worker)
    pool._sockets[ours.fileno()] = worker
    pool._poll.register(ours.fileno(), select.EPOLLIN)
    return worker, theirs


@pytest.mark.parametrize("said", [struct.pack("<I", 0xFFFFFFFF), struct.pack("<I", 1) + b"\xc1"], ids=["long", "none"])
def test_a_worker_that_breaks_its_channel_ends_alone(said: bytes) -> None:
    handle, other = os.pipe()
    nursery: Any = SimpleNamespace(handle=handle)
    lost: list[WorkerHandle] = []
    pool = WorkerPool(nursery, RuntimeLimits(), lost.append, lambda why: None)
    (bad, bad_end), (good, good_end) = add_worker(pool), add_worker(pool)
    bad_call = bad.call(1, m.ForkWorker(1, 1, 2, 0))
    bad_end.sendall(said)
    with pytest.raises(ShardUnavailable):
        bad_call.result(PATIENCE)
    assert pool.workers == [good]
    good_call = good.call(2, m.ForkWorker(2, 1, 2, 0))
    send_frame(good_end, m.encode(m.SplitDone(2, "", 0)), None)
    assert good_call.result(PATIENCE)[0].rid == 2
    for sock in (bad_end, good_end, good.side, bad.side):
        sock.close()
    for each in (handle, other):
        os.close(each)
