"""The finite sets of texts inside a constraint, such as the enums of an object's properties, and the detection of the
position where a set comes next.

Sets are collected from the constraint without their positions. The grammar, not this collection, shows where a set
comes next in the text. A set comes next if the grammar allows all texts of the set, and nothing else until one of them
is complete. References, alternatives and combined keywords of a schema therefore need no special rules. An option ends
before its closing quote, because tokens often join the quote with later text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any

from bridle.structured_output.matcher import Matcher
from bridle.structured_output.spec import Choice, Concat, Constraint, JsonSchema, OneOf
from bridle.structured_output.vocabulary import GrammarVocabulary

#: Maximum number of sets of a constraint, of options of a set, and of bytes of all options of a set.
MAX_SETS = 64
MAX_SET_OPTIONS = 256
MAX_SET_BYTES = 8_192
#: Maximum number of tokens in a mask that may be the beginning of a set.
_MAX_ALLOWED = 4_096
#: Maximum number of successive branchings of the texts of a set.
_MAX_BRANCHINGS = 128
#: Maximum nesting of anyOf and references in one set.
_MAX_DEPTH = 8

_Tokens = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class FiniteSet:
    """A set of texts, of which exactly one comes next. No text of the set is the beginning of another text."""

    texts: tuple[bytes, ...]

    @cached_property
    def prefix(self) -> bytes:
        """Return the bytes with which all texts begin; the grammar forces these bytes."""
        return _common(self.texts)

    @cached_property
    def following(self) -> frozenset[int]:
        """Return the bytes that may come after the common prefix."""
        return frozenset(text[len(self.prefix)] for text in self.texts)


@lru_cache(maxsize=128)
def finite_sets(constraint: Constraint) -> tuple[FiniteSet, ...]:
    """Return the finite sets inside a constraint, without sets that are too large, and up to a maximum number."""
    found: dict[FiniteSet, None] = {}
    for texts in _sets_in(constraint):
        made = _made(texts)
        if made is not None:
            found[made] = None
        if len(found) == MAX_SETS:
            break
    return tuple(found)


def _made(texts: Sequence[str]) -> FiniteSet | None:
    """Return the set of some texts: JSON strings without their closing quote, unless one string would then begin
    another."""
    whole = sorted({text.encode() for text in texts})
    opened = sorted({text[:-1] if text[:1] == text[-1:] == b'"' else text for text in whole})
    fitting = next((each for each in (opened, whole) if not _is_any_begun(each)), None)
    if fitting is None or not 1 < len(fitting) <= MAX_SET_OPTIONS or sum(map(len, fitting)) > MAX_SET_BYTES:
        return None
    return FiniteSet(tuple(fitting))


def _common(texts: Sequence[bytes]) -> bytes:
    """Return the bytes with which all texts begin."""
    first, last = min(texts), max(texts)
    size = next((at for at, (one, other) in enumerate(zip(first, last, strict=False)) if one != other), len(first))
    return first[: min(size, len(last))]


def _is_any_begun(texts: Sequence[bytes]) -> bool:
    """Return whether one of the sorted texts is the beginning of the next one."""
    return any(following.startswith(text) for text, following in pairwise(texts))


def _sets_in(constraint: Constraint) -> Iterator[Sequence[str]]:
    if isinstance(constraint, Choice) and constraint.scored is not False:
        yield constraint.options
    elif isinstance(constraint, (Concat, OneOf)):
        for part in constraint.parts:
            yield from _sets_in(part)
    elif isinstance(constraint, JsonSchema) and constraint.scored is not False:
        schema = json.loads(constraint.schema)
        yield from _sets_of(schema, schema)


def _sets_of(node: Any, root: Any) -> Iterator[Sequence[str]]:
    """Yield the texts of each finite part of a schema, outer parts before inner parts."""
    if isinstance(node, dict):
        values = _values(node, root, _MAX_DEPTH)
        if values is not None:
            yield [json.dumps(value, ensure_ascii=False) for value in values]
    for child in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from _sets_of(child, root)


def _values(node: Any, root: Any, depth: int) -> list[Any] | None:
    """Return the values that a schema lists; None if it lists no values. The grammar enforces any further restrictions
    of these values."""
    if not isinstance(node, dict) or not depth:
        return None
    if isinstance(node.get("enum"), list):
        is_plain = all(value is None or isinstance(value, (str, int)) for value in node["enum"])
        return node["enum"] if is_plain else None
    if isinstance(node.get("const"), (str, int)):
        return [node["const"]]
    kind = node.get("type")
    if isinstance(kind, str) and kind in _NAMED:
        return _NAMED[kind]
    if isinstance(node.get("$ref"), str):
        return _values(_resolved(node["$ref"], root), root, depth - 1)
    parts = node.get("anyOf") or node.get("oneOf")
    if not isinstance(parts, list) or len(parts) > MAX_SET_OPTIONS:
        return None
    known = [_values(part, root, depth - 1) for part in parts]
    return None if None in known else [value for values in known if values is not None for value in values]


_NAMED: dict[str, list[Any]] = {"boolean": [True, False], "null": [None]}


def _resolved(reference: str, root: Any) -> Any:
    """Return the part of a schema that a reference inside the schema names."""
    node = root
    for name in reference.removeprefix("#/").split("/") if reference.startswith("#/") else ():
        node = node.get(name) if isinstance(node, dict) else None
    return node


# -- the position ------------------------------------------------------------------------------------------


def next_options(sets: Sequence[FiniteSet], matcher: Matcher, mask: bytes, vocabulary: GrammarVocabulary) -> _Tokens:
    """Return the tokens of the options that come next, at a position where the matcher allows `mask`. The result is
    empty if no set comes next."""
    if int.from_bytes(mask, "little").bit_count() > _MAX_ALLOWED:
        return ()
    forced = matcher.forced_bytes()
    walk = matcher.copy()
    if not walk.take(forced):
        return ()
    coming = walk.next_bytes(walk.mask() if forced else mask)
    text = matcher.tail(max(len(each.prefix) for each in sets)) + forced
    for each in sets:
        if each.following == coming and text.endswith(each.prefix):
            rests = [text[len(each.prefix) :] for text in each.texts]
            if _is_next(walk, rests, _MAX_BRANCHINGS):
                return _spelled([forced + rest for rest in rests], matcher, vocabulary)
    return ()


def _is_next(walk: Matcher, rests: list[bytes], depth: int) -> bool:
    """Return whether the matcher allows each of `rests`, and nothing else until one is complete. Afterwards, the
    matcher has its initial state again. Return False for texts that branch more than `depth` times in succession."""
    if any(not rest for rest in rests):
        return len(rests) == 1
    if not depth:
        return False
    prefix = _common(rests)
    forced = walk.forced_bytes()
    if not prefix:
        heads = {rest[0] for rest in rests}
        return walk.next_bytes(walk.mask()) == heads and all(
            _follows(walk, bytes([head]), [rest[1:] for rest in rests if rest[0] == head], depth - 1) for head in heads
        )
    if not (forced.startswith(prefix) or (len(rests) == 1 and prefix.startswith(forced) and forced)):
        return False
    step = min(prefix, forced, key=len)
    return _follows(walk, step, [rest[len(step) :] for rest in rests], depth - 1)


def _follows(walk: Matcher, data: bytes, rests: list[bytes], depth: int) -> bool:
    """Return the result of `_is_next` after the bytes `data`."""
    num_before = walk.num_tokens
    is_right = walk.take(data) and _is_next(walk, rests, depth)
    walk.rollback(walk.num_tokens - num_before)
    return is_right


def _spelled(texts: Sequence[bytes], matcher: Matcher, vocabulary: GrammarVocabulary) -> _Tokens:
    """Return the tokens of the texts as the tokenizer produces them; empty if the grammar does not allow one of
    them."""
    options = tuple(tuple(vocabulary.encode(text)) for text in texts)
    is_whole = all(vocabulary.text_of(each) == text for each, text in zip(options, texts, strict=True))
    if not is_whole or len(set(options)) < len(options):
        return ()
    return options if all(matcher.num_allowed(each) == len(each) for each in options) else ()
