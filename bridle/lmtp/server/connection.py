"""Connects one client's channel with the client's session: messages go to the session, and its answers go back.

A reader task receives messages. A writer task sends all answers since its last write, so answers of several streams
share a message. If a client does not read, the server stops reading from it. If a client sends too much, the server
reads from it only when the scheduler gives its user a turn.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec

from bridle.errors import BridleError, ConnectionLost, ProtocolError
from bridle.lmtp import session as sessions
from bridle.lmtp.decoding import decode_request
from bridle.lmtp.encoding import encode_answers
from bridle.lmtp.failures import error_text
from bridle.lmtp.messages import Answer, Msg, Rejected, Request
from bridle.lmtp.server.info import describe
from bridle.lmtp.server.streams import ServerContext, Streams
from bridle.serving.requests.json_size import MAX_INLINE_BYTES, JsonSize, json_size
from bridle.serving.tenancy.keys import Identity
from bridle.serving.tenancy.loop_throttle import BURST, RateBudget

#: The maximum size of a message: biases for half of a vocabulary of 300,000 tokens, and a prompt of a million tokens.
_LIMIT = JsonSize(num_nodes=160_000, num_values=1 << 20)
#: If this many answers wait, the client reads too slowly.
_MANY_ANSWERS = 1024


class ServerChannel(Protocol):
    """Interface of a transport for the server: it carries whole messages, in order. Raises `ConnectionLost` once the
    peer has disconnected."""

    async def send(self, message: str) -> None:
        """Send a message to the peer. Waits while the peer accepts no message."""

    async def receive(self) -> str:
        """Receive and return the next message. Raises `ProtocolError` if the peer sends too many invalid messages."""

    async def close(self, reason: str = "") -> None:
        """Close the connection. If the peer is the cause and the transport supports it, the peer gets `reason`.
        Idempotent."""


class ServerConnection:
    """Serves one client until it disconnects. `echo` is called with each message of the client. `trace` has the headers
    that name the distributed trace of the client's requests."""

    def __init__(
        self,
        home: ServerContext,
        link: ServerChannel,
        identity: Identity,
        echo: Callable[[str], None] | None = None,
        trace: Mapping[str, str] | None = None,
    ) -> None:
        self._home = home
        self._user = identity.user
        self._link = link
        self._echo = echo
        self._session = sessions.Session(home.settings.max_streams)
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._streams = Streams(home, identity, self._session, self._send, self._has_room, trace or {})
        self._outbox: list[Answer] = []
        self._news = asyncio.Event()
        self._is_ending = False
        self._reason = ""  # reason for closing, if the client caused it
        self._rejected = RateBudget()
        self._num_replies = 0  # answers in the outbox that do not belong to a stream

    async def serve(self) -> None:
        """Read and write until either side closes the connection; then release everything that the connection uses."""
        sides = [asyncio.create_task(self._read()), asyncio.create_task(self._write())]
        try:
            await asyncio.wait(sides, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._do_all(self._session.close())
            for task in sides:
                task.cancel()
            results = await asyncio.gather(*sides, return_exceptions=True)
            await self._link.close(self._reason)
        for result in results:
            if isinstance(result, Exception) and not isinstance(result, ConnectionLost):
                raise result

    def drain(self, seconds: float) -> None:
        """Refuse new streams. Open streams have `seconds` to finish."""
        self._do_all(self._session.drain(seconds))

    def end(self, error: BridleError) -> None:
        """End every stream with an error, then close the connection."""
        self._do_all(self._session.fail_all(error))
        self._is_ending = True
        self._news.set()

    # -- receiving -------------------------------------------------------------------------------------------

    async def _read(self) -> None:
        turns = self._home.host.turns
        try:
            while True:
                text = await self._link.receive()
                if self._echo is not None:
                    self._echo(text)
                large = await self._decode_large(text) if len(text) > MAX_INLINE_BYTES else None
                began = time.monotonic()
                self._take(large or decode_request(text, _loads))
                turns.charge(time.monotonic() - began)
                await self._has_room.wait()
                await turns.wait(self._user)
        except ProtocolError as error:
            await self._blame(error)

    def _take(self, message: Request | Rejected) -> None:
        """Execute a message. The client is charged for the immediate answers, because they are written at once."""
        num_before = len(self._outbox)
        self._do_all(self._session.receive(message))
        self._num_replies += len(self._outbox) - num_before
        if isinstance(message, Rejected):
            self._rejected.charge("messages that are no requests")

    async def _blame(self, error: ProtocolError) -> None:
        """Send an error about an invalid message to the client, and close the connection. Does not return."""
        self._reason = str(error)
        self._send(Msg(stream_id=None, error=error_text(error), code=error.code))
        self.end(error)
        await asyncio.get_running_loop().create_future()

    async def _decode_large(self, text: str) -> Request | Rejected:
        async with self._home.reading:
            return await asyncio.to_thread(decode_request, text, _loads_large)

    def _do_all(self, todo: list[sessions.Action]) -> None:
        for action in todo:
            self._do(action)

    def _do(self, action: sessions.Action) -> None:
        match action:
            case sessions.Send(answer):
                self._send(answer)
            case sessions.Start(stream):
                self._try(stream, self._streams.start, action)
            case sessions.Reattach(stream):
                self._try(stream, self._streams.reattach, action)
            case sessions.StopStream():
                self._streams.stop(action)
            case sessions.Describe(asked):
                self._send(describe(self._home.host.registry, asked))
            case sessions.DefineBuffer(asked):
                self._streams.keep(asked)
            case sessions.AnswerCall(asked):
                self._streams.answer_call(asked)

    def _try(self, stream: sessions.Stream, step: Callable[[Any], None], action: sessions.Action) -> None:
        try:
            step(action)
        except BridleError as error:
            self._do_all(self._session.fail(stream, error))

    # -- sending ---------------------------------------------------------------------------------------------

    def _send(self, answer: Answer) -> None:
        self._outbox.append(answer)
        self._news.set()
        if len(self._outbox) >= _MANY_ANSWERS:
            self._has_room.clear()

    async def _write(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            answers, self._outbox = self._outbox, []
            num_replies, self._num_replies = self._num_replies, 0
            self._has_room.set()
            began = time.monotonic()
            for message in encode_answers(answers):
                await self._link.send(message)
            if num_replies:
                took = min(time.monotonic() - began, BURST)  # other tasks may have run during a slow send
                self._home.host.turns.charge(took * num_replies / len(answers))
            if self._is_ending and not self._outbox:
                return


def _loads_large(text: str) -> Any:
    json_size(text.encode("utf-8", "replace")).check(_LIMIT)
    return _loads(text)


def _loads(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise ValueError(str(error)) from None
