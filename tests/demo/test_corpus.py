"""The generator: the same seed gives the same text, and nothing held out is ever trained on."""

from __future__ import annotations

import json
import random
import re
from itertools import pairwise

import pytest

from lab.demo.corpus import document, draw, long_document, mix, split_of
from lab.demo.corpus.document import ASSISTANT, BOS, END, EOS, Exercise
from lab.demo.corpus.phrasings import RELATIONS
from lab.demo.corpus.world import COUNTRIES
from lab.demo.evaluate import CATEGORIES, EXTRA_CATEGORIES, questions


def text_of(pieces: list[mix.Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def training_texts(number: int, seed: int = 11) -> list[str]:
    """Short and long documents of every stage of training."""
    rng = random.Random(seed)
    texts = [text_of(document(rng, mixture=mix.STAGES[index % len(mix.STAGES)])) for index in range(number)]
    return texts + [text_of(long_document(rng)) for _ in range(number // 50)]


def test_the_same_seed_gives_the_same_documents() -> None:
    assert training_texts(200) == training_texts(200)
    assert training_texts(200) != training_texts(200, seed=12)


def test_the_split_is_fixed_and_holds_out_about_an_eighth() -> None:
    keys = [("fact", relation.name, s, t) for relation in RELATIONS for s in relation.facts for t in relation.questions]
    held_out = [key for key in keys if split_of(key) == "heldout"]
    assert 0.10 < len(held_out) / len(keys) < 0.14
    assert split_of(("sum", "12", "34")) == "train"
    assert split_of(("sum", "1", "14")) == "heldout"


def test_every_fact_is_asked_in_some_phrasing_that_is_trained() -> None:
    for relation in RELATIONS:
        for subject in relation.facts:
            assert any(split_of(("fact", relation.name, subject, t)) == "train" for t in relation.questions)


def test_there_are_a_few_hundred_facts() -> None:
    assert sum(len(relation.facts) for relation in RELATIONS) >= 400
    assert len(COUNTRIES) == len({capital for capital, _, _ in COUNTRIES.values()}) >= 50


@pytest.mark.parametrize("maker", [maker for maker, _ in mix.EXERCISES], ids=lambda maker: maker.__name__)
def test_every_kind_of_exercise_ends_with_the_answer(maker: mix.Maker) -> None:
    rng = random.Random(3)
    for _ in range(50):
        exercise = draw(rng, maker, "train")
        assert exercise.messages or (exercise.prompt and exercise.completion)
        if exercise.messages:
            assert exercise.messages[-1]["role"] == "assistant"
        assert split_of(exercise.key) == "train"


def test_no_held_out_sum_is_in_any_training_text() -> None:
    sums = {pair for text in training_texts(3000) for pair in re.findall(r"(\d+) \+ (\d+) = (?=\d\d?\d?\b)", text)}
    worked = {pair for pair in sums if max(len(number) for number in pair) > 1}
    assert len(worked) > 1000
    assert not [p for p in worked if split_of(("sum", *map(str, sorted(map(int, p))))) == "heldout"]


def test_no_held_out_question_is_in_any_training_text() -> None:
    asked = {
        line.removeprefix("Q: ")
        for text in training_texts(4000)
        for line in re.findall(r"<\|user\|>(.*?)<\|end\|>", text) + re.findall(r"^Q: .*$", text.replace(BOS, ""), re.M)
    }
    for category in ("facts", "tool calls", "lists", "yes/no"):
        for question in questions(category, 40, seed=0):
            match = re.search(r"<\|user\|>(.*?)<\|end\|>|Q: (.*)\nA:", question.prompt)
            if match is not None:
                assert (match[1] or match[2]) not in asked


def test_no_held_out_statement_is_in_any_training_text() -> None:
    texts = {text.removeprefix(BOS).removesuffix(EOS) for text in training_texts(4000)}
    rng = random.Random(5)
    for _ in range(200):
        exercise = draw(rng, mix.facts.statement, "heldout")
        assert exercise.prompt + exercise.completion not in texts


def test_the_stages_differ_in_what_they_practice() -> None:
    assert len({mixture.shares for mixture in mix.STAGES}) == len(mix.STAGES) == 5
    for mixture in mix.STAGES:
        assert list(mixture.forms) == sorted(mixture.forms)
        assert mixture.forms[-1] < 1


def test_questions_are_distinct_and_end_with_a_stop_mark() -> None:
    for category in CATEGORIES | EXTRA_CATEGORIES:
        found = questions(category, 40, seed=0)
        assert len({question.prompt for question in found}) == 40
        assert all(question.expected.endswith((EOS, END)) for question in found)
        assert found == questions(category, 40, seed=0)


def test_only_what_the_assistant_says_is_a_target() -> None:
    rng = random.Random(8)
    for _ in range(500):
        pieces = document(rng)
        for before, piece in pairwise(pieces):
            if before.text == ASSISTANT:
                assert piece.is_target
                assert piece.text.endswith(END)
            elif piece.text.startswith("<|"):
                assert not piece.is_target


def test_tool_calls_and_records_are_valid_json() -> None:
    rng = random.Random(9)
    for _ in range(200):
        call = text_of(mix.chat_pieces(draw(rng, mix.tools.any_call, "train").messages))
        body = re.search(r"<tool_call>\n(.*)\n</tool_call>", call)
        assert body is not None
        assert set(json.loads(body[1])) == {"name", "arguments"}
        record: Exercise = draw(rng, mix.records.any_request, "train")
        assert isinstance(json.loads(record.messages[-1]["content"]), dict)
