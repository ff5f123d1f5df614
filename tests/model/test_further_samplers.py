"""Tests of DRY, XTC, Mirostat 2, top-n-sigma and dynamic temperature, compared with a plain reference and with their
authors' descriptions."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bridle.engine.control.decision import mask_of
from bridle.engine.scheduling.step_plan import SampleRow
from bridle.model.sampling.dry import repetitions
from bridle.model.sampling.rows import gather
from bridle.model.sampling.truncation import dynamic_temperatures
from bridle.model.sampling.uniform import uniforms
from bridle.sampling import SamplingParams
from bridle.testing.sampler import distribution, next_mu, sample_row
from tests.model.sampling_kit import random_logits, row, run

VOCAB = 96
LOGITS = random_logits(6, VOCAB, seed=11)
PLAIN = [line.astype(np.float64) for line in LOGITS.numpy()]


@pytest.fixture(autouse=True, scope="module")
def same_numbers() -> Iterator[None]:
    """Inside the `with` block, the plain reference uses the sampler's random numbers instead of the scripted
    model's."""
    with patch("bridle.testing.sampler.uniform", lambda key, draw: float(uniforms([key], [draw])[0])):
        yield


#: For each sampler parameters that switch it off, whatever its others are.
NEUTRAL: list[dict[str, Any]] = [
    {"top_n_sigma": 0.0},
    {"top_n_sigma": -1.0},
    {"xtc_probability": 0.0, "xtc_threshold": 0.01},
    {"xtc_probability": 1.0, "xtc_threshold": 1.0},
    {"dynatemp_range": 0.0, "dynatemp_exponent": 3.0},
    {"mirostat": 0, "mirostat_tau": 0.1},
    {"dry_multiplier": 0.0, "dry_base": 3.0},
    {"dry_multiplier": 2.0, "dry_penalty_last_n": 0},
    {"dry_multiplier": 2.0, "dry_allowed_length": 1000},
]


@st.composite
def sampled(draw: st.DrawFn) -> tuple[SampleRow, list[int]]:
    """Return a row that uses some of the samplers, and a token history with repetitions."""
    fields = {
        "temperature": draw(st.sampled_from([0.0, 0.5, 1.0, 1.7])),
        "top_n_sigma": draw(st.sampled_from([0.0, 0.7, 1.6])),
        "xtc_probability": draw(st.sampled_from([0.0, 0.5, 1.0])),
        "xtc_threshold": draw(st.sampled_from([0.02, 0.1, 0.3])),
        "dynatemp_range": draw(st.sampled_from([0.0, 0.4, 3.0])),
        "dynatemp_exponent": draw(st.sampled_from([0.5, 1.0, 2.0])),
        "mirostat": draw(st.sampled_from([0, 0, 2])),
        "mirostat_tau": draw(st.sampled_from([0.5, 2.0, 5.0])),
        "mu": draw(st.sampled_from([None, -1.0, 1.0, 3.0])),
        "dry_multiplier": draw(st.sampled_from([0.0, 0.8, 5.0])),
        "dry_base": draw(st.sampled_from([1.0, 1.75])),
        "dry_allowed_length": draw(st.sampled_from([0, 1, 2, 4])),
        "dry_penalty_last_n": draw(st.sampled_from([-1, 0, 1, 12])),
        "dry_breaker_ids": draw(st.sampled_from([(), (1,), (0, 2)])),
        "top_p": draw(st.sampled_from([1.0, 0.8])),
        "repetition_penalty": draw(st.sampled_from([1.0, 1.4])),
        "mask": draw(st.sampled_from([None, mask_of(range(0, VOCAB, 2), VOCAB), mask_of([3], VOCAB)])),
    }
    history = draw(st.lists(st.integers(0, 3), max_size=40))
    index = draw(st.integers(0, len(LOGITS) - 1))
    return row(index, key=draw(st.integers(0, 2**64 - 1)), draw=draw(st.integers(0, 99)), **fields), history


