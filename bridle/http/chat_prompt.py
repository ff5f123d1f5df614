"""From a chat body to the tokens of its prompt: messages and tools are checked, then rendered by the model's
template."""

from __future__ import annotations

from typing import Any

from bridle.errors import InvalidRequest, UnsupportedFeature
from bridle.http.schemas import ChatBody
from bridle.service import LoadedModel, check_length

# Names that mean something to whoever renders the template, beside the template's own variables.
_RESERVED = frozenset({"self", "messages", "tools", "template", "add_generation_prompt", "tokenize"})
_TEXT_PARTS = ("text", "input_text", "output_text")


async def chat_prompt(body: ChatBody, model: LoadedModel) -> list[int]:
    """Prompt tokens of a conversation. Raises `InvalidRequest` naming the message at fault."""
    text = await render_prompt(body, model)
    return await model.in_text_thread(model.tokenizer.encode, text, False)


async def render_prompt(body: ChatBody, model: LoadedModel) -> str:
    """The text of the prompt of a conversation. Raises `InvalidRequest` naming the message at fault."""
    if not model.tokenizer.has_chat_template:
        raise UnsupportedFeature(f"{model.name!r} has no chat template; use /v1/completions", "messages")
    if not body.messages:
        raise InvalidRequest("messages is empty; it must have at least one message", "messages")
    num_chars = sum(_check_message(position, each, model) for position, each in enumerate(body.messages))
    check_length(model, num_chars, "messages")
    options = _template_options(body)
    tools = body.tools if wants_tools(body) else None
    return await model.in_text_thread(_render, model, body.messages, tools, options)


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


def _render(
    model: LoadedModel, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, options: dict[str, Any]
) -> str:
    return model.tokenizer.render_chat(messages, tools=tools, **options)


def _template_options(body: ChatBody) -> dict[str, Any]:
    options = body.chat_template_kwargs or {}
    for name in options:
        if name in _RESERVED or not name.isidentifier():
            raise InvalidRequest(f"chat_template_kwargs may not set {name[:80]!r}", "chat_template_kwargs")
    return options


def _check_message(position: int, message: dict[str, Any], model: LoadedModel) -> int:
    """The number of characters of a message's texts. What the templates' side checks anyway is not checked here."""
    calls = message.get("tool_calls")
    if calls is not None and not _are_calls(calls):
        where = f"messages[{position}].tool_calls"
        raise InvalidRequest(f"{where} must be a list of function calls", where)
    content = message.get("content")
    if isinstance(content, str):
        return len(content)
    parts = content if isinstance(content, list) else []
    return sum(_check_part(part, f"messages[{position}].content[{i}]", model) for i, part in enumerate(parts))


def _are_calls(calls: Any) -> bool:
    if not isinstance(calls, list):
        return False
    functions = [call.get("function") if isinstance(call, dict) else None for call in calls]
    return all(isinstance(each, dict) and isinstance(each.get("name"), str) for each in functions)


def _check_part(part: Any, where: str, model: LoadedModel) -> int:
    """The length of a text part. Raises `UnsupportedFeature` for images, sounds and files."""
    kind = part.get("type", "text") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind not in _TEXT_PARTS:
        raise UnsupportedFeature(f"{where} is of type {kind[:40]!r}; {model.name!r} reads only text", where)
    text = part.get("text") if isinstance(part, dict) else part
    return len(text) if isinstance(text, str) else 0
