"""Calls of tools, over variables with names of their own: the engine answers into them. Beyond AICI."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from typing import Any

from pyaici.sequence import self_seq_id
from pyaici.steps import wait_vars
from pyaici.variables import get_var, set_var

_numbers = itertools.count()


class ToolError(Exception):
    """A tool gave no answer; the text says why."""


class ToolCall:
    """A call that is under way, or over."""

    def __init__(self, name: str, arguments: Mapping[str, Any], timeout: float | None) -> None:
        self.name = name
        self._variable = f"tool:{self_seq_id()}-{next(_numbers)}"
        wanted: dict[str, Any] = {"name": name, "arguments": dict(arguments)}
        if timeout is not None:
            wanted["timeout"] = timeout
        set_var(self._variable, json.dumps(wanted))

    @property
    def is_done(self) -> bool:
        """Whether there is an answer, or an error."""
        return get_var(f"{self._variable}:answer") is not None

    async def text(self) -> str:
        """Wait for the answer; gives its text. Raises `ToolError` if there is none."""
        (answer,) = await wait_vars(f"{self._variable}:answer")
        error = get_var(f"{self._variable}:error")
        if error is not None:
            raise ToolError(f"tool {self.name!r}: {error.decode(errors='replace')}")
        return answer.decode(errors="replace")

    async def json(self) -> Any:
        """Wait for the answer; gives what its JSON says."""
        return json.loads(await self.text())

    def cancel(self) -> None:
        """Give it up."""
        set_var(self._variable, "")


def tool(name: str, arguments: Mapping[str, Any] | None = None, timeout: float | None = None) -> ToolCall:
    """Call a tool of the server; gives a handle at once. `timeout` is in seconds."""
    return ToolCall(name, arguments or {}, timeout)
