"""Begins, resumes and cancels the streams of one connection, as the connection's session decides.

Each stream has an asyncio task. The task outlives the connection only if the client's request had a key.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from bridle.errors import BridleError, InvalidRequest, Overloaded
from bridle.lmtp.failures import error_text, failure_of
from bridle.lmtp.messages import Answer, Generate, Msg, Score, StreamAnswer, StreamId, ToolResult
from bridle.lmtp.messages import Buffer as BufferRequest
from bridle.lmtp.server.buffers import Buffers, PrefixBuffer
from bridle.lmtp.server.info import served_name
from bridle.lmtp.server.requests import context_of
from bridle.lmtp.server.resumable_stream import Key, ReplayBuffer, ResumableStream, StreamRelay
from bridle.lmtp.server.settings import LmtpSettings
from bridle.lmtp.server.stream_task import StreamTask
from bridle.lmtp.session import Reattach, Session, Start, StopStream, Stream
from bridle.serving import new_request_id
from bridle.serving.lifecycle.request_lifecycle import AppState, RequestLifecycle
from bridle.serving.lifecycle.request_record import RequestRecord
from bridle.serving.outputs.direct_tools import answer_call
from bridle.serving.requests.request_builder import check_num_tokens
from bridle.serving.tenancy.keys import Identity


@dataclass(slots=True)
class ServerContext:
    """State that the connections of one server share. `tasks` are all running tasks. With the lock `reading`, large
    messages are parsed one at a time, because parsing blocks all other tasks."""

    host: AppState
    settings: LmtpSettings
    memory: ReplayBuffer
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    reading: asyncio.Lock = field(default_factory=asyncio.Lock)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task, and keep it in `tasks` until it is done."""
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task


