"""Tests of choices: options are scored as a whole, and sampled by their whole probability."""

from __future__ import annotations

import json
import math
from collections import Counter
from string import ascii_lowercase
from typing import Any

import pytest

from bridle.engine.sampling.option_draw import draw_option
from bridle.engine.sampling.token_trie import TokenTrie
from bridle.errors import InternalError
from bridle.outputs import Finished, FinishReason, Stored
from bridle.sampling import SamplingParams
from bridle.structured_output import Choice, Constraint, JsonSchema
from tests.conftest import IS_FULL
from tests.structured_output.choices import exact
from tests.structured_output.kit import Lab, Output, spell, text_vocabulary

PROMPT = (1, 2)
CITIES = Choice(["paris", "rome", "madrid", "madras", "r", "name"])
#: Every option of one token, so that no further step is needed.
SHORT = Choice(["a", "b", "c"])


def texts_of(lab: Lab, outputs: list[dict[int, Output]]) -> list[str]:
    return [spell(lab.vocab, output.tokens) for each in outputs for _, output in sorted(each.items())]


@pytest.mark.few(3)
@pytest.mark.parametrize("kv", ["paged", "sequences"])
@pytest.mark.parametrize("choice", [CITIES, SHORT])
def test_the_best_option_as_a_whole_is_chosen(choice: Choice, kv: str) -> None:
    for seed in range(12 if IS_FULL else 4):
        with Lab(text_vocabulary(), seed=seed, kv=kv) as lab:
            scores = exact(lab, choice.options, PROMPT)
            (output,) = lab.run(lab.request(choice, PROMPT))
            assert texts_of(lab, [output]) == [choice.options[scores.index(max(scores))]]
            assert output[0].finished is not None
            assert output[0].finished.reason is FinishReason.CONTROLLER


