"""The plugin that looks for threads, tasks and processes without an owner finds them, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[1]
MODULES = {
    "test_leaves.py": """
        import asyncio, subprocess, sys, threading
        def test_thread():
            threading.Thread(target=threading.Event().wait, name="lonely", daemon=True).start()
        def test_process():
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        def test_task():
            async def main():
                asyncio.create_task(asyncio.sleep(60), name="forgotten")
            asyncio.run(main())
    """,
    "test_tidy.py": """
        import threading, pytest
        @pytest.fixture(scope="session")
        def served():
            go = threading.Event()
            threading.Thread(target=go.wait, name="owned").start()
            yield
            go.set()
        def test_it(served):
            thread = threading.Thread(target=print)
            thread.start()
            thread.join()
    """,
    "test_ztidy.py": "def test_it(served=None):\n    pass\n",
    "conftest.py": "import tests.owners\ntests.owners.SECONDS = 0.05\n",
}


def test_what_is_left_behind_fails_its_module(tmp_path: Path) -> None:
    for name, text in MODULES.items():
        (tmp_path / name).write_text(textwrap.dedent(text))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.owners", "--rootdir", str(tmp_path), str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 1, run.stdout
    assert "thread 'lonely', seen first in test_leaves.py::test_thread" in run.stdout
    assert "time.sleep(60)" in run.stdout
    assert "task 'forgotten' of sleep" in run.stdout
    assert "1 error" in run.stdout and "owned" not in run.stdout
