"""A conversation, whichever API it came through, and the text of its prompt: messages and tools are checked, then
rendered by the model's template. Messages, tools and choices are in OpenAI's shapes, which all APIs translate theirs
into. Knows no wire format beyond these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bridle.chat.tools.offer import Offer, offer_of
from bridle.errors import InvalidRequest, TemplateFailure, UnsupportedFeature
from bridle.service import LoadedModel, check_length
from bridle.text.messages import TEXT_PARTS

# Names that mean something to whoever renders the template, beside the template's own variables.
_RESERVED = frozenset({"self", "messages", "tools", "template", "add_generation_prompt", "tokenize"})

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Conversation:
    """What was said, and how the model is to answer. It may think for `thinking_budget` tokens (None: for as many as it
    likes); `is_thinking` and `effort` are told to its template, as are `variables`. `template` is used instead of the
    model's own. The answer goes on after `prefill`. Unless one `reads_calls`, tools are for the template alone, in
    whatever shape it expects."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None = None
    tool_choice: str | Mapping[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    thinking_budget: int | None = None
    is_thinking: bool | None = None
    effort: str | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    template: str | None = None
    prefill: str = ""
    reads_calls: bool = True

    def __post_init__(self) -> None:
        if self.thinking_budget is not None and self.thinking_budget < 0:
            raise InvalidRequest(f"thinking_budget is {self.thinking_budget}; must be at least 0", "thinking_budget")

    def offer(self) -> Offer:
        """Which functions the model may call."""
        if not self.reads_calls or (self.tools is None and self.tool_choice is None):
            return Offer()
        return offer_of(self.tools, self.tool_choice, self.parallel_tool_calls)

    def options(self) -> dict[str, Any]:
        """Variables of the chat template: what is asked of the model's thinking, under the names that templates use,
        and what the client sets itself."""
        found: dict[str, Any] = {}
        if self.is_thinking is not None or self.thinking_budget is not None:
            found["enable_thinking"] = bool(self.thinking_budget) if self.is_thinking is None else self.is_thinking
        if self.effort is not None:
            found["reasoning_effort"] = self.effort
        for name in self.variables:
            if name in _RESERVED or not name.isidentifier():
                raise InvalidRequest(f"chat_template_kwargs may not set {name[:80]!r}", "chat_template_kwargs")
        return found | dict(self.variables)


def prompt_text(model: LoadedModel, conversation: Conversation, offer: Offer | None = None) -> str:
    """The text of the prompt of a conversation in which these functions are offered (None: those that it says); slow
    for long ones. Raises `InvalidRequest` naming the message at fault."""
    offer = conversation.offer() if offer is None else offer
    _check_messages(model, conversation)
    given = conversation.tools if offer.functions or not conversation.reads_calls else None
    text = model.tokenizer.render_chat(
        conversation.messages, tools=given, template=conversation.template, **conversation.options()
    )
    return text + conversation.prefill


def _check_messages(model: LoadedModel, conversation: Conversation) -> None:
    """Refuse what no template could render, or no context hold, before it is rendered."""
    if conversation.template is None and not model.tokenizer.has_chat_template:
        raise TemplateFailure(f"{model.name!r} has no chat template; send a plain prompt", "messages")
    if not conversation.messages:
        raise InvalidRequest("messages is empty; it must have at least one message", "messages")
    found = enumerate(conversation.messages)
    check_length(model, sum(_check_message(position, each, model) for position, each in found), "messages")


def _check_message(position: int, message: Any, model: LoadedModel) -> int:
    """The number of characters of a message's texts. What the templates' side checks anyway is not checked here."""
    if not isinstance(message, Mapping):
        return 0
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
