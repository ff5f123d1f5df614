"""Tests of the ends of outputs and data about their tokens: stop tokens, limits, log-probabilities and exact counts."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from bridle.engine.control.decision import Branch, Decision
from bridle.engine.request import MaxLength, MaxNewTokens, StopOnRepetition, StopOnTokens
from bridle.errors import ContextOverflow, InvalidRequest
from bridle.outputs import FinishReason, PromptEvent, PromptProgress, TokenEvent, Usage
from bridle.testing.text import PieceDecoder
from tests.engine.programs import script
from tests.engine.support import Lab, check_against_reference, make_request
from tests.fakes.reference_engine import reference_prompt_logprobs

COUNT_UP = {"vocab_size": 40, "next_token": lambda prefix: prefix[-1] + 1}


def test_the_end_token_ends_and_stays() -> None:
    lab = Lab(**COUNT_UP, eos_token_ids=(7, 12))
    got = lab.run_one((3,), max_tokens=20)
    assert got.first.tokens == [4, 5, 6, 7]
    assert got.first.finished is not None
    assert (got.first.reason, got.first.finished.stop) == (FinishReason.STOP, 7)


@pytest.mark.parametrize(
    ("fields", "tokens", "reason"),
    [
        ({"ignore_eos": True}, range(4, 14), "length"),
        ({"ignore_eos": True, "stop_token_ids": (9,)}, range(4, 10), "stop"),
        ({"stop_token_ids": (5,)}, range(4, 6), "stop"),
        ({"max_tokens": 3}, range(4, 7), "length"),
        ({"max_tokens": 4}, range(4, 8), "stop"),  # the end token comes first
        ({"stop": ("e",)}, range(4, 5), "stop"),
        ({"stop": ("fg",)}, range(4, 7), "stop"),
        ({"stop": ("fg",), "ignore_eos": True, "stop_token_ids": (5,)}, range(4, 6), "stop"),
        ({"stopping": (StopOnTokens({6}),)}, range(4, 7), "stop"),
        ({"stopping": (MaxNewTokens(2),)}, range(4, 6), "length"),
        ({"stopping": (MaxLength(3),)}, range(4, 6), "length"),
        ({"stopping": (lambda tokens, num_prompt: "odd" if tokens[-1] == 5 else None,)}, range(4, 6), "stop"),
    ],
)
def test_what_ends_an_output(fields: dict[str, object], tokens: Sequence[int], reason: str) -> None:
    lab = Lab(**COUNT_UP, eos_token_ids=(7,), decoder=PieceDecoder.alphabet(40))
    got = lab.run_one((3,), **{"max_tokens": 10, **fields})
    assert got.first.tokens == list(tokens)
    assert got.first.reason.value == reason


def test_stop_strings_are_cut_or_kept() -> None:
    for include, text in ((False, "ef"), (True, "efghi")):
        lab = Lab(**COUNT_UP, decoder=PieceDecoder.alphabet(40))
        request = make_request((3,), stop=("ghi", "xyz"), include_stop_str_in_output=include)
        (got,) = lab.run(request)
        assert got.first.text == text
        assert got.first.finished is not None
        assert got.first.finished.stop == "ghi"
        assert got.first.tokens == [4, 5, 6, 7, 8]
        check_against_reference(lab, request, got)


def test_no_text_where_none_is_wanted() -> None:
    lab = Lab(**COUNT_UP, decoder=PieceDecoder.alphabet(40))
    got = lab.run_one((3,), detokenize=False, max_tokens=5)
    assert (got.first.text, len(got.first.tokens)) == ("", 5)


def test_min_tokens_forbids_the_end_until_then() -> None:
    for seed in range(10):
        lab = Lab(vocab_size=4, eos_token_ids=(0, 1))
        request = make_request((2, 3), min_tokens=6, max_tokens=30, seed=seed, stop_token_ids=(2,))
        (got,) = lab.run(request)
        check_against_reference(lab, request, got)
        assert got.first.tokens[:6] == [3] * 6
        assert len(got.first.tokens) >= 6


def test_forced_end_tokens_end_too() -> None:
    lab = Lab(**COUNT_UP, eos_token_ids=(7,))
    got = lab.run_one((3,), controller=script(Decision.splice(0, (5, 7, 9))), max_tokens=10)
    assert got.first.tokens == [5, 7]
    assert got.first.usage.forced_tokens == 2


def test_criteria_see_tokens_and_prompt_length() -> None:
    seen: list[tuple[list[int], int]] = []

    def criterion(tokens: Sequence[int], num_prompt: int) -> str | None:
        seen.append((list(tokens), num_prompt))
        return "that will do" if len(seen) == 3 else None

    lab = Lab(**COUNT_UP)
    got = lab.run_one((1, 2), stopping=(criterion,))
    assert seen == [([1, 2, 3], 2), ([1, 2, 3, 4], 2), ([1, 2, 3, 4, 5], 2)]
    assert got.first.finished is not None
    assert got.first.finished.stop == "that will do"


def test_a_criterion_that_raises_ends_its_own_request() -> None:
    def criterion(tokens: Sequence[int], num_prompt: int) -> str | None:
        raise RuntimeError("broken criterion")

    lab = Lab()
    bystander = make_request(max_tokens=4)
    got, other = lab.run(make_request(stopping=(criterion,)), bystander)
    check_against_reference(lab, bystander, other)
    assert got.first.finished is not None
    assert isinstance(got.first.finished.error, InvalidRequest)
    assert "broken criterion" in str(got.first.finished.error)


@pytest.mark.parametrize(
    ("tokens", "num_prompt", "expected"),
    [
        ([9, 1, 2, 1, 2, 1, 2], 1, "repetition"),
        ([1, 2, 1, 2, 1, 2], 1, None),  # the first pair is prompt
        ([9, 1, 2, 1, 3, 1, 2], 1, None),
        ([9, 1, 2, 1, 2], 1, None),
    ],
)
def test_a_repeated_run_of_tokens_stops_an_output(tokens: list[int], num_prompt: int, expected: str | None) -> None:
    assert StopOnRepetition(2, 3)(tokens, num_prompt) == expected


# -- log-probabilities -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv", ["paged", "sequences"])
@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_prompt_logprobs_are_those_of_the_model(kv: str, chunk: int) -> None:
    lab = Lab(kv=kv, max_num_batched_tokens=chunk)
    for _ in range(2):  # the second time the prefix is cached, but its scores are wanted all the same
        request = make_request(range(10), prompt_logprobs=2, max_tokens=3)
        (got,) = lab.run(request)
        lab.events.clear()
        assert got.prompt is not None
        assert got.prompt.logprobs == reference_prompt_logprobs(lab.executor.model, request)
        assert got.prompt.tokens == tuple(range(10))
        check_against_reference(lab, request, got)


def test_scores_without_a_single_new_token() -> None:
    lab = Lab()
    request = make_request(range(9), prompt_logprobs=0, max_tokens=0)
    (got,) = lab.run(request)
    assert got.prompt is not None
    assert got.prompt.logprobs == reference_prompt_logprobs(lab.executor.model, request)
    assert (got.first.tokens, got.first.reason) == ([], FinishReason.LENGTH)
    assert lab.executor.num_computed_tokens == 8  # the last token predicts nothing that is asked for


def test_logprobs_of_forced_tokens_are_the_models() -> None:
    lab = Lab()
    program = script(Decision.splice(0, (4, 5)), Decision.sample(), Decision.splice(1, (6, 7, 8)))
    request = make_request((1, 2, 3), controller=program, logprobs=1, max_tokens=7)
    (got,) = lab.run(request)
    check_against_reference(lab, request, got)
    assert got.first.forced[:5] == [True, True, True, True, True]
    for i, logprob in enumerate(got.first.logprobs):
        row = lab.executor.model.row_after((1, 2, 3, *got.first.tokens[:i]))
        expected = row[got.first.tokens[i]] - math.log(sum(math.exp(value) for value in row))
        assert logprob is not None
        assert logprob.logprob == pytest.approx(expected)


def test_logprobs_when_forced_tokens_end_the_output() -> None:
    lab = Lab(eos_token_ids=(9,))
    request = make_request((1, 2), controller=script(Decision.splice(0, (4, 5, 9, 6))), logprobs=0, max_tokens=9)
    (got,) = lab.run(request)
    check_against_reference(lab, request, got)
    assert got.first.tokens == [4, 5, 9]
    assert all(logprob is not None for logprob in got.first.logprobs)


def test_forks_have_their_own_logprobs() -> None:
    lab = Lab()
    ways = Decision.fork([Branch(), Branch(), Branch()])
    request = make_request((1, 2), controller=script(Decision.splice(0, (3,)), ways), logprobs=2, max_tokens=5, n=2)
    (got,) = lab.run(request)
    assert len(got.outputs) == 6
    check_against_reference(lab, request, got)


# -- order and counts ------------------------------------------------------------------------------------------


def test_the_prompt_is_told_first_and_once() -> None:
    lab = Lab(max_num_batched_tokens=4)
    lab.run_one(range(11), max_tokens=3, n=2)
    progress = [event.num_computed for event in lab.events if isinstance(event, PromptProgress)]
    assert progress == [4, 8]
    kinds = [type(event) for event in lab.events][len(progress) :]
    assert kinds[0] is PromptEvent
    assert kinds.count(PromptEvent) == 1
    assert kinds.count(TokenEvent) == 6


def test_counts_are_exact() -> None:
    lab = Lab(num_blocks=40, block_size=4)
    lab.run_one(range(10), max_tokens=1)
    program = script(
        Decision.sample(),
        Decision.splice(0, (5, 6, 7)),
        Decision.splice(2, (8,)),
        Decision.fork([Branch(), Branch()]),
    )
    request = make_request((*range(8), 30, 31), controller=program, max_tokens=6)
    (got,) = lab.run(request)
    check_against_reference(lab, request, got)
    assert got.first.usage == Usage(
        prompt_tokens=10,
        cached_tokens=8,
        completion_tokens=6,
        sampled_tokens=4,
        forced_tokens=4,
        rewound_tokens=2,
        shared_tokens=0,
    )
    assert got.by_path[0,].usage == Usage(
        prompt_tokens=10,
        cached_tokens=8,
        completion_tokens=6,
        sampled_tokens=3,
        forced_tokens=0,
        rewound_tokens=0,
        shared_tokens=13,
    )
    statistics = lab.engine.statistics()
    assert statistics.num_sampled_tokens == 1 + 4 + 3
    assert (statistics.num_forced_tokens, statistics.num_rewound_tokens) == (4, 2)
    assert (statistics.num_prompt_tokens, statistics.num_cached_tokens) == (20, 8)
    assert dict(statistics.finished) == {"length": 3}


# -- what is refused at the door -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "fields", "message"),
    [
        ((), {}, "the prompt is empty"),
        ((1, 32), {}, "prompt holds token 32; the vocabulary has 32"),
        ((-1,), {}, "prompt holds token -1"),
        ((1,), {"logit_bias": {32: 1.0}}, "logit_bias names token 32"),
    ],
)
def test_wrong_parameters_are_refused(prompt: Sequence[int], fields: dict[str, object], message: str) -> None:
    lab = Lab()
    with pytest.raises(InvalidRequest, match=message):
        lab.engine.add(make_request(prompt, **fields))
    assert not lab.engine.has_work


def test_too_long_for_the_context_or_the_cache() -> None:
    lab = Lab(num_blocks=8, block_size=4, max_model_len=20)
    with pytest.raises(ContextOverflow, match="at most 20 tokens fit into the model's context"):
        lab.engine.add(make_request(range(10), max_tokens=11))
    lab = Lab(num_blocks=4, block_size=4, max_model_len=64)
    with pytest.raises(ContextOverflow, match="at most 16 tokens fit into the KV cache"):
        lab.engine.add(make_request(range(16), max_tokens=None))
    assert len(lab.run_one(range(15), max_tokens=None).first.tokens) == 1
    assert len(lab.run_one(range(6), max_tokens=10).first.tokens) == 10


def test_the_same_id_twice() -> None:
    lab = Lab()
    lab.engine.add(make_request(id="x"))
    with pytest.raises(InvalidRequest, match="id 'x' is running"):
        lab.engine.add(make_request(id="x"))
    lab.drain()
    lab.events.clear()
    assert lab.run(make_request(id="x", max_tokens=2))[0].first.reason is FinishReason.LENGTH


def test_a_full_queue_refuses_more() -> None:
    from bridle.errors import Overloaded

    lab = Lab(max_waiting=2)
    for _ in range(2):
        lab.engine.add(make_request())
    with pytest.raises(Overloaded, match="2 requests wait already; at most 2"):
        lab.engine.add(make_request())
    lab.step()
    lab.engine.add(make_request())
    lab.drain()


def test_cancelling_what_is_unknown_or_over_is_fine() -> None:
    lab = Lab()
    lab.engine.cancel("nobody")
    request = make_request(max_tokens=2)
    lab.run(request)
    lab.engine.cancel(request.id)
    assert lab.engine.step() == []
