"""Tests of properties of the sampler: a row's sample depends only on that row, and agrees with a plain reference."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st

from bridle.engine.scheduling.step_plan import SampleRow
from bridle.model.sampler import StandardSampler
from bridle.model.sampling.fixed_point_probs import UNIT, weights_of
from tests.model.sampling_kit import HISTORIES, LOGITS, VOCAB, rows, run


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
    """Return the tokens that the row's mask and its biases of -inf allow."""
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
    """Samples do not depend on torch's default dtype, which transformers changes for a moment while another model
    loads."""
    want = run(LOGITS, batch, histories=HISTORIES)
    torch.set_default_dtype(torch.bfloat16)
    try:
        got = run(LOGITS, batch, histories=HISTORIES)
    finally:
        torch.set_default_dtype(torch.float32)
    assert got == want
