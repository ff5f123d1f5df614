"""The whole way: a server process with its control runtime, a client process, and nothing left of them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from tests.aici.guests import END, NOOP, guest2, say
from tests.fakes.tiny_checkpoints import make_checkpoint
from tests.waiting import PATIENCE

ROOT = Path(__file__).parents[2]


def bridle(*words: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "bridle", *words],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_serve_upload_and_run(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path / "llama")
    (tmp_path / "guest.wasm").write_bytes(guest2([[say("hello from the sandbox\n"), *NOOP], END]))
    options = ("--port", "0", "--control", "on", "--control-store", str(tmp_path / "store"), "--log-format", "json")
    server = bridle("serve", str(folder), *options)
    children: list[psutil.Process] = []
    try:
        assert server.stdout is not None
        found = re.search(r"http://[\d.:]+/", server.stdout.readline())
        assert found is not None
        children = psutil.Process(server.pid).children(recursive=True)
        assert children
        client = bridle(
            "run", "-l", "3", "-u", str(tmp_path / "guest.wasm"), "-p", "x", "--base-url", f"{found.group()}v1"
        )
        out, err = client.communicate(timeout=PATIENCE)
        assert (client.returncode, err) == (0, "")
        assert out.startswith("[0]: hello from the sandbox\n[DONE]\n[Response] \n")
        server.send_signal(signal.SIGTERM)
        assert server.wait(PATIENCE) == 0
        assert psutil.wait_procs(children, timeout=PATIENCE)[1] == []
        assert not [name for name in os.listdir("/dev/shm") if name.startswith(f"bridle-{server.pid}-")]
    finally:
        server.kill()
        server.communicate()
        for child in children:
            if child.is_running():
                child.kill()
