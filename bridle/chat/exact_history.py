"""Continues a conversation from the exact tokens that the model wrote, where its template would write them differently.

After a tool call the client sends the answer back as text and calls. A template renders those in its own way: other
spaces, keys in another order, reasoning left out. Then the KV of the model's own tokens cannot be reused. So answers
with calls are remembered, and in the next prompt the model's own tokens replace the template's rendering. That requires
that the client sends back exactly what it received, reasoning included. The template must also write the same text
before the answer, and end it as the model did. In any doubt the prompt is the template's.
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

#: How many answers of a conversation are looked at, the latest first; each costs a rendering.
_MAX_TRIES = 3
#: What a message of the assistant may say in addition to what is compared.
_COMPARED = frozenset({"role", "content", "tool_calls", "name", *THOUGHT_KEYS})


def keep_answers(
    model: LoadedModel, request: Request, rendered: str, ended: Iterable[tuple[CompletionOutput, ChatMessage]]
) -> None:
    """Remember the answers of a finished request whose KV is parked. Only answers that call tools and ended by
    themselves are remembered; if there is none, the KV is released. `rendered` is the text of the prompt, empty if the
    template did not write all of it."""
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
    """Return the prompt `made` of a conversation with the model's own tokens in place of the template's rendering of
    earlier answers, where both have the same content."""
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
    """Return whether a message equals the answer that its client received."""
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
    """Arguments as they compare: values, in whatever order and with whatever spaces they were written."""
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
    """The prompt with the tokens of message `number` as the model wrote them; None where the template's text around it
    is another one."""
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
    # An end of turn is a special token, at which tokenizers split: what follows it has tokens of its own.
    rest = tuple(encode_prompt(model.tokenizer, written[end:] + text[len(before) :]))
    if made.tokens[len(made.tokens) - len(rest) :] != rest:
        return None
    return (*answer.prompt, *answer.tokens, *rest)


def _end_of_turn(model: LoadedModel, written: str) -> int | None:
    """Return the position in an assistant's turn of the token that ends it, or None if more than white space
    follows."""
    ends = filter(None, map(model.tokenizer.token_text, model.tokenizer.eos_token_ids))
    found = max(((written.rfind(end), len(end)) for end in ends), default=(-1, 0))
    return None if found[0] < 0 or written[sum(found) :].strip() else found[0]


def _says(written: str, answer: CachedToolCall) -> bool:
    """Return whether the template keeps everything that the model wrote and adds no call id."""
    told = answer.message
    if told.thoughts.strip() not in written or told.content.strip() not in written:
        return False
    return all(call.id in answer.text or call.id not in written for call in told.calls)
