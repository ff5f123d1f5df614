"""Continues a conversation from the exact tokens that the model wrote, if the chat template would write them
differently.

After a tool call, the client sends the answer back as text and calls. A template renders these in its own way: with
other spaces, with keys in another order, or without reasoning. Then the KV of the model's own tokens could not be
reused. So answers with calls are stored, and in the next prompt the model's exact tokens replace the template's
rendering. For this, the client must send back exactly what it received, reasoning included. The template must also
write the same text before the answer, and end the answer as the model did. In all other cases, the template's rendering
is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import msgspec

from bridle.chat.conversation import ChatPrompt, Conversation, prompt_text
from bridle.chat.stream_deltas import own_id
from bridle.chat.tool_choice import ToolChoice
from bridle.engine.request import Request
from bridle.outputs import BY_ITSELF, ChatMessage, CompletionOutput
from bridle.serving import LoadedModel
from bridle.serving.outputs.tool_call_token_cache import CachedToolCall, seal_of
from bridle.tokenizer.chat_template_quirks import THOUGHT_KEYS, thoughts_of
from bridle.tokenizer.content_tokens import encode_prompt, without_marks

#: The maximum number of answers in a conversation that are compared, latest first; each comparison renders the
#: template.
_MAX_TRIES = 3
#: Message fields that are compared; a message with any other field is rendered by the template.
_COMPARED = frozenset({"role", "content", "tool_calls", "name", *THOUGHT_KEYS})


def keep_answers(
    model: LoadedModel, request: Request, rendered: str, ended: Iterable[tuple[CompletionOutput, ChatMessage]]
) -> None:
    """Store the answers of a finished request whose KV is retained. Only answers that call tools and ended without a
    limit are stored; if there are none, the KV is released. `rendered` is the prompt's text, or empty if the template
    did not write all of the prompt."""
    calling = [(output, found) for output, found in ended if found.calls and output.finish_reason in BY_ITSELF]
    if not calling:
        model.client.release_retained_kv(request.id)
    for output, found in calling:
        if rendered and not isinstance(output.stop_reason, str):
            tokens = output.token_ids
            if tokens and tokens[-1] in model.tokenizer.eos_token_ids:
                tokens = tokens[:-1]
            model.answers.keep(request.tenant, request.id, rendered, request.prompt, tokens, output.text, found)


def recalled(
    model: LoadedModel, user: str, conversation: Conversation, offer: ToolChoice, made: ChatPrompt
) -> ChatPrompt:
    """Return the prompt `made` with the model's exact tokens instead of the template's rendering of earlier answers, if
    the messages equal those answers."""
    if made.sights.runs or conversation.template is not None:
        return made
    num_tries = 0
    for number in range(len(conversation.messages) - 1, -1, -1):
        message = conversation.messages[number]
        answer = _known(model, user, message)
        if answer is None:
            continue
        made = replace(made, continues=made.continues or answer.request_id)
        tokens = _spliced(model, conversation, offer, made, number, answer) if _is_told(message, answer) else None
        num_tries += 1
        if tokens is not None:
            return replace(made, tokens=tokens)
        if num_tries == _MAX_TRIES:
            break
    return made


def _known(model: LoadedModel, user: str, message: Mapping[str, Any]) -> CachedToolCall | None:
    calls = message.get("tool_calls") if message.get("role") == "assistant" else None
    first = calls[0] if isinstance(calls, list) and calls else None
    return model.answers.find(user, own_id(first.get("id"))) if isinstance(first, Mapping) else None


def _is_told(message: Mapping[str, Any], answer: CachedToolCall) -> bool:
    """Return whether a message equals the answer that the client received."""
    told, calls = answer.message, message["tool_calls"]
    content, thoughts = message.get("content") or "", thoughts_of(message)
    if any(value for name, value in message.items() if name not in _COMPARED):
        return False
    if not isinstance(content, str) or len(calls) != len(told.calls):
        return False
    if content.strip() != told.content.strip() or thoughts.strip() != told.thoughts.strip():
        return False
    return all(
        _form(call) == (each.id, each.name, _value(each.arguments))
        for call, each in zip(calls, told.calls, strict=True)
    )


def _form(call: Any) -> tuple[object, object, object]:
    function = call.get("function", call) if isinstance(call, Mapping) else {}
    if not isinstance(function, Mapping):
        return None, None, None
    return own_id(call.get("id")), function.get("name"), _value(function.get("arguments"))


def _value(arguments: object) -> object:
    """Return decoded arguments for a comparison, in which spaces and the order of keys do not matter."""
    try:
        return msgspec.json.decode(arguments) if isinstance(arguments, str) else arguments
    except (msgspec.DecodeError, RecursionError):
        return arguments


def _spliced(
    model: LoadedModel,
    conversation: Conversation,
    offer: ToolChoice,
    made: ChatPrompt,
    number: int,
    answer: CachedToolCall,
) -> tuple[int, ...] | None:
    """Return the prompt with the model's exact tokens for message `number`; None if the template's text around the
    message differs."""
    text = made.text
    if seal_of(text[: answer.prompt_chars]) != answer.seal:
        return None
    upto = replace(conversation, messages=conversation.messages[: number + 1], prefill="")
    before = prompt_text(model, upto, offer, add_generation_prompt=False)
    written = before[answer.prompt_chars :]
    if not text.startswith(before) or len(before) <= answer.prompt_chars:
        return None
    end = _end_of_turn(model, written)
    if end is None or not _says(without_marks(written[:end]), answer):
        return None
    # The end of a turn is a special token, at which tokenizers split, so the text after it is encoded separately.
    rest = tuple(encode_prompt(model.tokenizer, written[end:] + text[len(before) :]))
    if made.tokens[len(made.tokens) - len(rest) :] != rest:
        return None
    return (*answer.prompt, *answer.tokens, *rest)


def _end_of_turn(model: LoadedModel, written: str) -> int | None:
    """Return the position of the end-of-turn token in an assistant's turn; None if more than white space follows the
    token."""
    ends = filter(None, map(model.tokenizer.token_text, model.tokenizer.eos_token_ids))
    found = max(((written.rfind(end), len(end)) for end in ends), default=(-1, 0))
    return None if found[0] < 0 or written[sum(found) :].strip() else found[0]


def _says(written: str, answer: CachedToolCall) -> bool:
    """Return whether the template keeps all text of the answer and adds no call ids."""
    told = answer.message
    if told.thoughts.strip() not in written or told.content.strip() not in written:
        return False
    return all(call.id in answer.text or call.id not in written for call in told.calls)
