"""The messages about calls of tools: controllers run in replicas, tools beside the router."""

from __future__ import annotations

import msgspec

from bridle.controller_tools import ToolLimits


class ToolMessage(msgspec.Struct, array_like=True, tag=True, gc=False):
    """`number` names a call of one replica's."""

    number: int


class ToolAsked(ToolMessage):
    """A replica's controller calls a tool. `arguments` are JSON, `call_id` is the id that its client got, if that is to
    answer. `replica` is where the answer goes, where the carrier does not tell."""

    request_id: str
    name: str
    arguments: bytes
    timeout: float | None
    call_id: str
    replica: str = ""


class ToolGivenUp(ToolMessage):
    """Nobody there wants the answer any more."""

    replica: str = ""


class ToolAnswered(ToolMessage):
    """The call is over: with an answer, or with an error in words."""

    answer: str
    error: str | None


def sendable(text: str) -> str:
    """A text as UTF-8 can say it."""
    return text.encode(errors="replace").decode()


class ToolsElsewhere(msgspec.Struct, frozen=True):
    """Tools of the router as a replica knows them: their names, those that clients answer, and the limits."""

    names: tuple[str, ...] = ()
    of_clients: tuple[str, ...] = ()
    limits: ToolLimits = ToolLimits()
