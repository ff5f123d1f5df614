"""Tests of parts of the runtime's processes: ring buffers, frames, thread groups and downloads."""

from __future__ import annotations

import os
import socket
import threading
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import wasmtime
from hypothesis import given
from hypothesis import strategies as st

from bridle.aici.protocol import Auth
from bridle.aici.replies import ModuleData
from bridle.aici.runtime.github import Downloads
from bridle.aici.runtime.leader_followers import LeaderFollowers, WorkItem
from bridle.aici.runtime.limits import DEFAULT_LIMITS
from bridle.aici.runtime.modules import ModuleStore
from bridle.aici.runtime.ring import RING_SIZE, PeerGone, Port, make_memory, receive_frame, send_frame
from bridle.errors import InvalidRequest, ProtocolError
from tests.waiting import PATIENCE


def ports() -> tuple[Port, Port]:
    memory = make_memory()
    one, two = socket.socketpair()
    made = Port(memory, one, is_worker=False), Port(memory, two, is_worker=True)
    os.close(memory)
    return made


@given(st.lists(st.integers(0, RING_SIZE // 2 - 200), max_size=12))
def test_rings_keep_messages_whole(sizes: list[int]) -> None:
    """Messages have sizes up to half a ring buffer, so that they often wrap around its end."""
    one, two = ports()
    for number, size in enumerate(sizes):
        message = bytes([number]) * size
        one.send(message)
        assert [bytes(m) for m in two.receive()] == [message]
        two.send(message[:100])
        assert [bytes(m) for m in one.receive()] == [message[:100]]
    one.bell.close()
    two.bell.close()


def test_several_messages_at_once() -> None:
    one, two = ports()
    for i in range(50):
        one.send(bytes([i]) * i)
    assert [bytes(m) for m in two.receive()] == [bytes([i]) * i for i in range(50)]


def test_a_full_ring_waits_for_its_reader() -> None:
    one, two = ports()
    message = os.urandom(RING_SIZE // 2 - 200)
    received: list[bytes] = []

    def read() -> None:
        while len(received) < 6:
            received.extend(bytes(m) for m in two.receive())

    thread = threading.Thread(target=read)
    one.send(message)
    one.send(message)
    thread.start()
    for _ in range(4):
        one.send(message)
    thread.join(PATIENCE)
    assert received == [message] * 6


def test_what_a_ring_refuses() -> None:
    one, two = ports()
    with pytest.raises(ProtocolError, match="in this ring buffer"):
        one.send(bytes(RING_SIZE // 2))
    two.bell.close()
    with pytest.raises(PeerGone):
        list(one.receive())
    with pytest.raises(PeerGone):
        one.send(b"x")


@given(st.binary(max_size=300_000))
def test_a_frame_arrives_with_its_descriptors(message: bytes) -> None:
    one, two = socket.socketpair()
    reader, writer = os.pipe()
    thread = threading.Thread(target=lambda: send_frame(one, message, [writer]))
    thread.start()
    data, descriptors = receive_frame(two, 4)
    thread.join()
    assert data == message and len(descriptors) == 1
    os.write(descriptors[0], b"!")
    assert os.read(reader, 1) == b"!"
    one.close()
    with pytest.raises(PeerGone):
        receive_frame(two)
    for descriptor in (reader, writer, *descriptors):
        os.close(descriptor)
    two.close()


def test_a_stuck_task_loses_the_lead() -> None:
    """Tasks after a stuck task are done meanwhile, and the stuck task is also finished in the end."""
    release, others_done, done = threading.Event(), threading.Event(), threading.Event()
    order: list[str] = []
    tasks: deque[WorkItem | None] = deque()

    def stuck() -> None:
        assert others_done.wait(PATIENCE)
        order.append("stuck")
        done.set()

    def quick(name: str, event: threading.Event | None = None) -> WorkItem:
        def run() -> None:
            order.append(name)
            if event is not None:
                event.set()

        return WorkItem(run)

    tasks.extend([quick("first"), WorkItem(stuck), quick("second"), quick("third", others_done)])

    def next_task() -> WorkItem | None:
        if tasks:
            return tasks.popleft()
        done.wait(PATIENCE)
        release.set()
        return None

    crew = LeaderFollowers(wasmtime.Engine(), next_task)
    thread = threading.Thread(target=crew.run, daemon=True)
    thread.start()
    assert release.wait(PATIENCE)
    assert order == ["first", "second", "third", "stuck"]
    crew.ticker.stop()


# -- gh: references ----------------------------------------------------------------------------------------

RELEASE = b"""{"assets":[
 {"name":"aici_pyctrl.wasm","browser_download_url":"https://x/py","updated_at":"1"},
 {"name":"aici_jsctrl.wasm","browser_download_url":"https://x/js","updated_at":"1"},
 {"name":"readme.txt","browser_download_url":"https://x/txt"}]}"""


class Hub:
    """A fake hub that answers requests and records them."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.release = RELEASE

    def get(self, url: str, headers: dict[str, str], limit: int) -> bytes:
        self.asked.append(url)
        assert headers["User-Agent"] == "AICI"
        if "api.github.com" in url:
            if "missing" in url:
                raise OSError("404")
            assert headers["X-GitHub-Api-Version"] == "2022-11-28"
            return self.release
        return url.encode()


def test_a_module_is_downloaded_for_its_owner(tmp_path: Path) -> None:
    store, hub = ModuleStore(tmp_path), Hub()
    owners: list[Auth] = []

    def install(wasm: bytes, auth: Auth) -> ModuleData:
        owners.append(auth)
        return ModuleData(store.add(wasm, auth), len(wasm), 0, 0)

    downloads = Downloads(store, DEFAULT_LIMITS, allowed=True, get=hub.get)
    module = downloads.resolve("gh:o/r/pyctrl", install)
    assert store.path(module).read_bytes() == b"https://x/py"
    assert owners == [Auth("https://x/py", True)]
    assert downloads.resolve("gh:o/r/pyctrl", install) == module
    assert hub.asked == ["https://api.github.com/repos/o/r/releases/latest", "https://x/py"]  # both are cached
    downloads.resolve("gh:o/r/jsctrl/v1.2", install)
    assert hub.asked[2] == "https://api.github.com/repos/o/r/releases/tags/v1.2"
    for bad in ("gh:o/r", "gh:o/r/ruby", "gh:o/missing/x"):
        with pytest.raises(InvalidRequest, match=r"exactly one|cannot read"):
            downloads.resolve(bad, install)
    hub.release = b"<html>"
    with pytest.raises(InvalidRequest, match="cannot read"):
        downloads.resolve("gh:other/r/x", install)
    store.close()


def test_nothing_is_downloaded_without_permission(tmp_path: Path) -> None:
    store, hub = ModuleStore(tmp_path), Hub()

    def install(wasm: bytes, auth: Auth) -> ModuleData:
        raise AssertionError("must not happen")

    downloads: Any = Downloads(store, DEFAULT_LIMITS, allowed=False, get=hub.get)
    with pytest.raises(InvalidRequest, match="not installed"):
        downloads.resolve("gh:o/r/pyctrl", install)
    module = store.add(b"local", Auth("root", True))
    store.link("gh:o/r/pyctrl", module)
    assert downloads.resolve("gh:o/r/pyctrl", install) == module
    assert hub.asked == []
    store.close()
