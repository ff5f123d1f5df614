"""Conversations in the form that the model knows, by its chat template. Beyond AICI."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from wit_world.imports import host

from pyaici.results import MidProcessResult
from pyaici.sequence import Label, get_prompt_len, get_tokens
from pyaici.steps import NextToken, log
from pyaici.tokens import tokens_repr

Messages = str | Sequence[Mapping[str, Any]]


def template(
    messages: Messages,
    tools: Sequence[Mapping[str, Any]] | None = None,
    *,
    add_generation_prompt: bool = True,
    **variables: Any,
) -> str:
    """The text of a conversation (a text alone is the user's), up to where the answer begins. `variables` are further
    ones of the template. Raises `ValueError` where the template refuses it."""
    return str(_rendered(messages, tools, add_generation_prompt, variables)["text"])


async def chat(
    messages: Messages,
    tools: Sequence[Mapping[str, Any]] | None = None,
    *,
    following: Label | None = None,
    add_generation_prompt: bool = True,
    **variables: Any,
) -> None:
    """Append a conversation, as `template` writes it; special tokens that its messages spell stay text. With
    `following` it takes the place of all that comes after that label: what they have in common stays."""
    made = _rendered(messages, tools, add_generation_prompt, variables)
    await _Chat(made["tokens"], following)


class _Chat(NextToken):
    """Appends tokens, or lets them take the place of others."""

    def __init__(self, tokens: list[int], following: Label | None) -> None:
        super().__init__()
        self.tokens, self.following = tokens, following

    def is_fixed(self) -> bool:
        return True

    def mid_process(self) -> MidProcessResult:
        start = self._start()
        before = get_tokens()[start:]
        pairs = enumerate(zip(before, self.tokens, strict=False))
        common = next((place for place, (old, new) in pairs if old != new), min(len(before), len(self.tokens)))
        log(1, "CHAT", tokens_repr(self.tokens[common:]))
        return MidProcessResult.splice(len(before) - common, self.tokens[common:])

    def _start(self) -> int:
        """Where the conversation begins. A prompt that is only the start token is part of it."""
        tokens = get_tokens()
        start = len(tokens) if self.following is None else self.following.ptr
        return 0 if start == get_prompt_len() == 1 and tokens[:1] == self.tokens[:1] else start


def _rendered(messages: Messages, tools: Any, adds_prompt: bool, variables: Mapping[str, Any]) -> dict[str, Any]:
    said = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
    wanted = {"messages": said, "tools": tools, "add_generation_prompt": adds_prompt, "variables": dict(variables)}
    found: dict[str, Any] = json.loads(host.render_chat(json.dumps(wanted)))
    if "error" in found:
        raise ValueError(found["error"])
    return found
