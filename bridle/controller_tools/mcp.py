"""Servers of the Model Context Protocol as tools, through the official package `mcp` (extra `tools`).

A server is started, or connected to, at the first call of one of its tools. If it ends, the running call fails, and the
next call starts it again. `mcp_transports.py` has the transports. All code runs on the tool executor's event loop.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from bridle.controller_tools.executor import Arguments
from bridle.controller_tools.mcp_transports import START_SECONDS, McpServer, connect
from bridle.controller_tools.offer import ToolOffer
from bridle.controller_tools.session import listed
from bridle.distribution import install_hint
from bridle.errors import ToolFailed, UnsupportedFeature
from bridle.safe_repr import short_repr

if TYPE_CHECKING:
    from mcp import ClientSession

__all__ = ["McpServer", "McpTool", "check_installed"]

_MISSING = f"the package mcp is not installed; {install_hint('tools')}"
#: Seconds for which the error of a failed start is kept.
_PAUSE = 1.0
#: Maximum number of seconds until a connection that was closed reports the reason.
_MOMENT = 30.0
#: The package's message for a closed connection. Its error code is not enough, because servers use it for other errors.
_CLOSED = "Connection closed"
_MAX_SHOWN = 1_000
_MAX_TOOLS = 1_000


class McpTool:
    """The tools of one MCP server, each named `NAME.TOOL`."""

    def __init__(self, name: str, server: McpServer, pause: float = _PAUSE) -> None:
        self._name, self._server, self._pause = name, server, pause
        self.life: _Life | None = None
        self._ending: set[_Life] = set()  # earlier lives that may still have a process or a connection
        self._failed_at = -1e9
        self._failure = ""

    @property
    def description(self) -> str:
        """Description of the server."""
        return f"MCP: {self._server.url or ' '.join(self._server.command)}"[:_MAX_SHOWN]

    async def offers(self) -> list[ToolOffer]:
        """Return the tools of the server, which is started if necessary."""
        life = await self._ready()
        return [offer._replace(name=f"{self._name}.{name}") for name, offer in life.tools.items()]

    async def call(self, member: str, arguments: Arguments) -> str:
        """Call a tool of the server."""
        if not member:
            raise ToolFailed(f"this name is an MCP server; call one of its tools as {self._name}.TOOL")
        try:
            return await self._call(member, arguments)
        except _Forgotten:  # the call was not made yet
            return await self._call(member, arguments)

    async def _call(self, member: str, arguments: Arguments) -> str:
        life = await self._ready()
        if member not in life.tools:
            raise ToolFailed(
                f"server {self._name} has no tool {short_repr(member)}; its tools are {listed(life.tools)}"
            )
        return await life.call(member, arguments)

    async def _ready(self) -> _Life:
        """Return the server's current run; start a new run if the last one has ended. Several callers wait for the same
        start."""
        life = self.life
        if life is None or life.is_over:
            if time.monotonic() - self._failed_at < self._pause:
                raise ToolFailed(f"server {self._name} failed to start a moment ago: {self._failure}")
            self._ending = {each for each in (*self._ending, life) if each is not None and not each.has_ended}
            life = self.life = _Life(self._name, self._server)
        try:
            await asyncio.shield(life.ready)
        except ToolFailed as error:
            self._failed_at, self._failure = time.monotonic(), str(error)
            raise
        return life

    async def close(self) -> None:
        """End the server, if it runs, and wait until its earlier processes have ended, too."""
        lives = self._ending if self.life is None else self._ending | {self.life}
        await asyncio.gather(*(life.close() for life in lives))


class _Forgotten(ToolFailed):
    """The server does not know the session, because it was restarted."""


class _Life:
    """A server from its start to its end, in a task of its own. `ready` is done once the server's tools are known."""

    def __init__(self, name: str, server: McpServer) -> None:
        self._name, self._server = name, server
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[None] = loop.create_future()
        # marks an error as read; the caller may have been cancelled
        self.ready.add_done_callback(lambda done: done.cancelled() or done.exception())
        self.tools: dict[str, ToolOffer] = {}
        self._ended: asyncio.Future[str] = loop.create_future()  # the reason for the end
        self._session: ClientSession | None = None
        self._is_forgotten = False
        self._task = loop.create_task(self._run())

    @property
    def is_over(self) -> bool:
        """Return whether the connection accepts no more calls."""
        return self._ended.done() or self._task.done()

    @property
    def has_ended(self) -> bool:
        """Return whether the server's task has ended."""
        return self._task.done()

    def end(self, why: str) -> None:
        """Begin to end the server. Running calls fail with the reason `why`."""
        if not self._ended.done():
            self._ended.set_result(why)

    def _forget(self) -> None:
        """Record that the server no longer knows the session, because it was restarted."""
        self._is_forgotten = True

    async def call(self, tool: str, arguments: Arguments) -> str:
        """Call a tool. Fails if the server ends first."""
        assert self._session is not None
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED

        asking = asyncio.ensure_future(self._session.call_tool(tool, arguments))
        try:
            await asyncio.wait((asking, self._ended), return_when=asyncio.FIRST_COMPLETED)
            if not asking.done() or asking.cancelled():  # the transport failed, which ends the server
                raise ToolFailed(f"server {self._name} ended during the call: {await self._why()}")
            return _text_of(asking.result())
        except MCPError as error:
            if error.code == CONNECTION_CLOSED and error.message == _CLOSED:  # the server then reports its reason
                await asyncio.wait((self._ended,), timeout=_MOMENT)
            if self._ended.done():
                raise ToolFailed(f"server {self._name} ended during the call: {self._ended.result()}") from None
            if self._is_forgotten:
                self.end("it was started again")
                raise _Forgotten(f"{self._name} was started again") from None
            raise ToolFailed(f"{self._name}: {str(error)[:_MAX_SHOWN]}") from None
        except (ValueError, RuntimeError, OSError) as error:
            raise ToolFailed(f"{self._name}: {type(error).__name__}: {str(error)[:_MAX_SHOWN]}") from None
        finally:
            asking.cancel()
            asking.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def _why(self) -> str:
        """Wait for the reason of the server's end. A cancelled waiter must not cancel the future."""
        await asyncio.wait((self._ended,))
        return self._ended.result()

    async def _run(self) -> None:
        from mcp import ClientSession

        why = "it was closed"
        try:
            async with (
                connect(self._server, self.end, self._forget) as (reading, writing),
                ClientSession(reading, writing) as session,
            ):
                async with asyncio.timeout(START_SECONDS):
                    await self._begin(session)
                self._session = session
                self.ready.set_result(None)
                why = await self._why()
        except BaseException as error:
            why = self._ended.result() if self._ended.done() else _words(error)
            if not isinstance(error, (Exception, asyncio.CancelledError)):
                raise
        finally:
            self.end(why)
            if not self.ready.done():
                self.ready.set_exception(ToolFailed(f"{self._name} did not start: {why}"))

    async def _begin(self, session: ClientSession) -> None:
        """Initialize the session, and request the list of tools. Fails if the server ends first."""
        from mcp_types import PaginatedRequestParams

        async def ask() -> list[ToolOffer]:
            await session.initialize()
            found: list[ToolOffer] = []
            cursor: str | None = None
            while len(found) < _MAX_TOOLS:
                page = await session.list_tools(params=PaginatedRequestParams(cursor=cursor))
                found += [ToolOffer(tool.name, tool.description or "", tool.input_schema) for tool in page.tools]
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
            known = asking.result()[:_MAX_TOOLS]
            self.tools = {tool.name: tool for tool in known if offered is None or tool.name in offered}
        finally:
            asking.cancel()
            asking.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def close(self) -> None:
        """End the server, and wait until it has ended."""
        self.end("it was closed")
        if not self.ready.done():
            self._task.cancel()
        await asyncio.wait((self._task,))


def _words(error: BaseException) -> str:
    """Return the message of an error without its exception groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, TimeoutError):
        return f"it was not ready within {START_SECONDS:g} seconds"
    return str(error)[:_MAX_SHOWN] or type(error).__name__


def _text_of(result: Any) -> str:
    """Return the answer of a tool: its texts, or else its structured content as JSON."""
    from bridle.controller_tools.functions import as_text

    texts = [part.text for part in getattr(result, "content", ()) if getattr(part, "type", "") == "text"]
    text = "\n".join(texts)
    if not texts and getattr(result, "structured_content", None) is not None:
        text = as_text(result.structured_content)
    if getattr(result, "is_error", False):
        raise ToolFailed(text[:_MAX_SHOWN] or "the tool failed without a word")
    if not texts and not text:
        raise ToolFailed("the MCP server's answer has no text")
    return text


def check_installed() -> None:
    """Raise `UnsupportedFeature` unless the package `mcp` is installed."""
    from importlib.util import find_spec

    if find_spec("mcp") is None:
        raise UnsupportedFeature(_MISSING, "mcp")
