"""Handles choice constraints of guests. An engine may score the whole texts of a choice instead of sampling under a
mask.

A guest follows every kind of constraint token by token. So the host remembers the remaining texts of a choice, and
passes them to the engine together with the mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from bridle.aici.runtime.vocabulary import RuntimeVocabulary
from bridle.aici.runtime.wasm import GuestFault
from bridle.errors import InvalidRequest
from bridle.sampling_values import MAX_OPTION_TOKENS, MAX_SCORED
from bridle.structured_output import Choice, Constraint, parse

if TYPE_CHECKING:
    from bridle.aici.runtime.instance import Instance


def note_choice(guest: Instance, handle: int, kind: str, spec: str) -> None:
    """Remember the texts of a new constraint, if it is a choice."""
    if options := scored_texts(kind, spec):
        guest.choices[handle] = options


def add_options(guest: Instance, handle: int, mask: int) -> int:
    """Keep the remaining texts of a choice for a mask of the running callback. Returns the mask's name."""
    options = spelled(guest.surroundings.vocabulary, guest.choices.get(handle, ()))
    if options:
        guest.mask_options[mask - 1] = options
    return mask


def advance_choice(guest: Instance, handle: int, tokens: Sequence[int]) -> None:
    """Record tokens that the constraint committed."""
    if handle in guest.choices:
        text = b"".join(guest.surroundings.vocabulary.tokens[token] for token in tokens)
        left = (option for option in guest.choices[handle] if option.startswith(text))
        guest.choices[handle] = tuple(option[len(text) :] for option in left)


def scored_texts(kind: str, spec: str) -> tuple[bytes, ...]:
    """Return the texts of a choice that the engine may score as a whole; empty for other constraints."""
    if kind not in ("choice", "constraint"):
        return ()
    try:
        constraint = parse_spec(kind, spec)
    except InvalidRequest:
        return ()
    if not isinstance(constraint, Choice) or constraint.scored is False:
        return ()
    return tuple(text.encode() for text in dict.fromkeys(constraint.options))


def spelled(vocabulary: RuntimeVocabulary, texts: Sequence[bytes]) -> list[list[int]]:
    """Return the tokens of each text, as the tokenizer produces them. Returns an empty list if the engine cannot score
    the texts: too few or too many, one already complete, or two with equal tokens."""
    if not 1 < len(texts) <= MAX_SCORED or not all(texts):
        return []
    options = [_written(vocabulary, text) for text in texts]
    pairs = zip(options, texts, strict=True)
    is_exact = all(b"".join(vocabulary.tokens[token] for token in each) == text for each, text in pairs)
    is_small = sum(map(len, options)) <= MAX_OPTION_TOKENS
    return options if is_exact and is_small and len(set(map(tuple, options))) == len(options) else []


def _written(vocabulary: RuntimeVocabulary, text: bytes) -> list[int]:
    """Return the tokens of a text that continues other text; empty if the text contains an incomplete character."""
    try:
        written = text.decode()
    except UnicodeDecodeError:
        return []
    known = vocabulary.tokenizer
    return list(vocabulary.encode(written) if known is None else known.encode_inside(written))


def parse_spec(kind: str, spec: str) -> Constraint:
    """Return the constraint of a specification. The specification is plain text for most kinds of constraints, and JSON
    for others. The kind `constraint` takes the JSON of any constraint."""
    if kind in ("regex", "lark", "yacc", "substring", "json_schema"):
        return parse({kind: spec})
    if kind == "json_object":
        return parse({kind: True})
    if kind not in ("choice", "constraint"):
        raise GuestFault(
            f"unknown kind of constraint {kind!r}; must be regex, json_schema, json_object, lark, yacc, substring, "
            "choice or constraint"
        )
    try:
        data = msgspec.json.decode(spec)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the constraint is not JSON: {error}") from None
    return parse({kind: data} if kind == "choice" else data)
