"""The replica's end: offers this process's engine to a router in another process.

One event loop reads requests, and sends the events that all streams get in a step as one frame. Only one router can be
connected at a time. When the router disconnects, its requests are cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

from bridle.config import EngineConfig
from bridle.control_vectors import ControlVectors
from bridle.controllers.reasoning_gate import CompiledGrammar
from bridle.distributed import replica_messages as m
from bridle.distributed.adapter_messages import AdapterFetched
from bridle.distributed.codec.controllers import form_to_compile
from bridle.distributed.codec.errors import pack_error
from bridle.distributed.remote_tools import RemoteToolExecutor
from bridle.distributed.replica_adapters import HomeServer
from bridle.distributed.replica_vectors import PutVector, RemoveVector, RouterVectors, sizes_of
from bridle.distributed.tool_messages import ToolAnswered, ToolMessage
from bridle.engine.client import EngineClient, EventStream
from bridle.errors import BridleError, ProtocolError, UnsupportedFeature
from bridle.lora import AdapterPool
from bridle.outputs import Event, Finished, FinishReason
from bridle.structured_output import Constraint

_log = logging.getLogger(__name__)

BEAT_SECONDS = 0.25
#: A router that does not read for this many seconds counts as disconnected.
_WRITE_SECONDS = 10.0


#: Compiles the grammar of a controller before its request begins.
GrammarMaker = Callable[[Constraint], Awaitable[CompiledGrammar]]


async def _no_grammars(form: Constraint) -> CompiledGrammar:
    raise UnsupportedFeature("this replica compiles no grammars", "controller")


class ReplicaServer:
    """Serves `client` on a unix socket at `path`."""

    def __init__(
        self,
        client: EngineClient,
        config: EngineConfig,
        path: Path,
        make_grammar: GrammarMaker = _no_grammars,
        adapters: AdapterPool | None = None,
        desk: RemoteToolExecutor | None = None,
        vectors: ControlVectors | None = None,
    ) -> None:
        self._client = client
        self._adapters = adapters
        self._vectors = vectors
        self._desk = desk
        self._config = config
        self._path = path
        self._make_grammar = make_grammar
        self._is_taken = False

    async def run(self, ended: asyncio.Event, on_listening: Callable[[], None] = lambda: None) -> None:
        """Serve until `ended` is set. `on_listening` is called once routers can connect."""
        server = await asyncio.start_unix_server(self._serve, self._path)
        self._path.chmod(0o600)
        on_listening()
        async with server:
            await ended.wait()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_taken:
            writer.close()
            return
        self._is_taken = True
        _log.info("a router connected")
        try:
            parts = self._client, self._config, self._make_grammar, self._adapters, self._desk, self._vectors
            await _Conversation(*parts, reader, writer).run()
        except ProtocolError as error:
            _log.error("the connection to the router ended with an error: %s", error)
        except (OSError, asyncio.IncompleteReadError, TimeoutError):
            _log.info("the router has disconnected")
        finally:
            self._is_taken = False
            writer.close()


class _Conversation:
    """The connection with one router, from its first request until it disconnects."""

    def __init__(
        self,
        client: EngineClient,
        config: EngineConfig,
        make_grammar: GrammarMaker,
        adapters: AdapterPool | None,
        desk: RemoteToolExecutor | None,
        vectors: ControlVectors | None,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._client = client
        self._config = config
        self._make_grammar = make_grammar
        self._adapters = adapters
        self._desk = desk
        self._served = HomeServer(adapters, self._tell_router)
        self._sizes, self._vectors = sizes_of(vectors), RouterVectors(vectors)
        self._loop = asyncio.get_running_loop()
        self._reader = reader
        self._writer = writer
        self._outbox: list[m.WireEvent] = []
        self._has_news = asyncio.Event()
        self._streams: dict[str, asyncio.Task[None]] = {}
        self._compiling: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        info = self._client.info
        limits = None if self._adapters is None else self._adapters.limits
        config = self._config
        seconds = 0.0 if config.park_memory == 0 or not config.enable_prefix_caching else config.park_seconds
        bounds = config.max_forks, config.max_waiting
        hello = m.Handshake(m.PROTOCOL, os.getpid(), info, *bounds, limits, seconds, self._sizes)
        self._writer.write(m.frame(hello))
        if self._desk is not None:
            self._desk.connect(self._tell_router)
        helpers = [asyncio.create_task(self._send_events()), asyncio.create_task(self._beat())]
        try:
            await self._read(helpers)
        finally:
            for task in (*helpers, *self._compiling.values(), *self._streams.values()):
                task.cancel()  # leaving a stream cancels its request
            self._served.close()
            self._vectors.close()
            if self._desk is not None:
                self._desk.disconnect()

    async def _read(self, helpers: list[asyncio.Task[None]]) -> None:
        """Handle requests until the router disconnects."""
        while True:
            reading = asyncio.create_task(self._read_frame())
            try:
                await asyncio.wait({reading, *helpers}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                is_left = reading.cancel()  # by the router, or this task is cancelled: the reading ends
            if is_left:
                raise ConnectionResetError
            message = m.read_by_replica(reading.result())
            if isinstance(message, m.Submit):
                self._submit(message)
            elif isinstance(message, m.CancelRequest):
                self._cancel(message.id)
            elif isinstance(message, m.Unpark):
                self._client.release_retained_kv(message.id)
            elif isinstance(message, ToolAnswered):
                if self._desk is not None:
                    self._desk.handle(message)
            elif isinstance(message, PutVector | RemoveVector):
                await asyncio.to_thread(self._vectors.handle, message)  # heartbeats continue meanwhile
            else:
                self._served.handle(message)

    async def _read_frame(self) -> bytes:
        (size,) = m.HEADER.unpack(await self._reader.readexactly(m.HEADER.size))
        if size > m.MAX_FRAME_BYTES:
            raise ProtocolError(f"the router announced a frame of {size} bytes; at most {m.MAX_FRAME_BYTES}")
        return await self._reader.readexactly(size)

    def _submit(self, message: m.Submit) -> None:
        form = form_to_compile(message.controller)
        if form is None:
            self._start(message)
        else:
            self._compiling[message.request.id] = asyncio.create_task(self._compile_first(message, form))

    async def _compile_first(self, message: m.Submit, form: Constraint) -> None:
        try:
            grammar = await self._make_grammar(form)
        except BridleError as error:
            self._end(message.request.id, FinishReason.ERROR, error)
        except asyncio.CancelledError:
            self._end(message.request.id, FinishReason.CANCELLED)
        else:
            self._start(message, grammar)
        finally:
            del self._compiling[message.request.id]

    def _start(self, message: m.Submit, grammar: CompiledGrammar | None = None) -> None:
        try:
            stream = self._client.submit(m.unpack_request(message, grammar)).with_progress()
        except BridleError as error:
            self._end(message.request.id, FinishReason.ERROR, error)
            return
        self._streams[message.request.id] = asyncio.create_task(self._relay(stream))

    def _cancel(self, request_id: str) -> None:
        if request_id in self._compiling:
            self._compiling[request_id].cancel()
        self._client.cancel(request_id)

    def _end(self, request_id: str, reason: FinishReason, error: BridleError | None = None) -> None:
        """Report to the router that a request has ended before it ran."""
        self._pass_on([Finished(request_id, 0, reason, error=error)])

    async def _relay(self, stream: EventStream) -> None:
        """Put the events of one stream into the outbox that all streams share."""
        try:
            async for events in stream:
                self._pass_on(events)
                stream.listener = self._pass_on  # the listener needs no switch of tasks
        except BridleError as error:
            self._writer.write(m.frame(m.RequestFailed(stream.request_id, pack_error(error))))
        finally:
            self._streams.pop(stream.request_id, None)

    def _pass_on(self, events: Iterable[Event]) -> None:
        self._outbox += map(m.pack_event, events)
        self._has_news.set()

    def _tell_router(self, message: AdapterFetched | ToolMessage) -> None:
        """Send the router a message about an adapter or a tool call. Safe from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, because the router has disconnected
            self._loop.call_soon_threadsafe(self._writer.write, m.frame(message))

    async def _send_events(self) -> None:
        """Send the waiting events in one frame. The streams that have events of a step are woken together, and run
        before this task."""
        while True:
            await self._has_news.wait()
            self._has_news.clear()
            events, self._outbox = self._outbox, []
            self._write_events(events)
            async with asyncio.timeout(_WRITE_SECONDS):
                await self._writer.drain()

    def _write_events(self, events: list[m.WireEvent]) -> None:
        """Write events in as few frames as possible. An event that is too large for a frame ends only its own
        request."""
        try:
            self._writer.write(m.frame(m.Events(events)))
        except ProtocolError as error:
            if len(events) > 1:
                half = len(events) // 2
                self._write_events(events[:half])
                self._write_events(events[half:])
                return
            self._writer.write(m.frame(m.RequestFailed(events[0].request_id, pack_error(error))))
            self._cancel(events[0].request_id)

    async def _beat(self) -> None:
        while True:
            beat = m.pack_beat(self._client.is_healthy, self._client.statistics(), self._served.news())
            self._writer.write(m.frame(beat))
            await asyncio.sleep(BEAT_SECONDS)


def serve_replica(
    client: EngineClient,
    config: EngineConfig,
    path: Path,
    make_grammar: GrammarMaker = _no_grammars,
    adapters: AdapterPool | None = None,
    desk: RemoteToolExecutor | None = None,
    vectors: ControlVectors | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT. Blocks; call it from the main thread."""
    import signal

    async def main() -> None:
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, ended.set)
        await ReplicaServer(client, config, path, make_grammar, adapters, desk, vectors).run(ended)

    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(main())
