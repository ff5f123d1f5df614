"""Quirks of chat templates: converts messages to the roles and parts that a template accepts.

Templates differ. Some templates accept one system message or none. Some refuse two messages of the same role in a row.
Templates also have different names for the reasoning of earlier answers. A template is rendered with probes once.
Conversations are changed only if the template would refuse or drop a message, by these rules:

1. The role `developer` becomes `system` if the template does not write it.
2. If only the first system message counts, all instructions become one message, joined by blank lines. If no system
   message counts, the instructions are written at the beginning of the first user message.
3. If roles must alternate, neighbours of the same role are joined by a blank line. A user message directly after a tool
   result is added to that result.
4. Media in a tool result become a user message after the result, if the template writes only the text of results.
5. Reasoning of earlier answers has the name that the template reads. Reasoning is left out of messages with content and
   calls if the template refuses the combination.

Tools, calls and answers that a template leaves out are described in the messages (`tool_prompt.py`), or the tools are
refused. Chats of all APIs and of scripts follow these rules.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary

from bridle.errors import InvalidRequest, UnsupportedFeature, UnsupportedModel
from bridle.tokenizer import template_probes as probes
from bridle.tokenizer.chat_settings import ToolPrompt
from bridle.tokenizer.tool_prompt import described, support_of

if TYPE_CHECKING:
    from bridle.tokenizer import Tokenizer
    from bridle.tokenizer.chat_template import ChatTemplate, Prepared

Message = dict[str, Any]
Messages = list[Message]
Tools = Sequence[Mapping[str, Any]]

#: The field names that clients and templates use for the reasoning of a message.
THOUGHT_KEYS = ("reasoning_content", "reasoning", "thinking")
_FIRST, _SECOND = "zsystema", "zsystemb"
_INSTRUCTIONS = ("system", "developer")


@dataclass(frozen=True, slots=True)
class RoleRules:
    """The roles and parts that a template accepts. `system` says which system messages the template writes. A template
    `needs_user` if it refuses or drops instructions without a user message. `is_text` and `is_null` concern calls:
    arguments as JSON text, and null content in a message with calls."""

    has_developer: bool = False
    system: Literal["all", "first", "none"] = "all"
    needs_user: bool = False
    alternates: bool = False
    user_follows_tool: bool = True
    tool_parts: bool = False
    thought_key: str = THOUGHT_KEYS[0]
    thought_excludes_content: bool = False
    is_text: bool = False
    is_null: bool = False


#: The inferred rules of each existing template.
_KNOWN: WeakKeyDictionary[ChatTemplate, RoleRules] = WeakKeyDictionary()


def rules_of(template: ChatTemplate) -> RoleRules:
    """Return the rules of a template, which are inferred once. Slow the first time."""
    if template not in _KNOWN:
        _KNOWN[template] = infer_rules(probes.renderer_of(template))
    return _KNOWN[template]


def thoughts_of(message: Mapping[str, Any]) -> str:
    """Return the reasoning of a message, from whichever field has it."""
    return next((each for key in THOUGHT_KEYS if isinstance(each := message.get(key), str) and each), "")


# -- inference ---------------------------------------------------------------------------------------------------


def infer_rules(render: probes.RenderChat) -> RoleRules:
    """Infer the rules of a template by rendering probes."""
    prober = probes.prober_of(render)
    trial = _Trial(render, prober)
    if not trial.writes([_said("user", probes.USER)], probes.USER):
        return RoleRules(True, tool_parts=True)  # the template accepts none of the probes
    both = [_said("system", _FIRST), _said("system", _SECOND), _said("user", probes.USER)]
    later = [
        _said("user", probes.USER),
        _said("assistant", probes.CONTENT),
        _said("system", _SECOND),
        _said("user", "zmore"),
    ]
    one = [_said("system", _FIRST), _said("user", probes.USER)]
    takes_all = trial.writes(both, _FIRST, _SECOND) and trial.writes([_said("system", _FIRST), *later], _FIRST, _SECOND)
    thought_key = next(filter(trial.knows_thought, THOUGHT_KEYS), THOUGHT_KEYS[0])
    return RoleRules(
        has_developer=trial.writes([_said("developer", _FIRST), _said("user", probes.USER)], _FIRST),
        system="all" if takes_all else "first" if trial.writes(one, _FIRST) else "none",
        needs_user=not trial.writes(one[:1], _FIRST),
        alternates=not trial.writes([_said("user", probes.USER), _said("user", "zmore")], probes.USER, "zmore"),
        user_follows_tool=trial.has_no_calls or trial.writes([*trial.call(), _said("user", "zmore")], "zmore"),
        tool_parts=not trial.has_no_calls and trial.takes_parts(),
        thought_key=thought_key,
        thought_excludes_content=trial.refuses_thought_with_content(thought_key),
        is_text=prober is not None and (prober.is_text or _writes_python(prober)),
        is_null=prober is not None and prober.is_null,
    )


def _writes_python(prober: probes.Prober) -> bool:
    """Return whether the template writes arguments as a Python dictionary, but as JSON if they are given as JSON
    text."""
    arguments = {probes.KEYS[0]: probes.SAMPLES["string"]}
    turns = [replace(prober, is_text=is_text).turn([probes.ProbeCall(0, arguments)]) or "" for is_text in (False, True)]
    return str(arguments) in turns[0] and json.dumps(arguments) in turns[1]


def _said(role: str, content: Any) -> Message:
    return {"role": role, "content": content}


class _Trial:
    """Renders short conversations, with tools if the template writes calls."""

    def __init__(self, render: probes.RenderChat, prober: probes.Prober | None) -> None:
        self._render, self._prober = render, prober
        self.has_no_calls = prober is None

    def text(self, messages: Messages, tools: bool = False) -> str | None:
        """Return the prompt; None if the template refuses the messages."""
        try:
            return self._render(messages, probes.TOOLS if tools else None, messages[-1]["role"] != "assistant")
        except (InvalidRequest, UnsupportedModel):
            return None

    def writes(self, messages: Messages, *words: str) -> bool:
        """Return whether all of `words` are in the prompt."""
        text = self.text(messages, any("tool_calls" in each for each in messages))
        return text is not None and all(word in text for word in words)

    def call(self, result: Any = "zresult", **extra: Any) -> Messages:
        """Return messages with a question, a call and the call's result."""
        assert self._prober is not None
        message = self._prober.message([probes.ProbeCall(0, {probes.KEYS[0]: probes.SAMPLES["string"]})]) | extra
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": result}
        return [_said("user", probes.USER), message, result | {"name": message["tool_calls"][0]["function"]["name"]}]

    def takes_parts(self) -> bool:
        text = self.text(self.call([{"type": "text", "text": "zresult"}, {"type": "image"}]), tools=True)
        return (
            text is not None
            and "zresult" in text
            and "'type'" not in text
            and '"type"' not in text.rpartition(probes.USER)[2]
        )

    def knows_thought(self, key: str) -> bool:
        turn = [_said("user", probes.USER), _said("assistant", probes.CONTENT) | {key: probes.THOUGHT}]
        return self.writes(turn, probes.THOUGHT) or (
            not self.has_no_calls and self.writes(self.call(**{key: probes.THOUGHT}), probes.THOUGHT)
        )

    def refuses_thought_with_content(self, key: str) -> bool:
        if self.has_no_calls or not self.writes(self.call(content=probes.CONTENT)):
            return False
        return not self.writes(self.call(content=probes.CONTENT, **{key: probes.THOUGHT}))