def test_options_are_sampled_by_their_whole_probability() -> None:
    num, choice = 600 if IS_FULL else 300, CITIES
    with Lab(text_vocabulary(), seed=3) as lab:
        weights = [math.exp(score / 20.0) for score in exact(lab, choice.options, PROMPT)]
        asked = [lab.request(choice, PROMPT, temperature=20.0, seed=seed, n=2) for seed in range(num // 2)]
        found = Counter(texts_of(lab, lab.run(*asked)))
    assert sum(found.values()) == num
    expected = [num * weight / sum(weights) for weight in weights]
    pairs = zip(choice.options, expected, strict=True)
    assert sum((found[text] - mean) ** 2 / mean for text, mean in pairs) < 20.5  # 5 degrees of freedom, p = 0.001


@pytest.mark.parametrize("more", [{}, {"num_blocks": 18}, {"faults": {4: InternalError("lost")}}])
@pytest.mark.parametrize("max_num_seqs", [2, 5])
def test_a_backend_with_few_sequences_scores_as_many_at_a_time(max_num_seqs: int, more: dict[str, Any]) -> None:
    options = {"kv": "sequences", "max_num_seqs": max_num_seqs, "record": True, **more}
    with Lab(text_vocabulary(), seed=5) as lab:
        scores = exact(lab, CITIES.options, PROMPT)
    with Lab(text_vocabulary(), seed=5, **options) as lab:
        outputs = lab.run(lab.request(CITIES, PROMPT), lab.request(None, (3, 4), max_tokens=12), lab.request(CITIES))
        assert texts_of(lab, outputs[:1]) == [CITIES.options[scores.index(max(scores))]]
        assert max(len(plan.forks) for plan in lab.executor.plans) <= max_num_seqs // 2
        assert all(event.finished is not None for each in outputs for event in each.values())


def num_passes(lab: Lab) -> int:
    return sum(bool(plan.rows) for plan in lab.executor.plans)


@pytest.mark.parametrize(("choice", "passes"), [(SHORT, 1), (CITIES, 2)])
def test_a_choice_costs_at_most_one_further_step(choice: Choice, passes: int) -> None:
    with Lab(text_vocabulary(), record=True) as lab:
        lab.run_one(choice)
        assert num_passes(lab) == passes


#: Eight sequences and 16 tokens in a step, 8 of them of prompts.
SMALL_STEPS: dict[str, Any] = {"record": True, "max_num_seqs": 8, "max_num_batched_tokens": 8}


@pytest.mark.parametrize(("num_options", "sizes"), [(12, [2, 16, 16, 16]), (4, [2, 16])])
def test_steps_for_options_alone_are_full(num_options: int, sizes: list[int]) -> None:
    apart = Choice([5 * letter for letter in ascii_lowercase[:num_options]])  # each is a fork of four tokens
    with Lab(text_vocabulary(), **SMALL_STEPS) as lab:
        lab.run_one(apart)
        assert [plan.num_tokens for plan in lab.executor.plans if plan.rows] == sizes


def test_options_have_the_part_of_prompts_next_to_another_output() -> None:
    apart = Choice([5 * letter for letter in ascii_lowercase[:12]])
    with Lab(text_vocabulary(), **SMALL_STEPS) as lab:
        lab.run(lab.request(None, max_tokens=40, ignore_eos=True), lab.request(apart))
        plans = lab.executor.plans
        first = next(number for number, plan in enumerate(plans) if plan.forks)
        assert [plan.num_tokens for plan in plans[first : first + 2]] == [16, 16]
        assert [sum(row.num_scheduled - 1 for row in plan.rows) for plan in plans[first : first + 2]] == [8, 8]


@pytest.mark.parametrize(("step_tokens", "passes"), [(1024, 2), (512, 2), (256, 3)])
def test_a_thousand_options_cost_one_further_step_if_it_holds_their_tokens(step_tokens: int, passes: int) -> None:
    many = Choice([f"item {number:03}" for number in range(1_000)])  # 100 beginnings of seven tokens
    with Lab(text_vocabulary(), record=True, num_blocks=1024, max_num_batched_tokens=step_tokens) as lab:
        output = lab.run_one(many)
        assert spell(lab.vocab, output.tokens) in many.options
        assert num_passes(lab) == passes


def test_the_probabilities_of_all_options_are_reported_if_asked_for() -> None:
    choice = Choice(CITIES.options, scored=True)
    with Lab(text_vocabulary()) as lab:
        scores = exact(lab, choice.options, PROMPT)
        lab.engine.add(lab.request(choice, PROMPT))
        (stored,) = [event for event in lab.events() if isinstance(event, Stored)]
        told = json.loads(stored.value)
        assert told["logprobs"] == pytest.approx(scores, abs=1e-5)
        total = sum(map(math.exp, scores))
        assert told["probabilities"] == pytest.approx([math.exp(score) / total for score in scores], abs=1e-5)


@pytest.mark.parametrize(
    ("schema", "texts"),
    [({"type": "boolean"}, ("true", "false")), ({"type": "string", "enum": ["yes", "no"]}, ('"yes"', '"no"'))],
)
def test_a_schema_whose_answer_is_an_enum_is_a_choice(schema: dict[str, object], texts: tuple[str, ...]) -> None:
    for seed in range(6 if IS_FULL else 3):
        with Lab(text_vocabulary(), seed=seed) as lab:
            scores = exact(lab, texts, PROMPT)
            output = lab.run_one(JsonSchema(schema))
            assert spell(lab.vocab, output.tokens) == texts[scores.index(max(scores))]


@pytest.mark.parametrize(
    ("constraint", "sampling"),
    [
        (Choice(CITIES.options, scored=False), {}),
        (CITIES, {"logit_bias": {5: 1.0}}),
        (CITIES, {"max_tokens": 1}),
        (Choice(["yes", "y" * 70]), {}),
    ],
)
def test_masks_do_where_options_are_not_scored(constraint: Constraint, sampling: dict[str, object]) -> None:
    with Lab(text_vocabulary(), record=True) as lab:
        output = lab.run_one(constraint, **sampling)
        assert any(row.mask for batch in lab.executor.batches for row in batch.rows) and output.tokens


def test_neighbours_and_cancellation_are_not_affected() -> None:
    with Lab(text_vocabulary(), seed=5) as lab:
        plain = lab.run_one(None, temperature=1.0, seed=4).tokens
        choosing = [lab.request(CITIES, (1, 2, number), n=2) for number in range(5)]
        beside = lab.request(None, temperature=1.0, seed=4)
        outputs = lab.run(choosing[0], beside, *choosing[1:])
        assert outputs[1][0].tokens == plain
        left = lab.request(CITIES, PROMPT)
        lab.engine.add(left)
        lab.engine.step()
        lab.engine.cancel(left.id)
        list(lab.events())


@pytest.mark.parametrize("num_steps", range(4))
def test_a_choice_that_waits_for_room_goes_on_when_another_is_cancelled(num_steps: int) -> None:
    with Lab(text_vocabulary(), seed=5, kv="sequences", max_num_seqs=2, record=True) as lab:
        requests = [lab.request(CITIES, (1, number)) for number in (2, 3)]
        for request in requests:
            lab.engine.add(request)
        steps = (lab.engine.step() for _ in iter(lambda: any(plan.forks for plan in lab.executor.plans), True))
        found = [event for events in steps for event in events]
        found += [event for _ in range(num_steps) for event in lab.engine.step()]
        lab.engine.cancel(requests[0].id)
        found += [event for _ in range(50) for event in lab.engine.step()]
        assert {event.request_id for event in found if isinstance(event, Finished)} == {each.id for each in requests}


def test_a_trie_scores_each_edge_once() -> None:
    trie = TokenTrie([(1, 2, 3), (1, 2, 4), (5,), (1, 6, 7)])
    probes = trie.probes()
    assert [probe.tokens for probe in probes] == [(1, 2), (1, 6)]
    assert sorted(node for probe in probes for node in probe.nodes.values()) == [1, 2, 6]


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_p": 0.5}, {0}),
        ({"min_p": 0.4}, {0, 1}),
        ({"temperature": 0.0}, {0}),
        ({}, {0, 1, 2}),
    ],
)
def test_sampling_parameters_restrict_the_options(sampling: dict[str, float], kept: set[int]) -> None:
    scores = [math.log(0.6), math.log(0.3), math.log(0.1)]
    params = SamplingParams(**sampling)  # type: ignore[arg-type]
    assert {draw_option(scores, params, number << 54) for number in range(1 << 10)} == kept
