"""A slow, busy machine, made on purpose: `make test ARGS="-p tests.lateness"`.

Who reads the stream of a request comes late, again and again, and so does every thread that begins. A test that counts
on being quick then fails in one run of this, not in one of a hundred on a machine that happens to be busy. Nothing is
computed meanwhile, so that several such runs find room beside each other.
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
