"""Tests that a chat request runs few files and functions of the package."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.sources import ROOT

#: `chat/output_marks.py` is one more file since `chat/chat_request.py` outgrew the size that one file may have. It adds
#: 4 functions, blocks that are matched and published apart from recurrent states 3, constraint reports 2, and the
#: fields of prompt caches 1. `best_of`, retention and shared prompt caches have a file each since; pauses, the watch
#: over steps, probes, owners of blocks and live text add 17 more functions.
MAX_FILES, MAX_FUNCTIONS = 52, 292
#: Functions that call another file between the route and the engine, and how often the route calls a layer below.
MAX_STOPS, MAX_DESCENTS = 20, 3
NUM_TRIES = 3


def listing() -> dict[str, int]:
    """Return the number of functions that a chat runs in each file. The tracer watches all threads, so it runs in its
    own process."""
    command = [sys.executable, "-m", "dev.path_tracer", "chat"]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=True).stdout
    return {name: int(number) for name, number in re.findall(r"^(bridle/\S+) \((\d+)\)$", told, re.M)}


@pytest.mark.slow  # the few stops below bound the same way
def test_a_chat_passes_few_files_and_functions() -> None:
    """The shortest of several traces counts, because a request on a busy machine may run code for slow readers."""
    ways = []
    for _ in range(NUM_TRIES):
        ways.append(listing())
        if len(ways[-1]) <= MAX_FILES and sum(ways[-1].values()) <= MAX_FUNCTIONS:
            break
    shortest = min(ways, key=lambda way: (len(way), sum(way.values())))
    assert {
        "bridle/engine/engine.py",
        "bridle/http/openai/chat.py",
        "bridle/serving/lifecycle/request_lifecycle.py",
    } <= shortest.keys()
    assert len(shortest) <= MAX_FILES, sorted(shortest)
    assert sum(shortest.values()) <= MAX_FUNCTIONS, shortest


def test_a_reader_follows_a_chat_in_few_stops() -> None:
    command = [sys.executable, "-m", "dev.path_tracer", "--calls"]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=True).stdout
    calls = re.findall(r"^(bridle/\S+ \S+) -> (bridle/\S+ \S+)$", told, re.M)
    stops = {caller for caller, _ in calls}
    descents = [callee for caller, callee in calls if "/openai/chat.py" in caller and "bridle/http/" not in callee]
    assert "bridle/chat/chat_request.py prepare_chat" in descents
    assert len(stops) <= MAX_STOPS, sorted(stops)
    assert len(descents) <= MAX_DESCENTS, descents
