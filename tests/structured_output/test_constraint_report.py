"""Tests of reports about a constraint's effect on probabilities, and of minimum probabilities for forced text."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from bridle.constraint_usage import ConstraintUsage, ForcedText
from bridle.engine.outputs.constraint_meter import MAX_FLOOR_REWINDS, num_noncanonical
from bridle.errors import ControllerError, InvalidRequest
from bridle.outputs import FinishReason
from bridle.sampling import SamplingParams
from bridle.structured_output import Choice, Regex
from bridle.testing.text import PieceDecoder
from tests.conftest import IS_FULL
from tests.structured_output.choices import exact
from tests.structured_output.kit import Lab, Output, spell, text_vocabulary

PROMPT = (1, 2)
TWO_WAYS = Regex("(axx|byy)")


def score(lab: Lab, text: str) -> float:
    return exact(lab, (text,), PROMPT)[0]


def measured(output: Output) -> ConstraintUsage:
    assert output.finished is not None and output.finished.usage.constraint is not None
    return output.finished.usage.constraint


def forced(lab: Lab, text: str) -> float:
    """Return the log-probability of all text after the first character."""
    return score(lab, text) - score(lab, text[0])


@pytest.mark.few(3)
@pytest.mark.parametrize("fields", [{}, {"logprobs": 2}, {"speculate": 4}])
@pytest.mark.parametrize("is_traced", [False, True])
def test_masks_and_forced_runs_are_measured(fields: dict[str, Any], is_traced: bool) -> None:
    for seed in range(2):
        with Lab(text_vocabulary(), seed=seed) as lab:
            request = lab.request(TWO_WAYS, PROMPT, constraint_report=True, **fields)
            output = lab.run(replace(request, trace=is_traced))[0][0]
            usage, text = measured(output), spell(lab.vocab, output.tokens)
            left = math.exp(score(lab, "a")) + math.exp(score(lab, "b"))
            assert usage.masked_tokens == 1 and usage.removed_max == usage.removed_mean == usage.removed_sum
            assert usage.removed_sum == pytest.approx(1.0 - left, abs=1e-5)
            assert usage.least_likely is not None and usage.forced_runs == 1
            assert usage.least_likely.logprob == pytest.approx(forced(lab, text), abs=1e-4)


def test_nothing_is_measured_unless_asked_for() -> None:
    with Lab(text_vocabulary(), record=True) as lab:
        output = lab.run_one(TWO_WAYS)
        assert output.finished is not None and output.finished.usage.constraint is None
        assert not any(row.num_traced for batch in lab.executor.batches for row in batch.rows)
        assert not any(batch.scores for batch in lab.executor.batches)


def test_a_scored_choice_is_one_draw_and_nothing_forced() -> None:
    choice = Choice(["rome", "name", "paris"])
    with Lab(text_vocabulary()) as lab:
        usage = measured(lab.run_one(choice, constraint_report=True))
        left = math.fsum(map(math.exp, exact(lab, choice.options, PROMPT)))
        assert (usage.masked_tokens, usage.forced_runs, usage.least_likely) == (1, 0, None)
        assert usage.removed_sum == pytest.approx(1.0 - left, abs=1e-5)


def greedy_and_other(lab: Lab) -> tuple[str, str]:
    first = spell(lab.vocab, lab.run_one(TWO_WAYS).tokens)
    return first, "byy" if first == "axx" else "axx"


def with_worse_greedy(check: Callable[[Lab, str, str, float], None]) -> None:
    """Run `check` with models whose greedy option forces less likely text than the other, and a limit between both."""
    num_checked = 0
    for seed in range(8):
        with Lab(text_vocabulary(), seed=seed) as lab:
            first, other = greedy_and_other(lab)
            floor = (forced(lab, first) + forced(lab, other)) / 2
            if forced(lab, first) < floor:
                check(lab, first, other, floor)
                num_checked += 1
        if num_checked == 2 and not IS_FULL:
            break
    assert num_checked > 1


def test_a_run_below_the_floor_is_flagged() -> None:
    def check(lab: Lab, first: str, other: str, floor: float) -> None:
        output = lab.run_one(TWO_WAYS, constraint_floor=floor)
        assert spell(lab.vocab, output.tokens) == first and measured(output).runs_below_floor == 1

    with_worse_greedy(check)


def test_a_run_below_the_floor_is_refused() -> None:
    def check(lab: Lab, first: str, other: str, floor: float) -> None:
        output = lab.run_one(TWO_WAYS, constraint_floor=floor, on_constraint_floor="refuse")
        assert output.finished is not None and isinstance(output.finished.error, ControllerError)
        assert "log-probability" in str(output.finished.error)

    with_worse_greedy(check)


@pytest.mark.few(2)
@pytest.mark.parametrize("fields", [{}, {"speculate": 4}, {"logprobs": 0}])
def test_a_run_below_the_floor_is_taken_back(fields: dict[str, Any]) -> None:
    def check(lab: Lab, first: str, other: str, floor: float) -> None:
        output = lab.run_one(TWO_WAYS, constraint_floor=floor, on_constraint_floor="rewind", **fields)
        usage = measured(output)
        assert output.finished is not None and output.finished.reason is FinishReason.CONTROLLER
        assert (usage.rewound_runs, usage.runs_below_floor, usage.forced_runs) == (1, 0, 1)
        assert spell(lab.vocab, output.tokens[-2:]) in other and output.finished.usage.completion_tokens <= 3

    with_worse_greedy(check)


def test_the_last_way_stays_and_is_flagged() -> None:
    for seed in range(2):
        with Lab(text_vocabulary(), seed=seed) as lab:
            output = lab.run_one(TWO_WAYS, constraint_floor=-0.0001, on_constraint_floor="rewind")
            usage = measured(output)
            assert output.finished is not None and output.finished.reason is FinishReason.CONTROLLER
            assert (usage.rewound_runs, usage.runs_below_floor) == (2, 1)


def test_rewinds_are_bounded() -> None:
    way = Regex("([a-zA-Z0-9]qqq){3}")
    with Lab(text_vocabulary()) as lab:
        output = lab.run_one(way, constraint_floor=-0.0001, on_constraint_floor="rewind", max_tokens=400)
        assert measured(output).rewound_runs == MAX_FLOOR_REWINDS
        assert output.finished is not None and output.finished.reason is FinishReason.CONTROLLER


def test_tokens_that_the_tokenizer_would_not_write_are_counted() -> None:
    decoder = PieceDecoder([b"<end>", b"P", b"ar", b"is", b"Paris", b" "])
    assert num_noncanonical(decoder, [5, 4, 5, 1, 2, 3], 1) == 3
    assert num_noncanonical(decoder, [5, 4, 5, 4], 0) == 0


def test_usages_add_up() -> None:
    total = ConstraintUsage(2, 0.5, 0.4, 1, ForcedText("a", -1.0))
    total.add(ConstraintUsage(2, 1.5, 0.9, 3, ForcedText("b", -4.0), 2, 1, 1))
    assert total.to_dict() == {
        "masked_tokens": 4,
        "removed_probability": {"sum": 2.0, "mean": 0.5, "max": 0.9},
        "forced_runs": 4,
        "least_likely_run": {"text": "b", "logprob": -4.0},
        "noncanonical_tokens": 2,
        "runs_below_floor": 1,
        "rewound_runs": 1,
    }


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"constraint_floor": 1.0}, "constraint_floor is 1.0; must be at least -10000 and at most 0"),
        ({"on_constraint_floor": "stop"}, "on_constraint_floor is 'stop'; must be one of 'flag', 'refuse', 'rewind'"),
    ],
)
def test_wrong_values_are_refused(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidRequest, match=told):
        SamplingParams(**fields)
