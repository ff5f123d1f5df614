"""Tests of the recipes on a real model: each meets its promise in every case, and the calculator corrects wrong
sums."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import closing

import pytest

from bridle import LLM
from bridle.controller_tools import DEFAULT_LIMITS, ToolExecutor, function_tools
from dev.bench.recipes import recipe
from dev.recipes.columns import in_process
from dev.recipes.recipe import Case
from examples.recipes import interpreter
from examples.recipes.classify import calibrated, scores
from tests.real.controlled import controlled

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

_SEED = 77


@pytest.fixture(scope="module")
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    tools = function_tools({"sql": recipe("sql").tools["sql"], "python": interpreter.run}, DEFAULT_LIMITS)
    desk = ToolExecutor(tools, DEFAULT_LIMITS)
    with closing(desk), controlled("qwen2.5-coder:0.5b", request, tmp_path_factory.mktemp("store"), desk) as loaded:
        yield loaded


def answers(llm: LLM, name: str, column: str, count: int = 5) -> list[tuple[Case, str]]:
    made = recipe(name)
    cases = made.cases(count, _SEED)
    return [(case, answer.text) for case, answer in zip(cases, in_process(column, made, llm, cases), strict=True)]


def num_right(name: str, found: list[tuple[Case, str]]) -> int:
    return sum(recipe(name).is_right(case, text) for case, text in found)


def test_every_calculation_is_right(llm: LLM) -> None:
    found = answers(llm, "calculator", "steering")
    for _, text in found:
        for left, sign, right, result in re.findall(r"(?m)^(\d+) ([-+*]) (\d+) = (-?\d+)$", text):
            a, b = int(left), int(right)
            assert int(result) == {"+": a + b, "-": a - b, "*": a * b}[sign], text
    assert num_right("calculator", found) > num_right("calculator", answers(llm, "calculator", "alone"))


def test_every_quotation_is_a_sentence_of_the_article(llm: LLM) -> None:
    found = answers(llm, "quote", "steering")
    assert all(text in case.constants["ARTICLE"] and text.endswith(".") for case, text in found)


def test_every_extraction_is_valid_and_converted(llm: LLM) -> None:
    found = answers(llm, "extract", "steering")
    assert all(f"{json.loads(text)['to_pay']:.2f} EUR" in case.constants["TEXT"] for case, text in found)
    assert num_right("extract", found) > num_right("extract", answers(llm, "extract", "mask"))


def test_nearly_every_query_runs(llm: LLM) -> None:
    run = recipe("sql").tools["sql"]
    assert sum("rows" in run(case.id, text) for case, text in answers(llm, "sql", "steering")) >= 4


def test_every_thought_ends_with_a_sentence(llm: LLM) -> None:
    thoughts = [text.partition("\nThe answer is") for _, text in answers(llm, "thinking", "steering")]
    assert all(mark and len(thought.split()) <= 40 for thought, mark, _ in thoughts)
    assert all(thought.rstrip()[-1:] in (".", "!", "?") for thought, _, _ in thoughts)


def test_a_thought_without_a_full_stop_gets_one(llm: LLM) -> None:
    question = {"role": "user", "content": "What is 4 * 9 + 20?"}
    shown = {"role": "assistant", "content": "4 * 9 + 20 = 56\nThe answer is 56."}
    case = Case("1", [question, shown, question], None, {}, {"BUDGET": 40})
    (answer,) = in_process("steering", recipe("thinking"), llm, [case])
    assert answer.text == "4 * 9 + 20 = 56.\nThe answer is 56."


def test_a_program_passes_its_examples(llm: LLM) -> None:
    program = 'def last_two(word):\n    """The last two letters.\n\n    >>> last_two("abc")\n    \'bc\'\n    """\n'
    case = Case("1", [{"role": "user", "content": f"Complete:\n{program}"}], None, {}, {"PROGRAM": program})
    (answer,) = in_process("steering", recipe("code"), llm, [case])
    assert interpreter.run(answer.text.split("```")[1].removeprefix("python\n"))["error"] is None


def test_clear_texts_get_clear_classes(llm: LLM) -> None:
    texts = ["I love this wonderful film.", "The worst meal of my life.", "A warm and funny book.", "It broke at once."]
    found = scores(llm, texts)
    assert [each[1] > 0.5 for each in calibrated(found, found)] == [True, False, True, False]
