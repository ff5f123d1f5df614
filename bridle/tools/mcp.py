"""Servers of the Model Context Protocol as tools, by the official package `mcp` (`pip install 'bridle[tools]'`).

A server is started, or connected to, at the first call of one of its tools, and again at the first call after it has
ended; a call that was under way then fails. Whatever a server sends is bounded before it is read. All of it runs on the
desk's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bridle.errors import InvalidRequest, ToolFailed, UnsupportedFeature
from bridle.shown import shown
from bridle.tools.desk import Arguments, listed

if TYPE_CHECKING:
    from mcp import ClientSession

_log = logging.getLogger(__name__)

_MISSING = "the package mcp is not installed; pip install 'bridle[tools]'"
#: How long a server may take to start, in seconds, and how long a failed start is remembered.
_START, _PAUSE = 60.0, 1.0
#: A message holds more than the answer in it.
_ENVELOPE = 64 << 10
_MAX_SHOWN = 1_000
_MAX_TOOLS = 1_000


@dataclass(frozen=True, slots=True)
class McpServer:
    """How to reach a server: a `command` that speaks over its standard input and output, with `env` beside the usual
    variables, or a `url`, with `headers`. Of its tools those in `tools` are offered (None: all)."""

    command: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    url: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    tools: frozenset[str] | None = None
    max_bytes: int = 1 << 20

    def __post_init__(self) -> None:
        if bool(self.command) == (self.url is not None):
            raise InvalidRequest("an MCP server needs either a command or a url", "mcp")


class McpTool:
    """The tools of one server, each as `NAME.TOOL`."""

    def __init__(self, name: str, server: McpServer, pause: float = _PAUSE) -> None:
        self._name, self._server, self._pause = name, server, pause
        self._life: _Life | None = None
        self._failed_at = -1e9
        self._failure = ""
        self.num_starts = 0

    @property
    def description(self) -> str:
        """What it is."""
        return f"MCP: {self._server.url or ' '.join(self._server.command)}"[:_MAX_SHOWN]

    async def call(self, member: str, arguments: Arguments) -> str:
        """Call a tool of the server."""
        if not member:
            raise ToolFailed(f"it is a server; its tools are called {self._name}.TOOL")
        life = await self._ready()
        if member not in life.tools:
            raise ToolFailed(f"{self._name} has no tool {shown(member)}; there are {listed(life.tools)}")
        return await life.call(member, arguments)

    async def _ready(self) -> _Life:
        """The server's present life; a new one if the last has ended. Those who come meanwhile wait for the same."""
        life = self._life
        if life is None or life.is_over:
            if time.monotonic() - self._failed_at < self._pause:
                raise ToolFailed(f"{self._name} could not be started a moment ago: {self._failure}")
            life = self._life = _Life(self._name, self._server)
            self.num_starts += 1
        try:
            await asyncio.shield(life.ready)
        except ToolFailed as error:
            self._failed_at, self._failure = time.monotonic(), str(error)
            raise
        return life

    async def close(self) -> None:
        """End the server, if it runs."""
        if self._life is not None:
            await self._life.close()


