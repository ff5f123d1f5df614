"""Tests that the recipes' scripts run unchanged on the demo model with their tools."""

from __future__ import annotations

import json
import re
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bridle import LLM, RequestOutput, WasmController
from bridle.outputs import BY_ITSELF
from bridle.serving import ControlSettings
from examples.recipes import database, interpreter
from tests.sources import ROOT

FOLDER = ROOT / "examples" / "recipes"
Run = Callable[..., RequestOutput]


@pytest.fixture(scope="module")
def llm(py_store: Path) -> Iterator[LLM]:
    limits = ("max_prepare_wait=800000", "max_init_time=10000")
    args = ("--wasm-max-step-time=2000", *(word for limit in limits for word in ("--limit", limit)))
    control = ControlSettings("on", args=args, store=py_store)
    with LLM("demo", num_blocks=512, control=control, tools={"sql": database.run, "python": interpreter.run}) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def run(llm: LLM) -> Run:
    def once(file: str, **replaced: str) -> RequestOutput:
        """Run a recipe with some words of its script replaced; return the output."""
        script = (FOLDER / file).read_text(encoding="utf-8")
        for old, new in replaced.items():
            assert old in script
            script = script.replace(old, new)
        name = "jsctrl" if file.endswith(".js") else "pyctrl"
        controller = WasmController(name, script)
        (output,) = llm.generate([""], controller=controller, temperature=0, max_tokens=1500, ignore_eos=True)
        assert all(one.finish_reason in BY_ITSELF for one in output.outputs), output.outputs
        return output

    return once


def test_the_calculator_writes_the_result(run: Run) -> None:
    assert "23 + 45 = 68" in run("calculator.py").text


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("a total of 12 * 3", "36"),
        ("1,200 pens × 2 - 100", "2300"),
        ("2 + 3 * 4", "14"),
        ("7 - 9 / 2", "2.5"),
        ("951 pairs * 2", "1902"),
        ("1 / 0", None),
        ("x", None),
        ("12", None),
    ],
)
def test_the_calculator_reads_what_a_model_writes(text: str, result: str | None) -> None:
    source = (FOLDER / "calculator.py").read_text(encoding="utf-8")
    source = source.replace("import pyaici.server as aici\n", "").partition("async def main")[0]
    space: dict[str, Callable[[str], str | None]] = {}
    exec(source, space)
    assert space["value"](text) == result


def test_a_query_is_mended_where_it_is_wrong(run: Run) -> None:
    """The script begins with a query that names an unknown column, since the demo model writes no query itself."""
    begun = 'query = aici.Label(), "SELECT COUNT(weight) FROM products;"'
    last = 'await aici.gen_text(stop_at=";", max_tokens=80)'
    output = run("sql.py", **{'query = aici.Label(), "SELECT"': begun, last: f'("" if query[-1] == ";" else {last})'})
    first, *others = re.findall(r"rewound: (.+)", output.outputs[0].logs)
    assert first == "no such column: weight in SELECT COUNT(weight) FROM products;"
    assert others[0].partition(" in ")[2].startswith("SELECT COUNT(") and "weight" not in "".join(others)


def test_a_wrong_name_inside_of_another_one_is_not_mistaken_for_it(run: Run) -> None:
    begun = 'query = aici.Label(), "SELECT uct FROM products"'
    output = run(
        "sql.py",
        **{
            'query = aici.Label(), "SELECT"': begun,
            'await aici.gen_text(stop_at=";", max_tokens=80)': "''",
        },
    )
    assert "no such column: uct in SELECT uct FROM products" in output.outputs[0].logs
    assert output.text.partition("SELECT ")[2].split()[0] != "uct" and "SELECT uct FROM prod" not in output.text


def test_a_query_with_an_unknown_value_is_mended(run: Run) -> None:
    begun = "query = aici.Label(), \"SELECT price FROM products WHERE name = 'Lamp'\""
    last = 'await aici.gen_text(stop_at=";", max_tokens=80)'
    output = run("sql.py", **{'query = aici.Label(), "SELECT"': begun, last: "''"})
    assert "rewound: no such value: Lamp" in output.outputs[0].logs
    assert json.loads(output.storage["rows"]) in ([[25.0]], [[80.0]], [[240.0]])


