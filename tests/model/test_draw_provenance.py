"""Tests of the token distributions in traces, computed in torch: they equal plain numpy's, and tracing changes no
sample."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bridle.engine.control.decision import mask_of
from bridle.engine.scheduling.step_plan import SampleRow
from bridle.model.sampler import StandardSampler
from bridle.testing.sampler import draw_of
from bridle.traces import Draw, Odds
from tests.model.sampling_kit import random_logits, row, run

VOCAB = 300


def random_row(random: Random, index: int) -> SampleRow:
    made = row(
        index,
        key=random.randrange(1 << 60),
        temperature=random.choice([0.0, 1.0]),
        logprobs=random.choice([None, None, 2]),
        logprobs_mode=random.choice(["raw", "processed"]),
        logit_bias=random.choice([{}, {3: 1.5}]),
        mask=random.choice([None, mask_of(random.sample(range(VOCAB), random.randint(1, VOCAB)), VOCAB)]),
        bias=random.choice([(), ((5, -math.inf), (7, 2.0))]),
    )
    return replace(made, num_traced=random.choice([0, 1, 5]))


@given(st.integers(0, 1 << 40))
def test_draws_are_told_as_the_reference_counts_them(seed: int) -> None:
    random = Random(seed)
    logits = random_logits(4, VOCAB, seed=seed % 1000)
    rows = [random_row(random, index) for index in range(4)]
    result = run(logits, rows, sampler=StandardSampler(max_elements=random.choice([VOCAB, 10 * VOCAB])))
    plain = run(logits, [replace(each, num_traced=0) for each in rows])
    assert (result.tokens, result.logprobs) == (plain.tokens, plain.logprobs)
    assert not plain.draws
    if not any(each.num_traced for each in rows):
        assert not result.draws
        return
    for each, token, draw in zip(rows, result.tokens, result.draws, strict=True):
        if each.num_traced and token >= 0:
            assert draw is not None
            check(draw, draw_of(logits[each.logits_index].double().numpy(), each, token))
        else:
            assert draw is None


def check(draw: Draw, expected: Draw) -> None:
    check_odds(draw.before, expected.before)
    assert (draw.after is None) == (expected.after is None)
    if draw.after is not None and expected.after is not None:
        check_odds(draw.after, expected.after)
    assert draw.num_allowed == expected.num_allowed
    assert draw.taken == pytest.approx(expected.taken, abs=1e-6)


def check_odds(odds: Odds, expected: Odds) -> None:
    assert odds.logprob == pytest.approx(expected.logprob, abs=1e-4)
    assert odds.rank == expected.rank
    assert [token for token, _ in odds.top] == [token for token, _ in expected.top]
    assert [value for _, value in odds.top] == pytest.approx([value for _, value in expected.top], abs=1e-4)


def test_a_mask_that_leaves_one_token_takes_the_rest() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    made = replace(row(mask=mask_of([1], 4)), num_traced=2)
    (draw,) = run(logits, [made]).draws
    assert draw is not None
    assert draw.after is not None
    assert draw.before.top[0][0] == 3
    assert draw.after.top == ((1, 0.0),)
    assert (draw.num_allowed, draw.gap) == (1, None)
    assert draw.taken == pytest.approx(1 - math.exp(draw.before.logprob), abs=1e-6)


def test_a_row_with_nothing_to_draw_tells_nothing() -> None:
    made = replace(row(mask=bytes(4)), num_traced=5)
    assert list(run(torch.zeros(1, 4), [made]).draws) == [None]


@given(st.integers(0, 1 << 40))
def test_what_the_draw_has_counted_is_told_to_the_same_bits(seed: int) -> None:
    random = Random(seed)
    logits = random_logits(5, VOCAB, seed=seed % 1000)
    rows = [random_row(random, index) for index in range(4)]
    shared = run(logits, rows).draws or [None] * 4
    beside = replace(row(4, key=1, repetition_penalty=1.5), num_traced=1)  # nothing is shared in its company
    assert run(logits, [*rows, beside]).draws[:4] == shared
