"""Reasoning of models that think between tags: told apart from the answer, and kept within a budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bridle.chat.stream_deltas import held_back
from bridle.controllers.thinking import THOUGHT_TAGS
from bridle.errors import TemplateFailure

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from bridle.tokenizer import Tokenizer

#: What stands between the end of the thoughts and the answer.
GAP = "\n\n"


@dataclass(frozen=True, slots=True)
class ThinkTags:
    """The texts around a model's thoughts, and the tokens that spell them. Special tokens show as text only if that is
    asked for."""

    opening: str
    closing: str
    opening_token: int
    closing_token: int
    are_special: bool = False


def tags_of(tokenizer: Tokenizer) -> ThinkTags | None:
    """The tags of a model that thinks: its chat template knows them, and each is one token."""
    for opening, closing in THOUGHT_TAGS:
        first, last = tokenizer.id_of(opening), tokenizer.id_of(closing)
        if closing in tokenizer.template_text and first is not None and last is not None:
            are_special = not tokenizer.special_token_ids.isdisjoint((first, last))
            return ThinkTags(opening, closing, first, last, are_special)
    return None


#: The variables by which chat templates turn thoughts on and off.
_SWITCHES = ("enable_thinking", "thinking")
_PROBE = [{"role": "user", "content": "?"}]


def switched(variables: Mapping[str, Any]) -> bool | None:
    """Whether variables of a template turn thoughts on; None if they do not say."""
    return next((bool(variables[name]) for name in _SWITCHES if variables.get(name) is not None), None)


def thinks_unasked(tokenizer: Tokenizer) -> bool:
    """Whether a model thinks where nobody asks for it. Where its template writes another prompt once thoughts are
    turned on, they are off."""
    on = dict.fromkeys(_SWITCHES, True)
    try:
        plain, thoughtful = (tokenizer.chat_template.render(_PROBE, None, None, each) for each in ({}, on))
    except TemplateFailure:
        return True
    return plain == thoughtful


class ReasoningReader:
    """Splits growing text into thoughts and what follows. Thoughts come first or not at all; with `is_open` their tag
    stood in the prompt. Line breaks at the tags belong to neither part."""

    def __init__(self, tags: ThinkTags, is_open: bool) -> None:
        self._tags = tags
        self._held = ""
        self._state = "open" if is_open else "before"
        self._is_fresh = True  # nothing was told of the part that is being read

    def push(self, text: str, is_last: bool = False) -> tuple[str, str]:
        """New thoughts and new text of the answer."""
        self._held += text
        if self._state == "before":
            self._look_for_opening(is_last)
        thoughts = self._thoughts(is_last) if self._state == "open" else ""
        return thoughts, self._answer() if self._state == "after" else ""

    def _look_for_opening(self, is_last: bool) -> None:
        rest = self._held.lstrip()
        if rest.startswith(self._tags.opening):
            self._state, self._held = "open", rest.removeprefix(self._tags.opening)
        elif is_last or not self._tags.opening.startswith(rest):
            self._state, self._is_fresh = "after", False

    def _thoughts(self, is_last: bool) -> str:
        before, closing, after = self._held.partition(self._tags.closing)
        kept = len(before) if closing or is_last else len(before) - held_back(before, self._tags.closing)
        if not is_last or closing:  # line breaks before the closing tag do not count, and it may come next
            kept = len(before[:kept].rstrip("\n"))
        thoughts, self._held = before[:kept], after if closing else before[kept:]
        if self._is_fresh:
            thoughts = thoughts.lstrip("\n")
        self._is_fresh = self._is_fresh and not thoughts
        if closing:
            self._state, self._is_fresh = "after", True
        return thoughts

    def _answer(self) -> str:
        text, self._held = self._held, ""
        if self._is_fresh:
            text = text.lstrip("\n")
            self._is_fresh = not text
        return text
