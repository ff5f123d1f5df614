"""Tests of `bridle serve --replicas 2` without losses: tools of the server and of clients, and policies that are
reloaded while streams run."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.launch.kit import ROOT
from tests.waiting import PATIENCE, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

RULES = """
from bridle import Controller, Decision

class Shouts(Controller):
    \"\"\"Lets a text say capital letters only.\"\"\"

    def __init__(self, argument):
        self.words = argument

    def next(self, view):
        return Decision.stop("demanded") if len(view.generated) >= self.words else Decision.sample()
"""
TOOLS = """
import threading, time
from pathlib import Path

def note(text):
    with open({log!r}, "a") as file:
        file.write(text + "\\n")
    return text.upper()

def waits(text):
    note(text)
    while not Path({gate!r}).exists():
        time.sleep(0.05)
    return text.upper()
"""


def policies(most: int, word: str) -> str:
    return (
        f'[[policy]]\nname = "most"\nkind = "python"\nclass = "rules.py:Shouts"\nargument = {most}\n'
        f'[[policy]]\nname = "words"\nkind = "phrases"\nphrases = ["{word}"]\n'
    )


class Server:
    """A `bridle serve` process with two replicas of the demo model."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log, self.gate, self.file = folder / "log", folder / "gate", folder / "policies.toml"
        (folder / "rules.py").write_text(RULES)
        (folder / "calls.py").write_text(TOOLS.format(log=str(self.log), gate=str(self.gate)).replace("\\\\n", "\\n"))
        (folder / "tools.toml").write_text(
            '[tools.note]\npython = "calls.py:note"\n[tools.waits]\npython = "calls.py:waits"\n'
        )
        self.file.write_text(policies(12, "forbidden"))
        options = ("--port", "0", "--replicas", "2", "--kv-memory", "64MiB", "--num-threads", "1")
        control = ("--control", "on", "--control-store", str(folder / "store"))
        files = ("--tools", str(folder / "tools.toml"), "--policies", str(self.file))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "bridle", "serve", "demo", *options, *control, *files],
            stdout=subprocess.PIPE,
            stderr=(folder / "stderr").open("w"),
            text=True,
            cwd=folder,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(ROOT)},
        )
        assert self.process.stdout is not None
        lines = iter(self.process.stdout.readline, "")
        self.url = next(found for line in lines if (found := re.search(r"http://[\d.]+:\d+", line)))[0]

    def post(self, path: str, **body: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=PATIENCE)

    def complete(self, **fields: Any) -> dict[str, Any]:
        body = {"model": "demo", "prompt": "Once", "max_tokens": 40, "seed": 1} | fields
        while (answer := self.post("/v1/completions", **body)).status_code == 429:
            assert "is being compiled" in answer.text
            time.sleep(float(answer.headers["retry-after"]))  # as a client does
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def script(self, text: str, **fields: Any) -> dict[str, Any]:
        return self.complete(controller="jsctrl", controller_arg=text, **fields)

    @property
    def replicas(self) -> list[psutil.Process]:
        found = []
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.Error):  # it has ended
                if "bridle.launch.replica_process" in " ".join(child.cmdline()):
                    found.append(child)
        return found

    def calls(self) -> list[str]:
        return self.log.read_text().split() if self.log.exists() else []

    def close(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(PATIENCE)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    made = Server(tmp_path_factory.mktemp("server"))
    yield made
    made.gate.touch()
    made.close()


def test_scripts_call_tools_of_the_server(server: Server) -> None:
    found = server.script("await $`${await tool('note', { text: 'one' }).text()}`")
    assert found["choices"][0]["text"] == "ONE"
    assert server.calls() == ["one"]
    assert 'bridle_tool_calls_total{tool="note"} 1.0' in httpx.get(f"{server.url}/metrics").text


def test_a_killed_replica_makes_no_call_twice(server: Server) -> None:
    before = len(server.calls())
    text = "const a = await tool('note', { text: 'a' }).text(); const b = await tool('waits', { text: 'b' }).text()\n"
    found: list[dict[str, Any]] = []
    runs = threading.Thread(target=lambda: found.append(server.script(text + "await $`${a}${b}`")))
    runs.start()
    until(lambda: server.calls()[before:] == ["a", "b"])
    for replica in server.replicas:
        replica.kill()  # whichever it is
    until(lambda: len(server.replicas) == 2)
    server.gate.touch()
    runs.join(PATIENCE)
    assert found[0]["choices"][0]["text"] == "AB"
    assert server.calls()[before:] == ["a", "b"]


def test_a_client_answers_while_its_stream_waits(server: Server) -> None:
    body = {"model": "demo", "prompt": "Once", "max_tokens": 30, "stream": True, "client_tools": ["ask"]}
    body |= {"controller": "jsctrl", "controller_arg": "await $`${await tool('ask', { what: 1 }).text()}`"}
    told = ""
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=PATIENCE) as stream:
        for line in stream.iter_lines():
            told += line
            if (found := re.search(r"tool_call:([\w-]+)", line)) is not None:
                assert server.post(f"/v1/tool_results/{found[1]}", result="yes").status_code == 204
    assert '"yes"' in told


def test_policies_hold_in_each_replica_and_are_read_again(server: Server) -> None:
    """Reloading policies ends no stream: running requests keep the policies with which they began."""
    for seed in range(6):  # on both
        choice = server.complete(seed=seed, prompt=f"Number {seed}")
        assert choice["usage"]["completion_tokens"] <= 12, choice
    forces = {"controller": "jsctrl", "controller_arg": "await $`say forbidden`"}
    refused = server.post("/v1/completions", model="demo", prompt="Once", max_tokens=40, **forces)
    assert refused.status_code == 422
    assert "policy words forbids what is forced at position 4" in refused.json()["error"]["message"]
    server.gate.unlink(missing_ok=True)
    before = len(server.calls())
    held: list[dict[str, Any]] = []
    waits = "await tool('waits', { text: 'c' }).text(); await $`said`"
    runs = threading.Thread(target=lambda: held.append(server.script(waits)))
    runs.start()
    until(lambda: server.calls()[before:] == ["c"])
    server.file.write_text(policies(3, "other"))
    server.process.send_signal(signal.SIGHUP)

    def is_new() -> bool:
        listed = httpx.get(f"{server.url}/v1/policies", timeout=PATIENCE)
        return server.complete(seed=99)["usage"]["completion_tokens"] <= 3 and listed.status_code == 200

    until(is_new)
    assert server.script("await $`forbidden`")["choices"][0]["text"].startswith("for")
    server.gate.touch()
    runs.join(PATIENCE)
    assert held[0]["choices"][0]["text"] == "said"
