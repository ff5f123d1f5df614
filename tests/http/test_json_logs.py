"""Tests that with `--log-format json` every line on standard error is a JSON event, whichever process wrote it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from bridle.aici.client.process import RuntimeConfig, RuntimeProcess
from bridle.errors import BridleError
from bridle.logs import configure_logs
from tests.aici.guests import END, NOOP, guest2, say
from tests.sources import ROOT
from tests.waiting import PATIENCE, until

HELLO = guest2([[say("hello\n"), *NOOP], END])
#: What every event has.
KEYS = {"event", "level", "timestamp"}


class Server:
    """`bridle serve` with JSON logs, whose standard error is a file."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.log = folder / "log"
        words = ["serve", "demo", "--port", "0", "--control-store", str(folder / "store"), "--log-format", "json"]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "bridle", *words, *options],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
            )
        assert self.process.stdout is not None
        found = re.search(r"http://[\d.]+:\d+", self.process.stdout.readline())
        assert found is not None, self.log.read_text()
        self.url = found[0]

    def run(self) -> int:
        """Run a controller, and return the status of the answer."""
        body = {"controller": self.module, "controller_arg": "", "prompt": "Once"}
        return httpx.post(f"{self.url}/v1/run", json=body, timeout=PATIENCE).status_code

    def upload(self) -> None:
        answer = httpx.post(f"{self.url}/v1/controllers", content=HELLO, timeout=PATIENCE)
        self.module = str(answer.raise_for_status().json()["module_id"])

    def runtimes(self) -> list[psutil.Process]:
        """Return the processes of control runtimes, without their child processes."""
        return [child for child in self.children("bridle.aici.runtime") if child.pid == os.getpgid(child.pid)]

    def children(self, word: str) -> list[psutil.Process]:
        """Return the descendants of a process whose command line contains a word."""
        found = []
        for child in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):  # it has ended
                if word in child.cmdline():
                    found.append(child)
        return found

    def end(self) -> list[dict[str, Any]]:
        """End the server, and return the events of its log. Raises an error for a line that is not valid JSON."""
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(PATIENCE) == 0
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.mark.slow
def test_all_lines_are_events_though_runtime_and_shard_are_killed(tmp_path: Path) -> None:
    server = Server(tmp_path, "--control", "on", "--no-control-prepare", "--isolate-model")
    try:
        server.upload()
        assert server.run() == 200
        (runtime,) = server.runtimes()
        nursery = next(child for child in runtime.children())
        nursery.kill()
        until(lambda: not nursery.is_running())
        assert server.run() == 200
        runtime.kill()
        until(lambda: [each for each in server.runtimes() if each.pid != runtime.pid])
        until(lambda: server.run() == 200)
        shards = re.findall(r"shard started, pid (\d+)", server.log.read_text())  # not the one that stands by
        os.kill(int(shards[-1]), signal.SIGKILL)
        until(lambda: "killed by SIGKILL" in server.log.read_text(), "a line about the killed shard")
        until(lambda: server.run() == 200)
        events = server.end()
    finally:
        server.close()
    assert all(event.keys() >= KEYS for event in events)
    told = [event["event"] for event in events]
    assert any(each.startswith("warm: ") or "shard" in each for each in told), told


def test_a_runtime_that_cannot_start_says_so_in_the_log(capfd: pytest.CaptureFixture[str]) -> None:
    configure_logs("json")
    with pytest.raises(BridleError):
        RuntimeProcess(RuntimeConfig("none", extra_args=("--no-such-option",)))
    (event,) = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    assert event.keys() >= KEYS and event["level"] == "error"
    assert "unrecognized arguments: --no-such-option" in event["event"] and "--aici-rtarg" in event["event"]


@pytest.mark.slow
def test_replicas_log_as_the_server_does(tmp_path: Path) -> None:
    server = Server(tmp_path, "--control", "off", "--replicas", "2", "--log-level", "debug")
    try:
        server.children("bridle.launch.replica_process")[0].kill()
        body = {"model": "demo", "prompt": "Once", "max_tokens": 4}
        until(lambda: httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE).status_code == 200)
        events = server.end()
    finally:
        server.close()
    assert all(event.keys() >= KEYS for event in events)


def test_the_last_line_of_a_server_that_cannot_start_is_an_event() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bridle", "serve", "./nope", "--log-format=json"],
        env=os.environ | {"PYTHONPATH": str(ROOT), "BRIDLE_NO_SUCH": "1"},
        capture_output=True,
        text=True,
    )
    events = [json.loads(line) for line in done.stderr.splitlines()]
    assert done.returncode == 2 and [set(event) for event in events] == [KEYS, KEYS]
    assert [event["level"] for event in events] == ["warning", "error"]
    assert events[1]["event"].startswith("'./nope' is neither")


def test_an_uncaught_exception_is_one_event() -> None:
    code = """
import threading, warnings
from bridle.logs import configure_logs, log_failures
log_failures()
configure_logs("json")
def fail(): raise ValueError("in a thread")
thread = threading.Thread(target=fail); thread.start(); thread.join()
warnings.warn("some warning")
raise ValueError("at the end")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    events = [json.loads(line) for line in done.stderr.splitlines()]
    assert [event["level"] for event in events] == ["critical", "warning", "critical"]
    assert "in a thread" in events[0]["exception"] and "at the end" in events[2]["exception"]
