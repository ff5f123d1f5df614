"""Tests of channels between two processes with both kinds of synchronization: messages, killed processes, cleanup."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from bridle.aici.shm_channel import SharedChannels, attach_link, create_link, remove_names
from bridle.errors import ProtocolError
from tests.waiting import PATIENCE

SIZE = 64 << 10

ECHO = """
import sys
from bridle.aici.shm_channel import attach_link
prefix, futex = sys.argv[1], sys.argv[2] == "futex"
link = attach_link(prefix, json_size=65536, mask_size=65536, futex=futex)
print("ready", flush=True)
while (message := link.main.receive()) != b"stop":
    if message.startswith(b"mask "):
        link.masks[:5] = message[5:10]
    link.main.send(message[::-1])
"""

modes = pytest.mark.parametrize("futex", [False, True], ids=["semaphores", "futex"])


def names(prefix: str) -> list[str]:
    return [name for name in os.listdir("/dev/shm") if prefix[1:] in name]


@pytest.fixture
def prefix() -> Iterator[str]:
    value = f"/bt-{uuid.uuid4().hex[:8]}-"
    yield value
    left = names(value)
    remove_names(value)
    assert left == []


@pytest.fixture
def links(prefix: str, futex: bool) -> Iterator[tuple[SharedChannels, SharedChannels]]:
    engine = create_link(prefix, json_size=SIZE, mask_size=SIZE, futex=futex)
    runtime = attach_link(prefix, json_size=SIZE, mask_size=SIZE, futex=futex)
    engine.unlink()
    yield engine, runtime
    engine.close()
    runtime.close()


@pytest.fixture
def echo(prefix: str, futex: bool) -> Iterator[tuple[SharedChannels, subprocess.Popen[bytes]]]:
    """Yield channels to another process, which echoes messages."""
    link = create_link(prefix, json_size=SIZE, mask_size=SIZE, futex=futex)
    mode = "futex" if futex else "semaphores"
    child = subprocess.Popen([sys.executable, "-c", ECHO, prefix, mode], stdout=subprocess.PIPE)
    assert child.stdout and child.stdout.readline() == b"ready\n"
    link.unlink()
    yield link, child
    child.kill()
    child.communicate()
    link.close()


@modes
def test_echo_by_another_process(echo: tuple[SharedChannels, subprocess.Popen[bytes]]) -> None:
    link, child = echo
    alive = lambda: child.poll() is None  # noqa: E731
    for size in (1, 2, 1000, link.main.max_message):
        message = os.urandom(size - 1) + b"x"
        link.main.send(message, 20, alive)
        assert link.main.receive(20, alive) == message[::-1]
    link.main.send(b"mask 12345", 20, alive)
    link.main.receive(20, alive)
    assert link.masks[:5] == b"12345"
    link.main.send(b"stop")
    assert child.wait(PATIENCE) == 0


@modes
def test_a_killed_peer_is_noticed(echo: tuple[SharedChannels, subprocess.Popen[bytes]]) -> None:
    link, child = echo
    child.send_signal(signal.SIGKILL)
    child.wait()
    with pytest.raises(ProtocolError, match="has ended"):
        link.main.receive(alive=lambda: child.poll() is None)
    link.side.send(b"nobody reads this")
    with pytest.raises(ProtocolError, match="has ended"):
        link.side.send(b"so this cannot be sent", alive=lambda: child.poll() is None)


@modes
def test_main_and_side_do_not_mix(links: tuple[SharedChannels, SharedChannels]) -> None:
    engine, runtime = links
    engine.main.send(b"main")
    engine.side.send(b"side")
    assert runtime.side.receive(5) == b"side"
    assert runtime.main.receive(5) == b"main"
    runtime.side.send(b"reply")
    assert engine.side.receive(5) == b"reply"
    assert engine.main.receive(0) is None


@modes
def test_a_message_that_does_not_fit_touches_nothing(links: tuple[SharedChannels, SharedChannels]) -> None:
    engine, runtime = links
    with pytest.raises(ProtocolError, match=str(engine.main.max_message)):
        engine.main.send(bytes(engine.main.max_message + 1))
    engine.main.send(b"small")
    assert runtime.main.receive(5) == b"small"


@modes
def test_an_unread_message_blocks_the_next(links: tuple[SharedChannels, SharedChannels]) -> None:
    engine, runtime = links
    engine.main.send(b"one")
    with pytest.raises(ProtocolError, match="did not read"):
        engine.main.send(b"two", timeout=0.01)
    assert runtime.main.receive(5) == b"one"
    engine.main.send(b"two", timeout=5)
    assert runtime.main.receive(5) == b"two"


@modes
def test_a_waiting_reader_is_woken(links: tuple[SharedChannels, SharedChannels]) -> None:
    engine, runtime = links
    received: list[bytes | None] = []
    thread = threading.Thread(target=lambda: received.append(runtime.main.receive(20)))
    thread.start()
    engine.main.send(b"hello")
    thread.join(PATIENCE)
    assert received == [b"hello"]


@pytest.mark.parametrize("futex", [False])
def test_semaphore_channels_have_the_layout_of_the_protocol(
    links: tuple[SharedChannels, SharedChannels], prefix: str
) -> None:
    engine, _ = links
    engine.main.send(b"abc")
    assert engine.main.outgoing.region[:7] == b"\x03\0\0\0abc"  # type: ignore[attr-defined]


@pytest.mark.parametrize("futex", [True])
def test_futex_channels_have_the_layout_of_the_protocol(links: tuple[SharedChannels, SharedChannels]) -> None:
    engine, runtime = links
    engine.main.send(b"abc")
    assert engine.main.outgoing.region[:7] == b"\x03\0\0\0abc"  # type: ignore[attr-defined]
    runtime.main.send(b"wxyz")
    half = SIZE // 2
    assert engine.main.incoming.region[half : half + 8] == b"\x04\0\0\0wxyz"  # type: ignore[attr-defined]
    assert engine.main.receive(5) == b"wxyz"
    assert engine.main.incoming.region[half : half + 4] == bytes(4)  # type: ignore[attr-defined]


@modes
def test_a_corrupt_length_is_refused(links: tuple[SharedChannels, SharedChannels]) -> None:
    engine, runtime = links
    engine.main.send(b"abc")
    engine.main.outgoing.region[:4] = b"\xfe\xff\xff\x7f"  # type: ignore[attr-defined]
    with pytest.raises(ProtocolError, match="length"):
        runtime.main.receive(5)


@modes
def test_names_are_those_of_the_specification(prefix: str, futex: bool) -> None:
    link = create_link(prefix, json_size=SIZE, mask_size=SIZE, futex=futex)
    channels = ["cmd", "resp", "cmd-side", "resp-side"]
    expected = {f"{prefix[1:]}bin-shm"}
    if futex:
        expected |= {f"{prefix[1:]}{name}" for name in channels}
    else:
        expected |= {f"{prefix[1:]}{name}-shm" for name in channels}
        expected |= {f"sem.{prefix[1:]}{name}-{end}" for name in channels for end in ("wr", "rd")}
    assert set(names(prefix)) == expected
    link.unlink()
    link.unlink()
    link.close()


@modes
def test_stale_objects_are_replaced(prefix: str, futex: bool) -> None:
    old = create_link(prefix, json_size=SIZE, mask_size=SIZE, futex=futex)
    old.main.send(b"from a former life")
    new = create_link(prefix, json_size=SIZE, mask_size=SIZE, futex=futex)
    peer = attach_link(prefix, json_size=SIZE, mask_size=SIZE, futex=futex)
    assert peer.main.receive(0) is None
    new.main.send(b"now")
    assert peer.main.receive(5) == b"now"
    for link in (old, new, peer):
        link.unlink()
        link.close()


def test_attaching_needs_what_the_engine_made(prefix: str) -> None:
    with pytest.raises(ProtocolError, match="engine must create"):
        attach_link(prefix, json_size=SIZE, mask_size=SIZE)
    link = create_link(prefix, json_size=SIZE, mask_size=SIZE)
    with pytest.raises(ProtocolError, match="agreed"):
        attach_link(prefix, json_size=2 * SIZE, mask_size=SIZE)
    link.unlink()
    link.close()


@pytest.mark.parametrize("bad", ["", "x", "/", "/a/b", "/" + "x" * 300, "/\0"])
def test_bad_prefixes_are_refused(bad: str) -> None:
    with pytest.raises(ProtocolError, match="prefix"):
        create_link(bad, json_size=SIZE, mask_size=SIZE)


def test_a_failed_creation_leaves_nothing(prefix: str) -> None:
    with pytest.raises(ProtocolError):
        create_link(prefix, json_size=100, mask_size=SIZE, futex=True)
    with pytest.raises(Exception):  # noqa: B017  # whatever the system says of a region of size 0
        create_link(prefix, json_size=SIZE, mask_size=0)
    assert not Path("/dev/shm").joinpath(f"{prefix[1:]}cmd-shm").exists()
