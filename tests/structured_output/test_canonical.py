"""Canonical tokenization under constraints: no token is forbidden that the tokenizer writes, and no other one drawn."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from bridle.engine.control.decision import Decision, mask_of
from bridle.errors import InvalidRequest
from bridle.outputs import FinishReason
from bridle.sampling import SamplingParams
from bridle.structured_output import Constraint, GrammarVocabulary, JsonObject, Regex
from bridle.structured_output.canonical import CanonicalDraws
from bridle.structured_output.canonical_pairs import MAX_FILTERED
from bridle.structured_output.vocabulary import vocabulary_of
from bridle.tokenizer import Tokenizer
from tests.structured_output.kit import ODD, Lab, forbidden_pairs, matcher, spell, tokens_of

ROOT = Path(__file__).parents[2]


@cache
def merged_vocabulary() -> GrammarVocabulary:
    """The demo model's: byte-level BPE."""
    tokenizer = Tokenizer.load("demo")
    return vocabulary_of(tokenizer, tokenizer.vocab_size)


def test_nothing_is_forbidden_that_the_tokenizer_writes() -> None:
    vocab = merged_vocabulary()
    for text in (ODD, (ROOT / "README.md").read_text(encoding="utf-8")):
        assert forbidden_pairs(vocab, text) == []


@pytest.mark.parametrize(
    "constraint",
    [Regex("(the name|the same|those)[.]"), Regex("[a-z ]{12}!", longest=True), JsonObject()],
)
@pytest.mark.parametrize("fields", [{}, {"speculate": 4}])
def test_strict_outputs_are_canonical(constraint: Constraint, fields: dict[str, object]) -> None:
    vocab = merged_vocabulary()
    with Lab(vocab) as lab:
        asked = [
            lab.request(constraint, (1, 2), temperature=30.0, seed=seed, canonical="strict", max_tokens=30, **fields)
            for seed in range(8)
        ]
        for output in (found[0] for found in lab.run(*asked)):
            tokens = [token for token in output.tokens if token not in vocab.special]
            assert output.finished is not None
            if output.finished.reason is not FinishReason.ERROR:
                assert all(vocab.pairs.has(a, b) for a, b in pairwise(tokens))


def test_prefer_never_fails_where_masks_do_not() -> None:
    vocab = merged_vocabulary()
    with Lab(vocab) as lab:
        asked = [
            lab.request(Regex("(the name|the same|those)[.]"), (1, 2), temperature=30.0, seed=seed, canonical="prefer")
            for seed in range(16)
        ]
        for output in (found[0] for found in lab.run(*asked)):
            assert output.finished is not None and output.finished.reason is FinishReason.CONTROLLER
            assert spell(vocab, output.tokens) in ("the name.", "the same.", "those.")


def test_a_word_that_is_no_mode_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="canonical is 'yes'; must be one of 'strict', 'prefer', 'off'"):
        SamplingParams(canonical="yes")


def test_small_masks_keep_what_the_tokenizer_writes_and_drop_what_must_go_on() -> None:
    vocab = merged_vocabulary()
    walk = matcher(vocab, Regex("x (name|number)[.]"))
    walk.commit(vocab.encode(b"x"))
    mask = walk.mask()
    decision = CanonicalDraws(is_strict=True).restrict(Decision.sample(mask), walk, mask, vocab)
    kept = {vocab.text_of((token,)) for token in tokens_of(decision.branches[0].mask or b"")}
    allowed = {vocab.text_of((token,)) for token in tokens_of(mask)}
    assert allowed - kept == {b" num"}  # "ber." must follow, and the tokenizer joins it
    before = walk.num_tokens
    again = CanonicalDraws(is_strict=True).restrict(Decision.sample(mask), walk, mask, vocab)
    assert again == decision and walk.num_tokens == before


def test_what_must_follow_decides_where_masks_are_the_same() -> None:
    vocab = merged_vocabulary()
    kept, masks = [], []
    for pattern in ("x (name|number)[.]", "x (name|num(ber|![.]))[.]", "x (name|number)[.]"):
        walk = matcher(vocab, Regex(pattern))
        walk.commit(vocab.encode(b"x"))
        masks.append(walk.mask())
        decision = CanonicalDraws(is_strict=True).restrict(Decision.sample(masks[-1]), walk, masks[-1], vocab)
        kept.append({vocab.text_of((token,)) for token in tokens_of(decision.branches[0].mask or b"")})
    assert masks[0] == masks[1]
    assert kept[1] - kept[0] == {b" num"}  # "!" may follow, so it is not joined for certain
    assert kept[2] == kept[0]


@pytest.mark.parametrize("num_tokens", [MAX_FILTERED, MAX_FILTERED + 1])
def test_only_small_masks_are_filtered(num_tokens: int) -> None:
    vocab = merged_vocabulary()
    mask = mask_of(range(300, 300 + num_tokens), 8 * vocab.mask_bytes)
    assert (vocab.pairs.filtered(vocab.encode(b"the")[0], mask) is None) == (num_tokens > MAX_FILTERED)