@given(sampled())
def test_draws_agree_with_the_plain_reference(case: tuple[SampleRow, list[int]]) -> None:
    """Both samplers give the same token, unless the random number is within a rounding error of the edge between two
    tokens."""
    single, history = case
    found = run(LOGITS, [single], histories={single.seq_id: (history, 2)})
    plain = PLAIN[single.logits_index]
    expected, _ = sample_row(plain, single, history, 2)
    if found.tokens[0] != expected:
        assert is_close_call(single, history, plain, found.tokens[0])
    elif single.sampling.has_mirostat:
        assert found.mus[0] == pytest.approx(next_mu(plain, single, history, 2, expected), abs=1e-3)


def is_close_call(single: SampleRow, history: list[int], plain: Any, token: int) -> bool:
    """Return whether a change of the parameters by a rounding error makes the reference sample `token`."""
    for nudge in (-1e-4, 1e-4):
        for name in ("temperature", "top_n_sigma", "xtc_threshold", "top_p"):
            value = getattr(single.sampling, name) * (1 + nudge)
            sampling = single.sampling.with_(**{name: min(value, 1.0) if name == "top_p" else value})
            if sample_row(plain, replace(single, sampling=sampling), history, 2)[0] == token:
                return True
        if single.mu is not None and sample_row(plain, replace(single, mu=single.mu + nudge), history, 2)[0] == token:
            return True
    return False


@given(st.sampled_from(NEUTRAL), st.integers(0, 2**40), st.lists(st.integers(0, 5), max_size=20))
def test_a_sampler_that_is_off_changes_nothing(off: dict[str, Any], key: int, history: list[int]) -> None:
    plain = run(LOGITS, [row(i, key=key) for i in range(6)], histories=dict.fromkeys(range(6), (history, 1)))
    found = run(LOGITS, [row(i, key=key, **off) for i in range(6)], histories=dict.fromkeys(range(6), (history, 1)))
    assert found.tokens == plain.tokens and found.mus == []


@pytest.mark.parametrize(
    "fields", [{"top_n_sigma": 0.01}, {"xtc_probability": 1.0}, {"mirostat": 2}, {"dynatemp_range": 9}]
)
def test_at_temperature_0_the_best_token_is_taken(fields: dict[str, Any]) -> None:
    found = run(LOGITS, [row(i, temperature=0.0, **fields) for i in range(6)])
    assert found.tokens == LOGITS.argmax(1).tolist() and found.mus == []


# -- one by one ------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 2), max_size=120), st.sets(st.integers(0, 2), max_size=1))
def test_repetitions_are_those_of_the_original_loop(tokens: list[int], breakers: set[int]) -> None:
    """The DRY penalties equal those of the original loop over all earlier positions of the last token."""
    longest: dict[int, int] = {}
    for i in [i for i, token in enumerate(tokens[:-1]) if token == tokens[-1]]:
        if tokens[-1] in breakers or tokens[i + 1] in breakers:
            continue
        length = 1
        while length < 50 and i - length >= 0:
            before = tokens[-length - 1]
            if tokens[i - length] != before or before in breakers:
                break
            length += 1
        longest[tokens[i + 1]] = max(longest.get(tokens[i + 1], 0), length)
    found, lengths = repetitions(np.array(tokens, dtype=np.int64), np.array(sorted(breakers), dtype=np.int64))
    assert dict(zip(found.tolist(), lengths.tolist(), strict=True)) == longest


def test_dry_breaks_a_loop() -> None:
    """A model that would repeat three tokens for ever stops when the DRY penalty exceeds the repeated token's lead in
    logits."""
    history, period = [5, 6, 7, 5, 6, 7, 5, 6], 7
    logits = torch.zeros(1, VOCAB)
    logits[0, period] = 4.0
    base = {"temperature": 0.0, "dry_base": 2.0, "dry_allowed_length": 2}
    stays = run(logits, [row(0, dry_multiplier=0.1, **base)], histories={0: (history, 0)})
    leaves = run(logits, [row(0, dry_multiplier=1.0, **base)], histories={0: (history, 0)})
    broken = run(logits, [row(0, dry_multiplier=9.0, dry_breaker_ids=(6,), **base)], histories={0: (history, 0)})
    assert stays.tokens == [period] and leaves.tokens != [period] and broken.tokens == [period]


