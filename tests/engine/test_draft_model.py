"""Tests that a draft model of any accuracy changes only the time, and frees all resources that it takes."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given

from bridle.config import EngineConfig
from bridle.errors import BridleError
from bridle.sampling import AUTO_DRAFTS
from tests.engine.random_labs import (
    KEEPINGS,
    LATE,
    ON_TIME,
    SEED,
    DraftedLab,
    random_draft,
    random_lab,
    random_request,
    run_staggered,
)
from tests.engine.support import check_against_reference, make_request, more


@KEEPINGS
@more(3)
@given(seed=SEED)
def test_a_draft_model_changes_nothing(seed: int, kv: str) -> None:
    random = Random(seed)
    share, draft = random.choice([1.0, 0.9, 0.5, 0.0]), random_draft(random)
    lab = random_lab(random, kv, make=lambda **options: DraftedLab(share=share, draft=draft, **options))
    delays = random.choice([ON_TIME, LATE])
    requests = [
        random_request(random, delays, speculate=random.choice([AUTO_DRAFTS, None, 1, 3, 8]))
        for _ in range(random.randint(1, 6))
    ]
    replays = run_staggered(lab, requests, random)
    for request in requests:
        check_against_reference(lab, request, replays[request.id])


@KEEPINGS
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_right_draft_model_takes_one_step_for_many_tokens(kv: str, temperature: float) -> None:
    lab = DraftedLab(kv=kv, block_size=4, num_blocks=20)
    request = make_request([1, 2, 3], max_tokens=13, temperature=temperature, seed=5, ignore_eos=True, speculate=4)
    output = lab.run(request)[0].first
    assert output.tokens == lab.reference(request)[()].tokens
    # The prompt's step draws one token, each of the others five; the last one two, since no more are wanted.
    assert lab.executor.num_forwards == 4
    assert (output.usage.drafted_tokens, output.usage.accepted_tokens) == (9, 9)


@pytest.mark.parametrize(
    "fields",
    [
        {"allowed_token_ids": (1, 4, 9, 16, 25)},
        {"bad_words_ids": tuple((token,) for token in range(0, 32, 2))},
        {"min_tokens": 13, "stop_token_ids": tuple(range(0, 32, 2)), "ignore_eos": False},
    ],
)
def test_what_a_request_forbids_is_not_drafted(fields: dict[str, object]) -> None:
    lab = DraftedLab()
    chosen: dict[str, object] = {"max_tokens": 13, "temperature": 1.0, "seed": 5, "ignore_eos": True, **fields}
    request = make_request([1, 2, 3], speculate=4, **chosen)
    output = lab.run(request)[0].first
    assert output.tokens == lab.reference(request)[()].tokens
    assert (output.usage.drafted_tokens, output.usage.accepted_tokens) == (9, 9)


def test_sequences_are_drafted_for_together() -> None:
    """One forward pass of the draft model predicts one token of every sequence."""
    lab = DraftedLab(num_blocks=200)
    requests = [
        make_request([number, 9, 8], max_tokens=9, seed=number, ignore_eos=True, speculate=4) for number in range(8)
    ]
    lab.run(*requests)
    assert lab.executor.num_forwards == 3
    assert lab.draft.num_forwards == 6  # four, then two: the last token needs no draft


def test_what_came_true_is_not_computed_again() -> None:
    lab = DraftedLab()
    lab.run_one([1, 2, 3], max_tokens=25, seed=1, ignore_eos=True, speculate=3)
    num_tokens = 3 + 25
    assert lab.draft.num_computed_tokens <= num_tokens + 8  # of each step the last drafted token at most


def test_a_fork_finds_the_blocks_of_its_parent() -> None:
    lab = DraftedLab(draft={"block_size": 4})
    lab.run_one([number % 7 for number in range(40)], max_tokens=6, n=4, seed=1, ignore_eos=True, speculate=2)
    assert lab.draft.num_computed_tokens < 4 * 40


def test_left_to_the_engine_a_draft_model_drafts_unless_told_not_to() -> None:
    for speculate, expected in ((None, True), (0, False)):
        lab = DraftedLab(config=EngineConfig(speculate=speculate))
        output = lab.run_one(max_tokens=9, seed=1, ignore_eos=True).first
        assert (output.usage.drafted_tokens > 0) is expected


def test_a_draft_model_that_fails_costs_nobody_a_request() -> None:
    lab = DraftedLab(draft={"faults": {number: BridleError("broken") for number in (1, 5, 6, 7)}})
    requests = [make_request([number], max_tokens=40, seed=number, ignore_eos=True, speculate=2) for number in range(3)]
    replays = lab.run(*requests)
    for request, replay in zip(requests, replays, strict=True):
        check_against_reference(lab, request, replay)
    assert lab.draft.num_forwards == 8  # after three failures in a row it is left alone
    assert lab.engine.statistics().num_failed_steps == 0


def test_a_draft_model_with_fewer_tokens_or_a_shorter_context_leaves_the_rest_out() -> None:
    lab = DraftedLab(draft={"max_model_len": 12})
    output = lab.run_one([1, 2, 3], max_tokens=20, seed=1, ignore_eos=True, speculate=3).first
    assert len(output.tokens) == 20
    assert 0 < output.usage.drafted_tokens < 12


def test_closing_the_engine_closes_the_draft_model() -> None:
    lab = DraftedLab()
    lab.engine.close()
    assert lab.draft.is_closed
