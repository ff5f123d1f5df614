"""WebSocket frames are read a few at a time, in the user's turn. A connection buffers at most one read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest
import uvicorn
from hypothesis import given
from hypothesis import strategies as st
from uvicorn.server import ServerState

from bridle.http.server import websocket_protocol
from bridle.http.server.uvicorn_protocol import MAX_DROPPED
from bridle.http.server.websocket_protocol import MAX_FRAMES, bounded_frames
from bridle.serving.tenancy.loop_throttle import MAX_USELESS, LoopThrottle, RateBudget
from tests.http.carrier import Carrier

T = TypeVar("T")
HANDSHAKE = (
    b"GET /lmtp HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)


def frame(opcode: int, data: bytes) -> bytes:
    """Return a complete frame from a client, with a mask of zeros."""
    assert len(data) < 1 << 16
    size = bytes([0x80 | len(data)]) if len(data) < 126 else b"\xfe" + len(data).to_bytes(2, "big")
    return bytes([0x80 | opcode]) + size + b"\0\0\0\0" + data


class Kept(LoopThrottle):
    """A throttle whose turns the test grants."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Callable[[], object]] = []
        self.users: list[str] = []

    def schedule(self, user: str, go_on: Callable[[], object]) -> None:
        self.users.append(user)
        self.asked.append(go_on)

    def let(self) -> bool:
        """Grant a turn to every waiting connection, and return whether any connection waited."""
        asked, self.asked = self.asked, []
        for go_on in asked:
            go_on()
        return bool(asked)


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run `main`, then end the applications of its connections, which would wait forever."""

    async def whole() -> T:
        result = await main
        applications = asyncio.all_tasks() - {asyncio.current_task()}
        for task in applications:
            task.cancel()
        await asyncio.gather(*applications, return_exceptions=True)
        return result

    return asyncio.run(whole())


async def open_protocol(turns: Kept, got: list[Any]) -> tuple[Any, Carrier]:
    """Return a connection whose application takes one message each time `take` is set, and its transport."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        await asyncio.Event().wait()

    config = uvicorn.Config(app, lifespan="off", ws_ping_interval=None, log_config=None)
    config.load()
    protocol: Any = bounded_frames(turns)(config=config, server_state=ServerState(), app_state={})  # type: ignore[call-arg]
    carrier = Carrier()
    protocol.connection_made(carrier)
    protocol.data_received(HANDSHAKE)
    turns.let()
    for _ in range(5):
        await asyncio.sleep(0)
    assert b"101 Switching" in carrier.written
    return protocol, carrier


def test_a_closed_connection_waits_for_no_turn() -> None:
    async def main() -> None:
        turns = LoopThrottle()
        protocol, _ = await open_protocol(Kept(), [])
        protocol.is_due, protocol.shares = False, turns
        turns.charge(1.0)
        protocol.data_received(frame(9, b""))
        assert turns.num_waiting == 1
        protocol.connection_lost(None)
        assert turns.num_waiting == 0
        while (await protocol.receive())["type"] != "websocket.disconnect":
            pass
        assert turns.num_waiting == 0  # and asks for none

    run(main())


@pytest.mark.parametrize("opcode", [1, 2, 9], ids=["text", "binary", "ping"])
def test_of_a_flood_a_few_frames_are_handled_at_a_time(opcode: int, monkeypatch: pytest.MonkeyPatch) -> None:
    handled: list[int] = []
    real = websocket_protocol.BoundedFrameReader.go_on

    def counted(self: Any) -> None:
        real(self)
        handled.append(self._num_frames)

    monkeypatch.setattr(websocket_protocol.BoundedFrameReader, "go_on", counted)
    monkeypatch.setattr(websocket_protocol, "RateBudget", lambda: RateBudget(2_000))

    async def main() -> None:
        turns = Kept()
        protocol, carrier = await open_protocol(turns, [])
        turns.let()
        handled.clear()
        protocol.data_received(frame(opcode, b"") * 2_000)
        assert not carrier.is_read and not handled and protocol.queue.empty()  # before the first turn
        turns.let()
        assert protocol.queue.qsize() <= handled[0]
        for _ in range(4_000):
            while not protocol.queue.empty():
                await protocol.receive()
            if not turns.let() and carrier.is_read:
                break
        assert sum(handled) == 2_000 and carrier.is_read
        assert max(handled) <= MAX_FRAMES + websocket_protocol.PIECE_BYTES // 6 + 1

    run(main())


