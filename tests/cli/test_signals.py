"""Ctrl-C while a model loads, and a server that is ended during its start, at any moment of it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.waiting import PATIENCE, until

ROOT = Path(__file__).parents[2]


def started(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "bridle", *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def interrupt(process: subprocess.Popen[str], seconds: float, number: int) -> str:
    """Send a signal once the process has used `seconds` of processor time, or reports that it is ready; return its
    error output."""
    watched, told = psutil.Process(process.pid), process.stdout
    with contextlib.suppress(psutil.Error):
        until(lambda: sum(watched.cpu_times()[:2]) >= seconds or select.select([told], [], [], 0)[0])
        process.send_signal(number)
    return process.communicate(timeout=PATIENCE)[1]


def of_the_server(pid: int) -> list[str]:
    """Return the processes and shared memory names that a server left behind."""
    mark = f"bridle-{pid}-"
    found = [name for name in os.listdir("/dev/shm") if mark in name]
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if f"/{mark}".encode() in Path(f"/proc/{entry}/cmdline").read_bytes():
                found.append(entry)
    return found


def few(moments: list[float]) -> list[object]:
    """Mark all moments but one as slow tests; `tests/http/test_signals.py` tests moments after readiness."""
    return [each if i == 3 else pytest.param(each, marks=pytest.mark.slow) for i, each in enumerate(moments)]


MOMENTS = [round(0.25 + 0.25 * number, 2) for number in range(20)]  # a start takes 3 to 5 seconds of a core


@pytest.mark.parametrize("seconds", few(MOMENTS))
def test_an_interrupted_start_ends_with_one_line(seconds: float, tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    process = started("serve", "demo", "--port", "0", "--control-store", store, "--no-control-prepare")
    said = interrupt(process, seconds, signal.SIGINT)
    if "draining" in said:  # it was serving already
        assert process.returncode == 0
    else:
        assert (process.returncode, said.splitlines()[-1:]) == (130, ["bridle: interrupted"])
        assert "Traceback" not in said and "terminate" not in said
    until(lambda: not of_the_server(process.pid))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("seconds", MOMENTS)
def test_a_server_that_is_ended_while_it_starts_leaves_nothing(seconds: float, number: int, tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    process = started("serve", "demo", "--port", "0", "--control-store", store, "--no-control-prepare")
    said = interrupt(process, seconds, number)
    assert process.returncode == -number or "draining" in said
    until(lambda: not of_the_server(process.pid))


def test_interrupted_while_it_loads_for_a_command() -> None:
    process = started("generate", "demo", "Once", "--max-tokens", "4000")
    said = interrupt(process, 1.0, signal.SIGINT)
    assert (process.returncode, said) == (130, "bridle: interrupted\n")


LATE = """
import os, resource
from bridle.cli.signals import leave

end = os._exit

def end_late(status):
    os.write(2, b"late\\n")  # what a thread logs when the line is out
    end(status)

os._exit = end_late
"""
NONE_LEFT = "resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))\n"


@pytest.mark.parametrize(
    ("limit", "said"),
    [("", "bridle: interrupted\n"), (NONE_LEFT, "bridle: interrupted\nlate\n")],
    ids=["last", "no descriptor left"],
)
def test_an_interrupt_is_told_last(limit: str, said: str) -> None:
    """The interrupt is the last message, if there is a descriptor that silences the others; otherwise it is at least
    printed."""
    done = subprocess.run([sys.executable, "-c", LATE + limit + "leave()"], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stderr) == (130, said)
