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
from bridle.text.chat_template import Prepared, prepare

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

    def offer(self) -> Offer:
        """Which functions the model may call."""
        if not self.reads_calls or (self.tools is None and self.tool_choice is None):
            return Offer()
        return offer_of(self.tools, self.tool_choice, self.parallel_tool_calls)

    def options(self) -> dict[str, Any]:
        """Variables of the chat template: what is asked of the model's thinking, under the names that templates use,
        and what the client sets itself."""
        found: dict[str, Any] = {}
        if self.thinking_budget is not None and self.thinking_budget < 0:
            raise InvalidRequest(f"thinking_budget is {self.thinking_budget}; must be at least 0", "thinking_budget")
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
    messages = _messages_of(model, conversation)
    given = conversation.tools if offer.functions or not conversation.reads_calls else None
    template, variables = conversation.template, conversation.options()
    return model.tokenizer.chat_template.render(messages, given, template, variables) + conversation.prefill


def _messages_of(model: LoadedModel, conversation: Conversation) -> Prepared:
    """The messages as templates expect them, checked: what no template could render, or no context hold, is refused
    before anything is rendered."""
    if conversation.template is None and not model.tokenizer.chat_template.is_present:
        raise TemplateFailure(f"{model.name!r} has no chat template; send a plain prompt", "messages")
    try:
        messages = prepare(conversation.messages)
    except UnsupportedFeature as error:
        raise UnsupportedFeature(f"{error}; {model.name!r} reads only text", error.param) from None
    check_length(model, sum(len(message["content"]) for message in messages), "messages")
    return messages
