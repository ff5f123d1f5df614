"""Finds the part of a prompt that later conversations share, which a prompt cache retains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile

from bridle.chat.conversation import Conversation, make_prompt
from bridle.errors import UnsupportedFeature
from bridle.serving import LoadedModel

#: Two texts that have no common byte and occur in no prompt.
_MARKS = ("\ue000", "\U000f0000")


def num_common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the common prefix of two prompts, in tokens."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def shared_prompt(model: LoadedModel, conversation: Conversation) -> tuple[int, ...]:
    """Return the tokens with which every continuation of this conversation begins. If the last message is from a user
    or a tool, that is the whole prompt. Raises `InvalidRequest`; `UnsupportedFeature` for images."""
    last = conversation.messages[-1].get("role") if conversation.messages else None
    ends: list[Conversation] = [conversation]
    if last not in ("user", "tool"):
        ends = [
            replace(conversation, messages=[*conversation.messages, {"role": "user", "content": mark}])
            for mark in _MARKS
        ]
    made = [make_prompt(model, each) for each in ends]
    if any(each.sights.runs for each in made):
        raise UnsupportedFeature("messages: got images; a cache holds text. Send them with each request", "messages")
    return made[0].tokens[: num_common(made[0].tokens, made[-1].tokens)]
