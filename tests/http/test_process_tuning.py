"""Tests of the process settings that a server makes at startup."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from bridle.http.metrics.metrics import Metrics
from bridle.http.settings import HttpSettings
from bridle.http.state import HttpState
from bridle.serving import Admission, ModelRegistry
from tests.waiting import PATIENCE

CODE = """
import gc, resource, sys
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
from bridle.http.server.process_tuning import SWITCH_INTERVAL, tune_process
gc.set_threshold(50_000)
tune_process(500)
assert gc.get_threshold() == (700, 10, 10), "those of a start"
tune_process(10)  # less is wanted: nothing is taken away
print("found", resource.getrlimit(resource.RLIMIT_NOFILE)[0], gc.get_freeze_count() > 1000)
assert abs(sys.getswitchinterval() - SWITCH_INTERVAL) < 1e-6
resource.setrlimit(resource.RLIMIT_NOFILE, (200, 300))
tune_process(500)
print("found", resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


@pytest.mark.skipif(sys.platform == "win32", reason="limits of a Unix")
def test_many_connections_may_be_open_and_collections_are_short() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("found")] == ["found 756 True", "found 300"]
    assert "the limit of open files is low" in done.stdout + done.stderr


def test_what_a_crowd_leaves_of_the_heap_goes_back_once_nobody_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    returned: list[int] = []
    registry = ModelRegistry()
    state = HttpState(registry, Admission(), settings=HttpSettings(), metrics=Metrics(registry))
    monkeypatch.setattr(
        "bridle.serving.lifecycle.request_lifecycle.return_free_memory",
        lambda: returned.append(state.admission.num_requests),
    )

    async def serve(count: int) -> None:
        tickets = [state.admission.admit() for _ in range(count)]
        for ticket in tickets:
            state.on_request_end()
            ticket.release()
        state.on_request_end()
        await asyncio.get_running_loop().shutdown_default_executor()

    for count, times in ((3, 0), (40, 1), (3, 1)):
        asyncio.run(serve(count))
        assert returned == [0] * times
