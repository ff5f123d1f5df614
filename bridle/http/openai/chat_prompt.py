"""From a chat body to the text of its prompt: messages and tools are checked, then rendered by the model's
template."""

from __future__ import annotations

from typing import Any

from bridle.chat.tools.offer import offer_of
from bridle.errors import InvalidRequest, TemplateFailure, UnsupportedFeature
from bridle.http.openai.schemas import ChatBody
from bridle.service import LoadedModel, check_length
from bridle.text.messages import TEXT_PARTS

# Names with a meaning for the template's renderer, beside the template's own variables.
_RESERVED = frozenset({"self", "messages", "tools", "template", "add_generation_prompt", "tokenize"})


async def render_prompt(body: ChatBody, model: LoadedModel, has_tools: bool | None = None) -> str:
    """The text of the prompt of a conversation; `has_tools` says whether tools are offered to the model (None: if there
    are any). Raises `InvalidRequest` naming the message at fault."""
    if not model.tokenizer.has_chat_template:
        raise TemplateFailure(f"{model.name!r} has no chat template; use /v1/completions", "messages")
    if not body.messages:
        raise InvalidRequest("messages is empty; it must have at least one message", "messages")
    num_chars = sum(_check_message(position, each, model) for position, each in enumerate(body.messages))
    check_length(model, num_chars, "messages")
    options = _template_options(body)
    if has_tools is None:
        has_tools = bool(offer_of(body.tools, body.tool_choice, body.parallel_tool_calls).functions)
    tools = body.tools if has_tools else None
    return await model.in_text_thread(_render, model, body.messages, tools, options)


def _render(
    model: LoadedModel, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, options: dict[str, Any]
) -> str:
    return model.tokenizer.render_chat(messages, tools=tools, **options)


def _template_options(body: ChatBody) -> dict[str, Any]:
    options = body.template_options
    for name in options:
        if name in _RESERVED or not name.isidentifier():
            raise InvalidRequest(f"chat_template_kwargs may not set {name[:80]!r}", "chat_template_kwargs")
    return options


def _check_message(position: int, message: dict[str, Any], model: LoadedModel) -> int:
    """Check a message; returns the number of characters of its texts. What the template's renderer checks anyway is not
    checked here."""
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
    if isinstance(kind, str) and kind not in TEXT_PARTS:
        raise UnsupportedFeature(f"{where} is of type {kind[:40]!r}; {model.name!r} reads only text", where)
    text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, dict) else part
    return len(text) if isinstance(text, str) else 0
