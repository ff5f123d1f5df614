"""Cost of canonical masks: the processor time of masks along some texts, with and without canonical tokenization.

    python -m dev.bench.canonical MODEL...

Tokens that the grammar forces need no mask and are skipped, as in the engine. Each mask is timed three times. `first`
is before any pair of tokens is cached, `new` has cached pairs but a new text, and `again` repeats the text. `new` and
`again` are the fastest of several runs.

Then whole requests are timed: the mean milliseconds of one request's masks and forced tokens. The requests of one kind
share their caches. For requests, `new` is before the texts of that kind were processed, and `again` is after.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from bridle import LLM
from bridle.engine.control.decision import Decision
from bridle.engine.interfaces import Ask
from bridle.structured_output import Constraint, JsonSchema, Regex, Substring, vocabulary_of
from bridle.structured_output.canonical import CanonicalDraws
from bridle.structured_output.constrained_sequence import ConstrainedSequence
from bridle.structured_output.grammar import grammar_of
from bridle.structured_output.matcher import Matcher
from bridle.structured_output.vocabulary import GrammarVocabulary
from dev.bench.canonical_requests import Case, requests

_REPEATS = 7
_SOURCE = (
    "The quick brown fox jumps over the lazy dog near the river, and 27 people were watching it with interest. " * 3
)
_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "age", "tags"],
}
#: A constraint of each kind, and a text that satisfies it.
_CASES: dict[str, tuple[Constraint, str]] = {
    "regex": (Regex("[a-z ,]+[.]", longest=True), "the quick brown fox jumps over the lazy dog near the river."),
    "json": (JsonSchema(_PERSON), '{"name": "Ada Lovelace", "age": 36, "tags": ["mathematician", "countess"]}'),
    "substring": (
        Substring(_SOURCE),
        "brown fox jumps over the lazy dog near the river, and 27 people were watching it",
    ),
    "date": (Regex("[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}"), "2024-05-17T13:45"),
    "words": (Regex("(red|reddish|green|greenish|blue|bluish) (apple|apricot|banana)s?"), "reddish apricots"),
}


def compare(path: str) -> dict[str, Any]:
    """Return microseconds per mask and milliseconds per request, for each kind of constraint and each value of
    `canonical`."""
    with LLM(path, max_model_len=512) as llm:
        vocabulary = vocabulary_of(llm.tokenizer, llm.tokenizer.vocab_size)
    found = {name: _measure(vocabulary, *case) for name, case in _CASES.items()}
    whole = {name: _whole(vocabulary, cases) for name, cases in requests().items()}
    return {"model": Path(path).stem, "microseconds": found, "request_milliseconds": whole}


def _whole(vocabulary: GrammarVocabulary, cases: list[Case]) -> dict[str, dict[str, float]]:
    """Return the mean time of the requests of one kind, for each value of `canonical`."""
    grammars = {constraint.key: Matcher(vocabulary, grammar_of(constraint)) for constraint, _ in cases}
    runs: dict[str, dict[str, list[list[float]]]] = {
        how: {"new": [], "again": []} for how in ("off", "prefer", "strict")
    }
    for name in ("again", "new", "again"):  # the first runs only teach which tokens follow one another
        for how, kept in [*runs.items()] * _REPEATS:  # in turns, since the machine's speed changes
            if name == "new":
                vocabulary.masks.clear()
                vocabulary.pairs.draws.clear()
            kept[name].append([_request(grammars[each.key].copy(), vocabulary, text, how) for each, text in cases])
    return {how: {name: _best(times) for name, times in kept.items()} for how, kept in runs.items()}


def _best(times: list[list[float]]) -> float:
    """Return the mean milliseconds over requests, each in its fastest run."""
    best: list[float] = [min(each) for each in zip(*times, strict=True)]
    return round(sum(best) / len(best) * 1e3, 3)


def _request(matcher: Matcher, vocabulary: GrammarVocabulary, text: str, how: str) -> float:
    """Return the seconds of all controller decisions of one request whose sampled tokens spell `text`."""
    sequence = ConstrainedSequence(matcher, canonical=None if how == "off" else CanonicalDraws(how == "strict"))
    ask, left, seconds = Ask(-1, ()), text, 0.0
    while True:
        began = time.thread_time()
        answer = sequence.advance(ask) or sequence.masked()
        seconds += time.thread_time() - began
        if answer.error is not None:
            raise answer.error
        branches = answer.decision.branches if answer.decision is not None else ()
        if not branches or not left:
            return seconds
        is_drawn = branches[0].sample
        tokens = vocabulary.encode(left.encode())[:1] if is_drawn else branches[0].splices[0].ff_tokens
        left = left[len(vocabulary.text_of(tokens).decode()) :]
        ask = Ask(-1, tuple(tokens), sampled=tokens[0] if is_drawn else None)


def _measure(vocabulary: GrammarVocabulary, constraint: Constraint, text: str) -> dict[str, dict[str, float]]:
    start = Matcher(vocabulary, grammar_of(constraint))
    _walk(start.copy(), vocabulary, text, "off")  # fills llguidance's own caches
    return {how: _times(start, vocabulary, text, how) for how in ("off", "prefer", "strict")}


def _times(start: Matcher, vocabulary: GrammarVocabulary, text: str, how: str) -> dict[str, float]:
    runs: dict[str, list[list[float]]] = {"first": [], "new": [], "again": []}
    vars(vocabulary).pop("pairs", None)
    for name, found in runs.items():
        for _ in range(1 if name == "first" else _REPEATS):
            if name != "again":
                vocabulary.masks.clear()
                vocabulary.pairs.draws.clear()
            found.append(_walk(start.copy(), vocabulary, text, how))
    return {name: _mean([min(each) for each in zip(*found, strict=True)]) for name, found in runs.items()}


def _mean(seconds: list[float]) -> float:
    return round(sum(seconds) / len(seconds) * 1e6, 1)


def _walk(matcher: Matcher, vocabulary: GrammarVocabulary, text: str, how: str) -> list[float]:
    """Return the seconds of each mask along a text."""
    draws = None if how == "off" else CanonicalDraws(how == "strict")
    left, seconds = list(vocabulary.encode(text.encode())), list[float]()
    while left and not matcher.is_complete:
        forced = matcher.forced()
        if forced and tuple(left[: len(forced)]) == forced:
            matcher.commit(forced)
            left = left[len(forced) :]
            continue
        began = time.thread_time()
        mask = matcher.mask()
        decision = Decision.sample(mask)
        if draws is not None:
            draws.restrict(decision, matcher, mask, vocabulary)
        seconds.append(time.thread_time() - began)
        matcher.commit([left.pop(0)])
    return seconds


if __name__ == "__main__":
    for each in sys.argv[1:]:
        print(json.dumps(compare(each)))
