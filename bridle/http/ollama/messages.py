"""Converts messages, tools and formats of Ollama's API to OpenAI's format."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from bridle.chat.stream_deltas import own_id
from bridle.errors import InvalidRequest
from bridle.safe_repr import short_repr

Row = dict[str, Any]
_ROLES = ("system", "user", "assistant", "tool")
#: The first base64 characters of common image formats.
_PICTURES = {"/9j/": "image/jpeg", "iVBOR": "image/png", "R0lGOD": "image/gif", "UklGR": "image/webp"}


def to_messages(messages: Iterable[Mapping[str, Any]]) -> list[Row]:
    """Convert the messages of a conversation to OpenAI's format. Raises `InvalidRequest` that names the invalid
    message.

    Ollama's tool calls have no ids, or ids that clients do not send back. So a result belongs to the first call of its
    `tool_name` without a result. If there is no such call, the result belongs to the first call of any tool without a
    result.
    """
    found: list[Row] = []
    open_calls: list[tuple[str, str]] = []
    for position, message in enumerate(messages):
        where = f"messages[{position}]"
        role = str(message.get("role", "")).lower()
        if role not in _ROLES:
            raise InvalidRequest(
                f"{where}.role is {short_repr(message.get('role'))}; must be one of {', '.join(_ROLES)}",
                f"{where}.role",
            )
        made: Row = {"role": role, "content": with_images(_text(message, where), message.get("images"), where)}
        if message.get("thinking"):
            made["reasoning_content"] = str(message["thinking"])
        if message.get("tool_calls"):
            made["tool_calls"] = _calls(message["tool_calls"], f"{where}.tool_calls", len(found))
            open_calls = [(call["id"], call["function"]["name"]) for call in made["tool_calls"]]
        if role == "tool":
            made["tool_call_id"] = _result_id(message, open_calls)
        found.append(made)
    return found


def _text(message: Mapping[str, Any], where: str) -> str:
    content = message.get("content")
    if content is None:
        return ""
    if not isinstance(content, str):
        raise InvalidRequest(f"{where}.content is {short_repr(content)}; must be a string", f"{where}.content")
    return content


def with_images(text: str, images: Any, where: str) -> str | list[Row]:
    """Return the text. If there are images, return content parts of a message: first the images, then the text."""
    if not images:
        return text
    if not isinstance(images, list) or not all(isinstance(image, str) for image in images):
        raise InvalidRequest(f"{where}.images must be a list of base64 strings", f"{where}.images")
    return [*map(_picture, images), {"type": "text", "text": text}]


def _picture(data: str) -> Row:
    kind = next((kind for begin, kind in _PICTURES.items() if data.startswith(begin)), "image/png")
    return {"type": "image", "source": {"type": "base64", "media_type": kind, "data": data}}


def _calls(calls: Any, where: str, number: int) -> list[Row]:
    if not isinstance(calls, list):
        raise InvalidRequest(f"{where} must be a list of tool calls", where)
    return [_call(call, f"{where}[{index}]", f"call_{number}_{index}") for index, call in enumerate(calls)]


def _call(call: Any, where: str, usual_id: str) -> Row:
    function = call.get("function") if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    arguments = function.get("arguments", {}) if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not isinstance(arguments, Mapping):
        raise InvalidRequest(f"{where} must have a function, with a name, and arguments that are an object", where)
    given = call.get("id")
    return {
        "id": own_id(given) if isinstance(given, str) and given else usual_id,
        "type": "function",
        "function": {"name": name, "arguments": msgspec.json.encode(arguments).decode()},
    }


def _result_id(message: Mapping[str, Any], open_calls: list[tuple[str, str]]) -> str:
    """Return the id of the tool call that a result belongs to, and remove the call from `open_calls`."""
    given = message.get("tool_call_id")
    if isinstance(given, str) and given:
        found = str(own_id(given))
        open_calls[:] = [call for call in open_calls if call[0] != found]
        return found
    name = message.get("tool_name") or message.get("name")
    chosen = next((call for call in open_calls if call[1] == name), open_calls[0] if open_calls else ("call", ""))
    if chosen in open_calls:
        open_calls.remove(chosen)
    return chosen[0]


def to_tools(tools: list[Row] | None) -> list[Row] | None:
    """Return the tools without fields that are null, which Ollama's clients may send."""
    return None if not tools else [_without_nulls(tool) for tool in tools]


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    return value


def to_response_format(form: Any) -> Row | None:
    """Convert `format`, which is "json" or a JSON schema, to OpenAI's `response_format`. Raises `InvalidRequest`."""
    if form is None or form == "":
        return None
    if form == "json":
        return {"type": "json_object"}
    if isinstance(form, dict):
        return {"type": "json_schema", "json_schema": {"name": "format", "schema": form}}
    raise InvalidRequest(f'invalid format: {short_repr(form)}; expected "json" or a valid JSON Schema object', "format")
