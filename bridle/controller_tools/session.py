"""Tool calls of one request: all its outputs share the request's own limits."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import msgspec

from bridle.controller_tools.call import Call
from bridle.controller_tools.client import MAX_NAME_CHARS
from bridle.controller_tools.limits import ToolLimits
from bridle.errors import ToolFailed
from bridle.safe_repr import short_repr

_MAX_NAMED = 16


class ToolCallContext(NamedTuple):
    """The user and the request for which a call is made. The user's client answers calls of `client_tools`. `call_id`
    is the id by which the client must answer this call; if it is empty, a random one is used."""

    user: str = ""
    client_tools: Collection[str] = ()
    request_id: str = ""
    call_id: str = ""


NOBODY = ToolCallContext()


class Desk(Protocol):
    """Executor of tool calls, in this process or another."""

    @property
    def limits(self) -> ToolLimits:
        raise NotImplementedError

    def begin(
        self,
        name: str,
        arguments: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        behalf: ToolCallContext = NOBODY,
    ) -> Call:
        """Begin a call. Never blocks, and never raises."""

    def watch(self, on_done: Callable[[], None]) -> None:
        """Call `on_done`, from any thread, whenever a call has ended."""


@dataclass(slots=True)
class ToolSession:
    """Calls tools for one request. `names` are the executor's tools that the request may use (None: all). One thread at
    a time."""

    desk: Desk
    names: Collection[str] | None = None
    behalf: ToolCallContext = NOBODY
    num_calls: int = 0
    pending: list[Call] = field(default_factory=list)

    def call(
        self, name: str, arguments: Mapping[str, Any] | None = None, timeout: float | None = None, call_id: str = ""
    ) -> Call:
        """Begin a call. A call that is not allowed fails at once."""
        limits, theirs = self.desk.limits, self.behalf.client_tools
        self.pending = [call for call in self.pending if not call.is_done]
        why = None
        if self.names is not None and entry_of(name, self.names) is None and name not in theirs:
            why = f"the request has no such tool; its tools are {listed((*self.names, *theirs))}"
        elif len(self.pending) >= limits.max_pending:
            why = f"{len(self.pending)} calls of this request are under way; at most {limits.max_pending} (max_pending)"
        elif self.num_calls >= limits.max_calls:
            why = f"this request has made {self.num_calls} calls; at most {limits.max_calls} (max_calls)"
        if why is not None:
            call = Call(str(name)[:MAX_NAME_CHARS])
            call.end(error=why)
            return call
        self.num_calls += 1
        call = self.desk.begin(name, arguments, timeout, self.behalf._replace(call_id=call_id))
        self.pending.append(call)
        return call


def pack_arguments(arguments: Mapping[str, Any] | None, timeout: float | None, limits: ToolLimits) -> bytes:
    """Return the arguments of a call as JSON. Raises `ToolFailed` for a call that the limits do not allow."""
    if timeout is not None and not (isinstance(timeout, (int, float)) and 0 < timeout <= limits.max_timeout):
        raise ToolFailed(
            f"timeout is {short_repr(timeout)}; must be more than 0 and at most {limits.max_timeout:g} seconds"
        )
    try:
        packed = msgspec.json.encode(dict(arguments or {}))
    except Exception as error:  # objects of the caller may raise any exception
        raise ToolFailed(f"the arguments are not JSON: {error}") from None
    if len(packed) > limits.max_argument_bytes:
        raise ToolFailed(
            f"the arguments have {len(packed)} bytes; at most {limits.max_argument_bytes} (max_argument_bytes)"
        )
    return packed


def entry_of(name: Any, names: Collection[str]) -> str | None:
    """Return the entry of `names` for a call's name: the name itself, or its part before a dot."""
    if not isinstance(name, str):
        return None
    if name in names:
        return name
    entry, dot, _ = name.partition(".")
    return entry if dot and entry in names else None


def adopt(calls: Collection[Call]) -> list[Call]:
    """Return the calls that a fork shares with the output from which it was forked: those that have not ended."""
    shared = [call for call in calls if not call.is_done]
    for call in shared:
        call.num_owners += 1
    return shared


def leave(calls: Collection[Call]) -> None:
    """Record that an output has ended. Calls for which no other output waits are cancelled."""
    for call in calls:
        call.num_owners -= 1
        if not call.num_owners:
            call.cancel()


def listed(names: Collection[str]) -> str:
    """Return the first of some names, for a message."""
    some = list(names)[:_MAX_NAMED]
    return ", ".join(some) + (f" and {len(names) - len(some)} more" if len(names) > len(some) else "") or "none"