def test_xtc_leaves_the_least_likely_of_the_top_choices() -> None:
    probs = [0.4, 0.3, 0.15, 0.1, 0.05]
    logits = torch.tensor([probs]).log()
    always = {"xtc_probability": 1.0, "xtc_threshold": 0.12}
    drawn = run(logits, [row(0, key=key, **always) for key in range(2000)]).tokens
    assert set(drawn) == {2, 3, 4}
    shares = np.bincount(drawn, minlength=5) / 2000
    assert shares[2:] == pytest.approx([0.5, 1 / 3, 1 / 6], abs=0.06)
    one = run(logits, [row(0, key=key, xtc_probability=1.0, xtc_threshold=0.35) for key in range(500)]).tokens
    assert 0 in one  # a single token above the threshold stays


def test_xtc_strikes_as_often_as_it_is_told_to() -> None:
    logits = torch.tensor([[0.5, 0.5]]).log()
    drawn = run(logits, [row(0, key=key, xtc_probability=0.4, xtc_threshold=0.1) for key in range(4000)]).tokens
    assert np.mean(np.array(drawn) == 0) == pytest.approx(0.3, abs=0.04)  # never when it strikes, else every second


@pytest.mark.few(1)
@pytest.mark.parametrize("n", [0.3, 1.0, 2.0])
def test_top_n_sigma_keeps_what_the_paper_keeps(n: float) -> None:
    logits = random_logits(1, 400, seed=2)
    kept = set(
        run(logits.expand(1, -1), [row(0, key=key, top_n_sigma=n, temperature=50.0) for key in range(4000)]).tokens
    )
    edge = float(logits.max() - n * logits.std(correction=0))
    assert kept <= set((logits[0] >= edge - 1e-3).nonzero().flatten().tolist())
    assert len(kept) >= 0.8 * int((logits[0] >= edge).sum())


def test_top_n_sigma_does_not_depend_on_the_temperature() -> None:
    rows = [replace(row(0, top_n_sigma=1.0, temperature=t), key=1) for t in (0.1, 1.0, 30.0)]
    kept = [np.flatnonzero(distribution(PLAIN[0], each)).tolist() for each in rows]
    assert kept[1] == kept[2] and set(kept[0]) <= set(kept[1])


def test_a_dynamic_temperature_goes_from_its_least_to_its_most() -> None:
    """The dynamic temperature is highest if all tokens are equally probable, and lowest if one token is certain."""
    flat, sharp = torch.zeros(1, 50), torch.full((1, 50), -200.0)
    sharp[0, 3] = 0.0
    params = [SamplingParams(temperature=0.7, dynatemp_range=0.5)]
    assert dynamic_temperatures(gather(flat, [0]), params).item() == pytest.approx(1.2, abs=1e-5)
    assert dynamic_temperatures(gather(sharp, [0]), params).item() == pytest.approx(0.2, abs=1e-5)
    half = torch.full((1, 16), -math.inf)
    half[0, :4] = 0.0  # of 4 allowed tokens all alike: entropy at its most
    assert dynamic_temperatures(gather(half, [0]), params).item() == pytest.approx(1.2, abs=1e-5)


@pytest.mark.few(1)
@pytest.mark.parametrize("tau", [1.0, 3.0, 5.0])
def test_mirostat_brings_the_mean_surprise_to_tau(tau: float) -> None:
    logits = random_logits(1, 2000, seed=4, scale=1.0)
    mu, seen = None, []
    for step in range(600):
        single = replace(row(0, mirostat=2, mirostat_tau=tau, key=9), mu=mu, draw=step)
        before = 2 * tau if mu is None else mu
        mu = run(logits, [single]).mus[0]
        seen.append(tau + (before - mu) / 0.1)
    assert np.mean(seen[100:]) == pytest.approx(tau, abs=0.15)
