"""Large buffers that are made again and again come from memory that the process has."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
import numpy
from bridle.malloc import keep_large_buffers, return_free_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        numpy.ones(12 << 20, numpy.float32)  # 48 MiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()

keep_large_buffers() if sys.argv[1] == "kept" else None
faults()
print(faults(), resident(), return_free_memory() or resident())
"""


def run(how: str) -> list[int]:
    done = subprocess.run([sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=True)
    return [int(word) for word in done.stdout.split()]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the functions are glibc's")
def test_large_buffers_are_kept_until_memory_is_returned() -> None:
    """By page faults, huge pages or not."""
    (fresh, _, _), (reused, held, returned) = run("fresh"), run("kept")
    assert reused < fresh / 4, (reused, fresh)
    assert held - returned > 40 << 20, (held, returned)
