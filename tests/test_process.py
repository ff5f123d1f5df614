"""Tests of process resources: threads, the processor time that a container allows, and buffers that are reused."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

from bridle.cgroups import num_cores
from bridle.model import device_defaults
from bridle.threads import ThreadPerCall, run_after, run_in_thread
from tests.waiting import PATIENCE


def test_it_runs_elsewhere_and_is_over_afterwards() -> None:
    thread = run_in_thread(threading.current_thread)
    thread.join(PATIENCE)
    assert thread is not threading.current_thread() and not thread.is_alive()


def test_what_it_raises_is_raised_here() -> None:
    with pytest.raises(ZeroDivisionError):
        run_in_thread(lambda: 1 // 0)


def test_each_call_has_a_thread_of_its_own() -> None:
    together = threading.Barrier(3)

    def meet() -> int:
        together.wait(PATIENCE)
        return threading.get_ident()

    calls: list[Future[int]] = [ThreadPerCall("calls").submit(meet) for _ in range(3)]
    assert len({each.result(PATIENCE) for each in calls}) == 3


def priority() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priorities of their own elsewhere")
def test_what_runs_behind_others_gives_way_and_so_do_its_workers() -> None:
    before = priority()
    behind = min(before + 10, 19)
    assert run_after(lambda: (priority(), run_in_thread(priority)), "behind") == (behind, behind)
    assert priority() == before
    with pytest.raises(ZeroDivisionError):
        run_after(lambda: 1 // 0, "behind")


def test_a_control_group_bounds_the_cores(tmp_path: Path) -> None:
    (tmp_path / "service" / "app").mkdir(parents=True)
    outer, inner = tmp_path / "service" / "cpu.max", tmp_path / "service" / "app" / "cpu.max"
    membership = tmp_path / "membership"
    membership.write_text("0::/service/app\n")
    allowed = num_cores(tmp_path, tmp_path / "nothing")
    assert allowed >= 1
    inner.write_text("max 100000\n")
    outer.write_text("6400000 100000\n")
    assert num_cores(tmp_path, membership) == min(allowed, 64)
    outer.write_text("50000 100000\n")
    assert num_cores(tmp_path, membership) == 1
    inner.write_text("no number\n")
    assert num_cores(tmp_path, membership) == 1
    group = tmp_path / "cpu" / "box"
    group.mkdir(parents=True)
    (group / "cpu.cfs_quota_us").write_text("-1\n")
    (group / "cpu.cfs_period_us").write_text("100000\n")
    membership.write_text("4:cpu,cpuacct:/box\n0::/\n")
    assert num_cores(tmp_path, membership) == allowed
    (group / "cpu.cfs_quota_us").write_text("80000\n")
    assert num_cores(tmp_path, membership) == 1


def test_no_more_threads_compute_than_there_are_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr("bridle.model.device_defaults.num_cores", lambda: 2)
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    for threads in (64, 2, 1):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        device_defaults.choose_threads(None)
    device_defaults.choose_threads(5)  # who asks for more gets more
    assert chosen == [2, 5]


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
    """Page faults show that a buffer is reused, with or without huge pages."""
    (fresh, _, _), (reused, held, returned) = run("fresh"), run("kept")
    assert reused < fresh / 4, (reused, fresh)
    assert held - returned > 40 << 20, (held, returned)
