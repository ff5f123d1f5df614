"""Reasoning of models that write it between tags: separates it from the answer, and limits it by a budget."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from bridle.chat.stream_deltas import held_back
from bridle.chat.tool_parsers.presets import TAGS_FROM_TEMPLATE, reasoning_tags
from bridle.controllers.thinking import THOUGHT_TAGS
from bridle.errors import InvalidRequest, TemplateFailure, UnsupportedModel
from bridle.tokenizer import Tokenizer
from bridle.tokenizer.chat_template import ChatTemplate
from bridle.tokenizer.template_probes import (
    CONTENT,
    KEYS,
    NAMES,
    SAMPLES,
    THOUGHT,
    TOOLS,
    ProbeCall,
    Prober,
    renderer_of,
)

#: The text between the end of reasoning and the answer.
GAP = "\n\n"


@dataclass(frozen=True, slots=True)
class ThinkTags:
    """The texts around a model's reasoning, and the tokens that spell them. If `are_special`, the tags are in the
    output's text only if special tokens are not skipped. `lead` and `tail` are marks that the model writes before and
    after the answer."""

    opening: str
    closing: str
    opening_token: int
    closing_token: int
    are_special: bool = False
    lead: str = ""
    tail: str = ""


def tags_of(tokenizer: Tokenizer) -> ThinkTags | None:
    """Return the tags of a reasoning model: its chat template writes or contains both tags, and each tag is one
    token."""
    name = tokenizer.chat_settings.reasoning_format
    chosen = None if name in TAGS_FROM_TEMPLATE else reasoning_tags(name)
    if name not in TAGS_FROM_TEMPLATE and chosen is None:
        return None
    for opening, closing, lead, tail in _shown(tokenizer) if chosen is None else [chosen]:
        first, last = tokenizer.id_of(_TAG_OF_CHANNEL.sub(r"\1", opening)), tokenizer.id_of(closing)
        if first is not None and last is not None:
            are_special = not tokenizer.special_token_ids.isdisjoint((first, last))
            return ThinkTags(opening, closing, first, last, are_special, lead, tail)
    if chosen is not None:
        message = (
            f"reasoning_format is {name!r}, but the model has no tokens {chosen[0]} and {chosen[1]}; use auto or none"
        )
        raise InvalidRequest(message, "reasoning_format")
    return None


def _shown(tokenizer: Tokenizer) -> list[tuple[str, str, str, str]]:
    """Return the tags that the chat template writes, then the known tags that the template contains."""
    shown = infer_thoughts(tokenizer.chat_template)
    known = [(*pair, "", "") for pair in THOUGHT_TAGS if pair[1] in tokenizer.template_text]
    return [shown, *known] if shown else known


#: Patterns of a tag that opens reasoning, and of any tag.
_OPENING = re.compile(
    r"(?:[<\[][^<>\[\]\n]*(?:think|reason)[^<>\[\]\n]*[>\]]|<[^<>\n]*channel[^<>\n]*>\w*th[io]\w+)\s*\Z", re.IGNORECASE
)
#: A channel is opened by a token, and the text after the token is its name.
_TAG_OF_CHANNEL = re.compile(r"\A(<[^<>\n]*channel[^<>\n]*>)\w+\Z")
_ANSWER = re.compile(r"(<[^<>\s]*response[^<>\s]*>)\s*\Z", re.IGNORECASE)
_TAG = re.compile(r"[<\[][^<>\[\]\n]+[>\]]")


def infer_thoughts(template: ChatTemplate) -> tuple[str, str, str, str] | None:
    """Return the two tags that a chat template writes around reasoning, and its marks before and after the answer
    (empty if it has none). Return None if the template writes no reasoning, or writes it without tags."""
    for options, has_call in product(({}, dict.fromkeys(SWITCHES, True)), (False, True)):
        text = _thoughtful(template, options, has_call)
        before, thought, rest = text.partition(THOUGHT)
        between, content, after = rest.partition(NAMES[0] if has_call else CONTENT)
        opening, closing = _OPENING.search(before), _TAG.match(between.strip())
        if thought and content and opening is not None and closing is not None:
            lead = between.strip()[closing.end() :].strip()
            if has_call:
                before, _, after = _thoughtful(template, options, False).partition(CONTENT)
                lead = found[1] if (found := _ANSWER.search(before)) else ""
            tail = _TAG.match(after.strip()) if lead else None
            return opening[0].strip(), closing[0], lead, "" if tail is None else tail[0]
    return None


def _thoughtful(template: ChatTemplate, options: dict[str, bool], has_call: bool) -> str:
    """Return a turn with reasoning, and an answer or a call, as a template renders it; empty if rendering fails. Some
    templates drop the reasoning of answers, so a turn with a call is tried, too."""
    message = {"role": "assistant", "content": CONTENT, "reasoning_content": THOUGHT, "reasoning": THOUGHT}
    if has_call:
        message |= Prober(renderer_of(template)).message([ProbeCall(0, {KEYS[0]: SAMPLES["string"]})])
    try:
        tools = TOOLS if has_call else None
        return template.render([*_PROBE, message], tools, None, options, add_generation_prompt=False)
    except (InvalidRequest, UnsupportedModel):
        return ""


#: The variables by which chat templates turn reasoning on and off.
SWITCHES = ("enable_thinking", "thinking")
_PROBE = [{"role": "user", "content": "?"}]


def switched(variables: Mapping[str, Any]) -> bool | None:
    """Return whether template variables turn reasoning on; None if they do not set it."""
    return next((bool(variables[name]) for name in SWITCHES if variables.get(name) is not None), None)


def thinks_unasked(tokenizer: Tokenizer) -> bool:
    """Return whether a model reasons by default. If its template renders another prompt with reasoning turned on,
    reasoning is off by default."""
    on = dict.fromkeys(SWITCHES, True)
    try:
        plain, thoughtful = (tokenizer.chat_template.render(_PROBE, None, None, each) for each in ({}, on))
    except TemplateFailure:
        return True
    return plain == thoughtful


class ReasoningReader:
    """Splits growing text into reasoning and the answer. Reasoning comes first or not at all; with `is_open`, its
    opening tag is in the prompt. Line breaks next to the tags belong to neither part."""

    def __init__(self, tags: ThinkTags, is_open: bool) -> None:
        self._tags = tags
        self._held = ""
        self._state = "open" if is_open else "before"
        self._is_fresh = True  # no text of the current part was returned yet

    @property
    def is_over(self) -> bool:
        """Return whether all further text belongs to the answer, unchanged."""
        return self._state == "after" and not self._is_fresh

    def push(self, text: str, is_last: bool = False) -> tuple[str, str]:
        """Return the new text of the reasoning, and the new text of the answer."""
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
        if not is_last or closing:  # line breaks before the closing tag do not count, and the tag may come next
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
            text = text.lstrip("\n").removeprefix(self._tags.lead)
            self._is_fresh = not text
        return text
