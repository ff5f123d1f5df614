"""Tools whose answers come from the client: its stream tells of a call, another request of the same user answers it.

An operator names such a tool, and says what it is for; whoever sent the request that calls it has to know what to do.
"""

from __future__ import annotations

import asyncio
from typing import Any

from bridle.errors import ToolFailed
from bridle.shown import shown

#: How the variable is called by which a client is told of a call; its id follows.
CALL_VARIABLE = "tool_call:"


class ClientTool:
    """Waits until the client has answered; the desk ends the call then."""

    def __init__(self, description: str) -> None:
        self.description = description

    async def call(self, member: str, arguments: dict[str, Any]) -> str:
        """Never answers by itself."""
        if member:
            raise ToolFailed(f"it has no part {shown(member)}")
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        return await answer

    async def close(self) -> None:
        """It holds nothing."""
