"""Tests that an output that began on another engine continues as if it had run on this engine from the start."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridle.errors import InvalidRequest
from bridle.testing.text import PieceDecoder
from tests.engine.random_labs import PIECES, random_request
from tests.engine.support import Lab, check_usage, make_request


def make_lab() -> Lab:
    return Lab(vocab_size=16, num_blocks=60, decoder=PieceDecoder(PIECES), eos_token_ids=(13,))


@given(seed=st.integers(0, 1 << 40))
def test_going_on_adds_what_was_missing(seed: int) -> None:
    random = Random(seed)
    request = random_request(random, controller=None, n=1, adapter=None, prompt_logprobs=None, mirostat=0)
    whole = make_lab().run(request)[0].first
    num_before = random.randint(0, len(whole.tokens) - 1)
    again = replace(request, id="again", generated=tuple(whole.tokens[:num_before]))
    lab = make_lab()
    lab.engine.add(again)
    while lab.engine.has_work:
        lab.step()
    tokens = [event.token for event in lab.events if hasattr(event, "token")]
    logprobs = [event.logprob for event in lab.events if hasattr(event, "logprob")]
    assert whole.tokens[num_before:] == tokens
    assert whole.logprobs[num_before:] == logprobs
    text = "".join(getattr(event, "text", "") for event in lab.events)
    assert whole.text.endswith(text) or any(hasattr(event, "num_chars") for event in lab.events)
    last = lab.events[-1]
    assert whole.finished is not None
    assert (last.reason, last.stop) == (whole.finished.reason, whole.finished.stop)  # type: ignore[attr-defined]
    check_usage(last.usage, whole.usage)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"n": 2}, "one output"),
        ({"controller": object()}, "one output"),
        ({"mirostat": 2}, "one output"),
        ({"max_tokens": 2}, "5 tokens already; the output ends at 5"),
        ({"generated": (1, 99)}, "outside the vocabulary"),
    ],
)
def test_what_cannot_go_on_is_refused(fields: dict[str, object], why: str) -> None:
    request = make_request(**{"generated": (1, 2), "max_tokens": 9, **fields})
    with pytest.raises(InvalidRequest, match=why):
        make_lab().engine._intake.check(request)
