"""Tests of aligned sampling: allowed texts keep the relative probabilities that the model gives them."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest

from bridle.engine.outputs.aligned import AlignedSampling
from bridle.errors import InvalidRequest
from bridle.outputs import Event, FinishReason, Rewind
from bridle.sampling import SamplingParams
from bridle.structured_output import Choice, Regex
from bridle.testing.async_executor import LateScriptedExecutor
from bridle.testing.logits import Logits
from bridle.testing.scripted import ScriptedExecutor
from tests.structured_output.choices import exact
from tests.structured_output.kit import Lab, spell, vocabulary

PROMPT = (1, 2)
#: Free draws, forced runs, and alternatives that part late.
FORM = Regex("(aaa|abc|ac[ab]|baaa|bbb|c[abc]{2})")
TEXTS = ("aaa", "abc", "aca", "acb", "baaa", "bbb", *(f"c{x}{y}" for x in "abc" for y in "abc"))


def skewed(prefix: Any) -> Logits:
    """Return logits of 4 tokens with moderate probabilities, so that every text occurs often enough to be counted."""
    random = np.random.default_rng([*map(int, prefix), len(prefix)])
    return random.normal(0.0, 0.7, 4).astype(np.float32)


def lab(**options: Any) -> Lab:
    return Lab(vocabulary("abc"), next_token=skewed, **options)


def counts_of(one: Lab, num: int, **fields: Any) -> Counter[str]:
    asked = [one.request(FORM, PROMPT, temperature=1.0, seed=seed, n=8, **fields) for seed in range(num // 8)]
    outputs = [output for found in one.run(*asked) for output in found.values()]
    assert {output.finished.reason for output in outputs if output.finished} == {FinishReason.CONTROLLER}
    return Counter(spell(one.vocab, output.tokens) for output in outputs)


def chi_squared(counts: Counter[str], weights: list[float]) -> float:
    total, whole = sum(counts.values()), sum(weights)
    assert set(counts) <= set(TEXTS)
    expected = [total * weight / whole for weight in weights]
    return sum((counts[text] - want) ** 2 / want for text, want in zip(TEXTS, expected, strict=True))


#: Exceeded with a probability of 0.001 at 14 degrees of freedom.
LIMIT = 36.12


@pytest.mark.few(1)
@pytest.mark.parametrize("scripted", [ScriptedExecutor, LateScriptedExecutor])
def test_whole_texts_have_the_models_distribution_and_a_mask_alone_does_not(scripted: Any) -> None:
    with lab(scripted=scripted) as one:
        weights = [math.exp(score) for score in exact(one, TEXTS, PROMPT)]
        assert chi_squared(counts_of(one, 480, aligned=1_000), weights) < LIMIT
        assert chi_squared(counts_of(one, 480), weights) > 2 * LIMIT
        assert chi_squared(counts_of(one, 480, aligned=2), weights) > LIMIT / 2  # closer, and not there


@pytest.mark.parametrize("fields", [{}, {"logprobs": 1}, {"speculate": 4}])
def test_a_text_that_begins_again_ends_and_repeats(fields: dict[str, Any]) -> None:
    with lab() as one:
        events: list[Event] = []
        for seed in range(8):
            one.engine.add(one.request(FORM, PROMPT, temperature=1.0, seed=seed, aligned=50, **fields))
            events += one.events()
        assert any(isinstance(event, Rewind) for event in events)
        assert counts_of(one, 16, aligned=50, **fields) == counts_of(one, 16, aligned=50)


def test_restarts_are_bounded() -> None:
    state = AlignedSampling(lambda number: 1.0, restarts_left=2)
    for restarts_left in (2, 1):
        assert state.advance(1, 0.5, 0.9) and not state.advance(2, 0.5, 0.1) and state.must_restart
        state.restart()
        assert state.restarts_left == restarts_left - 1 and len(state.path) == 1
    assert state.advance(1, 0.5, 0.9) and state.advance(2, 0.5, 0.1)
    assert state.path[0].left == pytest.approx(0.9 - 0.5 * 0.9)
    assert dict(state.fork(lambda number: 0.0).biases()) == {}


def test_options_are_not_drawn_as_a_whole_instead() -> None:
    with lab() as one:
        asked = one.request(Choice(["abc", "baa"]), PROMPT, temperature=1.0, aligned=8)
        ((output,),) = [list(found.values()) for found in one.run(asked)]
        assert output.forced[0] is False


@pytest.mark.parametrize(
    ("name", "value"), [("temperature", 0.7), ("top_p", 0.9), ("lookahead", 4), ("logit_bias", {1: 1})]
)
def test_what_changes_the_distribution_is_refused(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"{name}: got .* with aligned"):
        SamplingParams(aligned=4, **{name: value})
    assert SamplingParams(aligned=4, top_k=-1, mirostat_tau=3.0).takes_text_back