# -- application -------------------------------------------------------------------------------------------------


def fitted(messages: Messages, rules: RoleRules) -> Messages:
    """Return the messages in roles and parts that the template accepts."""
    made = [
        _with_calls(_with_thoughts(each, rules), rules) if each["role"] == "assistant" else each for each in messages
    ]
    if not rules.has_developer:
        made = [each | {"role": "system"} if each["role"] == "developer" else each for each in made]
    if rules.system != "all":
        made = _one_instruction(made, rules)
    if rules.needs_user and made and all(each["role"] in _INSTRUCTIONS for each in made):
        made = [each | {"role": "user"} for each in made]
    if not rules.tool_parts and any(each["role"] == "tool" for each in made):
        made = [part for each in made for part in _without_media(each)]
    return _alternating(made, rules) if rules.alternates or not rules.user_follows_tool else made


def _with_thoughts(message: Message, rules: RoleRules) -> Message:
    if not any(key in message for key in THOUGHT_KEYS):
        return message
    thoughts = thoughts_of(message)
    rest = {key: value for key, value in message.items() if key not in THOUGHT_KEYS}
    is_refused = rules.thought_excludes_content and message.get("content") and message.get("tool_calls")
    return rest if is_refused or not thoughts else rest | {rules.thought_key: thoughts}


def _with_calls(message: Message, rules: RoleRules) -> Message:
    """Return the message with its calls in the format that the template can write."""
    calls = message.get("tool_calls")
    if not calls or not (rules.is_text or rules.is_null):
        return message
    content = None if rules.is_null and not message["content"] else message["content"]
    made = [_with_text(call) for call in calls] if rules.is_text else calls
    return message | {"content": content, "tool_calls": made}


