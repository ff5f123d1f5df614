"""A server that is a child process: its port is found, and it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bridle.bench.subprocesses import announced_port, end_process
from bridle.errors import EngineClosed

STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)"

#: A benchmark that starts a server, says its number and waits.
BENCHMARK = """
import sys, time
from pathlib import Path
from rich.console import Console
from bridle.bench.run import measured
from bridle.bench.settings import BenchSettings
from bridle.bench.subprocesses import child_process

def guesses(settings, limits):
    return {}

def measure(settings, console, phases):
    with child_process([sys.executable, "-c", "input()"], Path(sys.argv[1])) as server:
        print(server.pid, flush=True)
        time.sleep(600)

measured(sys.modules["__main__"], BenchSettings(), Console())
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_server_ends_with_an_interrupted_benchmark(number: signal.Signals, tmp_path: Path) -> None:
    command = [sys.executable, "-c", BENCHMARK, str(tmp_path / "log")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        server = int(process.stdout.readline())
        process.send_signal(number)
        process.wait(60)
        with pytest.raises(ProcessLookupError):
            os.kill(server, 0)
        assert process.returncode != 0


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
    with pytest.raises(EngineClosed, match="did not start: no model"):
        announced_port(process, log)
