"""Conversations of all APIs, and their prompts: messages and tools are validated, then rendered by the model's chat
template. Messages, tools and tool choices have OpenAI's format. The other APIs convert their requests to this format.
This module knows no other wire format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bridle.chat.files import with_files
from bridle.chat.reasoning import SWITCHES
from bridle.chat.tool_choice import ToolChoice, offer_of, shown_tools
from bridle.chat.tool_parsers.formats import is_hermes
from bridle.engine.multimodal.multimodal_inputs import NO_SIGHTS, MultiModalInputs
from bridle.errors import InvalidRequest, TemplateFailure, UnsupportedFeature
from bridle.multimodal import MediaReader
from bridle.multimodal.modalities import reads
from bridle.safe_repr import short_repr
from bridle.serving import LoadedModel, check_length
from bridle.tokenizer import Tokenizer
from bridle.tokenizer.chat_settings import ToolPrompt
from bridle.tokenizer.chat_template import Look, Prepared, prepare
from bridle.tokenizer.chat_template_quirks import fit_template
from bridle.tokenizer.content_tokens import MARK, Content, encode_prompt, protect, with_marks, without_marks

# Names that the renderer itself uses, in addition to the template's variables.
_RESERVED = frozenset({"self", "messages", "tools", "template", "add_generation_prompt", "tokenize"})

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages of a chat, and the settings for the model's answer. The model may reason for `thinking_budget` tokens
    (None: no limit), and then writes `thinking_budget_message` (None: the operator's setting). `is_thinking`, `effort`
    and `variables` are passed to the template. `template` replaces the model's chat template. The answer continues
    after `prefill`. If `reads_calls` is false, tools are only passed to the template, in any format. `tool_prompt`
    replaces the operator's setting of that name. `breakpoints` are conversations with the same beginning, each with the
    seconds for which the common prefix is retained."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None = None
    tool_choice: str | Mapping[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    thinking_budget: int | None = None
    thinking_budget_message: str | None = None
    is_thinking: bool | None = None
    effort: str | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    template: str | None = None
    prefill: str = ""
    reads_calls: bool = True
    tool_prompt: ToolPrompt | None = None
    breakpoints: tuple[tuple[Conversation, float], ...] = ()

    def offer(self) -> ToolChoice:
        """Return the functions that the model may call."""
        if not self.reads_calls or (self.tools is None and self.tool_choice is None):
            return ToolChoice()
        return offer_of(self.tools, self.tool_choice, self.parallel_tool_calls)

    def options(self) -> dict[str, Any]:
        """Return the variables of the chat template: the reasoning settings, under the names that templates use, and
        the client's own variables."""
        found: dict[str, Any] = {}
        if self.thinking_budget is not None and self.thinking_budget < 0:
            raise InvalidRequest(f"thinking_budget is {self.thinking_budget}; must be at least 0", "thinking_budget")
        if self.thinking_budget is None and self.thinking_budget_message is not None:
            given = short_repr(self.thinking_budget_message)
            raise InvalidRequest(
                f"thinking_budget_message: got {given}; it needs thinking_budget. Set thinking_budget too, or "
                "leave the message out",
                "thinking_budget_message",
            )
        if self.thinking_budget is not None:
            found |= {"enable_thinking": bool(self.thinking_budget), "thinking_budget": self.thinking_budget}
        if self.effort is not None:
            found["reasoning_effort"] = self.effort
            found |= {"enable_thinking": False} if self.effort == "none" else {}
        if self.is_thinking is not None:
            found["enable_thinking"] = self.is_thinking
        for name in self.variables:
            if name in _RESERVED or not name.isidentifier():
                raise InvalidRequest(f"chat_template_kwargs may not set {name[:80]!r}", "chat_template_kwargs")
        found |= self.variables
        is_on = next((bool(found[name]) for name in SWITCHES if found.get(name) is not None), None)
        return found if is_on is None else dict.fromkeys(SWITCHES, is_on) | found


def continued(
    messages: Sequence[Message], continues: bool | None, adds_prompt: bool | None
) -> tuple[Sequence[Message], str]:
    """Return the messages to answer, and the beginning of the answer. With `continues` (the field
    `continue_final_message`), the answer continues the last message; `adds_prompt` is vLLM's field
    `add_generation_prompt`."""
    if not continues:
        if adds_prompt is False:
            raise InvalidRequest(
                "add_generation_prompt is false; this needs continue_final_message to be true", "add_generation_prompt"
            )
        return messages, ""
    if adds_prompt:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt are both true; set only one of them",
            "continue_final_message",
        )
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or not isinstance(last.get("content"), str) or last.get("tool_calls"):
        raise InvalidRequest(
            "continue_final_message is true; the last message must be an assistant text", "continue_final_message"
        )
    return messages[:-1], last["content"]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """The prompt of a conversation: its text (with marks, see `content_tokens.py`), its tokens, and the images and
    audio among the tokens. `continues` is the request whose retained KV the prompt continues."""

    text: str
    tokens: tuple[int, ...]
    sights: MultiModalInputs = NO_SIGHTS
    continues: str = ""


