"""A connection that reconnects by itself. The connection is opened on first use, and opened again if it is lost while
streams are open.

`ClientProtocol` chooses the messages to send and interprets received messages. This module has the asyncio tasks, time
limits and backpressure.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from bridle.errors import BridleError, ConnectionLost, DeadlineExceeded, InternalError, RequestCancelled
from bridle.lmtp.client.protocol import ClientProtocol, PendingCall
from bridle.lmtp.client.retry import RetryPolicy
from bridle.lmtp.client.stream import TokenStream
from bridle.lmtp.client.stream_state import StreamProgress
from bridle.lmtp.client.transports import ClientChannel, Transport
from bridle.lmtp.messages import Buffer, ModelInfo, Msg, ToolResult


class ClientConnection:
    """A connection for one event loop. When `max_unread` tokens wait for readers and no reader waits for a token, the
    connection is not read, so that the server slows down. While a reader waits for a token, the connection is always
    read."""

    def __init__(self, carrier: Transport, exchange: ClientProtocol, patience: RetryPolicy, max_unread: int) -> None:
        self.carrier = carrier
        self.patience = patience
        self._exchange = exchange
        self._link: ClientChannel | None = None
        self._runner: asyncio.Task[None] | None = None
        self._greeted = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self._max_unread = max_unread
        self._streams: weakref.WeakSet[TokenStream] = weakref.WeakSet()
        self._num_readers = 0
        self._num_checked = 0
        self._wanted = asyncio.Event()

    async def connect(self) -> Mapping[str, Any]:
        """Connect if there is no connection. Returns the extensions that the server has announced. Raises
        `ConnectionLost` if the server cannot be reached."""
        for attempt in range(1, self.patience.connect_attempts + 1):
            if self._greeted.is_set() or await self._wait_for_greeting():
                return self._exchange.features
            await asyncio.sleep(self.patience.pause(attempt))
        raise ConnectionLost(f"the server {self.carrier.name} closes each connection before it announces its features")

    async def _wait_for_greeting(self) -> bool:
        """Wait until the server has announced its features. Returns False if the connection was lost first."""
        runner = self._start()
        greeted = asyncio.ensure_future(self._greeted.wait())
        try:
            await asyncio.wait({runner, greeted}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            greeted.cancel()
        if runner.done() and not runner.cancelled() and (error := runner.exception()) is not None:
            raise error
        return self._greeted.is_set()

    async def close(self) -> None:
        """Close the connection and end all streams. Idempotent."""
        self._is_closed = True
        self._exchange.fail(ConnectionLost("the client was closed"))
        tasks = [*self._tasks, *([self._runner] if self._runner else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- streams ---------------------------------------------------------------------------------------------

    async def open(self, stream: TokenStream, progress: StreamProgress) -> None:
        """Begin a stream. The stream is cancelled when its caller drops the last reference to it."""
        self._streams.add(stream)
        weakref.finalize(stream, _abandon, asyncio.get_running_loop(), self, progress).atexit = False
        try:
            await self.post(progress)
        except ConnectionLost as error:
            progress.fail(error)

    async def ask(self, request: ModelInfo | Buffer | ToolResult) -> Msg:
        """Send a request and return its answer."""
        question = PendingCall(request)
        changed = asyncio.Event()
        question.wake = changed.set
        await self.post(question)
        try:
            await changed.wait()
        finally:
            self._exchange.drop(question)
        if question.answer is None:
            raise question.error or InternalError("a request ended without an answer")
        return question.answer

    # -- the connection's task -------------------------------------------------------------------------------

    def _start(self) -> asyncio.Task[None]:
        if self._is_closed:
            raise ConnectionLost("the client was closed")
        if self._runner is None or self._runner.done():
            self._runner = asyncio.get_running_loop().create_task(self._run())
            self._runner.add_done_callback(_look_away)
        return self._runner

    async def post(self, item: StreamProgress | PendingCall) -> None:
        """Send the messages that begin a stream or call. Without a connection, these messages are sent when the client
        has connected."""
        self._start()
        await self._send(self._link, self._exchange.add(item))

    async def _send(self, link: ClientChannel | None, lines: Sequence[str]) -> None:
        """Send messages over the channel for which they were made. If a channel is lost, the connection's task notices
        and reconnects."""
        with contextlib.suppress(ConnectionLost):
            for line in lines:
                if link is not None:
                    await link.send(line)

    async def _run(self) -> None:
        """Connect and read, and reconnect while any stream is open. An error that ends this task ends every stream."""
        try:
            await self._keep_talking()
        except BridleError as error:
            self._exchange.fail(error)
            raise
        except Exception as error:
            self._exchange.fail(InternalError(f"the client failed: {error!r}"))
            raise

    async def _keep_talking(self) -> None:
        num_lost = 0
        while True:
            link = await self._connect()
            num_answers = self._exchange.num_answers
            try:
                await self._talk(link)
            except ConnectionLost:
                self._exchange.lose(self.patience.retries)
            finally:
                self._greeted.clear()
                self._link = None
                await link.close()
            if not self._exchange:
                return
            num_lost = 1 if self._exchange.num_answers > num_answers else num_lost + 1
            if num_lost > 1:
                await asyncio.sleep(self.patience.pause(num_lost - 1))

    async def _connect(self) -> ClientChannel:
        for attempt in range(1, self.patience.connect_attempts + 1):
            try:
                return await self.carrier.connect()
            except ConnectionLost:
                if attempt == self.patience.connect_attempts:
                    raise
                await asyncio.sleep(self.patience.pause(attempt))
        raise AssertionError("unreachable")

    async def _talk(self, link: ClientChannel) -> None:
        hello, lines = self._exchange.begin()
        self._link = link
        for line in lines:
            await link.send(line)
        if hello is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.patience.handshake):
                    while not hello.is_over:
                        self._hear(await link.receive())
        lines = self._exchange.resume(hello)
        self._greeted.set()
        sender = asyncio.get_running_loop().create_task(self._send(link, lines))
        try:
            while True:
                self._hear(await link.receive())
                if self._exchange.num_answers - self._num_checked > self._max_unread:
                    await self._wait_for_readers()
        finally:
            sender.cancel()

    def _hear(self, frame: str) -> None:
        failed, lines = self._exchange.receive(frame)
        for progress in failed:
            self._try_again(progress)
        if lines:
            self._spawn(self._send(self._link, lines))

    async def _wait_for_readers(self) -> None:
        """Wait until a reader waits for a token, or until readers have taken enough tokens."""
        while (num_unread := sum(stream.num_unread for stream in self._streams)) >= self._max_unread:
            if self._num_readers:
                return
            self._wanted.clear()
            await self._wanted.wait()
        self._num_checked = self._exchange.num_answers - num_unread

    # -- further attempts ------------------------------------------------------------------------------------

    def _try_again(self, progress: StreamProgress, *, cancels: bool = False) -> None:
        """Begin a new attempt of a stream after its last attempt has failed."""
        self._spawn(self._begin_again(progress, cancels))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _begin_again(self, progress: StreamProgress, cancels: bool) -> None:
        await self._send(self._link, self._exchange.drop(progress, cancels=cancels))
        if progress.is_over:
            return
        if progress.num_failures > self.patience.retries:
            progress.give_up()
            return
        if progress.retry_after != 0.0:
            await asyncio.sleep(max(progress.retry_after or 0.0, self.patience.pause(progress.num_failures)))
        if progress.has_failed and not progress.is_over:
            await self.post(progress)

    async def wait_for(self, stream: TokenStream, progress: StreamProgress, seconds: float | None) -> None:
        """Wait until the stream's state has changed. After `seconds`, the current attempt fails, and a new attempt
        begins."""
        self._num_readers += 1
        self._wanted.set()
        try:
            async with asyncio.timeout(seconds):
                await stream.changed.wait()
        except TimeoutError:
            if not progress.is_over and not progress.ready:
                progress.fail_try(DeadlineExceeded(f"{self.carrier.name} sent no token within {seconds:g} s"))
                self._try_again(progress, cancels=True)
        finally:
            self._num_readers -= 1

    def note_taken(self) -> None:
        """Record that a reader has taken tokens."""
        self._wanted.set()

    async def cancel(self, progress: StreamProgress, error: BridleError) -> None:
        """End a stream with an error. If the server supports cancelling, cancel the stream there too."""
        link, lines = self._link, self._exchange.drop(progress)
        if not progress.is_over:
            progress.fail(error)
        await self._send(link, lines)

    def forget(self, progress: StreamProgress) -> None:
        """Cancel a stream to which no caller has a reference any more."""
        self._spawn(self.cancel(progress, RequestCancelled("the stream has no reader")))


def _abandon(loop: asyncio.AbstractEventLoop, connection: ClientConnection, progress: StreamProgress) -> None:
    """Cancel a stream to which no caller has a reference any more. Safe from any thread."""
    if progress.is_over or loop.is_closed():
        return
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(connection.forget, progress)


def _look_away(task: asyncio.Task[None]) -> None:
    """Retrieve the task's error, which every stream has already received, so that asyncio does not warn."""
    if not task.cancelled():
        task.exception()
