"""Simulate a slow, busy machine: `make test ARGS="-p tests.lateness"`.

Readers of a request's stream are delayed repeatedly, and so is every thread that starts. A test that depends on speed
then fails in a single run, not in one of a hundred runs on a busy machine. A delay uses no processor time, so several
such runs can share a machine.
"""

from __future__ import annotations

import os
import random
import threading
import time

import pytest

from bridle.engine.client import EventStream
from bridle.outputs import Event

#: How often somebody is late, and by how many seconds at most.
_CHANCE, _MOST = 0.4, 0.4


def pytest_configure(config: pytest.Config) -> None:
    chances = random.Random(os.getpid())
    read, run = EventStream.read_nowait, threading.Thread.run

    def be_late() -> None:
        if chances.random() < _CHANCE:
            time.sleep(_MOST * chances.random())

    def read_late(self: EventStream) -> list[Event] | None:
        be_late()
        return read(self)

    def run_late(self: threading.Thread) -> None:
        be_late()
        run(self)

    EventStream.read_nowait = read_late  # type: ignore[method-assign]
    threading.Thread.run = run_late  # type: ignore[method-assign]
