"""Tests of the compiler's time limit, which is measured by the clock, and extended only while the compiler gets no
processor time."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import pytest

from bridle.aici.runtime.compile_cache import await_word
from bridle.aici.runtime.fork_server import Process
from bridle.errors import InvalidRequest

LIMIT = 30  # ms


@dataclass
class Compiler:
    """A fake compiler process with a given processor time at each check. The compiler answers after a number of checks.
    Its clock advances by the limit with each check."""

    voice: socket.socket
    seconds: float
    speaks_after: int = 1 << 30
    num_looks: int = 0

    def cpu_seconds(self) -> float:
        self.num_looks += 1
        if self.num_looks == self.speaks_after:
            self.voice.send(b"x")
        return self.seconds

    def clock(self) -> float:
        return self.num_looks * LIMIT / 1000


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def wait(ends: tuple[socket.socket, socket.socket], compiler: Compiler) -> None:
    await_word(ends[0], cast(Process, compiler), LIMIT, compiler.clock)


def test_what_had_its_time_is_given_up_at_the_first_look(ends: tuple[socket.socket, socket.socket]) -> None:
    compiler = Compiler(ends[1], seconds=LIMIT / 1000)
    with pytest.raises(InvalidRequest, match=f"longer than the limit of {LIMIT} ms"):
        wait(ends, compiler)
    assert compiler.num_looks == 1


def test_what_was_kept_waiting_goes_on(ends: tuple[socket.socket, socket.socket]) -> None:
    compiler = Compiler(ends[1], seconds=LIMIT / 2000, speaks_after=2)
    wait(ends, compiler)
    assert ends[0].recv(1) == b"x"


def test_what_never_computes_is_given_up_too(ends: tuple[socket.socket, socket.socket]) -> None:
    compiler = Compiler(ends[1], seconds=0.0)
    with pytest.raises(InvalidRequest, match="longer than the limit"):
        wait(ends, compiler)
    assert compiler.num_looks > 1


def test_a_compiler_that_ends_is_heard(ends: tuple[socket.socket, socket.socket]) -> None:
    ends[1].close()
    wait(ends, Compiler(ends[1], seconds=0.0))
