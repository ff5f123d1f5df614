"""Describes a constraint in the conversation, because a model does not see its constraint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bridle.chat.conversation import Conversation
from bridle.errors import InvalidRequest
from bridle.structured_output.spec import Choice, Constraint, JsonObject, JsonSchema, Regex

#: The maximum length of a description; a longer one would be most of the prompt, and is refused.
MAX_DESCRIPTION_CHARS = 16_384


def describe(constraint: Constraint) -> str:
    """Return a sentence that asks for output in the constraint's format. Raises `InvalidRequest` if the sentence is too
    long."""
    match constraint:
        case JsonSchema():
            text = f"Answer with JSON that fits this schema, and with nothing else:\n{constraint.schema}"
        case JsonObject():
            text = "Answer with a JSON object, and with nothing else."
        case Choice():
            options = ", ".join(json.dumps(option, ensure_ascii=False) for option in constraint.options)
            text = f"Answer with one of these texts, without quotes, and with nothing else: {options}"
        case Regex():
            text = (
                f"Answer with a text that matches this regular expression, and with nothing else: {constraint.pattern}"
            )
        case _:
            form = json.dumps(constraint.to_dict(), ensure_ascii=False)
            text = f"Answer with a text of this form, and with nothing else: {form}"
    if len(text) > MAX_DESCRIPTION_CHARS:
        raise InvalidRequest(
            f"describe_constraint: the description has {len(text)} characters; at most {MAX_DESCRIPTION_CHARS}. "
            "Describe the required output in a message instead.",
            "describe_constraint",
        )
    return text


def with_description(conversation: Conversation, constraint: Constraint | None) -> Conversation:
    """Return the conversation with the description at the end of the last user message. Raises `InvalidRequest` without
    a constraint or without a user message."""
    place = next((i for i, each in reversed([*enumerate(conversation.messages)]) if each.get("role") == "user"), None)
    if constraint is None or place is None:
        lacking = "constraint, such as a response_format" if constraint is None else "user message"
        raise InvalidRequest(
            f"describe_constraint: got true, but the request has no {lacking}. Add one, or leave the field out.",
            "describe_constraint",
        )
    messages = [*conversation.messages]
    messages[place] = _extended(messages[place], describe(constraint))
    return replace(conversation, messages=messages)


def _extended(message: Mapping[str, Any], text: str) -> dict[str, Any]:
    """Return the message with an additional paragraph; its content may be a text or a list of parts."""
    content = message.get("content")
    if isinstance(content, list):
        return {**message, "content": [*content, {"type": "text", "text": text}]}
    return {**message, "content": f"{content}\n\n{text}" if content else text}
