"""`kill -9` during running streams of `bridle serve`: of a worker, a compiler, the fork server, the supervisor, and the
server itself. Only the streams of the killed process fail, at once. All others continue, the service recovers, and no
resource is leaked. `tests/aici/test_pool_kills.py` tests kills in the control runtime without a server, in less
time."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from bridle.serving.tenancy.keys import KeyStore
from tests.aici.guests import END, guest2, sample, say
from tests.http.controlled import events_of, last_fork
from tests.waiting import PATIENCE, until

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
VOCAB_SIZE = 3072  # of the demo model
FOREVER = guest2([sample([65], VOCAB_SIZE)])
SHORT = guest2([sample([66], VOCAB_SIZE), END])


def slow_to_compile(number: int) -> bytes:
    return guest2([[say(f"{number} {part}") for part in range(3)] for _ in range(1500)])


class Stream:
    """A stream that a separate thread reads. `kind` is `plain`, or the user whose controller steers the stream."""

    def __init__(self, url: str, kind: str, path: str, headers: dict[str, str], **body: Any) -> None:
        self.kind = kind
        self.items: list[Any] = []
        self.status = 0
        self.ended = threading.Event()
        self._close: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=self._read, args=(url + path, headers, body), daemon=True)
        self._thread.start()

    def _read(self, url: str, headers: dict[str, str], body: dict[str, Any]) -> None:
        with (
            contextlib.suppress(httpx.HTTPError),
            httpx.stream("POST", url, json=body, headers=headers, timeout=PATIENCE) as answer,
        ):
            self.status, self._close = answer.status_code, answer.close
            for item in events_of(answer.iter_lines()):
                self.items.append(item)
        self.ended.set()

    @property
    def num_tokens(self) -> int:
        return len(self.items) - 1

    @property
    def failure(self) -> str:
        """Return the error of a controlled stream, or an empty text if it did not fail."""
        done = self.ended.is_set() and self.items and self.items[-1] == "[DONE]"
        return str(last_fork(self.items)["error"]) if done else ""

    def leave(self) -> None:
        """Disconnect the client."""
        with contextlib.suppress(Exception):
            self._close()
        self._thread.join(PATIENCE)


class Server:
    """`bridle serve` with the demo model and keys, and the processes behind it."""

    def __init__(self, folder: Path, num_streams: int) -> None:
        self.num_streams = num_streams
        keys = KeyStore(folder / "keys.db")
        self.keys = {name: keys.add(name, is_admin=True) for name in ("ada", "bob")}
        keys.close()
        options = ("--port", "0", "--control", "on", "--control-store", str(folder / "store"), "--no-control-prepare")
        limits = ("--keys", str(folder / "keys.db"), "--max-waiting", "1000", "-A", "--wasm-max-step-time=2000")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "bridle", "serve", "demo", *options, *limits],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        )
        assert self.process.stdout is not None
        lines = iter(self.process.stdout.readline, "")
        self.url = next(found for line in lines if (found := re.search(r"http://[\d.]+:\d+", line)))[0]
        self.forever, self.short = self.upload(FOREVER), self.upload(SHORT)

    def headers(self, name: str) -> dict[str, str]:
        return {"authorization": f"Bearer {self.keys[name]}"}

    def upload(self, wasm: bytes) -> str:
        answer = self.post_module(wasm)
        answer.raise_for_status()
        return str(answer.json()["module_id"])

    def post_module(self, wasm: bytes) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/controllers", content=wasm, headers=self.headers("ada"), timeout=PATIENCE)

    def controlled(self, name: str, module: str, max_tokens: int) -> Stream:
        body = {"controller": module, "controller_arg": "", "prompt": "Once", "max_tokens": max_tokens}
        return Stream(self.url, name, "/v1/run", self.headers(name), **body)

    def begin(self) -> list[Stream]:
        """Start the same number of plain and controlled streams, and wait until the controlled streams have output."""
        plain = {"model": "demo", "prompt": "Once", "max_tokens": 150, "seed": 1, "stream": True, "ignore_eos": True}
        half = range(self.num_streams // 2)
        streams = [self.controlled(("ada", "bob")[number % 2], self.forever, 1_500) for number in half]
        until(lambda: all(stream.num_tokens > 1 for stream in streams))
        streams += [Stream(self.url, "plain", "/v1/completions", self.headers("ada"), **plain) for _ in half]
        until(lambda: all(stream.num_tokens > 1 for stream in streams))
        assert not any(stream.ended.is_set() for stream in streams if stream.kind != "plain")
        return streams

    def finish(self, streams: list[Stream]) -> None:
        """Plain streams end normally, every user is served again, and the round leaves no resources behind."""
        for stream in streams:
            if stream.kind == "plain":
                assert stream.ended.wait(PATIENCE)
                assert stream.status == 200 and stream.items[-1] == "[DONE]"
                assert stream.items[-2]["choices"][0]["finish_reason"] == "length"
            else:
                stream.leave()
        for name in self.keys:
            again = self.controlled(name, self.short, 5)
            assert again.ended.wait(PATIENCE)
            assert last_fork(again.items)["finish_reason"] == "aici-stop", again.items

    # -- processes ---------------------------------------------------------------------------------------------

    @property
    def supervisor(self) -> psutil.Process:
        return next(
            p for p in psutil.Process(self.process.pid).children() if "bridle.aici.runtime" in " ".join(p.cmdline())
        )

    @property
    def nursery(self) -> psutil.Process:
        return self.supervisor.children()[0]

    def made(self) -> set[psutil.Process]:
        """Return the workers and compilers of the server's runtimes."""
        return set(self.nursery.children())

    def everything(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def names(self) -> list[str]:
        return [name for name in os.listdir("/dev/shm") if f"bridle-{self.process.pid}-" in name]

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture(scope="module", params=[8, 100])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("server"), request.param)
    yield server
    children = server.everything() if server.process.poll() is None else []
    server.close()
    assert psutil.wait_procs(children, timeout=PATIENCE)[1] == []
    assert server.names() == []


