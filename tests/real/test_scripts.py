"""Tests that the scripts in `examples` run unchanged on a real model and write sensible text."""

from __future__ import annotations

import json
import re
import runpy
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from bridle import LLM, RequestOutput, SamplingParams, WasmController
from bridle.outputs import BY_ITSELF
from bridle.serving.tracing.replay import replay
from bridle.traces import parse
from bridle.traces.compare import compare
from bridle.traces.format import encode_trace
from tests.controllers.example_tools import example_tools
from tests.http.controlled import lent
from tests.http.harness import served
from tests.real.controlled import controlled
from tests.real.material import model_path
from tests.sources import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

FOLDER = ROOT / "examples"
FRUITS = {"apple", "banana", "cherry", "date", "fig", "grape", "kiwi", "lemon", "mango", "orange", "peach", "pear"}
Run = Callable[..., RequestOutput]


@pytest.fixture(scope="module")
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    desk = example_tools(tmp_path_factory.mktemp("starts"))
    store = tmp_path_factory.mktemp("store")
    with closing(desk), controlled("qwen2.5-coder:0.5b", request, store, desk) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def run(llm: LLM) -> Run:
    sampling = SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True)  # as `bridle run` does

    def once(file: str, prompt: str = "\n") -> RequestOutput:
        name = "jsctrl" if file.endswith(".js") else "pyctrl"
        controller = WasmController(name, (FOLDER / file).read_text(encoding="utf-8"))
        (output,) = llm.generate([prompt], sampling, controller=controller)
        assert all(one.finish_reason in BY_ITSELF for one in output.outputs), output.outputs
        return output

    return once


def test_the_ultimate_answer(run: Run) -> None:
    assert run("ultimate_answer.js").text.endswith("19 + 23 = 42")


def test_five_words_are_listed(run: Run) -> None:
    lines = run("list_of_five.js").text.splitlines()[1:]
    items = [line.partition(". ")[2] for line in lines]
    assert len(set(items)) == 5 and len(FRUITS & set(items)) >= 4, items


def test_the_judges_agree(run: Run) -> None:
    first, *others = run("judges.js").outputs
    assert first.text.endswith(": a dog is a mammal.") and len(others) == 2


def test_banned_phrases_do_not_appear(run: Run) -> None:
    text = run("phrase_ban.js").text
    assert text.startswith("Once upon a time") and len(text.split()) > 12
    assert not any(phrase in text for phrase in ("had an idea", "very much", "The next day"))


def test_yes_or_no(run: Run) -> None:
    assert run("yesno.py").text.endswith("A: Yes, it is.")


def test_json_by_schema(run: Run) -> None:
    record = json.loads(run("json_by_schema.py").text.partition("A: ")[2])
    assert (record["name"], record["age"]) == ("Emma", 34)


def test_the_answer_alone_is_kept(run: Run) -> None:
    output = run("chain_of_thought.py")
    assert "<think>" not in output.text and output.text.endswith(f"The answer is {output.storage['answer'].decode()}.")
    assert output.storage["answer"] == b"85"


def test_thoughts_are_ended(run: Run) -> None:
    output = run("thinking_budget.py")
    assert output.text.endswith("</think>\n\n23 + 45 = 68") and "answer: 68" in output.outputs[0].logs


def test_a_word_that_was_begun_is_completed(run: Run) -> None:
    assert run("token_healing.py", "The capital of Italy is Ro").text.startswith(" Rome")


def test_a_call_is_one_of_the_tools(run: Run) -> None:
    output = run("tool_call.py")  # this model begins a call without its tag
    assert json.loads(output.storage["call"]) == {"name": "weather", "arguments": {"city": "Oslo"}}


@pytest.mark.parametrize(("file", "city"), [("agent.js", "Tokyo"), ("agent.py", "Oslo")])
def test_an_agent_calls_its_tools(run: Run, file: str, city: str) -> None:
    output = run(file)
    # What it says then is its own affair: the marks around the turns are those of the demo model.
    assert f"called: {city}" in output.outputs[0].logs and "12:34" in output.text


def test_a_human_is_asked(run: Run, llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    human = runpy.run_path(str(FOLDER / "human.py"))
    with served(lent(llm.model)) as url:
        human["main"](url, lambda question: "Emma")
    text = re.sub(r"\d{4}-\d\d-\d\d [^\n]*\n", "", capsys.readouterr().out)  # the server logs there, too
    assert text.startswith("Once upon a time there was a girl named Emma."), text


@pytest.mark.parametrize(("file", "ran"), [("yesno.py", "pyctrl"), ("judges.js", "jsctrl")])
def test_a_script_replays_to_the_token(llm: LLM, file: str, ran: str) -> None:
    controller = WasmController(ran, (FOLDER / file).read_text(encoding="utf-8"))
    sampling = SamplingParams(temperature=0.8, seed=5, max_tokens=200)
    (output,) = llm.generate(["\n"], sampling, controller=controller, trace=True)
    assert output.trace is not None
    (trace,) = parse(encode_trace(output.trace))
    found = compare(trace, replay(llm.model, trace))
    assert found.is_same, found.sentences


def test_the_programs(capsys: pytest.CaptureFixture[str]) -> None:
    """The example programs that load a model themselves print the results that they describe."""

    def printed(name: str) -> list[str]:
        runpy.run_path(str(FOLDER / name))["main"](str(model_path("smollm2")))
        return [line for line in capsys.readouterr().out.splitlines() if line.strip()]

    records = [json.loads(line) for line in printed("distinct_digits.py")]
    assert all(len({*each["pin"], *each["code"]}) == 7 for each in records) and len(records) == 2
    forms = [line for line in printed("steer.py") if line.startswith("{")]
    assert len(forms) == 3 and all("'age': " in line for line in forms)
    stories = "\n".join(printed("custom_stopping.py"))
    assert stories.startswith("Once upon a time") and stories.count("  stopped: 2 sentences") == 2, stories
