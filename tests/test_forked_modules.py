"""A module that is forked for a test is the test's child, with the folder and the files of the call."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.waiting import PATIENCE, until


@pytest.mark.skipif(sys.platform != "linux", reason="needs a process that can get another parent")
def test_a_fork_is_a_child_with_its_own_folder_files_and_status(tmp_path: Path) -> None:
    words = ["-m", "tests.launch.scripted_shard", "--listen", "x", "--parent", str(os.getpid()), "--standby"]
    with subprocess.Popen([sys.executable, *words], stdin=subprocess.PIPE, cwd=tmp_path) as standing:
        fork = psutil.Process(standing.pid)
        assert fork.ppid() == os.getpid() and "tests.forked_modules" in fork.cmdline()
        until(lambda: fork.cwd() == str(tmp_path), "the fork to take over")
        assert standing.stdin is not None
        standing.stdin.close()
        assert standing.wait(PATIENCE) == 0
    refused = subprocess.run([sys.executable, *words[:2], "--port"], stderr=subprocess.PIPE, text=True)
    assert refused.returncode == 2 and "--listen" in refused.stderr
