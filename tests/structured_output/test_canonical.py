"""Tests of canonical tokenization under constraints: exactly the tokens that the tokenizer writes are allowed."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from bridle.engine.control.decision import Decision, mask_of
from bridle.errors import InvalidRequest
from bridle.outputs import FinishReason
from bridle.sampling import SamplingParams
from bridle.structured_output import Constraint, GrammarVocabulary, JsonObject, Regex, canonical_pairs
from bridle.structured_output.canonical import CanonicalDraws
from bridle.structured_output.canonical_pairs import MAX_FILTERED, CanonicalPairs
from bridle.structured_output.vocabulary import vocabulary_of
from bridle.tokenizer import Tokenizer
from tests.structured_output.kit import ODD, Lab, forbidden_pairs, matcher, spell, tokens_of

ROOT = Path(__file__).parents[2]


@cache
def merged_vocabulary() -> GrammarVocabulary:
    """Return the vocabulary of the demo model, which is byte-level BPE."""
    tokenizer = Tokenizer.load("demo")
    return vocabulary_of(tokenizer, tokenizer.vocab_size)


def test_nothing_is_forbidden_that_the_tokenizer_writes() -> None:
    vocab = merged_vocabulary()
    for text in (ODD, (ROOT / "README.md").read_text(encoding="utf-8")):
        assert forbidden_pairs(vocab, text) == []


@pytest.mark.few(4)
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


def test_inside_a_word_only_letters_around_it_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    vocab = merged_vocabulary()
    words = [data for data in map(vocab.text_of, ((token,) for token in range(vocab.size))) if data.strip().isalpha()]
    splits = [(data[:cut], data[cut:]) for data in words for cut in range(1, len(data))][::8]
    meeting = [*splits, *zip(words[::4], words[1::4], strict=False)]
    pairs = [(vocab.token_of(head), vocab.token_of(tail)) for head, tail in meeting]
    known = [(first, second) for first, second in pairs if first is not None and second is not None]
    few = CanonicalPairs(vocab)
    found = [few.has(*pair) for pair in known]
    monkeypatch.setattr(canonical_pairs, "IN_WORDS", canonical_pairs.AROUND)
    many = CanonicalPairs(vocab)
    assert found == [many.has(*pair) for pair in known] and len(set(found)) == 2


def test_a_draw_is_remembered_until_a_token_is_refused() -> None:
    vocab = merged_vocabulary()
    walk = matcher(vocab, Regex("x (name|number)[.]"))
    walk.commit(vocab.encode(b"x"))
    mask = walk.mask()
    draws = CanonicalDraws(is_strict=True)
    first, twin = (draws.restrict(Decision.sample(mask), each, mask, vocab) for each in (walk, walk.copy()))
    assert twin is first
    token = min(tokens_of(first.branches[0].mask or b""))
    draws.refused.add(token)
    for _ in range(2):
        draw = draws.restrict(Decision.sample(mask), walk, mask, vocab)
        assert token not in tokens_of(draw.branches[0].mask or b"")
    assert CanonicalDraws(is_strict=True).restrict(Decision.sample(mask), walk, mask, vocab) is first
