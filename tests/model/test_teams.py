"""Tests that loading leaves no idle OpenMP team, with which the workers of other teams would sleep between
operations."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_LOAD = """
import os
import time
import torch
from bridle.config import ModelConfig
from bridle.model import load_executor

def num_tasks():
    \"\"\"Once those that end have ended.\"\"\"
    counts = list(range(5))
    while len(set(counts[-5:])) > 1:
        time.sleep(0.3)
        counts.append(len(os.listdir("/proc/self/task")))
    return counts[-1]

executor = load_executor(ModelConfig("demo", num_threads=2, kv_memory=16 << 20))
loaded = num_tasks()
torch.ones(1 << 20).exp()
print(num_tasks() - loaded)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts the threads of a process as Linux tells them")
def test_loading_leaves_no_team() -> None:
    """The thread that loaded a model starts one new worker for its first computation, so no older team was left."""
    told = subprocess.run(
        [sys.executable, "-c", _LOAD], env=os.environ | {"OMP_NUM_THREADS": "2"}, stdout=subprocess.PIPE, check=True
    )
    assert int(told.stdout.split()[-1]) == 1
