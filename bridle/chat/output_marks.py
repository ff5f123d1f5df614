"""Marks in the output of a chat: the format of its calls, the tags of its reasoning, its channels, and its end tokens.

Marks of a tokenizer stay cached as long as the tokenizer exists.
"""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

from bridle.chat.chat_format import learn
from bridle.chat.conversation import Conversation
from bridle.chat.reasoning import ThinkTags, switched, tags_of, thinks_unasked
from bridle.chat.tool_choice import ToolChoice
from bridle.chat.tool_parsers.formats import ToolFormat, format_of, shows_special_tokens
from bridle.chat.tool_parsers.harmony import Harmony, harmony_of
from bridle.errors import UnsupportedFeature
from bridle.serving import LoadedModel
from bridle.tokenizer import Tokenizer

_MARKS: WeakKeyDictionary[Tokenizer, tuple[ThinkTags | None, Harmony | None]] = WeakKeyDictionary()
_THINKS: WeakKeyDictionary[Tokenizer, bool] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class OutputMarks:
    """The marks of one chat's output: the format of its calls and the token that begins calls, the tags of its
    reasoning, and the channels that the model writes in. `is_calling` and `is_thinking`: the prompt already ends in
    calls or in reasoning."""

    format: ToolFormat | None
    token: int | None
    tags: ThinkTags | None
    channels: Harmony | None
    is_calling: bool
    is_thinking: bool

    @classmethod
    def of(cls, model: LoadedModel, offer: ToolChoice, prompt: str, is_held: bool) -> OutputMarks:
        """Find the marks of an output that follows `prompt`. Reasoning is separated from the answer only if text that
        may be rolled back is held (`is_held`). Raises `UnsupportedFeature` for a model that cannot call tools."""
        kind = format_of(model.tokenizer) if offer.functions else None
        token = None if kind is None else _call_token(model, kind)
        tags, channels = known_marks(model.tokenizer)
        tags = tags if is_held else None
        is_thinking = tags is not None and prompt.rstrip().endswith(tags.opening)
        return cls(kind, token, tags, channels, token is not None and offer.is_required, is_thinking)

    @property
    def are_special(self) -> bool:
        """Return whether some marks are special tokens, so that special tokens must be visible as text."""
        is_marked = self.channels is not None or (self.format is not None and shows_special_tokens(self.format))
        return is_marked or (self.tags is not None and self.tags.are_special)

    def ends(self, tokenizer: Tokenizer) -> tuple[str, ...]:
        """Return texts that may end an output and are not content, if marks are special: end tokens, with or without
        the mark that follows an answer."""
        ends = tuple(map(tokenizer.token_text, tokenizer.eos_token_ids))
        tail = self.tags.tail if self.tags is not None else ""
        return (*(tail + end for end in ends), tail, *ends) if tail else ends


def _call_token(model: LoadedModel, kind: ToolFormat) -> int | None:
    """Return the token that begins calls; None if the format has no such token."""
    if kind.opening_token is None:
        return None
    token = model.tokenizer.id_of(kind.opening_token)
    if token is None:
        raise UnsupportedFeature(f"{model.name!r} has no token {kind.opening_token}, so it cannot call tools", "tools")
    return token


async def learn_marks(model: LoadedModel) -> None:
    """Infer a model's marks and its chat format, unless they were inferred when the model was loaded. The template is
    rendered many times, so this runs outside of the event loop."""
    if model.tokenizer not in _MARKS:
        await model.in_text_thread(_learn, model)


def _learn(model: LoadedModel) -> None:
    known_marks(model.tokenizer)
    if model.chat_format is None:
        learn(model)


def known_marks(tokenizer: Tokenizer) -> tuple[ThinkTags | None, Harmony | None]:
    """Return the tags of a model's reasoning, and the channels that the model writes in; each may be None."""
    if tokenizer not in _MARKS:
        channels = harmony_of(tokenizer)
        _MARKS[tokenizer] = (tags_of(tokenizer) if channels is None else None), channels
    return _MARKS[tokenizer]


def may_open(model: LoadedModel, conversation: Conversation, tags: ThinkTags | None, prompt: str) -> bool:
    """Return whether the output may begin with reasoning: the prompt has not closed reasoning, and the model
    reasons."""
    if tags is None or prompt.rstrip().endswith(tags.closing):
        return False
    return _may_think(model.tokenizer, conversation)


def _may_think(tokenizer: Tokenizer, conversation: Conversation) -> bool:
    """Return whether a model may open reasoning before a constrained answer: if the request turned reasoning on, or the
    model reasons by default. Otherwise the opening tag would only be the most probable token under the mask, and a
    required answer would be read as reasoning."""
    said = switched(conversation.options())
    if said is not None or conversation.template is not None:
        return said is not False
    if tokenizer not in _THINKS:
        _THINKS[tokenizer] = thinks_unasked(tokenizer)
    return _THINKS[tokenizer]
