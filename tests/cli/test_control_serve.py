"""A server process with its control runtime and a client process: after they end, no process of theirs remains."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import psutil

from tests.aici.guests import END, NOOP, guest2, say
from tests.command_server import PipedCommand
from tests.fakes.tiny_checkpoints import make_checkpoint
from tests.waiting import PATIENCE


def test_serve_upload_and_run(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path / "llama")
    (tmp_path / "guest.wasm").write_bytes(guest2([[say("hello from the sandbox\n"), *NOOP], END]))
    options = ("--port", "0", "--control", "on", "--control-store", str(tmp_path / "store"), "--log-format", "json")
    with PipedCommand(["serve", str(folder), *options]) as server:
        found = re.search(r"http://[\d.:]+/", server.stdout.readline())
        assert found is not None
        children = psutil.Process(server.pid).children(recursive=True)
        assert children
        words = ("run", "-l", "3", "-u", str(tmp_path / "guest.wasm"), "-p", "x", "--base-url", f"{found.group()}v1")
        with PipedCommand(words) as client:
            assert (client.stderr.read(), client.wait()) == ("", 0)
            assert client.stdout.read().startswith("[0]: hello from the sandbox\n[DONE]\n[Response] \n")
        server.send_signal(signal.SIGTERM)
        assert server.wait() == 0
        assert psutil.wait_procs(children, timeout=PATIENCE)[1] == []
        assert not [name for name in os.listdir("/dev/shm") if name.startswith(f"bridle-{server.pid}-")]
