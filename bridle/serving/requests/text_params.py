"""Converts texts among the sampling parameters to tokens of a model: bad words and the sequence breakers of DRY.

A sequence breaker stands for every token whose text contains it, and for the last token of its own spelling, as in the
original DRY. The search is one pass over the texts of the vocabulary, which are joined once per tokenizer.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from bridle.errors import InvalidRequest
from bridle.sampling import SamplingParams

if TYPE_CHECKING:
    from bridle.serving.models.loading import LoadedModel
    from bridle.tokenizer.tokenizer import Tokenizer

_BETWEEN = "\0"
_MAX_CACHED = 64  # results per tokenizer


class VocabIndex:
    """The texts of a vocabulary, in which tokens can be found by a text that they contain."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        texts = [tokenizer.token_text(token).replace(_BETWEEN, "") for token in range(vocab_size)]
        self._joined = _BETWEEN.join(texts)
        self._starts = list(accumulate((len(text) + 1 for text in texts), initial=0))
        self._found: dict[str, tuple[int, ...]] = {}

    def containing(self, text: str) -> tuple[int, ...]:
        """Return the tokens whose text contains `text`."""
        found = self._found.get(text)
        if found is None:
            found = tuple(dict.fromkeys(bisect_right(self._starts, place) - 1 for place in self._places(text)))
            if len(self._found) >= _MAX_CACHED:
                self._found.clear()
            self._found[text] = found
        return found

    def _places(self, text: str) -> Iterator[int]:
        place = self._joined.find(text)
        while place >= 0:
            yield place
            place = self._joined.find(text, place + 1)


_texts: WeakKeyDictionary[Tokenizer, VocabIndex] = WeakKeyDictionary()


def resolve_text_params(model: LoadedModel, sampling: SamplingParams) -> SamplingParams:
    """Return the sampling parameters with the tokens for their texts."""
    if sampling.has_dry and sampling.dry_sequence_breakers:
        sampling = sampling.with_(dry_breaker_ids=_breakers(model, sampling.dry_sequence_breakers))
    if sampling.bad_words:
        spelled = [ids for word in sampling.bad_words for ids in _spellings(model, word)]
        sampling = sampling.with_(bad_words_ids=tuple(dict.fromkeys((*sampling.bad_words_ids, *spelled))))
    if sampling.prediction:
        expected = model.tokenizer.encode(sampling.prediction, False)
        sampling = sampling.with_(prediction_ids=tuple(expected))
    if sampling.bias_texts:
        bias = dict(sampling.logit_bias)
        for text, addend in sampling.bias_texts:
            for token in model.tokenizer.encode(text, False):
                bias[token] = bias.get(token, 0.0) + addend
        sampling = sampling.with_(logit_bias=bias, bias_texts=())
    return sampling


def _spellings(model: LoadedModel, word: str) -> list[tuple[int, ...]]:
    """Return the tokens of a word by itself, and of the word after a space."""
    bare = word.lstrip(" ")
    if not bare:
        raise InvalidRequest(f"bad_words has {word!r}, which has only spaces", "bad_words")
    return [tuple(ids) for text in (bare, f" {bare}") if (ids := model.tokenizer.encode(text, False))]


def _breakers(model: LoadedModel, breakers: tuple[str, ...]) -> tuple[int, ...]:
    tokenizer = model.tokenizer
    texts = _texts.get(tokenizer)
    if texts is None:
        texts = _texts[tokenizer] = VocabIndex(tokenizer, model.info.vocab_size)
    found: set[int] = set()
    for breaker in breakers:
        found.update(texts.containing(breaker))
        found.update(tokenizer.encode(f"a{breaker}", False)[-1:])
    return tuple(sorted(found))