def make_prompt(model: LoadedModel, conversation: Conversation, offer: ToolChoice | None = None) -> ChatPrompt:
    """Return the prompt of a conversation, with the functions of `offer` (None: the conversation's functions). Slow for
    long conversations and for images. Raises `InvalidRequest` that names the invalid message."""
    pictures = model.pictures
    if pictures is None:
        text = prompt_text(model, conversation, offer)
        return ChatPrompt(text, _encoded(model.tokenizer, text))
    look = look_of(pictures, model.tokenizer, conversation)
    text = look.placed(prompt_text(model, conversation, offer, look))
    tokens = _encoded(model.tokenizer, text)
    if not look.sources:
        return ChatPrompt(text, tokens)
    return ChatPrompt(text, *pictures.place(tokens, pictures.read_all(look.sources), model.tokenizer))


def _encoded(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """Return the tokens of a prompt. Marks in the prompt protect text that spells special tokens
    (`content_tokens.py`)."""
    return tuple(encode_prompt(tokenizer, text) if MARK in text else tokenizer.encode(text, False))


def look_of(pictures: MediaReader, tokenizer: Tokenizer, conversation: Conversation) -> Look:
    """Return how images and other media are written in the prompt of a multimodal model. A template accepts content as
    a list of parts if it contains the name of a modality; the model's own template must also contain `type`."""
    own, given = tokenizer.chat_template.text, conversation.template
    named = any(modality in (own if given is None else given) for modality in pictures.senses)
    takes_parts = named and (given is not None or "type" in own)
    places = {modality: tokenizer.token_text(sense.placeholder) for modality, sense in pictures.senses.items()}
    written = {modality: sense.written for modality, sense in pictures.senses.items() if sense.written}
    return Look(places, takes_parts, written)


def prompt_text(
    model: LoadedModel,
    conversation: Conversation,
    offer: ToolChoice | None = None,
    look: Look | None = None,
    add_generation_prompt: bool = True,
) -> str:
    """Return the prompt text of a conversation, with the functions of `offer` (None: the conversation's functions).
    Slow for long conversations. `look` collects the images. Marks protect text that spells special tokens
    (`content_tokens.py`). Raises `InvalidRequest` that names the invalid message."""
    offer = conversation.offer() if offer is None else offer
    messages = _messages_of(model, conversation, look)
    given: Sequence[Mapping[str, Any]] | None = None
    if conversation.tools is not None and (offer.functions or not conversation.reads_calls):
        given = shown_tools(conversation.tools)
    if conversation.template is None:
        wanted, reads_calls = conversation.tool_prompt, conversation.reads_calls
        explains = not given or not reads_calls or is_hermes(model.tokenizer)
        messages, given = fit_template(model.tokenizer, messages, given, wanted, explains, reads_calls)
    own = (*look.placeholders.values(), *look.written.values()) if look is not None and look.sources else ()
    said = protect(model.tokenizer, Content(messages, given, conversation.options(), conversation.prefill), own)
    render = model.tokenizer.chat_template.render
    try:
        text = render(said.messages, said.tools, conversation.template, said.variables, add_generation_prompt)
    except InvalidRequest as error:
        error.args = tuple(without_marks(each) if isinstance(each, str) else each for each in error.args)
        raise
    return with_marks(model.tokenizer, text) + said.prefill


def _messages_of(model: LoadedModel, conversation: Conversation, look: Look | None) -> Prepared:
    """Return the messages as templates expect them, validated. Messages that no template could render, or that no
    context could hold, are refused before rendering."""
    template, said = conversation.template, conversation.messages
    if template is None and not model.tokenizer.chat_template.is_present:
        raise TemplateFailure(f"{model.name!r} has no chat template; send a plain prompt", "messages")
    has_parts = any(isinstance(each, Mapping) and isinstance(each.get("content"), list) for each in said or ())
    source = model.tokenizer.chat_template.text if template is None else template
    try:
        messages = prepare(with_files(said, model.pictures) if has_parts else said, look, source)
    except UnsupportedFeature as error:
        raise UnsupportedFeature(f"{error}; {reads(model.name, model.modalities)}", error.param) from None
    contents = (message["content"] for message in messages)
    lengths = (len(c) if isinstance(c, str) else sum(len(part.get("text", "")) for part in c) for c in contents)
    check_length(model, sum(lengths), "messages")  # before the messages are rendered
    return messages