@dataclass(eq=False, repr=False)
class Streams:
    """Executes a session's actions on streams and buffers. `send` sends an answer to the client. The event `room` is
    set while the client reads fast enough. `trace` has the headers that name the distributed trace of the client's
    requests."""

    _home: ServerContext
    _identity: Identity
    _session: Session
    _send: Callable[[Answer], None]
    room: asyncio.Event
    _trace: Mapping[str, str]

    def __post_init__(self) -> None:
        self._relays: dict[Stream, StreamRelay] = {}
        self._num_filling = 0
        self._buffers = Buffers(self._home.settings.max_buffers, self._home.settings.max_buffer_tokens)

    def put(self, stream: Stream, answer: StreamAnswer) -> None:
        """Send an answer to the client, unless the answer's stream has ended."""
        if self._session.put(stream, answer):
            self._send(answer)
        if not stream.is_open:
            self._relays.pop(stream, None)

    def release(self, stream: Stream) -> None:
        """Forget a stream without informing the client, because another connection gets its further answers."""
        self._session.release(stream)
        self._relays.pop(stream, None)

    def start(self, action: Start) -> None:
        """Begin a stream, or continue the stream that an equal request with the same key began. If the server is full,
        the stream is refused before any work."""
        asked, stream = action.request, action.stream
        if isinstance(asked, Generate) and asked.key is not None:
            key = self._key(asked.key)
            known = self._home.memory.same(key, asked)
            if known is not None or asked.position:
                self._attach(stream, known or self._home.memory.get(key), asked.position)
                return
            prefix, save = self._buffers_of(asked)
            relay: StreamRelay = self._home.memory.add(self, stream, key, asked)
        else:
            prefix, save = self._buffers_of(asked)
            relay = StreamRelay(self, stream)
        try:
            self._home.host.check_open()
            self._home.host.admission.check(self._identity.user, self._identity.limits)
        except BridleError as error:
            _refuse(relay, asked.stream_id, error, save)
            return
        self._relays[stream] = relay
        work = StreamTask(
            self._home.host,
            self._home.settings,
            self._identity,
            relay,
            asked,
            self._session.is_extended,
            prefix,
            save,
            self._trace,
        )
        relay.stop = self._home.spawn(work.run()).cancel

    def reattach(self, action: Reattach) -> None:
        """Continue a stream that was begun on another connection."""
        asked = action.request
        self._attach(action.stream, self._home.memory.get(self._key(asked.key)), asked.position)

    def stop(self, action: StopStream) -> None:
        """Stop a stream that no client reads any more."""
        relay = self._relays.pop(action.stream, None)
        if relay is None:
            return
        relay.detach()
        if isinstance(relay, ResumableStream) and not action.is_lost:
            self._home.memory.drop(relay)

    def keep(self, asked: BufferRequest) -> None:
        """Create or delete a buffer, and answer the client."""
        if asked.drop:
            self._buffers.drop(asked.name)
            self._send(Msg(stream_id=asked.stream_id, buffer=asked.name, num_tokens=0))
            return
        try:
            if self._num_filling >= self._home.settings.max_buffers:
                raise Overloaded(
                    f"{self._num_filling} buffers are being filled, which is the limit; wait for one of them"
                )
            parent = self._buffers.find(asked.parent, asked.model, "parent")
            buffer = self._buffers.reserve(asked.name, asked.model)
        except BridleError as error:
            self._refuse(asked, error)
            return
        self._num_filling += 1
        self._home.spawn(self._fill(asked, parent, buffer))

    def answer_call(self, asked: ToolResult) -> None:
        """Pass a client's answer on to a tool call of this user, and confirm that to the client."""
        try:
            answer_call(self._home.host.registry, self._identity.user, asked.id, asked.result, asked.error)
        except BridleError as error:
            self._refuse(asked, error)
            return
        self._send(Msg(stream_id=asked.stream_id, tool_result=asked.id))

    async def _fill(self, asked: BufferRequest, parent: PrefixBuffer | None, buffer: PrefixBuffer) -> None:
        try:
            prefix = await parent.tokens() if parent is not None else ()
            prefix = prefix if asked.length is None else prefix[: max(asked.length, 0)]
            host = self._home.host
            story = RequestRecord(id=new_request_id(), route="LMTP BUFFER", identity=self._identity)
            with ExitStack() as held:
                serving = RequestLifecycle(host, story, held, self._home.settings.load_timeout)
                model = await serving.acquire_model_for_metadata(served_name(host.registry, asked.model))
                context = await context_of(serving, asked.prompt, prefix)
                check_num_tokens(model, len(context))
                buffer.fill(context)
            tokens = await buffer.tokens()
        except BridleError as error:
            buffer.fail(error)
            self._refuse(asked, error)
        else:
            self._send(Msg(stream_id=asked.stream_id, buffer=asked.name, num_tokens=len(tokens)))
        finally:
            self._num_filling -= 1

    def _refuse(self, asked: BufferRequest | ToolResult, error: BridleError) -> None:
        self._send(Msg(stream_id=asked.stream_id, error=error_text(error), code=error.code))

    def _attach(self, stream: Stream, relay: ResumableStream, position: int) -> None:
        self._relays[stream] = relay
        try:
            relay.attach(self, stream, position)
        except BridleError:
            del self._relays[stream]
            raise

    def _buffers_of(self, asked: Generate | Score) -> tuple[PrefixBuffer | None, PrefixBuffer | None]:
        prefix = self._buffers.find(asked.buffer, asked.model)
        save = asked.save if isinstance(asked, Generate) else None
        return prefix, None if save is None else self._buffers.reserve(save, asked.model)

    def _key(self, key: str) -> Key:
        return self._identity.user, key


def _refuse(relay: StreamRelay, stream_id: StreamId, error: BridleError, save: PrefixBuffer | None) -> None:
    """End a stream that was refused before it began."""
    if save is not None:
        save.fail(InvalidRequest(f"buffer {save.name!r} was not filled: its stream was refused", "buffer"))
    relay.put(failure_of(stream_id, error))
    relay.end()
