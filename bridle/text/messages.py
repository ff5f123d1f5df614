"""Chat messages as templates expect them: plain dictionaries with a role, texts and parsed tool calls."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from bridle.errors import InvalidRequest, UnsupportedFeature
from bridle.shown import shown

Message = Mapping[str, Any]
Prepared = list[dict[str, Any]]

MAX_MESSAGES = 4_096
#: The types of content parts that are text. A refusal is the text of an assistant that declined to answer.
TEXT_PARTS = ("text", "input_text", "output_text", "refusal")


def prepare(messages: Sequence[Message]) -> Prepared:
    """Copies, checked, in one common form: content is text (parts are joined with line breaks, none becomes empty), and
    the arguments of tool calls are objects, not JSON in a string.

    Raises `InvalidRequest` for what is no list of messages, `UnsupportedFeature` for images and the like.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise InvalidRequest("messages must be a list of objects with `role` and `content`", "messages")
    if not messages:
        raise InvalidRequest("messages is empty; it must have at least one message", "messages")
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequest(f"messages has {len(messages)} entries; at most {MAX_MESSAGES}", "messages")
    return [_prepare(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _prepare(message: Message, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"{where} is {type(message).__name__}; must be an object", where)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidRequest(f"{where}.role is {shown(role)}; must be a non-empty string", f"{where}.role")
    prepared = dict(message)
    prepared["content"] = _text(message.get("content"), f"{where}.content")
    if message.get("tool_calls") is not None:
        prepared["tool_calls"] = _tool_calls(message["tool_calls"], f"{where}.tool_calls")
    return prepared


def _text(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise InvalidRequest(f"{where} is {type(content).__name__}; must be text or a list of parts", where)
    return "\n".join(_part(part, f"{where}[{i}]") for i, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
    text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, Mapping) else None
    if kind in TEXT_PARTS and isinstance(text, str):
        return text
    if kind in TEXT_PARTS:
        raise InvalidRequest(f"{where} has no text", where)
    raise UnsupportedFeature(f"{where} is of type {shown(kind)}", where)


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """The calls, each an object with a `function`, or itself one, that has a name."""
    if not isinstance(calls, Sequence):
        raise InvalidRequest(f"{where} must be a list of function calls", where)
    return [_tool_call(call, where) for call in calls]


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    """The call with its arguments as an object; arguments that are not JSON stay as they are."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequest(f"{where} must be a list of function calls", where)
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return dict(call)
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return dict(call)
    if function is call:
        return {**call, "arguments": parsed}
    return {**call, "function": {**function, "arguments": parsed}}
