"""The replica's end of tool calls: a tool executor that sends calls to the router, whose process has the tools.

If the router has disconnected, no call is made, and running calls end with an error.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from itertools import count
from typing import Any

import msgspec

from bridle.controller_tools import Call, ToolCallContext, ToolLimits
from bridle.controller_tools.client import new_call_id, notice_of
from bridle.controller_tools.session import NOBODY, entry_of, listed, pack_arguments
from bridle.distributed.tool_messages import ToolAnswered, ToolAsked, ToolGivenUp, ToolMessage, ToolsElsewhere, sendable
from bridle.errors import ToolFailed

_ALONE = "the router has disconnected"
#: Maximum length of a tool's name together with the part after its dot.
_MAX_NAME_CHARS = 4_096


class RemoteToolExecutor:
    """A tool executor that passes calls on to the router. Safe from any thread."""

    def __init__(self, tools: ToolsElsewhere) -> None:
        self._tools = tools
        self._lock = threading.Lock()
        self._numbers = count()
        self._live: dict[int, Call] = {}
        self._send: Callable[[ToolMessage], None] | None = None
        self._on_done: Callable[[], None] = lambda: None

    @property
    def limits(self) -> ToolLimits:
        """Return the limits of the router's tool executor."""
        return self._tools.limits

    def watch(self, on_done: Callable[[], None]) -> None:
        """Call `on_done`, from any thread, whenever a call has ended."""
        self._on_done = on_done

    def begin(
        self,
        name: str,
        arguments: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        behalf: ToolCallContext = NOBODY,
    ) -> Call:
        """Begin a call. Never blocks, and never raises."""
        call = Call.of(name)
        try:
            packed = pack_arguments(arguments, timeout, self.limits)
            if not isinstance(name, str) or len(name) > _MAX_NAME_CHARS:
                raise ToolFailed(f"unknown tool; available tools: {listed((*self._tools.names, *behalf.client_tools))}")
        except ToolFailed as error:
            call.end(error=str(error))
            return call
        call_id = new_call_id() if self._asks_client(name, behalf) else ""
        if call_id:
            call.notice = notice_of(call_id, call.name, msgspec.json.decode(packed))
        self._ask(call, ToolAsked(0, behalf.request_id, sendable(name), packed, timeout, call_id))
        return call

    def _asks_client(self, name: str, behalf: ToolCallContext) -> bool:
        """Return whether the request's client, not the router, answers calls of this tool."""
        entry = entry_of(name, self._tools.names)
        return name in behalf.client_tools if entry is None else entry in self._tools.of_clients

    def _ask(self, call: Call, message: ToolAsked) -> None:
        with self._lock:
            send = self._send
            if send is not None:
                message.number = number = next(self._numbers)
                self._live[number] = call
        if send is None:
            call.end(error=_ALONE)
            return
        call.when_done(lambda: self._note_done(number))
        send(message)

    def _note_done(self, number: int) -> None:
        """Report an ended call to its waiters, and a call that was cancelled in this process also to the router."""
        with self._lock:
            was_live, send = self._live.pop(number, None) is not None, self._send
        if was_live and send is not None:
            send(ToolGivenUp(number))
        self._on_done()

    # -- the conversation with the router ------------------------------------------------------------------------

    def connect(self, send: Callable[[ToolMessage], None]) -> None:
        """Send calls to a router with `send`, which any thread may call."""
        with self._lock:
            self._send = send

    def disconnect(self) -> None:
        """End all running calls, because the router has disconnected."""
        with self._lock:
            self._send, live = None, list(self._live.values())
            self._live.clear()
        for call in live:
            call.end(error=_ALONE)

    def handle(self, message: ToolAnswered) -> None:
        """End a call with the answer in the router's message."""
        with self._lock:
            call = self._live.pop(message.number, None)
        if call is not None:
            with contextlib.suppress(RuntimeError):  # the engine is closing
                call.end(message.answer, message.error)
