"""Messages about tool calls. Controllers run in replicas, and tools run in the router's process."""

from __future__ import annotations

import msgspec

from bridle.controller_tools import ToolLimits


class ToolMessage(msgspec.Struct, array_like=True, tag=True, gc=False):
    """Base of messages about tool calls. `number` identifies a call of one replica."""

    number: int


class ToolAsked(ToolMessage):
    """Replica to router: a controller calls a tool. `arguments` are JSON. `call_id` is the id that the client sees if
    the client answers the call. `replica` names the recipient of the answer for transports that need it."""

    request_id: str
    name: str
    arguments: bytes
    timeout: float | None
    call_id: str
    replica: str = ""


class ToolGivenUp(ToolMessage):
    """Replica to router: the controller no longer needs the answer."""

    replica: str = ""


class ToolAnswered(ToolMessage):
    """Router to replica: the call has ended with an answer or an error message."""

    answer: str
    error: str | None


def sendable(text: str) -> str:
    """Return the text with all characters replaced that UTF-8 cannot encode."""
    return text.encode(errors="replace").decode()


class ToolsElsewhere(msgspec.Struct, frozen=True):
    """The router's tools, as its replicas see them: the names of all tools, the names of tools that clients answer, and
    the limits."""

    names: tuple[str, ...] = ()
    of_clients: tuple[str, ...] = ()
    limits: ToolLimits = ToolLimits()