def failures_of(streams: list[Stream]) -> set[str]:
    """Wait until every controlled stream has ended, and return the streams' errors."""
    controlled = [stream for stream in streams if stream.kind != "plain"]
    for stream in controlled:
        assert stream.ended.wait(PATIENCE)
    return {stream.failure for stream in controlled}


def test_a_killed_worker_ends_streams_of_one_tenant_alone(server: Server) -> None:
    streams = server.begin()
    min(server.made(), key=lambda process: process.pid).kill()
    controlled = [stream for stream in streams if stream.kind != "plain"]
    until(lambda: any(stream.failure for stream in controlled))
    before = {id(stream): stream.num_tokens for stream in controlled}
    until(lambda: any(stream.num_tokens > before[id(stream)] + 10 for stream in controlled))
    lost = [stream for stream in controlled if stream.ended.is_set()]
    assert all(stream.failure.startswith("Worker:") for stream in lost)
    assert len({stream.kind for stream in lost}) == 1  # no process serves two tenants
    server.finish(streams)


def test_a_killed_compiler_fails_its_upload_alone(server: Server) -> None:
    streams = server.begin()
    workers = server.made()
    with ThreadPoolExecutor(1) as threads:
        for attempt in count():  # on a busy machine it may be done before it is found
            module = slow_to_compile(attempt)
            upload = threads.submit(server.post_module, module)
            while not upload.done():
                for process in server.made() - workers:  # the streams have their workers already
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()
            answer = upload.result()
            if answer.status_code != 200:
                break
    assert answer.status_code == 400 and "compiler died" in answer.text
    assert not any(stream.ended.is_set() for stream in streams if stream.kind != "plain")
    server.finish(streams)
    assert server.upload(module)


def test_a_killed_nursery_ends_controlled_streams_alone(server: Server) -> None:
    supervisor = server.supervisor
    streams = server.begin()
    server.nursery.kill()
    assert all(error.startswith("Worker:") for error in failures_of(streams))
    server.finish(streams)
    assert server.supervisor == supervisor  # with its modules, tags and channels


@pytest.mark.parametrize("round_number", [0, 1])
def test_a_killed_supervisor_ends_controlled_streams_and_comes_back(server: Server, round_number: int) -> None:
    streams = server.begin()
    files = psutil.Process(server.process.pid).num_fds()
    lost = [server.supervisor, *server.supervisor.children(recursive=True)]
    server.supervisor.kill()
    assert all("control runtime" in error for error in failures_of(streams))
    assert psutil.wait_procs(lost, timeout=PATIENCE)[1] == []
    server.finish(streams)
    assert server.names() == []
    until(lambda: psutil.Process(server.process.pid).num_fds() <= files)


def test_a_killed_server_leaves_no_process_and_no_stream(server: Server) -> None:
    """If the process that clients connect to is killed, all its child processes and all streams end."""
    streams = server.begin()
    children = server.everything()
    assert children
    server.process.kill()
    assert psutil.wait_procs(children, timeout=PATIENCE)[1] == []
    assert all(stream.ended.wait(PATIENCE) for stream in streams)
    assert server.names() == []
