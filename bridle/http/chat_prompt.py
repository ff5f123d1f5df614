"""From a chat body to the tokens of its prompt: messages and tools are checked, then rendered by the model's
template."""

from __future__ import annotations

from typing import Any

from bridle.errors import InvalidRequest, UnsupportedFeature
from bridle.http.schemas import ChatBody
from bridle.service import LoadedModel, check_text

_RESERVED = frozenset({"messages", "tools", "template", "chat_template", "tokenize", "add_special_tokens"})
_TEXT_PARTS = ("text", "input_text")


async def chat_prompt(body: ChatBody, model: LoadedModel) -> list[int]:
    """Prompt tokens of a conversation. Raises `InvalidRequest` naming the message at fault."""
    if not model.tokenizer.has_chat_template:
        raise UnsupportedFeature(f"{model.name!r} has no chat template; use /v1/completions", "messages")
    if not body.messages:
        raise InvalidRequest("messages is empty; it must have at least one message", "messages")
    messages = [_message(position, message, model) for position, message in enumerate(body.messages)]
    _check_size(messages, model)
    options = _template_options(body)
    return await model.in_text_thread(_encode, model, messages, body.tools if wants_tools(body) else None, options)


def wants_tools(body: ChatBody) -> bool:
    """Whether tools are offered to the model. Raises `UnsupportedFeature` for a choice that cannot be
    enforced."""
    for position, tool in enumerate(body.tools or ()):
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, dict):
            raise InvalidRequest(f"tools[{position}] must be of type 'function' and have a function", "tools")
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise InvalidRequest(f"tools[{position}].function.name must be a non-empty string", "tools")
    choice = body.tool_choice
    if choice in (None, "auto", "none"):
        return bool(body.tools) and choice != "none"
    raise UnsupportedFeature(f"tool_choice is {str(choice)[:80]!r}; this server takes 'auto' and 'none'", "tool_choice")


def check_response_format(body: ChatBody) -> None:
    """Refuse formats that would be promised and not kept."""
    kind = (body.response_format or {}).get("type", "text")
    if kind != "text":
        raise UnsupportedFeature(f"response_format is {str(kind)[:80]!r}; this server takes 'text'", "response_format")


def _encode(
    model: LoadedModel, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, options: dict[str, Any]
) -> list[int]:
    return list(model.tokenizer.encode_chat(messages, tools=tools, **options))


def _template_options(body: ChatBody) -> dict[str, Any]:
    options = body.chat_template_kwargs or {}
    for name in options:
        if name in _RESERVED or not name.isidentifier():
            raise InvalidRequest(f"chat_template_kwargs may not set {name[:80]!r}", "chat_template_kwargs")
    return options


def _message(position: int, message: dict[str, Any], model: LoadedModel) -> dict[str, Any]:
    """A message as templates expect it: its content one string."""
    param = f"messages.{position}"
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidRequest(f"messages[{position}].role must be a non-empty string", f"{param}.role")
    calls = message.get("tool_calls")
    if calls is not None and not _are_calls(calls):
        raise InvalidRequest(f"messages[{position}].tool_calls must be a list of function calls", f"{param}.tool_calls")
    checked = {name: value for name, value in message.items() if value is not None}
    checked["content"] = _content(message.get("content"), f"messages[{position}].content", model)
    return checked


def _are_calls(calls: Any) -> bool:
    if not isinstance(calls, list):
        return False
    functions = [call.get("function") if isinstance(call, dict) else None for call in calls]
    return all(isinstance(each, dict) and isinstance(each.get("name"), str) for each in functions)


def _content(content: Any, where: str, model: LoadedModel) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"{where} must be a string or a list of parts", "messages")
    return "".join(_part(part, f"{where}[{position}]", model) for position, part in enumerate(content))


def _part(part: Any, where: str, model: LoadedModel) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in _TEXT_PARTS and isinstance(part.get("text"), str):
        return str(part["text"])
    if isinstance(kind, str) and kind not in _TEXT_PARTS:
        raise UnsupportedFeature(f"{where} is of type {kind[:40]!r}; {model.name!r} reads only text", "messages")
    raise InvalidRequest(f"{where} must be an object with type 'text' and a text", "messages")


def _check_size(messages: list[dict[str, Any]], model: LoadedModel) -> None:
    """Refuse what cannot fit before a template works on it."""
    for message in messages:
        check_text(model, message["content"], "messages")
    check_text(model, "".join(message["content"] for message in messages), "messages")
