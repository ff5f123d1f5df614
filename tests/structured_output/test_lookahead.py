"""Tests of lookahead: the choice of a token considers the tokens that a mask forces after it."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from bridle.controllers.pool import PythonControllerPool
from bridle.controllers.reasoning_gate import CompiledGrammar, ReasoningThenGrammar
from bridle.outputs import FinishReason, TokenEvent
from bridle.structured_output import Regex
from bridle.testing.async_executor import LateScriptedExecutor
from tests.structured_output.choices import exact
from tests.structured_output.kit import Lab, matcher, spell, text_vocabulary

PROMPT = (1, 2)
TEXTS = ("axx", "byy", "czz", "dww")
FORM = Regex("(axx|byy|czz|dww)")
#: Values of chi-squared with 3 degrees of freedom that are exceeded with this probability.
LIMIT = {0.999: 16.27}


def chi_squared(counts: Counter[str], weights: list[float]) -> float:
    total, whole = sum(counts.values()), sum(weights)
    expected = [total * weight / whole for weight in weights]
    return sum((counts[text] - want) ** 2 / want for text, want in zip(TEXTS, expected, strict=True))


@pytest.mark.few(5)
@pytest.mark.parametrize("options", [{}, {"scripted": LateScriptedExecutor}, {"kv": "sequences", "max_num_seqs": 4}])
@pytest.mark.parametrize("fields", [{}, {"logprobs": 1}, {"constraint_report": True}, {"speculate": 4}])
def test_the_best_whole_text_wins(fields: dict[str, Any], options: dict[str, Any]) -> None:
    num_changed = 0
    for seed in range(6):
        with Lab(text_vocabulary(), seed=seed, **options) as lab:
            scores = dict(zip(TEXTS, exact(lab, TEXTS, PROMPT), strict=True))
            best = max(TEXTS, key=scores.__getitem__)
            plain = spell(lab.vocab, lab.run_one(FORM).tokens)
            output = lab.run_one(FORM, lookahead=8, **fields)
            assert spell(lab.vocab, output.tokens) == best and output.forced == [False, True, True]
            num_changed += plain != best
    assert num_changed  # else the test would hold without lookahead, too


def test_a_sampled_text_has_the_exact_probability() -> None:
    with Lab(text_vocabulary(), seed=3) as lab:
        weights = [math.exp(score) for score in exact(lab, TEXTS, PROMPT)]
        for lookahead, is_exact in ((8, True), (0, False)):
            asked = [
                lab.request(FORM, PROMPT, lookahead=lookahead, temperature=1.0, seed=seed, n=4) for seed in range(60)
            ]
            outputs = [each for found in lab.run(*asked) for each in found.values()]
            counts = Counter(spell(lab.vocab, each.tokens) for each in outputs)
            assert len(outputs) == 240 and (chi_squared(counts, weights) < LIMIT[0.999]) is is_exact


def test_only_as_many_tokens_count_as_asked_for() -> None:
    with Lab(text_vocabulary(), seed=3) as lab:
        for lookahead in (1, 2):
            shorter = tuple(text[: 1 + lookahead] for text in TEXTS)
            best = max(zip(exact(lab, shorter, PROMPT), TEXTS, strict=True))[1]
            assert spell(lab.vocab, lab.run_one(FORM, lookahead=lookahead).tokens) == best


def test_log_probabilities_of_the_chosen_token_are_reported() -> None:
    with Lab(text_vocabulary(), seed=2) as lab:
        request = lab.request(FORM, PROMPT, lookahead=8, logprobs=2)
        lab.engine.add(request)
        told = [event for event in lab.events() if isinstance(event, TokenEvent)]
        assert all(event.logprob is not None and len(event.logprob.top) == 2 for event in told)
        total = sum(event.logprob.logprob for event in told if event.logprob is not None)
        assert total == pytest.approx(max(exact(lab, TEXTS, PROMPT)), abs=1e-4)


def test_many_draws_in_one_text_end_and_repeat() -> None:
    form = Regex("((axx|byy)-){6}")
    with Lab(text_vocabulary(), seed=1) as lab:
        asked = lab.request(form, PROMPT, lookahead=4, temperature=1.0, max_tokens=40)
        ((first,), (again,)) = [list(found.values()) for found in lab.run(asked, replace(asked, id="again"))]
        assert first.tokens == again.tokens and first.finished is not None
        assert first.finished.reason is FinishReason.CONTROLLER


def test_an_answer_after_reasoning_is_chosen_as_a_whole() -> None:
    end = ord("|")
    num_changed = 0
    for seed in range(6):
        vocab = text_vocabulary()
        with Lab(vocab, seed=seed, pools=[PythonControllerPool(vocab.size)]) as lab:
            grammar = CompiledGrammar(matcher(vocab, FORM), vocab, FORM)
            form = ReasoningThenGrammar(end, budget=0, closing=(end,), then=grammar)
            texts = [spell(vocab, lab.run_one(form, lookahead=most).tokens[1:]) for most in (0, 4)]
            scores = exact(lab, TEXTS, (*PROMPT, end))
            assert texts[1] == max(zip(scores, TEXTS, strict=True))[1]
            num_changed += texts[0] != texts[1]
    assert num_changed


def test_nothing_is_computed_unless_asked_for() -> None:
    for lookahead, num_rows in ((0, 1), (8, 2)):
        with Lab(text_vocabulary(), record=True) as lab:
            lab.run_one(FORM, lookahead=lookahead)
            assert sum(len(batch.rows) for batch in lab.executor.batches) == num_rows
