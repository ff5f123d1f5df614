"""A conversation, whichever API it came through, and the text of its prompt: messages and tools are checked, then
rendered by the model's template. Messages, tools and choices are in OpenAI's shapes. All other APIs convert theirs to
these. This module knows no other wire format."""

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

# Names that mean something to whoever renders the template, in addition to the template's own variables.
_RESERVED = frozenset({"self", "messages", "tools", "template", "add_generation_prompt", "tokenize"})

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages of a chat, and the settings for the model's answer. It may think for `thinking_budget` tokens (None:
    without a limit), and then writes `thinking_budget_message` (None: as the operator says); `is_thinking`
    and `effort` are passed to its template, as are `variables`. `template` is used instead of the model's own. The
    answer continues after `prefill`. Unless one `reads_calls`, tools are for the template alone, in whatever shape it
    expects. `tool_prompt` replaces the operator's setting of that name. `breakpoints` are conversations that begin in
    the same way, each with a number of seconds for which the common beginning is retained."""

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
        """Variables of the chat template: the settings of the model's thinking, under the names that templates use, and
        the client's own settings."""
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
    """The messages to answer, and the beginning of the answer: the last one, if it is to be continued, as
    `continue_final_message` says, with vLLM's `add_generation_prompt` beside it."""
    if not continues:
        if adds_prompt is False:
            raise InvalidRequest(
                "add_generation_prompt is false; continue_final_message must be true then", "add_generation_prompt"
            )
        return messages, ""
    if adds_prompt:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt are true; a message is continued or a new one begun",
            "continue_final_message",
        )
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or not isinstance(last.get("content"), str) or last.get("tool_calls"):
        raise InvalidRequest(
            "continue_final_message is true; the last message must be text of the assistant", "continue_final_message"
        )
    return messages[:-1], last["content"]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """The prompt of a conversation: its text (with marks, see `content_tokens.py`), its tokens, and the images and
    sounds among these. It continues from the KV that a request `continues` has parked."""

    text: str
    tokens: tuple[int, ...]
    sights: MultiModalInputs = NO_SIGHTS
    continues: str = ""


def make_prompt(model: LoadedModel, conversation: Conversation, offer: ToolChoice | None = None) -> ChatPrompt:
    """The prompt of a conversation in which these functions are offered (None: those that it says); slow for long
    ones, and for images. Raises `InvalidRequest` naming the message at fault."""
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
    """The tokens of a prompt. Marks in it keep special tokens in messages text (`content_tokens.py`)."""
    return tuple(encode_prompt(tokenizer, text) if MARK in text else tokenizer.encode(text, False))


def look_of(pictures: MediaReader, tokenizer: Tokenizer, conversation: Conversation) -> Look:
    """Return how media appear in the prompt of a model that reads them. A template that names a kind of files, the
    model's own beside `type`, knows content that is a list of parts."""
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
    """The text of the prompt of a conversation in which these functions are offered (None: those that it says); slow
    for long ones. `look` takes its images. Marks in it protect text that spells special tokens (`content_tokens.py`).
    Raises `InvalidRequest` naming the message at fault."""
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
    """The messages as templates expect them, checked. Messages that no template could render, or no context could hold,
    are refused before rendering."""
    template, said = conversation.template, conversation.messages
    if template is None and not model.tokenizer.chat_template.is_present:
        raise TemplateFailure(f"{model.name!r} has no chat template; send a plain prompt", "messages")
    has_parts = any(isinstance(each, Mapping) and isinstance(each.get("content"), list) for each in said or ())
    try:
        messages = prepare(with_files(said, model.pictures) if has_parts else said, look)
    except UnsupportedFeature as error:
        raise UnsupportedFeature(f"{error}; {reads(model.name, model.modalities)}", error.param) from None
    contents = (message["content"] for message in messages)
    lengths = (len(c) if isinstance(c, str) else sum(len(part.get("text", "")) for part in c) for c in contents)
    check_length(model, sum(lengths), "messages")  # before it is rendered
    return messages
