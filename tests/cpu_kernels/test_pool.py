"""Tests of the kernels' thread pool: a step does not wait for a worker that is late or never starts."""

from __future__ import annotations

import platform
import subprocess
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridle.cpu_kernels.features import cpu_features
from bridle.cpu_kernels.isa_targets import SOURCES
from bridle.cpu_kernels.library import fitting
from dev.cpu_kernels.zig import zig_cc
from tests.leftovers import kept_folder

TARGETS = list(fitting(platform.system(), platform.machine(), cpu_features()))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not TARGETS, reason="no kernels for this machine"),
]


@cache
def program() -> Path:
    """Build the thread pool with points at which the test delays its threads."""
    made = kept_folder("bridle-pool-") / "pool"
    source = Path(__file__).with_name("pool.c")
    flags = ("-std=gnu11", "-O1", "-w", "-fsanitize=undefined", "-fsanitize-trap=undefined", f"-I{SOURCES}")
    zig_cc([*TARGETS[-1].flags, *flags, "-o", made, source, "-lpthread", "-lm"])
    return made


@settings(max_examples=5, deadline=None)
@given(seed=st.integers(1, 1 << 30))
def test_every_chunk_is_computed_once_whoever_comes(seed: int) -> None:
    """The C program tests random orders of threads, several callers, a pool after a fork, and a pool without
    workers."""
    done = subprocess.run([program(), str(seed)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "all ran\n"), done.stderr[-2000:]