@given(st.lists(st.binary(max_size=3_000), max_size=12), st.integers(1, 5_000))
def test_every_message_arrives_whole_and_in_order(messages: list[bytes], size: int) -> None:
    async def main() -> list[bytes]:
        turns, got = Kept(), []
        protocol, carrier = await open_protocol(turns, got)
        stream = b"".join(frame(2, message) for message in messages)
        while stream or protocol.rest or not protocol.queue.empty() or turns.asked:
            if stream and carrier.is_read:
                protocol.data_received(stream[:size])
                stream = stream[size:]
            while not protocol.queue.empty():
                got.append((await protocol.receive())["bytes"])
            turns.let()
            assert len(protocol.rest) <= size  # no more than one read, however much there is
        return got

    assert run(main()) == messages


def test_pings_of_a_peer_that_takes_no_answers_are_not_heard() -> None:
    async def main() -> None:
        turns = Kept()
        protocol, carrier = await open_protocol(turns, [])
        turns.let()
        protocol.pause_writing()
        before = len(carrier.written)
        protocol.data_received(frame(9, b"") * MAX_USELESS)
        while turns.let():
            pass
        assert len(carrier.written) == before and not carrier.is_read
        protocol.resume_writing()
        while turns.let():
            pass
        assert len(carrier.written) == before + MAX_USELESS * 2 and carrier.is_read

    run(main())


@pytest.mark.parametrize("bytes_", [frame(9, b"a"), frame(10, b"a"), b"\x00\x80\0\0\0\0"], ids=["ping", "pong", "part"])
def test_a_flood_of_frames_without_content_ends_in_a_close_that_says_so(bytes_: bytes) -> None:
    async def main() -> None:
        turns, got = Kept(), []
        protocol, carrier = await open_protocol(turns, got)
        if bytes_[0] == 0:
            protocol.data_received(b"\x02\x80\0\0\0\0")  # a message begins
        protocol.data_received(bytes_ * MAX_USELESS)
        while turns.let():
            pass
        assert b"too many" not in carrier.written and carrier.is_read
        protocol.data_received(bytes_ * MAX_USELESS)  # in no time the allowance would be this again
        while turns.let():
            pass
        told = carrier.written.rpartition(b"\x03\xf0")[2]  # the close code
        assert told == b"too many frames without content: at most 1000 at once, and then 10 per second"
        assert protocol.queue.get_nowait() == {"type": "websocket.disconnect", "code": 1008, "reason": told.decode()}
        assert carrier.is_read and not carrier.is_aborted  # so that the reason arrives
        num_written = len(carrier.written)
        for _ in range(MAX_DROPPED // 6_000 + 1):
            protocol.data_received(bytes_ * 1_000)
        assert carrier.is_aborted and len(carrier.written) == num_written and not turns.asked

    run(main())


def test_nothing_is_parsed_before_its_turn() -> None:
    async def main() -> None:
        config = uvicorn.Config(lambda: None, lifespan="off", log_config=None)
        turns = Kept()
        protocol: Any = bounded_frames(turns)(config=config, server_state=ServerState(), app_state={})  # type: ignore[call-arg]
        carrier = Carrier()
        protocol.connection_made(carrier)
        protocol.data_received(HANDSHAKE)
        assert not protocol.handshake_initiated and not carrier.is_read
        assert turns.users == ["127.0.0.2"]  # nobody knows the user yet

    run(main())


def test_a_read_takes_no_more_than_others_can_wait_for() -> None:
    class Sized(Carrier):
        max_size = 1 << 18

    async def main() -> None:
        config = uvicorn.Config(lambda: None, lifespan="off", log_config=None)
        protocol: Any = bounded_frames(LoopThrottle())(config=config, server_state=ServerState(), app_state={})  # type: ignore[call-arg]
        carrier = Sized()
        protocol.connection_made(carrier)
        assert carrier.max_size <= 1 << 14

    run(main())
