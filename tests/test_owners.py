"""Tests that the plugin `owners` reports exactly the threads, tasks and processes without an owner."""

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
        def test_task_of_an_own_loop():
            loop = asyncio.new_event_loop()
            task = loop.create_task(asyncio.sleep(60), name="dropped")
            loop.close()
        def test_last():
            pass
    """,
    "test_tidy.py": """
        import concurrent.futures, threading, pytest
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
        @pytest.fixture(scope="module")
        def pool():
            with concurrent.futures.ThreadPoolExecutor(4, "owned") as pool:
                yield pool
        def test_of_the_pool(pool):  # its first thread starts here, the second during the next test
            assert pool.submit(lambda: 1).result() == 1
        def test_beside_the_pool():
            pass
        class TestClass:
            @pytest.fixture(scope="class")
            def stays(self):
                go = threading.Event()
                threading.Thread(target=go.wait, name="owned").start()
                yield
                go.set()
            def test_first(self, stays):
                pass
            def test_second(self):
                pass
        def test_that_fails():
            threading.Thread(target=threading.Event().wait, name="owned", daemon=True).start()
            assert False, "as planned"
    """,
    "test_ztidy.py": "def test_it(served=None):\n    pass\n",
    "conftest.py": "import tests.owners\ntests.owners.SECONDS = 0.05\n",
}


def test_what_is_left_behind_fails_its_test(tmp_path: Path) -> None:
    for name, text in MODULES.items():
        (tmp_path / name).write_text(textwrap.dedent(text))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.owners", "--rootdir", str(tmp_path), str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 1, run.stdout
    assert "thread 'lonely', seen first in test_leaves.py::test_thread" in run.stdout
    assert "time.sleep(60)" in run.stdout
    assert "task 'forgotten' of sleep" in run.stdout and "task 'dropped' of sleep" in run.stdout
    errors = [line for line in run.stdout.splitlines() if line.startswith("ERROR ") and "::" in line]
    assert [line.split("::")[1].split()[0] for line in errors] == [
        "test_thread",
        "test_task",
        "test_task_of_an_own_loop",
        "test_last",  # of the module, for its process
    ]
    assert "1 failed" in run.stdout and "owned" not in run.stdout.split("short test summary")[1]