def test_a_query_is_completed_after_the_last_rewind(run: Run) -> None:
    begun = 'query = aici.Label(), "SELECT uct FROM products"'
    told = {'await aici.gen_text(stop_at=";", max_tokens=80)': '(print("completed") or "")'}
    output = run("sql.py", **{'query = aici.Label(), "SELECT"': begun, "MAX_REWINDS = 5": "MAX_REWINDS = 1", **told})
    assert re.findall("completed|rewound", output.outputs[0].logs) == ["completed", "rewound", "completed"]


def test_a_quotation_is_a_sentence_with_its_place(run: Run) -> None:
    output = run("quote.py")
    quoted = json.loads(output.storage["quote"])
    space = {"article": (FOLDER / "quote.py").read_text(encoding="utf-8")}
    assert output.text.endswith(quoted["text"]) and quoted["text"][-1] == "."
    assert quoted["end"] - quoted["begin"] == len(quoted["text"]) and quoted["text"].split()[0] in space["article"]


def test_what_is_extracted_is_converted_by_code(run: Run) -> None:
    record = json.loads(run("extract.py").text.rpartition("{")[2].join(["{", ""]))
    assert record["delivered"] in ("2024-03-03", "2024-03-17")
    assert record["weight_kg"] == pytest.approx(11.34, abs=0.001) and record["to_pay"] in (20.0, 130.5)


def test_a_call_is_one_of_the_functions_or_none(run: Run) -> None:
    call = json.loads(run("call.py").text.rpartition("?")[2])
    assert call["name"] in ("get_weather", "none") and set(call["arguments"]) <= {"city", "unit"}


@pytest.mark.parametrize(
    ("value", "is_said"),
    [
        ("Oslo", True),
        ("Bergen", False),
        (12.0, True),
        (12.5, False),
        (["oslo", 12], True),
        (["oslo", "Bergen"], False),
        ([], False),
        ({"city": "Oslo"}, True),
    ],
)
def test_an_argument_stays_if_the_question_contains_it(value: object, is_said: bool) -> None:
    source = (FOLDER / "call.py").read_text(encoding="utf-8").partition("async def main")[0]
    source = re.sub(r"(?m)^.*pyaici.*$", "", source)
    space: dict[str, Any] = {}
    exec(source, space)
    space["QUESTION"] = "Book 12 nights in Oslo"
    assert space["is_said"](value) == is_said


def test_forks_vote(run: Run) -> None:
    output = run("vote.js")
    answers = [output.storage[f"answer {each}"].decode() for each in range(5)]
    most = max(map(answers.count, answers))
    best = next(each for each in answers if answers.count(each) == most)
    assert len(output.outputs) == 5 and output.outputs[0].text.endswith(f"The answer is {best}.")
    assert output.storage["votes"].decode() == f"{most} of 5"


def test_a_thought_ends_with_a_sentence(run: Run) -> None:
    text = run("thinking.py").text
    thought, mark, answer = text.rpartition("\nThe answer is")
    assert mark and answer.strip(" .").isdigit() and not thought.endswith("=")


def test_sentences_are_written_until_they_keep_the_style(run: Run) -> None:
    output = run("style.py")
    assert output.text.count(".") + output.text.count("!") + output.text.count("?") >= 3


def test_code_is_rewound_to_the_line_that_fails(run: Run) -> None:
    output = run("code.py")
    assert "```python\ndef last_two" in output.text
    logs = output.outputs[0].logs
    assert (
        output.usage.rewound_tokens > 0 and len(re.findall(r"(?m)^line ", logs)) == 6
    )  # the demo model knows no Python
    assert output.text == run("code.py", **{"MAX_TRIES = 6": "MAX_TRIES = 1"}).text  # the first attempt stays


def test_classes_are_printed_with_their_probability(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(FOLDER / "classify.py"))["main"]("demo")
    lines = capsys.readouterr().out.strip().splitlines()
    assert len(lines) == 4
    assert all(line.split()[0] in ("negative", "positive") and float(line.split()[1]) >= 0.5 for line in lines)
