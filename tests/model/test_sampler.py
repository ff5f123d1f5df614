"""Tests of the sampler's rules, one rule in each test."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from bridle.engine.control.decision import mask_of
from bridle.engine.scheduling.step_plan import SampleRow, ScoreRun
from bridle.model.sampler import NOTHING, StandardSampler
from bridle.model.sampling.logprobs import FLOOR
from bridle.model.sampling.uniform import uniforms
from bridle.sampling import SamplingParams
from tests.model.sampling_kit import random_logits, row, run

VOCAB = 300


def test_greedy_takes_the_first_of_equal_logits() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[0, [17, 99]] = 4.0
    logits[1, [250, 3]] = 2.0
    plain = run(logits, [row(0, temperature=0.0), row(1, temperature=0.0)])
    masked = run(logits, [row(i, temperature=0.0, mask=mask_of(range(VOCAB), VOCAB)) for i in range(2)])
    assert plain.tokens == masked.tokens == [17, 3]
    assert plain.step == 7


def test_logits_are_left_untouched() -> None:
    logits = random_logits(2, VOCAB)
    before = logits.clone()
    fields = {"repetition_penalty": 2.0, "top_p": 0.5, "logit_bias": {3: 5.0}, "mask": mask_of([1, 2], VOCAB)}
    run(logits, [row(0, **fields), row(1, temperature=0.3, typical_p=0.4)], histories={0: ([1, 2], 1)})
    assert torch.equal(logits, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_any_floating_type_gives_the_token_of_its_own_values(dtype: torch.dtype) -> None:
    logits = random_logits(1, VOCAB).to(dtype)
    rows = [row(0, key=key, top_p=0.9) for key in range(20)]
    assert run(logits, rows).tokens == run(logits.float(), rows).tokens


def test_bias_is_added_from_both_sources_and_minus_infinity_forbids() -> None:
    logits = torch.zeros(1, VOCAB)
    both = row(0, temperature=0.0, logit_bias={5: 1.0, 6: 1.5}, bias=((5, 1.0),))
    assert run(logits, [both]).tokens == [5]
    twice = row(0, temperature=0.0, bias=((8, 1.0), (8, 1.0), (9, 1.5)))
    assert run(logits, [twice]).tokens == [8]
    allowed = {t: -math.inf for t in range(VOCAB) if t != 42}
    assert run(logits, [row(0, key=k, logit_bias=allowed) for k in range(5)]).tokens == [42] * 5


def test_bias_outside_the_vocabulary_is_ignored() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 11] = 1.0
    assert run(logits, [row(0, temperature=0.0, bias=((VOCAB, 9.0), (-1, 9.0), (10**9, 9.0)))]).tokens == [11]


def test_mask_shorter_than_the_logits_forbids_the_padding() -> None:
    logits = torch.zeros(1, 512)
    logits[0, 400:] = 50.0
    drawn = run(logits, [row(0, key=k, mask=mask_of([3, 4, 299], VOCAB)) for k in range(40)]).tokens
    assert set(drawn) == {3, 4, 299}


def test_mask_longer_than_the_logits_allows_nothing_more() -> None:
    logits = torch.zeros(1, 40)
    assert run(logits, [row(0, mask=mask_of([50, 63], 64))]).tokens == [NOTHING]
    assert run(logits, [row(0, mask=mask_of([7, 63], 64))]).tokens == [7]


def test_rows_with_nothing_to_draw_answer_minus_one_and_leave_the_others_alone() -> None:
    logits = random_logits(3, VOCAB)
    logits[1] = math.nan
    rows = [
        row(0, mask=mask_of([], VOCAB), logprobs=2),
        row(0, bias=tuple((t, -math.inf) for t in range(VOCAB))),
        row(1, temperature=0.7, top_p=0.9, top_k=5, typical_p=0.5, logprobs=1),
        row(1, temperature=0.0),
        row(0, mask=mask_of([4], VOCAB), bias=((4, -math.inf),), temperature=0.0, min_p=0.5),
        row(2, key=3, logprobs=0),
    ]
    result = run(logits, rows)
    assert result.tokens[:5] == [NOTHING] * 5
    assert result.logprobs[:5] == [None] * 5
    assert result.tokens[5] == run(logits, [rows[5]]).tokens[0] != NOTHING
    assert run(logits, [row(1, temperature=0.0)]).tokens == [NOTHING]


def test_repetition_penalty_counts_prompt_and_output_once() -> None:
    logits = torch.full((1, VOCAB), -9.0)
    logits[0, [1, 2, 3]] = torch.tensor([4.0, 3.0, 2.5])
    fields = {"temperature": 0.0, "repetition_penalty": 1.5}
    assert run(logits, [row(0, **fields)], histories={0: ([], 0)}).tokens == [1]
    assert run(logits, [row(0, **fields)], histories={0: ([1, 1, 1], 3)}).tokens == [2]  # 2.67: once, not thrice
    assert run(logits, [row(0, **fields)], histories={0: ([1, 2], 1)}).tokens == [1]  # 2.67 against 2.0 and 2.5
    negative = torch.tensor([[-1.0, -1.2]])
    assert run(negative, [row(0, **fields)], histories={0: ([0], 0)}).tokens == [1]


def test_presence_and_frequency_look_at_the_output_alone() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [1, 2]] = torch.tensor([3.0, 2.0])
    history = {0: ([1, 1, 1, 2], 3)}
    assert run(logits, [row(0, temperature=0.0, presence_penalty=2.0)], histories=history).tokens == [1]
    history = {0: ([5, 1, 1], 1)}
    frequent = row(0, temperature=0.0, frequency_penalty=0.4)
    assert run(logits, [frequent], histories=history).tokens == [1]  # 3 - 0.8
    assert run(logits, [frequent], histories={0: ([5, 1, 1, 1], 1)}).tokens == [2]  # 3 - 1.2
    assert run(logits, [row(0, temperature=0.0, presence_penalty=1.1)], histories=history).tokens == [2]


def test_history_is_followed_through_growth_rewind_and_reuse() -> None:
    sampler, logits = StandardSampler(), torch.zeros(1, VOCAB)
    rows = [row(0, temperature=0.0, repetition_penalty=1.0, presence_penalty=-5.0)]
    tokens = [200, 9]
    assert run(logits, rows, histories={0: (tokens, 1)}, sampler=sampler).tokens == [9]
    tokens += range(100, 180)  # past the spare room of the kept array
    logits[0, 170] = 0.5
    assert run(logits, rows, histories={0: (tokens, 1)}, sampler=sampler).tokens == [170]
    del tokens[-20:]  # rewound: 170 is gone again
    logits[0, 150] = 0.4
    assert run(logits, rows, histories={0: (tokens, 1)}, sampler=sampler).tokens == [150]
    tokens[-10:] = [33] * 30  # rewound and grown past the earlier length between two draws
    logits[0, 33] = 0.3
    assert run(logits, rows, histories={0: (tokens, 1)}, sampler=sampler).tokens == [33]
    assert run(logits, rows, histories={0: (np.array([1, 5]), 1)}, sampler=sampler).tokens == [5]
    assert run(logits, rows, histories={0: ((2, 6, 10**9), 1)}, sampler=sampler).tokens == [6]


def test_temperature_near_zero_is_greedy() -> None:
    logits = random_logits(1, VOCAB)
    best = int(logits.argmax())
    for temperature in (1e-300, 1e-38, 1e-6):
        assert run(logits, [row(0, key=k, temperature=temperature) for k in range(5)]).tokens == [best] * 5


@pytest.mark.parametrize("fields", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}, {"top_k": 1, "top_p": 0.5}])
def test_the_narrowest_filters_are_greedy_even_among_equals(fields: dict[str, float]) -> None:
    logits = torch.zeros(1, 1000)
    logits[0, [600, 601, 602]] = 3.0
    drawn = set(run(logits, [row(0, key=k, **fields) for k in range(30)]).tokens)
    assert drawn == ({600, 601, 602} if "min_p" in fields else {600})


def test_top_k_keeps_exactly_k_of_equal_logits() -> None:
    drawn = set(run(torch.zeros(1, 1000), [row(0, key=k, top_k=3) for k in range(60)]).tokens)
    assert drawn == {0, 1, 2}


def test_wide_nuclei_are_found_beyond_the_first_head() -> None:
    logits = torch.zeros(1, 6000)
    drawn = run(logits, [row(0, key=k, top_p=0.5) for k in range(200)]).tokens
    assert max(drawn) < 3000 and max(drawn) > 2800  # equal logits: the first half by id


def test_parameters_may_change_with_every_row() -> None:
    logits = random_logits(1, VOCAB)
    order = logits[0].argsort(descending=True).tolist()
    rows = [row(0, key=1, top_k=1), row(0, temperature=0.0), row(0, key=5, mask=mask_of([77], VOCAB))]
    assert run(logits, rows).tokens == [order[0], order[0], 77]


# -- log-probabilities ---------------------------------------------------------------------------------------


def test_raw_logprobs_ignore_mask_bias_and_temperature() -> None:
    logits = random_logits(1, VOCAB)
    expected = logits[0].log_softmax(-1)
    result = run(logits, [row(0, temperature=2.0, logprobs=3, mask=mask_of([8], VOCAB), bias=((8, -2.0),))])
    logprob = result.logprobs[0]
    assert logprob is not None and logprob.token == 8
    assert logprob.logprob == pytest.approx(float(expected[8]), abs=1e-5)
    assert logprob.rank == 1 + int((logits[0] > logits[0, 8]).sum())
    best = expected.topk(3)
    assert [t for t, _ in logprob.top] == best.indices.tolist()
    assert [v for _, v in logprob.top] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_processed_logprobs_follow_bias_and_mask_but_not_penalties() -> None:
    logits = random_logits(1, VOCAB)
    allowed = [8, 9, 10]
    wanted = {"logprobs": 5, "logprobs_mode": "processed"}
    later = {"repetition_penalty": 9.0, "temperature": 0.1}
    steered = row(0, mask=mask_of(allowed, VOCAB), bias=((9, 1.0),), **wanted, **later)
    logprob = run(logits, [steered], histories={0: ([8, 9], 0)}).logprobs[0]
    values = logits[0, allowed] + torch.tensor([0.0, 1.0, 0.0])
    expected = dict(zip(allowed, values.log_softmax(-1).tolist(), strict=True))
    assert logprob is not None
    assert dict(logprob.top) == pytest.approx(expected, abs=1e-5)  # the two others are impossible: not listed
    assert logprob.logprob == pytest.approx(expected[logprob.token], abs=1e-5)


def test_logprobs_are_finite_for_impossible_tokens() -> None:
    logits = torch.full((2, VOCAB), -math.inf)
    logits[0, 3] = 1.0
    logits[1] = math.nan
    runs = [
        ScoreRun(0, 0, (4,), 2),
        ScoreRun(0, 1, (3,), 2),
        ScoreRun(0, 0, (VOCAB + 500,)),
        ScoreRun(0, 0, (3,)),
    ]
    scores = run(logits, scores=runs).scores
    assert [score[0].logprob for score in scores] == [FLOOR, FLOOR, FLOOR, 0.0]
    assert scores[0][0].top == ((3, 0.0),)
    assert scores[1][0].top == ()


def test_scores_equal_log_softmax_in_parts_of_any_size() -> None:
    logits = random_logits(13, VOCAB).bfloat16()
    tokens = tuple(range(50, 60))
    runs = [ScoreRun(1, 2, tokens, 2), ScoreRun(2, 0, (7,)), ScoreRun(3, 1, ())]
    expected = logits.float().log_softmax(-1)
    for max_elements in (1, 4 * VOCAB, None):
        scores = run(logits, scores=runs, sampler=StandardSampler(max_elements)).scores
        assert [[s.token for s in score] for score in scores] == [list(tokens), [7], []]
        found = [s.logprob for s in scores[0]]
        assert found == pytest.approx([float(expected[2 + i, t]) for i, t in enumerate(tokens)], abs=1e-5)
        assert scores[0][4].top[0][0] == int(logits[6].float().argmax())
        assert len(scores[0][4].top) == 2 and scores[1][0].top == ()


def test_scoring_a_long_prompt_works_in_bounded_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    from bridle.model.sampling import logprobs

    widest = 0
    original = logprobs.gather

    def watched(logits: torch.Tensor, indices: list[int]) -> torch.Tensor:
        nonlocal widest
        widest = max(widest, len(indices) * logits.shape[1])
        return original(logits, indices)

    monkeypatch.setattr(logprobs, "gather", watched)
    logits = torch.zeros(4000, 1).expand(4000, 3000)
    scores = run(logits, scores=[ScoreRun(0, 0, (5,) * 4000)], sampler=StandardSampler(1 << 16)).scores
    assert len(scores[0]) == 4000 and widest <= 1 << 16
    assert scores[0][3999].logprob == pytest.approx(-math.log(3000), abs=1e-6)


# -- random numbers ------------------------------------------------------------------------------------------


def test_uniforms_are_a_function_of_key_and_draw() -> None:
    many = uniforms([1, 2, 1, -1, 1 << 64], [0, 0, 1, 5, 3])
    assert many[0] == uniforms([1], [0])[0] and many[4] == uniforms([0], [3])[0]
    assert len(set(many.tolist())) == 5


def test_uniforms_fill_the_unit_interval_evenly_along_keys_and_draws() -> None:
    for keys, draws in ((range(20_000), [0] * 20_000), ([3] * 20_000, range(20_000))):
        values = uniforms(list(keys), list(draws))
        counts = np.bincount((values * 20).astype(int), minlength=20)
        assert len(counts) == 20 and float(((counts - 1000) ** 2 / 1000).sum()) < 43.8  # chi2, 19 df, p = 0.001
        assert abs(float(np.corrcoef(values[:-1], values[1:])[0, 1])) < 0.03


def test_no_rows_give_no_tokens() -> None:
    result = run(torch.zeros(0, VOCAB))
    assert (result.tokens, result.logprobs, result.scores) == ([], [], [])


def test_more_biases_than_are_remembered_stay_apart() -> None:
    sampler, logits = StandardSampler(), torch.zeros(1, VOCAB)
    for token in range(0, 200, 2):  # more objects than the bias cache keeps
        params = SamplingParams(temperature=0.0, logit_bias={token: 1.0})
        assert run(logits, [SampleRow(0, 0, params)], sampler=sampler).tokens == [token]
