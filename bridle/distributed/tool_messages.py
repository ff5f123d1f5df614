"""Messages about tool calls: controllers run in replicas, tools in the router's process."""

from __future__ import annotations

import msgspec

from bridle.controller_tools import ToolLimits


class ToolMessage(msgspec.Struct, array_like=True, tag=True, gc=False):
    """Base of messages about calls. `number` identifies a call of one replica."""

    number: int


class ToolAsked(ToolMessage):
    """A replica's controller calls a tool. `arguments` are JSON. `call_id` is the client's id if the client answers.
    `replica` is the recipient of the answer, if the transport does not know the recipient."""

    request_id: str
    name: str
    arguments: bytes
    timeout: float | None
    call_id: str
    replica: str = ""


class ToolGivenUp(ToolMessage):
    """The caller no longer needs the answer."""

    replica: str = ""


class ToolAnswered(ToolMessage):
    """The call has ended with an answer or an error message."""

    answer: str
    error: str | None


def sendable(text: str) -> str:
    """Return a text that UTF-8 can encode."""
    return text.encode(errors="replace").decode()


class ToolsElsewhere(msgspec.Struct, frozen=True):
    """The router's tools for a replica: their names, the names that clients answer, and the limits."""

    names: tuple[str, ...] = ()
    of_clients: tuple[str, ...] = ()
    limits: ToolLimits = ToolLimits()
