"""Transports of MCP (Model Context Protocol) messages: pipes to a child process, or HTTP.

Messages of a server are limited in size before they are read. This module does not know calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any

from bridle.errors import InvalidRequest, ToolFailed
from bridle.safe_repr import short_repr

_log = logging.getLogger(__name__)

#: Maximum number of seconds for the start of a server.
START_SECONDS = 60.0
#: Bytes of a message in addition to the answer in it.
_ENVELOPE = 64 << 10
_SESSION = "mcp-session-id"

#: Streams of messages: from a server, and to the server.
Streams = tuple[Any, Any]


@dataclass(frozen=True, slots=True)
class McpServer:
    """Address of an MCP server: a `command` that uses standard input and output, with `env` added to the usual
    variables, or a `url` with `headers`. Only tools of the server in `tools` are offered (None: all)."""

    command: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    url: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    tools: frozenset[str] | None = None
    max_bytes: int = 1 << 20

    def __post_init__(self) -> None:
        if bool(self.command) == (self.url is not None):
            raise InvalidRequest("an MCP server needs either a command or a url", "mcp")

    @property
    def max_message_bytes(self) -> int:
        """Return the maximum number of bytes of a message that carries the largest answer."""
        return self.max_bytes + _ENVELOPE


def connect(
    server: McpServer, end: Callable[[str], None], forget: Callable[[], None]
) -> AbstractAsyncContextManager[Streams]:
    """Connect to a server until the block ends. `end` is called with the reason when the server has ended, `forget`
    when it does not know the session any more."""
    return _over_http(server, forget) if server.url is not None else _over_pipes(server, end)


# -- HTTP --------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def _over_http(server: McpServer, forget: Callable[[], None]) -> AsyncIterator[Streams]:
    """Yield a connection to a server over HTTP, whose answers are limited in size."""
    import httpx2
    from mcp.client.streamable_http import streamable_http_client

    limit = server.max_message_bytes

    class Bounded(httpx2.AsyncByteStream):
        def __init__(self, stream: Any) -> None:
            self._stream = stream

        async def __aiter__(self) -> AsyncIterator[bytes]:
            num_bytes = 0
            async for piece in self._stream:
                num_bytes += len(piece)
                if num_bytes > limit:
                    raise httpx2.ReadError(f"the answer has more than {limit} bytes (max_result_bytes)")
                yield piece

        async def aclose(self) -> None:
            await self._stream.aclose()

    async def look(response: Any) -> None:
        if response.status_code == 404 and _SESSION in response.request.headers:
            forget()
        if "text/event-stream" not in response.headers.get("content-type", ""):
            response.stream = Bounded(response.stream)

    timeout = httpx2.Timeout(START_SECONDS, read=None)
    async with (
        httpx2.AsyncClient(headers=dict(server.headers), timeout=timeout, event_hooks={"response": [look]}) as client,
        streamable_http_client(str(server.url), http_client=client, max_sse_event_size=limit) as (reading, writing),
    ):
        yield reading, writing


# -- pipes -------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def _over_pipes(server: McpServer, end: Callable[[str], None]) -> AsyncIterator[Streams]:
    """Yield a connection to a server in a child process. A line that is too long ends the connection, and so does the
    end of the process.

    The package's own transport keeps a line of any length; this one reads no more than the limit.
    """
    import anyio
    from mcp.client.stdio import get_default_environment

    limit = server.max_message_bytes
    process = await asyncio.create_subprocess_exec(
        *server.command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=get_default_environment() | dict(server.env),
        start_new_session=True,  # the terminal's Ctrl-C must reach only bridle, which then ends in order
        limit=limit,
    )
    heard, reading = anyio.create_memory_object_stream[Any](0)
    writing, to_say = anyio.create_memory_object_stream[Any](0)
    tasks = [asyncio.ensure_future(_listen(process, limit, heard, end)), asyncio.ensure_future(_speak(process, to_say))]
    try:
        yield reading, writing
    finally:
        for task in tasks:
            task.cancel()
        for stream in (heard, reading, writing, to_say):
            stream.close()
        await _stop(process)


async def _listen(process: asyncio.subprocess.Process, limit: int, heard: Any, end: Callable[[str], None]) -> None:
    """Forward the process's output, line by line, until the process ends or a line is too long."""
    import anyio

    assert process.stdout is not None
    try:
        while line := await process.stdout.readline():
            await heard.send(_message_of(line))
        end(f"its process ended with code {await process.wait()}")
    except ValueError:  # raised by the reader for a line beyond its limit
        end(f"it sent a message of more than {limit} bytes (max_result_bytes)")
    except anyio.BrokenResourceError:
        pass  # the session is over


def _message_of(line: bytes) -> Any:
    """Return the message of a line. For an invalid line, return an error, which the session ignores."""
    from mcp.shared.message import SessionMessage
    from mcp_types import jsonrpc_message_adapter

    try:
        return SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
    except ValueError:
        _log.warning("MCP server sent an invalid message: %s", short_repr(line.decode(errors="replace")))
        return ToolFailed("it said what is no message")


async def _speak(process: asyncio.subprocess.Process, to_say: Any) -> None:
    """Write messages to the process, one per line."""
    import anyio

    assert process.stdin is not None
    with contextlib.suppress(OSError, anyio.BrokenResourceError):
        async for message in to_say:
            process.stdin.write(message.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n")
            await process.stdin.drain()


async def _stop(process: asyncio.subprocess.Process) -> None:
    """End a process. The process's input is closed first; if the process does not end then, it is killed."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.close()
    try:
        async with asyncio.timeout(1):
            await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with the processes that it started, as `npx` does
        while await process.stdout.read(1 << 16):
            pass  # `wait` also waits for the end of its output
        await process.wait()
