"""A server that is a child process: its port is found, and it ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bridle.bench.subprocesses import announced_port, end_process
from bridle.errors import EngineClosed

STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)"


@pytest.mark.parametrize("before", ["", STUBBORN])
def test_the_port_is_found_and_the_process_ends(before: str, tmp_path: Path) -> None:
    program = f"{before}\nprint('Serving demo at http://127.0.0.1:4711/', flush=True)\ninput()"
    log = tmp_path / "log"
    with log.open("wb") as output:
        process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=output)
    assert announced_port(process, log) == 4711
    end_process(process, 0.2)
    assert process.poll() is not None
    assert process.stdin is not None
    process.stdin.close()


def test_a_server_that_does_not_come_up_says_why(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("wb") as output:
        process = subprocess.Popen([sys.executable, "-c", "raise SystemExit('no model')"], stdout=output, stderr=output)
        process.wait()
    with pytest.raises(EngineClosed, match="did not come up: no model"):
        announced_port(process, log)
