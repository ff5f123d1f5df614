"""Threads that end with their work."""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import Future

import pytest

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
