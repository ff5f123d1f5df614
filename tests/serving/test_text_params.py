"""Tests that texts in sampling parameters become tokens on every API, and forbidden texts are never written."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridle.errors import InvalidRequest
from bridle.sampling import SamplingParams
from bridle.serving.requests.prompts import build_request
from bridle.serving.requests.text_params import VocabIndex, resolve_text_params
from tests.engine.support import Lab, make_request
from tests.serving.fakes import ByteTokenizer, fake_model, served_by


def test_a_bad_word_is_spelled_alone_and_after_a_space() -> None:
    found = resolve_text_params(fake_model(), SamplingParams(bad_words=("no", " never")))
    assert found.bad_words_ids == (tuple(b"no"), tuple(b" no"), tuple(b"never"), tuple(b" never"))
    with pytest.raises(InvalidRequest, match="only spaces"):
        resolve_text_params(fake_model(), SamplingParams(bad_words=("  ",)))


@given(st.text(min_size=1, max_size=3))
def test_a_breaker_is_each_token_that_has_it(text: str) -> None:
    texts = VocabIndex(ByteTokenizer(), 257)  # type: ignore[arg-type]
    expected = [token for token in range(257) if text in ByteTokenizer().token_text(token).replace("\0", "")]
    assert list(texts.containing(text)) == ([] if "\0" in text else expected)


def test_breakers_are_looked_up_only_where_they_count() -> None:
    assert resolve_text_params(fake_model(), SamplingParams(dry_sequence_breakers=("x",))).dry_breaker_ids == ()
    found = resolve_text_params(fake_model(), SamplingParams(dry_multiplier=1.0, dry_sequence_breakers=("x", "yz")))
    assert found.dry_breaker_ids == tuple(sorted(b"xz"))  # of a longer one the last token


async def test_both_ways_in_do_it() -> None:
    model, sampling = fake_model(), SamplingParams(bad_words=("no",))
    assert build_request(model, "x", sampling).sampling.bad_words_ids == (tuple(b"no"), tuple(b" no"))
    serving = await served_by(model)
    generation = await serving.prepare([(1,)], sampling)
    assert generation.parts[0].request.sampling.bad_words_ids == (tuple(b"no"), tuple(b" no"))


@given(st.integers(0, 10_000), st.integers(1, 3))
def test_the_engine_never_completes_a_bad_word(seed: int, n: int) -> None:
    words = ((1, 2), (3,), (2, 2, 4))
    lab = Lab(vocab_size=6)
    (replay,) = lab.run(make_request(seed=seed, n=n, max_tokens=30, bad_words_ids=words, ignore_eos=True))
    for output in replay.outputs.values():
        said = output.tokens
        for word in words:
            assert word not in [tuple(said[i : i + len(word)]) for i in range(len(said))]


@pytest.mark.parametrize("fields", [{"prediction": "\ud800"}, {"logit_bias": {"a\ud800": 1.0}}, {"stop": "\ud800"}])
def test_half_a_surrogate_is_no_text(fields: dict[str, Any]) -> None:
    (name,) = fields
    with pytest.raises(InvalidRequest, match=f"{name} is not valid Unicode: lone surrogate U\\+D800") as refusal:
        build_request(fake_model(), "x", SamplingParams(**fields))
    assert refusal.value.param == name


def test_biases_of_texts_are_those_of_their_tokens() -> None:
    model, sampling = fake_model(), SamplingParams(logit_bias={"aab": 1.0, ord("b"): 0.5, 7: -1.0})
    assert sampling.bias_texts == (("aab", 1.0),) and sampling.with_(seed=3).bias_texts == sampling.bias_texts
    found = build_request(model, "x", sampling).sampling
    assert found.logit_bias == {ord("a"): 2.0, ord("b"): 1.5, 7: -1.0} and not found.bias_texts
    for wrong in ({"": 1.0}, {"x" * 1025: 1.0}, {"x": "y"}, {str(i): 1.0 for i in range(257)}):
        with pytest.raises(InvalidRequest, match="logit_bias"):
            SamplingParams(logit_bias=wrong)
