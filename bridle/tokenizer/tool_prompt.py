"""Tools for models whose chat template does not write them: describes tools in the system message.

The description uses the text of Qwen's and Hermes' templates, which many models have seen, and calls are parsed in that
format. If a template writes no calls or no tool results, these become text of the assistant and the user, as in Qwen's
and Hermes' templates. This module renders a template to find out what it writes; it does not parse calls.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from bridle.errors import InvalidRequest, UnsupportedModel

if TYPE_CHECKING:
    from bridle.tokenizer import Tokenizer

Messages = list[dict[str, Any]]
Tools = Sequence[Mapping[str, Any]]

_BEGIN = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>"""
_END = """
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""
#: Words that no template contains.
_TOOL, _CALL, _ANSWER, _SYSTEM = "ztoolname", "zcallname", "ztoolanswer", "zsystemtext"
_PROBED = {"type": "function", "function": {"name": _TOOL, "description": "d", "parameters": {"type": "object"}}}


@dataclass(frozen=True, slots=True)
class TemplateSupport:
    """The parts of a conversation with tools that a chat template writes."""

    tools: bool
    calls: bool
    answers: bool
    system: bool


_KNOWN: WeakKeyDictionary[Tokenizer, TemplateSupport] = WeakKeyDictionary()


def support_of(tokenizer: Tokenizer) -> TemplateSupport:
    """Return the features that the model's template supports."""
    if tokenizer not in _KNOWN:
        _KNOWN[tokenizer] = _find(tokenizer)
    return _KNOWN[tokenizer]


def _find(tokenizer: Tokenizer) -> TemplateSupport:
    user: dict[str, Any] = {"role": "user", "content": "q"}
    call = {"id": "zcallid00", "type": "function", "function": {"name": _CALL, "arguments": {"k": "v"}}}
    called = [user, {"role": "assistant", "content": "", "tool_calls": [call]}]
    answered = [*called, {"role": "tool", "tool_call_id": "zcallid00", "name": _CALL, "content": _ANSWER}]
    tools = _writes(tokenizer, [user], _TOOL, [_PROBED])
    return TemplateSupport(
        tools is not False,
        tools is not False or _writes(tokenizer, called, _CALL) is not False,
        tools is not False or bool(_writes(tokenizer, answered, _ANSWER) and _knows_tool_role(tokenizer)),
        bool(_writes(tokenizer, [{"role": "system", "content": _SYSTEM}, user], _SYSTEM)),
    )


def _writes(tokenizer: Tokenizer, messages: Messages, word: str, tools: Tools | None = None) -> bool | None:
    """Return whether the rendered text has the word; None if the template refuses the messages."""
    try:
        return word in tokenizer.chat_template.render(messages, tools, None, {})
    except (InvalidRequest, UnsupportedModel):
        return None


def _knows_tool_role(tokenizer: Tokenizer) -> bool:
    """Return whether the template has its own format for tool results."""
    text = tokenizer.chat_template.text
    return "'tool'" in text or '"tool"' in text


def described(
    tokenizer: Tokenizer, messages: Messages, tools: Tools | None, explains: bool = True
) -> tuple[Messages, Tools | None]:
    """Return prepared messages and tools, with text instead of the parts that the template would omit. Without
    `explains`, the tools are listed without a format of calls."""
    has_tools = bool(tools) or any("tool_calls" in each or each["role"] == "tool" for each in messages)
    if not has_tools or (found := support_of(tokenizer)).tools:
        return messages, tools
    made = _with_answers([each if found.calls else _with_calls(each) for each in messages], found)
    return (_with_system(made, _text(tools, explains), found.system) if tools else made), None


def _text(tools: Tools, explains: bool) -> str:
    lines = (json.dumps(dict(tool), ensure_ascii=False) for tool in tools)
    return "\n".join((_BEGIN, *lines)) + (_END if explains else "\n</tools>")


def _with_system(messages: Messages, text: str, has_system: bool) -> Messages:
    """Return the messages with `text` in the system message; without a system message, in the first user message."""
    roles = ("system", "developer") if has_system else ("user",)
    for place, message in enumerate(messages[:1] if has_system else messages):
        if message["role"] in roles:
            old = message["content"]
            parts = (old, text) if has_system else (text, old)
            content = "\n\n".join(filter(None, parts)) if isinstance(old, str) else _among(old, text, has_system)
            return [*messages[:place], {**message, "content": content}, *messages[place + 1 :]]
    return [{"role": roles[0], "content": text}, *messages]


def _among(parts: list[dict[str, Any]], text: str, is_behind: bool) -> list[dict[str, Any]]:
    added = {"type": "text", "text": text}
    return [*parts, added] if is_behind else [added, *parts]


def _with_calls(message: dict[str, Any]) -> dict[str, Any]:
    """Return an assistant message with its calls as text."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    functions = (call.get("function", call) for call in calls)
    told = [{"name": each["name"], "arguments": each.get("arguments", {})} for each in functions]
    texts = [f"<tool_call>\n{json.dumps(each, ensure_ascii=False)}\n</tool_call>" for each in told]
    content = message["content"] if isinstance(message["content"], str) else ""
    kept = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**kept, "content": "\n".join(filter(None, (content, *texts)))}


def _with_answers(messages: Messages, found: TemplateSupport) -> Messages:
    """Return the messages with tool results as text; neighbouring results become one user message."""
    made: Messages = []
    for place, message in enumerate(messages):
        if found.answers or message["role"] != "tool":
            made.append(message)
            continue
        text = f"<tool_response>\n{message['content']}\n</tool_response>"
        if place and messages[place - 1]["role"] == "tool":
            made[-1] = {"role": "user", "content": f"{made[-1]['content']}\n{text}"}
        else:
            made.append({"role": "user", "content": text})
    return made
