"""The operator's settings for chat templates, calls and reasoning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: Treatment of tools that the chat template does not write.
ToolPrompt = Literal["describe", "refuse"]


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """`tool_format` and `reasoning_format` are names of formats, or `auto`: as the chat template shows. With
    `parse_special_text` a special token that is spelled in a message becomes that token. With `bare_calls` an answer
    that begins with the JSON of a call is one, without any markup. Tools that the chat template leaves out are
    described in the system message, or refused, as `tool_prompt` says. A model whose budget of reasoning ends writes
    `thinking_budget_message` before it closes the reasoning. After `max_repeated_calls` equal calls in a row with equal
    results the model is offered no tools (0: it always is)."""

    tool_format: str = "auto"
    reasoning_format: str = "auto"
    parse_special_text: bool = False
    bare_calls: bool = True
    tool_prompt: ToolPrompt = "describe"
    thinking_budget_message: str = ""
    max_repeated_calls: int = 0
