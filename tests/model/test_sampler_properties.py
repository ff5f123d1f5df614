"""Properties: what a row draws depends on that row alone, and agrees with a plain reference."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st

from bridle.engine.control.decision import mask_of
from bridle.engine.scheduling.step_plan import SampleRow
from bridle.model.sampler import StandardSampler
from bridle.model.sampling.fixed_point_probs import UNIT, weights_of
from tests.model.sampling_kit import random_logits, row, run

VOCAB = 777
LOGITS = torch.cat([random_logits(4, VOCAB, seed=5), (random_logits(4, VOCAB, seed=6) * 4).round() / 4])
HISTORIES = {i: ([(7 * i + j * j) % VOCAB for j in range(40 + i)] + [4, 4], 9) for i in range(8)}
MASKS = [None, mask_of(range(0, VOCAB, 3), VOCAB), mask_of([4, 5, 6], VOCAB), mask_of([], VOCAB)]


@st.composite
def rows(draw: st.DrawFn) -> SampleRow:
    fields = {
        "temperature": draw(st.sampled_from([0.0, 0.01, 0.7, 1.0, 3.0])),
        "top_k": draw(st.sampled_from([0, 1, 7, 200, 776, 5000])),
        "top_p": draw(st.sampled_from([1.0, 0.95, 0.5, 1e-6])),
        "min_p": draw(st.sampled_from([0.0, 0.05, 1.0])),
        "typical_p": draw(st.sampled_from([1.0, 0.9, 0.2])),
        "repetition_penalty": draw(st.sampled_from([1.0, 1.3])),
        "presence_penalty": draw(st.sampled_from([0.0, 0.6])),
        "frequency_penalty": draw(st.sampled_from([0.0, -0.2])),
        "top_n_sigma": draw(st.sampled_from([-1.0, 0.0, 0.5, 2.0])),
        "xtc_probability": draw(st.sampled_from([0.0, 0.5, 1.0])),
        "xtc_threshold": draw(st.sampled_from([0.01, 0.1, 0.4])),
        "dynatemp_range": draw(st.sampled_from([0.0, 0.3, 5.0])),
        "dynatemp_exponent": draw(st.sampled_from([0.0, 1.0, 3.0])),
        "mirostat": draw(st.sampled_from([0, 2])),
        "mirostat_tau": draw(st.sampled_from([0.0, 1.0, 5.0])),
        "mu": draw(st.sampled_from([None, -3.0, 0.5, 4.0, 1e3])),
        "dry_multiplier": draw(st.sampled_from([0.0, 0.8])),
        "dry_allowed_length": draw(st.sampled_from([0, 1, 2])),
        "dry_breaker_ids": draw(st.sampled_from([(), (4,), (99, 100)])),
        "logit_bias": draw(st.sampled_from([{}, {3: 2.0, 9: -math.inf}])),
        "logprobs": draw(st.sampled_from([None, 0, 3])),
        "logprobs_mode": draw(st.sampled_from(["raw", "processed"])),
        "mask": draw(st.sampled_from(MASKS)),
        "bias": draw(st.sampled_from([(), ((4, 1.5),)])),
    }
    kept = draw(st.sets(st.sampled_from(sorted(fields)), max_size=7))
    index = draw(st.integers(0, len(LOGITS) - 1))
    chosen = {name: fields[name] for name in sorted(kept)}
    return row(index, key=draw(st.integers(0, 2**64)), draw=draw(st.integers(0, 2**40)), **chosen)


def test_lifting_the_hopeless_changes_no_weight() -> None:
    shifted = torch.cat([torch.linspace(-40.0, 0.0, 400_001), torch.tensor([-torch.inf, -1e30, -0.0])])
    assert torch.equal(weights_of(shifted), (shifted.exp() * UNIT).floor())
    assert weights_of(torch.tensor([torch.nan])).isnan().all()


@given(st.lists(rows(), min_size=1, max_size=9), st.sampled_from([None, 1, 2500]))
def test_a_row_is_bitwise_the_same_alone_and_among_others(batch: list[SampleRow], budget: int | None) -> None:
    sampler = StandardSampler(budget)
    together = run(LOGITS, batch, histories=HISTORIES, sampler=sampler)
    for i, single in enumerate(batch):
        alone = run(LOGITS, [single], histories=HISTORIES)
        assert alone.tokens[0] == together.tokens[i]
        assert alone.logprobs[0] == together.logprobs[i]
        assert (alone.mus or [0.0])[0] == (together.mus or [0.0] * len(batch))[i]


@given(rows(), st.sampled_from([1, 23, 247, 900]), st.sampled_from([-math.inf, -80.0]))
def test_padding_the_vocabulary_changes_no_token(single: SampleRow, extra: int, value: float) -> None:
    counts_all = single.sampling.typical_p < 1.0 or single.sampling.top_n_sigma > 0 or single.sampling.dynatemp_range
    if single.sampling.top_k > VOCAB or (value > -math.inf and counts_all):
        return  # a top-k beyond the vocabulary means something else in a wider one; so do finite extra logits
    padded = torch.cat([LOGITS, torch.full((len(LOGITS), extra), value)], dim=1)
    expected = run(LOGITS, [single], histories=HISTORIES)
    assert run(padded, [single], histories=HISTORIES).tokens == expected.tokens


@given(rows())
def test_what_is_drawn_was_allowed(single: SampleRow) -> None:
    token = run(LOGITS, [single], histories=HISTORIES).tokens[0]
    possible = allowed_tokens(single)
    assert token in possible if possible else token == -1


def allowed_tokens(single: SampleRow) -> set[int]:
    """Tokens that mask and -inf biases leave."""
    allowed = set(range(VOCAB))
    if single.mask is not None:
        allowed = {t for t in allowed if single.mask[t >> 3] >> (t & 7) & 1}
    return allowed - {t for t, b in single.sampling.logit_bias.items() if b == -math.inf}


@given(st.lists(rows(), min_size=1, max_size=4), st.permutations(range(len(LOGITS))))
def test_the_place_of_a_logits_row_does_not_matter(batch: list[SampleRow], order: list[int]) -> None:
    moved = [replace(r, logits_index=order.index(r.logits_index)) for r in batch]
    expected = run(LOGITS, batch, histories=HISTORIES).tokens
    assert run(LOGITS[order], moved, histories=HISTORIES).tokens == expected


@given(st.lists(rows(), min_size=1, max_size=4))
def test_the_default_dtype_does_not_matter(batch: list[SampleRow]) -> None:
    """The library changes it for a moment, for the whole process, whenever another model is loaded."""
    want = run(LOGITS, batch, histories=HISTORIES)
    torch.set_default_dtype(torch.bfloat16)
    try:
        got = run(LOGITS, batch, histories=HISTORIES)
    finally:
        torch.set_default_dtype(torch.float32)
    assert got == want
