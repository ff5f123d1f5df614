"""The operator's settings for chat templates, tool calls and reasoning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: Treatment of tools that the chat template does not write.
ToolPrompt = Literal["describe", "refuse"]


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """Settings for the chats of a model. `tool_format` and `reasoning_format` are names of formats, or `auto`, which
    infers the format from the chat template. With `parse_special_text`, a special token that is spelled in a message
    becomes that token. With `bare_calls`, an answer that begins with the JSON of a call is a call, even without markup.
    `tool_prompt` says whether tools that the chat template omits are described in the system message, or refused. When
    a reasoning budget ends, the model writes `thinking_budget_message` before it closes the reasoning. After
    `max_repeated_calls` equal calls in a row with equal results, the model gets no tools (0: no limit)."""

    tool_format: str = "auto"
    reasoning_format: str = "auto"
    parse_special_text: bool = False
    bare_calls: bool = True
    tool_prompt: ToolPrompt = "describe"
    thinking_budget_message: str = ""
    max_repeated_calls: int = 0
