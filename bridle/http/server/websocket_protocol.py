"""uvicorn's WebSocket protocol with an additional limit on the number of frames that are handled at a time for a
connection.

A frame can be six bytes long, so one read can return tens of thousands of frames. Without a limit, all frames of one
read would be handled before another connection is handled. This protocol handles only a few frames at a time. Further
frames wait as bytes until the application has processed the earlier frames, and until the scheduler gives the user a
turn. While frames wait, the connection is not read, so that its memory is bounded. The limit applies from the first
byte on, before the user is known.

If a client sends too many useless frames (pings, unsolicited pongs, empty parts of messages), the server closes the
connection and reports this reason.
"""

from __future__ import annotations

import asyncio
import time

from uvicorn._types import ASGIReceiveEvent
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import CloseCode, Frame, Opcode

from bridle.errors import ProtocolError
from bridle.http.server.uvicorn_protocol import LINGER, MAX_DROPPED, limit_reads
from bridle.serving.tenancy.keys import Identity
from bridle.serving.tenancy.loop_throttle import LoopThrottle, RateBudget

#: The maximum number of frames that are handled in one turn; `PIECE_BYTES` bytes are searched for them.
MAX_FRAMES = 8
PIECE_BYTES = 256
_MAX_PIECE = 2_048


def bounded_frames(turns: LoopThrottle) -> type[asyncio.Protocol]:
    """Return a protocol class for uvicorn's `ws` setting. The scheduler `turns` decides which connection is handled
    next."""

    class BoundedFrames(BoundedFrameReader):
        shares = turns

    return BoundedFrames


class BoundedFrameReader(WebSocketsSansIOProtocol):
    shares: LoopThrottle
    rest = b""  # received bytes that were not handled yet
    _num_frames = 0  # frames handled in this turn
    is_due = False  # a turn is scheduled
    _asked_as = ""  # the user whose turn is scheduled
    _num_to_drop: int | None = None  # bytes that may still come before the connection is aborted

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._allowance = RateBudget()
        limit_reads(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.shares.leave(self._asked_as, self.go_on)
        self.is_due, self.rest = True, b""  # prevents further turns
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._num_to_drop is not None:
            self._num_to_drop -= len(data)
            if self._num_to_drop < 0:
                self.transport.abort()
            return
        self.rest += data
        if not self.is_due:
            self._ask()
        if self.is_due:
            self._read(False)

    async def receive(self) -> ASGIReceiveEvent:
        message = await self.queue.get()
        if self.queue.empty() and not self.is_due:
            self._ask()
        return message

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.is_due:
            self._ask()

    def handle_events(self) -> None:
        frames = [event for event in self.conn.events if isinstance(event, Frame)]
        self._num_frames += len(frames)
        super().handle_events()
        useless = sum(self.close_sent or is_useless(frame) for frame in frames)
        if useless:
            try:
                self._allowance.charge("frames without content", useless)
            except ProtocolError as error:
                self._leave(str(error))

    def _leave(self, reason: str) -> None:
        """Close the connection. Received bytes are dropped first, because closing with unread bytes would drop the
        reason for the close."""
        self.rest, self._num_to_drop = b"", MAX_DROPPED
        self.stop_keepalive()
        self.queue.put_nowait({"type": "websocket.disconnect", "code": CloseCode.POLICY_VIOLATION, "reason": reason})
        self.conn.fail(CloseCode.POLICY_VIOLATION, reason)
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.close_sent = True
        if self.transport.can_write_eof():
            self.transport.write_eof()
        if self.close_timer is not None:
            self.close_timer.cancel()
        self.close_timer = self.loop.call_later(LINGER, self.transport.close)

    def _ask(self) -> None:
        self.is_due = True
        identity = self.scope.get("state", {}).get("identity") if self.handshake_initiated else None
        sender = (self.client or ("",))[0]
        self._asked_as = identity.user if isinstance(identity, Identity) else sender
        self.shares.schedule(self._asked_as, self.go_on)

    def go_on(self) -> None:
        """Handle a few frames. While a connection has more frames, it is not read. If a client does not read what the
        server sends, none of its frames are handled."""
        self.is_due = False
        if not self.writable.is_set():
            self._read(False)
            return
        began = time.monotonic()
        self._num_frames, size = 0, PIECE_BYTES
        while self.rest and self._num_frames < MAX_FRAMES and not self.transport.is_closing():
            piece, self.rest = self.rest[:size], self.rest[size:]
            super().data_received(piece)
            size = min(2 * size, _MAX_PIECE)  # probably a long message, so take larger pieces
        self.shares.charge(time.monotonic() - began)
        is_taken = self.queue.empty() or self.close_sent  # nobody reads the queue after the close
        self._read(is_taken and not self.rest)
        if self.rest and is_taken and not self.is_due:
            self._ask()

    def _read(self, wanted: bool) -> None:
        """Resume reading if `wanted`, else pause it. A connection that is about to be closed is read to its end."""
        wanted = wanted or self._num_to_drop is not None
        if wanted is self.read_paused and not self.transport.is_closing():
            self.read_paused = not wanted
            (self.transport.resume_reading if wanted else self.transport.pause_reading)()


def is_useless(frame: Frame) -> bool:
    """Return whether a frame has no effect: a ping, a pong, or an empty part of a message."""
    return frame.opcode in (Opcode.PING, Opcode.PONG) or (frame.opcode is Opcode.CONT and not frame.data)
