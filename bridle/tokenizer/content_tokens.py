"""Keeps special tokens that are spelled in messages as text: they do not become special tokens.

Before the template is rendered, a mark is inserted after the first character of each such spelling, so that no special
token matches. The rendered prompt is tokenized as a whole, and the tokens of the marks are removed. Special tokens that
the template writes itself stay special. A conversation without such spellings is not changed.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from bridle.errors import InvalidRequest

if TYPE_CHECKING:
    from bridle.tokenizer import Tokenizer
    from bridle.tokenizer.chat_template import Prepared

#: Two noncharacters of Unicode. Content that contains the mark is protected as well, so that its own marks are not
#: removed.
MARK = "\ufdd0\ufdd1"
#: The mark in the output of templates that escape non-ASCII characters.
_ESCAPED = r"\ufdd0\ufdd1"
_CONTROL = re.compile(r"<[|｜].*[|｜]>", re.DOTALL)
_TAG = re.compile(r"[<\[].*[>\]]", re.DOTALL)


class Spellings:
    """The texts of tokens, which can be found in other texts."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = {text for text in (*texts, MARK, _ESCAPED) if len(text) > 1}
        lengths: dict[str, set[int]] = {}
        for text in self._texts:
            lengths.setdefault(text[:2], set()).add(len(text))
        self._lengths = lengths
        self._heads = re.compile(f"(?=({'|'.join(map(re.escape, sorted(lengths)))}))")

    def protect(self, text: str) -> str:
        """Return the text with a mark in each spelling of a token."""
        places = [head.start() + 1 for head in self._heads.finditer(text) if self._is_at(text, head.start(), head[1])]
        return MARK.join(text[start:end] for start, end in pairwise((0, *places, len(text)))) if places else text

    def _is_at(self, text: str, start: int, head: str) -> bool:
        return any(text[start : start + length] in self._texts for length in self._lengths[head])


@dataclass(frozen=True, slots=True)
class Content:
    """The parts of a conversation, in the form that templates accept."""

    messages: Prepared
    tools: Sequence[Mapping[str, Any]] | None
    variables: Mapping[str, Any] = field(default_factory=dict)
    prefill: str = ""


def protect(tokenizer: Tokenizer, content: Content, own: Collection[str] = ()) -> Content:
    """Return the content with marks in the spellings of tokens. Spellings in `own`, the placeholders of images, get no
    marks."""
    if tokenizer.chat_settings.parse_special_text:
        return content
    texts, of_answers = _spellings_of(tokenizer, own)
    try:
        return Content(
            [_message(message, texts, of_answers) for message in content.messages],
            _protected(content.tools, texts),
            _protected(content.variables, texts),
            of_answers.protect(content.prefill),
        )
    except RecursionError:
        raise InvalidRequest("messages and tools are nested too deeply; flatten them", "messages") from None


def _message(message: dict[str, Any], texts: Spellings, of_answers: Spellings) -> dict[str, Any]:
    """Return a message with marks. An assistant's content keeps the spellings of reasoning tags, because templates
    search for them."""
    changed: dict[str, Any] = _protected(message, texts)
    if message.get("role") == "assistant":
        changed["content"] = _protected(message.get("content"), of_answers)
    return changed


def _protected(value: Any, texts: Spellings) -> Any:
    if isinstance(value, str):
        return texts.protect(value)
    if isinstance(value, Mapping):
        return {_protected(key, texts): _protected(each, texts) for key, each in value.items()}
    return [_protected(each, texts) for each in value] if isinstance(value, (list, tuple)) else value


#: The spellings for all texts and for an assistant's answers, for each existing tokenizer.
_KNOWN: WeakKeyDictionary[Tokenizer, tuple[Spellings, Spellings]] = WeakKeyDictionary()


def _spellings_of(tokenizer: Tokenizer, own: Collection[str]) -> tuple[Spellings, Spellings]:
    if own:
        return _find_spellings(tokenizer, own)
    if tokenizer not in _KNOWN:
        _KNOWN[tokenizer] = _find_spellings(tokenizer, own)
    return _KNOWN[tokenizer]


def _find_spellings(tokenizer: Tokenizer, own: Collection[str]) -> tuple[Spellings, Spellings]:
    """Find the tokens whose spellings are protected: special tokens, and added tokens that look like control tokens.
    Tags in the template are also protected, except in an assistant's text. Other added tokens are words such as
    `<table>`."""
    special = set(map(tokenizer.token_text, tokenizer.special_token_ids))
    added = set(tokenizer.added_tokens)
    of_answers = special | set(filter(_CONTROL.fullmatch, added))
    tags = {text for text in added if _TAG.fullmatch(text) and text in tokenizer.template_text}
    return Spellings((of_answers | tags).difference(own)), Spellings(of_answers.difference(own))


# -- the prompt ------------------------------------------------------------------------------------------------


def with_marks(tokenizer: Tokenizer, rendered: str) -> str:
    """Return a template's output for protected content, with escaped marks restored."""
    if tokenizer.chat_settings.parse_special_text:
        return rendered
    return rendered.replace(_ESCAPED, MARK)


def without_marks(text: str) -> str:
    """Return the text without marks."""
    return text.replace(MARK, "")


def encode_prompt(tokenizer: Tokenizer, text: str, add_special_tokens: bool = False) -> list[int]:
    """Return the tokens of a prompt that was rendered from protected content."""
    tokens = tokenizer.encode(text, add_special_tokens)
    kept = _kept(tokenizer, text, tokens)
    return tokens if kept is None else [tokens[position] for position in kept]


def encode_with_offsets(tokenizer: Tokenizer, text: str) -> list[tuple[int, int, int]]:
    """Return the tokens of a prompt with marks, each with its range of characters in the text without marks."""
    rows = tokenizer.encode_with_offsets(text, add_special_tokens=False)
    kept = _kept(tokenizer, text, [token for token, _, _ in rows])
    if kept is None:
        return rows
    marks = [place.start() for place in re.finditer(MARK, text)]

    def moved(place: int) -> int:
        return place - len(MARK) * bisect_left(marks, place)

    return [(token, moved(start), moved(stop)) for token, start, stop in (rows[position] for position in kept)]


def _kept(tokenizer: Tokenizer, text: str, tokens: list[int]) -> list[int] | None:
    """Return the positions of the tokens that are not marks; None if there are no marks."""
    num_marks = text.count(MARK)
    if not num_marks or tokenizer.chat_settings.parse_special_text:
        return None
    dropped = _tokens_of_marks(list(map(tokenizer.token_bytes, tokens)))
    if dropped is None or len(dropped) != num_marks:
        raise InvalidRequest(
            "messages has the text of a special token, which this tokenizer cannot encode as text; leave it out, or "
            "set parse_special_text",
            "messages",
        )
    positions = {position for each in dropped for position in each}
    return [position for position in range(len(tokens)) if position not in positions]


def _tokens_of_marks(pieces: list[bytes]) -> list[range] | None:
    """Return the positions of the tokens that spell marks; None if a token spells more than a mark."""
    ends, mark = [0, *accumulate(map(len, pieces))], MARK.encode()
    found = []
    for place in re.finditer(re.escape(mark), b"".join(pieces)):
        first, last = bisect_right(ends, place.start()) - 1, bisect_right(ends, place.end()) - 1
        if ends[first] != place.start() or ends[last] != place.end():
            return None
        found.append(range(first, last))
    return found
