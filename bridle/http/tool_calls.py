"""Tool calls in a model's text: `<tool_call>` tags around JSON, as the demo model and several families write
them.

Works on text as it streams: what may become a tag is held back, what turns out not to be a call is given out
as the text it is. A model that writes its calls otherwise is passed through untouched.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Any

import msgspec

OPEN_TAG = "<tool_call>"
CLOSE_TAG = "</tool_call>"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model asks for; `arguments` is a JSON text."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")

    def shape(self) -> dict[str, Any]:
        """OpenAI's shape."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class ToolCallReader:
    """Splits growing text into content and calls."""

    def __init__(self) -> None:
        self._held = ""
        self.num_calls = 0

    def push(self, text: str, is_last: bool = False) -> tuple[str, list[ToolCall]]:
        """Content and calls that became certain with `text`."""
        self._held += text
        content = ""
        calls: list[ToolCall] = []
        while OPEN_TAG in self._held:
            before, _, rest = self._held.partition(OPEN_TAG)
            inside, end, after = rest.partition(CLOSE_TAG)
            content += self._clean(before)
            if not end and not is_last:
                self._held = OPEN_TAG + rest
                return content, calls
            call = parse_call(inside)
            if call is None:
                content += OPEN_TAG + inside + end
            else:
                calls.append(call)
                self.num_calls += 1
            self._held = after
        cut = len(self._held) - (0 if is_last else _length_of_tag_begun(self._held))
        content, self._held = content + self._clean(self._held[:cut]), self._held[cut:]
        return content, calls

    def _clean(self, content: str) -> str:
        """Line breaks between calls are not content."""
        return "" if self.num_calls and not content.strip() else content


def parse_call(text: str) -> ToolCall | None:
    """The call in JSON `text`, `{"name": ..., "arguments": {...}}`; None if it is not one."""
    try:
        value = msgspec.json.decode(text.strip())
    except (msgspec.DecodeError, RecursionError):
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", {})
    if not isinstance(arguments, dict):
        return None
    return ToolCall(value["name"], msgspec.json.encode(arguments).decode())


def _length_of_tag_begun(text: str) -> int:
    """How many of the last characters could be the beginning of a tag."""
    for length in range(min(len(OPEN_TAG) - 1, len(text)), 0, -1):
        if OPEN_TAG.startswith(text[-length:]):
            return length
    return 0
