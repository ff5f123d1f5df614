"""Frames of WebSockets: a few at a time, in the user's turn, and no more held of a connection than one read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import uvicorn
from hypothesis import given
from hypothesis import strategies as st
from uvicorn.server import ServerState

from bridle.http.transport import frames
from bridle.http.transport.frames import MAX_FRAMES, bounded_frames
from bridle.service.turns import Turns

HANDSHAKE = (
    b"GET /lmtp HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)


def frame(opcode: int, data: bytes) -> bytes:
    """A whole frame of a client, masked with zeros."""
    assert len(data) < 1 << 16
    size = bytes([0x80 | len(data)]) if len(data) < 126 else b"\xfe" + len(data).to_bytes(2, "big")
    return bytes([0x80 | opcode]) + size + b"\0\0\0\0" + data


class Carrier(asyncio.Transport):
    """A transport that remembers what is written, and whether it is read."""

    def __init__(self) -> None:
        super().__init__({"sockname": ("127.0.0.1", 1), "peername": ("127.0.0.1", 2)})
        self.written = b""
        self.is_read = True

    def write(self, data: Any) -> None:
        self.written += data

    def pause_reading(self) -> None:
        self.is_read = False

    def resume_reading(self) -> None:
        self.is_read = True

    def is_closing(self) -> bool:
        return False

    def close(self) -> None: ...


class Kept(Turns):
    """Turns that come when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Callable[[], object]] = []

    def ask(self, user: str, go_on: Callable[[], object]) -> None:
        self.asked.append(go_on)

    def let(self) -> bool:
        """Give everybody who asked a turn; whether anybody had."""
        asked, self.asked = self.asked, []
        for go_on in asked:
            go_on()
        return bool(asked)


async def open_protocol(turns: Turns, got: list[Any]) -> tuple[Any, Carrier]:
    """A connection whose application takes one message each time `take` is set."""

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
    for _ in range(5):
        await asyncio.sleep(0)
    assert b"101 Switching" in carrier.written
    return protocol, carrier


@pytest.mark.parametrize("opcode", [1, 2, 9], ids=["text", "binary", "ping"])
def test_of_a_flood_a_few_frames_are_handled_at_a_time(opcode: int, monkeypatch: pytest.MonkeyPatch) -> None:
    handled: list[int] = []
    real = frames._BoundedFrames._go_on

    def counted(self: Any) -> None:
        real(self)
        handled.append(self._num_frames)

    monkeypatch.setattr(frames._BoundedFrames, "_go_on", counted)

    async def main() -> None:
        turns = Kept()
        protocol, carrier = await open_protocol(turns, [])
        turns.let()
        handled.clear()
        protocol.data_received(frame(opcode, b"") * 2_000)
        assert not carrier.is_read and protocol.queue.qsize() <= handled[0]
        for _ in range(4_000):
            while not protocol.queue.empty():
                await protocol.receive()
            if not turns.let() and carrier.is_read:
                break
        assert sum(handled) == 2_000 and carrier.is_read
        assert max(handled) <= MAX_FRAMES + frames._PIECE // 6 + 1

    asyncio.run(main())


@given(st.lists(st.binary(max_size=3_000), max_size=12), st.integers(1, 5_000))
def test_every_message_arrives_whole_and_in_order(messages: list[bytes], size: int) -> None:
    async def main() -> list[bytes]:
        turns, got = Kept(), []
        protocol, carrier = await open_protocol(turns, got)
        stream = b"".join(frame(2, message) for message in messages)
        while stream or protocol._rest or not protocol.queue.empty() or turns.asked:
            if stream and carrier.is_read:
                protocol.data_received(stream[:size])
                stream = stream[size:]
            while not protocol.queue.empty():
                got.append((await protocol.receive())["bytes"])
            turns.let()
            assert len(protocol._rest) <= size  # no more than one read, however much there is
        return got

    assert asyncio.run(main()) == messages


def test_pings_of_a_peer_that_takes_no_answers_are_not_heard() -> None:
    async def main() -> None:
        turns = Kept()
        protocol, carrier = await open_protocol(turns, [])
        turns.let()
        protocol.pause_writing()
        before = len(carrier.written)
        protocol.data_received(frame(9, b"") * 2_000)
        while turns.let():
            pass
        assert len(carrier.written) == before and not carrier.is_read
        protocol.resume_writing()
        while turns.let():
            pass
        assert len(carrier.written) == before + 2_000 * 2 and carrier.is_read

    asyncio.run(main())


def test_a_read_takes_no_more_than_others_can_wait_for() -> None:
    class Sized(Carrier):
        max_size = 1 << 18

    async def main() -> None:
        config = uvicorn.Config(lambda: None, lifespan="off", log_config=None)
        protocol: Any = bounded_frames(Turns())(config=config, server_state=ServerState(), app_state={})  # type: ignore[call-arg]
        carrier = Sized()
        protocol.connection_made(carrier)
        assert carrier.max_size <= 1 << 14

    asyncio.run(main())
