"""The texts of a constraint that allows only a few texts, so that the model can score all of them.

A constraint is finite if it is a choice, or a schema whose whole value is an enum, a constant or a boolean.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from bridle.engine.request import Request
from bridle.engine.sampling.choice_scoring import RESTRICTING
from bridle.errors import InvalidRequest, UnsupportedFeature
from bridle.sampling import SamplingParams
from bridle.sampling_values import MAX_OPTION_TOKENS, MAX_SCORED
from bridle.structured_output.matcher import Matcher
from bridle.structured_output.spec import Choice, Constraint, JsonSchema
from bridle.structured_output.vocabulary import GrammarVocabulary

#: Keywords of a schema that do not restrict an enum further.
_IGNORED = frozenset({"title", "description", "$schema", "default", "examples"})

Tokens = tuple[tuple[int, ...], ...]


def finite_texts(constraint: Constraint) -> tuple[str, ...]:
    """Return all texts that the constraint allows, without duplicates; empty if the constraint is not known to be
    finite."""
    if isinstance(constraint, Choice):
        return tuple(dict.fromkeys(constraint.options))
    if not isinstance(constraint, JsonSchema) or constraint.whitespace != "fixed":
        return ()
    schema = json.loads(constraint.schema)
    values = _values(schema) if isinstance(schema, dict) else ()
    return tuple(dict.fromkeys(json.dumps(value, ensure_ascii=False) for value in values))


def _values(schema: dict[str, Any]) -> Sequence[Any]:
    """Return the values that a schema lists. Objects and lists are left out, because they may be spelled in several
    ways."""
    kinds = set(schema) - _IGNORED
    if kinds == {"type"} and schema["type"] == "boolean":
        return (True, False)
    if kinds == {"type", "enum"} and schema["type"] == "string":
        return [value for value in schema["enum"] if isinstance(value, str)]
    if kinds == {"enum"} and all(isinstance(value, (str, bool)) or value is None for value in schema["enum"]):
        return list(schema["enum"])
    return ()


def scored_options(
    constraint: Constraint, request: Request, vocabulary: Callable[[], GrammarVocabulary], start: Matcher
) -> Tokens:
    """Return the canonical tokens of the texts of which the request samples one as a whole; empty if masks must be
    used. Raises `UnsupportedFeature` or `InvalidRequest` if the request requires scores that cannot be computed."""
    asked = constraint.scored if isinstance(constraint, (Choice, JsonSchema)) else None
    texts = () if asked is False else finite_texts(constraint)
    if len(texts) < 2 and asked is not True:
        return ()
    reason = _reason(request, texts)
    if reason is None:
        known = vocabulary()
        options = tuple(tuple(known.encode(text.encode())) for text in texts)
        reason = _misfit(options, request.sampling)
        is_spelled = all(known.text_of(each) == text.encode() for each, text in zip(options, texts, strict=True))
        if reason is None and not (is_spelled and _is_allowed(constraint, options, start)):
            reason = InvalidRequest("choice: the tokenizer cannot spell an option as it is written", "choice")
    if reason is None:
        return options
    if asked:
        raise reason
    return ()


def can_score(request: Request) -> bool:
    """Return whether the request's parameters allow options to be scored."""
    return _reason(request, ()) is None


def _reason(request: Request, texts: Sequence[str]) -> InvalidRequest | None:
    """Return the reason why options cannot be scored for this request, or None."""
    if len(texts) > MAX_SCORED:
        message = f"choice: got {len(texts)} options; at most {MAX_SCORED} can be scored. Send fewer, or scored=false."
        return InvalidRequest(message, "choice")
    if request.is_composed or request.guard is not None:
        return UnsupportedFeature(
            "choice: options are not scored next to a controller or a policy; leave the controller out, or set scored "
            "to false in a `choice` of another route",
            "choice",
        )
    for name in RESTRICTING:
        if getattr(request.sampling, name):
            return InvalidRequest(f"{name}: options that are scored as a whole do not follow it. Leave it out.", name)
    return None


def _is_allowed(constraint: Constraint, options: Tokens, start: Matcher) -> bool:
    """Return whether a schema's grammar allows these token sequences. A choice always allows its options."""
    return isinstance(constraint, Choice) or all(start.num_allowed(each) == len(each) for each in options)


def _misfit(options: Tokens, sampling: SamplingParams) -> InvalidRequest | None:
    """Return the reason why options with these tokens cannot be scored, or None."""
    if sum(map(len, options)) > MAX_OPTION_TOKENS:
        return InvalidRequest(f"choice: the options have more than {MAX_OPTION_TOKENS} tokens. Shorten them.", "choice")
    if len(set(options)) < len(options) or not all(options):
        return InvalidRequest("choice: an option is empty, or two have the same tokens", "choice")
    longest = max(map(len, options))
    if sampling.max_tokens is not None and longest > sampling.max_tokens:
        message = f"max_tokens: got {sampling.max_tokens}; the longest option has {longest} tokens. Allow as many."
        return InvalidRequest(message, "max_tokens")
    return None