def _with_text(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call with its arguments as JSON text."""
    function = call.get("function", call)
    arguments = function.get("arguments")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    changed = {**function, "arguments": text}
    return {**call, "function": changed} if "function" in call else changed


def _one_instruction(messages: Messages, rules: RoleRules) -> Messages:
    """Return the messages with all text instructions in one place. Instructions with media stay at their positions."""
    found = [each for each in messages if each["role"] in _INSTRUCTIONS and _is_text(each["content"])]
    if not found or (rules.system == "first" and len(found) == 1 and messages[0] is found[0]):
        return messages
    taken = {id(each) for each in found}
    rest = [each for each in messages if id(each) not in taken]
    content = joined(*(each["content"] for each in found))
    user = next((number for number, each in enumerate(rest) if each["role"] == "user"), None)
    if rules.system == "first" or user is None:
        return [found[0] | {"content": content}, *rest]
    rest[user] = rest[user] | {"content": joined(content, rest[user]["content"])}
    return rest


def _without_media(message: Message) -> Messages:
    """Return a tool result as text, and a user message with the result's media if it has any."""
    content = message["content"]
    if message["role"] != "tool" or not isinstance(content, list):
        return [message]
    texts = "\n".join(part["text"] for part in content if "text" in part)
    result = message | {"content": texts}
    return [result] if _is_text(content) else [result, {"role": "user", "content": content_media(content)}]


def content_media(content: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the content parts that are not text."""
    return [dict(part) for part in content if "text" not in part]


def _alternating(messages: Messages, rules: RoleRules) -> Messages:
    groups: list[Messages] = []  # joined at the end, because joining one by one would copy a long text repeatedly
    for message in messages:
        if groups and _joins(groups[-1][0], message, rules):
            groups[-1].append(message)
        else:
            groups.append([message])
    return [_as_one(group) for group in groups]


def _as_one(group: Messages) -> Message:
    return group[0] if len(group) == 1 else group[0] | {"content": joined(*(each["content"] for each in group))}


def _joins(before: Message, message: Message, rules: RoleRules) -> bool:
    pair = before.get("role"), message["role"]
    if pair == ("tool", "user"):
        return not rules.user_follows_tool and (rules.tool_parts or _is_text(message["content"]))
    if not rules.alternates or pair not in (("user", "user"), ("assistant", "assistant")):
        return False
    return not any(key in each for each in (before, message) for key in ("tool_calls", *THOUGHT_KEYS))


def joined(*contents: Any) -> Any:
    """Return the non-empty contents, joined by blank lines."""
    filled = [each for each in contents if each]
    if len(filled) < 2:
        return filled[0] if filled else contents[-1]
    if all(isinstance(each, str) for each in filled):
        return "\n\n".join(filled)
    parts = [[{"type": "text", "text": each}] if isinstance(each, str) else each for each in filled]
    gap = [{"type": "text", "text": "\n\n"}]
    return [part for number, each in enumerate(parts) for part in (*(gap if number else ()), *each)]


def _is_text(content: Any) -> bool:
    return content is None or isinstance(content, str) or all("text" in part for part in content)


def fit_template(
    tokenizer: Tokenizer,
    messages: Prepared,
    tools: Tools | None,
    tool_prompt: ToolPrompt | None = None,
    explains: bool = True,
    describes: bool = True,
) -> tuple[Prepared, Tools | None]:
    """Return prepared messages and tools, changed so that the template writes all of them. `tool_prompt` replaces the
    operator's setting. Without `explains`, tools are listed without a format of calls. Without `describes`, only the
    roles are adapted to the template. Raises `UnsupportedFeature` for tools if tools must be refused. Slow the first
    time for a template."""
    rules = rules_of(tokenizer.chat_template)
    messages = fitted(messages, rules)
    if not describes:
        return messages, tools
    if not tools and not any("tool_calls" in each or each["role"] == "tool" for each in messages):
        return messages, tools
    if tools and (tool_prompt or tokenizer.chat_settings.tool_prompt) == "refuse" and not support_of(tokenizer).tools:
        raise UnsupportedFeature(
            "tools: the model's chat template does not write them; leave tools out, or set tool_prompt to 'describe'",
            "tools",
        )
    messages, tools = described(tokenizer, messages, tools, explains)
    return fitted(messages, rules), tools  # a description may have a role that the template refuses
