"""Texts of calls that a grammar allows, chosen at random: what a model under the grammar could write."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from bridle.chat.tool_parsers.call_format import CallFormat
from bridle.chat.tool_parsers.call_grammar import CallGrammar
from bridle.chat.tool_parsers.grammar import Form, Function
from bridle.structured_output.grammar import grammar_of
from bridle.structured_output.matcher import Matcher
from bridle.structured_output.vocabulary import GrammarVocabulary

_NUM_BYTES = 256
#: Bytes that are chosen within values. Others are chosen where the grammar allows none of these.
_USUAL = set("aZ 0123.-_:&(/é日".encode() + b'"\\,{}[]')
#: A text is ended as soon as the grammar allows from here on.
_LONG = 400
_MOST_STEPS = 1_000


class CallSampler:
    """Samples texts of up to three calls of these functions in a format."""

    def __init__(self, form: CallFormat, functions: Sequence[Function]) -> None:
        literals = {part for each in form.literals() for part in (each, each.strip(), *re.findall(r"<[^<>]*>", each))}
        keys = {key for each in functions for key in each.parameters.get("properties", ())} | {"item", "street"}
        literals |= {each.replace("{key}", key) for each in literals for key in keys}
        literals |= {'": ', *form.closing.split()}
        self._tokens = [bytes([byte]) for byte in range(_NUM_BYTES)]
        self._tokens += [each.encode() for each in sorted(literals - {""}) if len(each) > 1]
        self._end = len(self._tokens)
        vocabulary = GrammarVocabulary([*self._tokens, b"<end>"], [self._end], [self._end], lambda t: list(t.encode()))
        constraint = Form(CallGrammar(form, {}).must_call(functions, 3), False).constraint()
        self._matcher = Matcher(vocabulary, grammar_of(constraint))

    def sample(self, seed: int) -> str | None:
        """Return one text, always the same for a seed; None if the text does not end."""
        chance, matcher, text = random.Random(seed), self._matcher.copy(), b""
        for _ in range(_MOST_STEPS):
            if self._is_over(matcher, chance, len(text)):
                return text.decode()
            token = self._choose(matcher.mask(), chance, len(text))
            matcher.commit([token])
            text += self._tokens[token]
        return None

    def _is_over(self, matcher: Matcher, chance: random.Random, length: int) -> bool:
        mask = matcher.mask()
        if not matcher.is_accepting:
            return False
        return length > _LONG or chance.random() < 0.5 or not any(mask[: self._end >> 3])

    def _choose(self, mask: bytes, chance: random.Random, length: int) -> int:
        allowed = [token for token in range(self._end) if mask[token >> 3] >> (token & 7) & 1]
        marks = [token for token in allowed if token >= _NUM_BYTES or self._tokens[token] in b"\"}])'"]
        if marks and (length > _LONG or chance.random() < 0.4):
            return chance.choice(marks)
        usual = [token for token in allowed if token in _USUAL]
        return chance.choice(usual or allowed)