class _Life:
    """A server from its start to its end, in a task of its own. `ready` is done once its tools are known."""

    def __init__(self, name: str, server: McpServer) -> None:
        self._name, self._server = name, server
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[None] = loop.create_future()
        self.ready.add_done_callback(lambda done: done.cancelled() or done.exception())  # somebody may have left
        self.tools: tuple[str, ...] = ()
        self._ended: asyncio.Future[str] = loop.create_future()  # why it is over
        self._session: ClientSession | None = None
        self._task = loop.create_task(self._run())

    @property
    def is_over(self) -> bool:
        """Whether it takes no more calls."""
        return self._ended.done() or self._task.done()

    def end(self, why: str) -> None:
        """Have it end."""
        if not self._ended.done():
            self._ended.set_result(why)

    async def call(self, tool: str, arguments: Arguments) -> str:
        """Call a tool; fails if the server ends first."""
        assert self._session is not None
        from mcp import MCPError

        asking = asyncio.ensure_future(self._session.call_tool(tool, arguments))
        try:
            await asyncio.wait((asking, self._ended), return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                raise ToolFailed(f"{self._name} ended during the call: {self._ended.result()}")
            return _text_of(asking.result())
        except MCPError as error:
            raise ToolFailed(f"{self._name}: {str(error)[:_MAX_SHOWN]}") from None
        except (ValueError, RuntimeError, OSError) as error:
            raise ToolFailed(f"{self._name}: {type(error).__name__}: {str(error)[:_MAX_SHOWN]}") from None
        finally:
            asking.cancel()
            asking.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def _run(self) -> None:
        from mcp import ClientSession

        why = "it was closed"
        try:
            async with (
                _transport(self._server, self.end) as (reading, writing),
                ClientSession(reading, writing) as session,
            ):
                async with asyncio.timeout(_START):
                    await self._begin(session)
                self._session = session
                self.ready.set_result(None)
                why = await self._ended
        except BaseException as error:
            why = self._ended.result() if self._ended.done() else _words(error)
            if not isinstance(error, (Exception, asyncio.CancelledError)):
                raise
        finally:
            self.end(why)
            if not self.ready.done():
                self.ready.set_exception(ToolFailed(f"{self._name} did not start: {why}"))

    async def _begin(self, session: ClientSession) -> None:
        """Shake hands, and ask for the tools; fails if the server ends first."""
        from mcp_types import PaginatedRequestParams

        async def ask() -> list[str]:
            await session.initialize()
            found: list[str] = []
            cursor: str | None = None
            while len(found) < _MAX_TOOLS:
                page = await session.list_tools(params=PaginatedRequestParams(cursor=cursor))
                found += [tool.name for tool in page.tools]
                cursor = page.next_cursor
                if not cursor:
                    break
            return found

        asking = asyncio.ensure_future(ask())
        try:
            await asyncio.wait((asking, self._ended), return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                raise ToolFailed(self._ended.result())
            offered = self._server.tools
            self.tools = tuple(name for name in asking.result()[:_MAX_TOOLS] if offered is None or name in offered)
        finally:
            asking.cancel()
            asking.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def close(self) -> None:
        """End the server, and wait until it has."""
        self.end("it was closed")
        if not self.ready.done():
            self._task.cancel()
        await asyncio.wait((self._task,))


def _words(error: BaseException) -> str:
    """What went wrong, without the groups that a library packs errors into."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, TimeoutError):
        return f"it was not ready within {_START:g} seconds"
    return str(error)[:_MAX_SHOWN] or type(error).__name__


def _text_of(result: Any) -> str:
    """The answer of a tool: its texts, or else its structured content as JSON."""
    from bridle.tools.functions import as_text

    texts = [part.text for part in getattr(result, "content", ()) if getattr(part, "type", "") == "text"]
    text = "\n".join(texts)
    if not texts and getattr(result, "structured_content", None) is not None:
        text = as_text(result.structured_content)
    if getattr(result, "is_error", False):
        raise ToolFailed(text[:_MAX_SHOWN] or "the tool failed without a word")
    if not texts and not text:
        raise ToolFailed("its answer has no text")
    return text


def check_installed() -> None:
    """Raise `UnsupportedFeature` unless the package is there."""
    from importlib.util import find_spec

    if find_spec("mcp") is None:
        raise UnsupportedFeature(_MISSING, "mcp")


def _transport(server: McpServer, end: Any) -> contextlib.AbstractAsyncContextManager[tuple[Any, Any]]:
    return _spoken_over_http(server) if server.url is not None else _spoken_over_pipes(server, end)


@contextlib.asynccontextmanager
async def _spoken_over_http(server: McpServer) -> AsyncIterator[tuple[Any, Any]]:
    """A connection to a server over HTTP, whose answers are bounded."""
    import httpx2
    from mcp.client.streamable_http import streamable_http_client

    limit = server.max_bytes + _ENVELOPE

    class Bounded(httpx2.AsyncByteStream):
        def __init__(self, stream: Any) -> None:
            self._stream = stream

        async def __aiter__(self) -> AsyncIterator[bytes]:
            num_bytes = 0
            async for piece in self._stream:
                num_bytes += len(piece)
                if num_bytes > limit:
                    raise httpx2.ReadError(f"an answer has more than {limit} bytes (max_result_bytes)")
                yield piece

        async def aclose(self) -> None:
            await self._stream.aclose()

    async def bound(response: Any) -> None:
        if "text/event-stream" not in response.headers.get("content-type", ""):
            response.stream = Bounded(response.stream)

    timeout = httpx2.Timeout(_START, read=None)
    async with (
        httpx2.AsyncClient(headers=dict(server.headers), timeout=timeout, event_hooks={"response": [bound]}) as client,
        streamable_http_client(str(server.url), http_client=client, max_sse_event_size=limit) as (reading, writing),
    ):
        yield reading, writing


@contextlib.asynccontextmanager
async def _spoken_over_pipes(server: McpServer, end: Any) -> AsyncIterator[tuple[Any, Any]]:
    """A server in a process of its own. A line that is too long, or the end of the process, ends it.

    The package's own transport keeps a line of any length; this one reads no more than the limit.
    """
    import anyio
    from mcp.client.stdio import get_default_environment
    from mcp.shared.message import SessionMessage
    from mcp_types import jsonrpc_message_adapter

    limit = server.max_bytes + _ENVELOPE
    process = await asyncio.create_subprocess_exec(
        *server.command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=get_default_environment() | dict(server.env),
        limit=limit,
    )
    assert process.stdin is not None and process.stdout is not None
    stdin, stdout = process.stdin, process.stdout
    heard, reading = anyio.create_memory_object_stream[Any](0)
    writing, to_say = anyio.create_memory_object_stream[Any](0)

    async def listen() -> None:
        try:
            while line := await stdout.readline():
                try:
                    message: Any = SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
                except ValueError:
                    _log.warning("an MCP server says what is no message: %s", shown(line.decode(errors="replace")))
                    message = ToolFailed("it said what is no message")
                await heard.send(message)
            end(f"its process ended with code {await process.wait()}")
        except ValueError:
            end(f"it sent a message of more than {limit} bytes (max_result_bytes)")
        except anyio.BrokenResourceError:
            pass  # the session is over

    async def speak() -> None:
        with contextlib.suppress(OSError, anyio.BrokenResourceError):
            async for message in to_say:
                stdin.write(message.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n")
                await stdin.drain()

    tasks = [asyncio.ensure_future(listen()), asyncio.ensure_future(speak())]
    try:
        yield reading, writing
    finally:
        for task in tasks:
            task.cancel()
        for stream in (heard, reading, writing, to_say):
            stream.close()
        await _stop(process)


async def _stop(process: asyncio.subprocess.Process) -> None:
    """End a process: it may see that nobody speaks to it any more; else it is killed."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        async with asyncio.timeout(1):
            await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
