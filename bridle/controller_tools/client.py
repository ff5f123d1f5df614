"""Tools whose answers come from the client: its stream reports a call, and another request of the same user answers it.

An operator defines such a tool with a description, or a request names its own tools. The client must know how to answer
such calls.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Collection, Sequence
from typing import Any

import msgspec

from bridle.controller_tools.offer import ToolOffer
from bridle.errors import InvalidRequest, ToolFailed
from bridle.safe_repr import short_repr

#: Prefix of the variable that reports a call to a client; the id of the call follows.
CALL_VARIABLE = "tool_call:"
#: Name in the metrics for tools that requests name; no tool may have this name.
OF_REQUESTS = "(client)"
MAX_CLIENT_TOOLS, MAX_NAME_CHARS = 64, 128


class ClientTool:
    """A tool that the client answers. The tool executor ends the call when the answer arrives."""

    def __init__(self, description: str) -> None:
        self.description = description

    async def offers(self) -> list[ToolOffer]:
        """Return no offers, because only a request of the client's own can ask the client."""
        return []

    async def call(self, member: str, arguments: dict[str, Any]) -> str:
        """Wait for ever, because the client's answer ends the call."""
        if member:
            raise ToolFailed(f"a client's tool has no member {short_repr(member)}")
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        return await answer

    async def close(self) -> None:
        """Do nothing, because there are no resources to release."""


def check_client_tools(names: Sequence[str], taken: Collection[str]) -> tuple[str, ...]:
    """Return the tools that a request names as its client's own. These tools must not have a name that the operator has
    `taken`, even if the user may not call that tool, because a client must not answer for it. Raises
    `InvalidRequest`."""
    if len(names) > MAX_CLIENT_TOOLS:
        raise InvalidRequest(f"client_tools has {len(names)} names; at most {MAX_CLIENT_TOOLS}", "client_tools")
    for name in names:
        if not isinstance(name, str) or not is_name(name):
            raise InvalidRequest(
                f"client_tools has the name {short_repr(name)}; must be 1 to {MAX_NAME_CHARS} printable characters",
                "client_tools",
            )
        if name in taken or name.partition(".")[0] in taken:
            raise InvalidRequest(
                f"client_tools has {short_repr(name)}, but a tool of the server has this name", "client_tools"
            )
    return tuple(names)


def new_call_id() -> str:
    """Return an unguessable id, by which a client answers a call."""
    return secrets.token_urlsafe(18)


def notice_of(call_id: str, name: str, arguments: Any) -> tuple[str, bytes]:
    """Return the variable that notifies a client of a call."""
    return CALL_VARIABLE + call_id, msgspec.json.encode({"name": name, "arguments": arguments})


def is_name(name: str) -> bool:
    """Return whether `name` is a valid tool name."""
    return 0 < len(name) <= MAX_NAME_CHARS and name.isprintable() and name != OF_REQUESTS
