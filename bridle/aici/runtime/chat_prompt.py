"""Renders a guest's conversation with the model's chat template. Input and output are JSON, for modules and
components."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

from bridle.aici.runtime.wasm import GuestFault
from bridle.errors import BridleError
from bridle.tokenizer.chat_template import prepare
from bridle.tokenizer.chat_template_quirks import fit_template
from bridle.tokenizer.content_tokens import Content, encode_prompt, protect, with_marks, without_marks

if TYPE_CHECKING:
    from bridle.aici.runtime.instance import Instance
    from bridle.tokenizer import Tokenizer


class _Conversation(msgspec.Struct):
    """The JSON of a conversation that a guest wants to render."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    variables: dict[str, Any] = {}


_decoder = msgspec.json.Decoder(_Conversation)


def prepare_chats(tokenizer: Tokenizer | None) -> None:
    """Render an example conversation, so that the chat template is loaded before a guest's time limit applies."""
    if tokenizer is not None and tokenizer.chat_template.is_present:
        with suppress(BridleError):  # a template that is not valid: each conversation says so
            fit_template(tokenizer, [{"role": "assistant", "content": "", "tool_calls": []}], None)


def render_chat(guest: Instance, conversation: bytes) -> bytes:
    """Return text and tokens of a conversation, or an error, as JSON. The conversation's length counts towards the
    limit of tokenized text."""
    limits = guest.surroundings.limits
    guest.spent_tokenizing += len(conversation)
    if len(conversation) > limits.max_tokenize or guest.spent_tokenizing > limits.max_tokenize_total:
        raise GuestFault(
            f"this callback tokenizes {guest.spent_tokenizing} bytes, {len(conversation)} of them in this "
            f"conversation; at most {limits.max_tokenize_total} in a callback and {limits.max_tokenize} in one call"
        )
    tokenizer = guest.surroundings.vocabulary.tokenizer
    try:
        if tokenizer is None or not tokenizer.chat_template.is_present:
            return msgspec.json.encode({"error": "chat: the model has no chat template; write a plain text"})
        return _rendered(tokenizer, _decoder.decode(conversation))
    except (BridleError, msgspec.MsgspecError, RecursionError) as error:
        return msgspec.json.encode({"error": f"chat: {without_marks(str(error))}"})


def _rendered(tokenizer: Tokenizer, wanted: _Conversation) -> bytes:
    prepared = prepare(wanted.messages, template=tokenizer.chat_template.text)
    messages, tools = fit_template(tokenizer, prepared, wanted.tools)
    said = protect(tokenizer, Content(messages, tools, wanted.variables))
    template = tokenizer.chat_template
    text = template.render(said.messages, said.tools, None, said.variables, wanted.add_generation_prompt)
    marked = with_marks(tokenizer, text)
    return msgspec.json.encode({"text": without_marks(marked), "tokens": encode_prompt(tokenizer, marked)})
