"""Tests that the JavaScript examples run unchanged on the demo model."""

from __future__ import annotations

import json
import re
import runpy
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from bridle import LLM, ModelConfig, SamplingParams, WasmController
from bridle.controllers import standard
from bridle.outputs import FinishReason, RequestOutput
from bridle.serving import ControlSettings, load_model
from tests.controllers.example_tools import example_tools
from tests.http.controlled import lent
from tests.http.harness import served
from tests.sources import ROOT

FOLDER = ROOT / "examples"
FRUITS = {"apple", "banana", "cherry", "grape", "lemon", "orange", "pear", "plum"}

Example = Callable[[str], RequestOutput]


@pytest.fixture(scope="module")
def llm(script_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    control = ControlSettings(store=script_store)
    desk = example_tools(tmp_path_factory.mktemp("starts"))
    with closing(desk), LLM(load_model(ModelConfig("demo", num_blocks=512), control=control, tools=desk)) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def run(llm: LLM) -> Example:
    sampling = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
    module = llm.upload(standard.load("jsctrl"))

    def one(name: str) -> RequestOutput:
        controller = WasmController(module, (FOLDER / f"{name}.js").read_text(encoding="utf-8"))
        (output,) = llm.generate("\n", sampling, controller=controller)
        assert all(o.finish_reason is FinishReason.CONTROLLER for o in output.outputs), output.outputs
        return output

    return one


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.js")), ids=lambda path: path.stem)
def test_examples_say_what_they_are_for(path: Path) -> None:
    assert f"bridle run examples/{path.name}\n" in path.read_text(encoding="utf-8")


def test_the_ultimate_answer_is_computed_by_the_script(run: Example) -> None:
    assert run("ultimate_answer").outputs[0].text == "Life, the universe and everything: 19 + 23 = 42"


def test_the_list_has_five_items(run: Example) -> None:
    output = run("list_of_five").outputs[0]
    line = next(line for line in output.logs.splitlines() if line.startswith("JSON-OUT: "))
    items = json.loads(line.removeprefix("JSON-OUT: "))
    assert len(set(items)) == 5 and set(items) <= FRUITS
    assert output.text.splitlines()[1:] == [f"{number}. {item}" for number, item in enumerate(items, 1)]


def test_the_judges_agree(run: Example) -> None:
    first, *others = run("judges").outputs
    assert first.text.endswith(": a dog is a mammal.") and len(others) == 2
    assert [other.text.rsplit(" ", 1)[1] for other in others] == ["Yes", "No"]


def test_banned_phrases_are_taken_back(run: Example) -> None:
    output = run("phrase_ban")
    text, logs = output.outputs[0].text, output.outputs[0].logs
    assert text.startswith("Once upon a time") and len(text) > 80
    assert not any(phrase in text for phrase in ("had an idea", "very much", "The next day"))
    assert logs.count("taken back:") >= 2
    assert output.outputs[0].usage.rewound_tokens >= 4


def test_an_agent_calls_two_servers_of_tools(run: Example) -> None:
    """One tool call uses the result of another, and the KV of the text before the calls is never computed again."""
    output = run("agent")
    assert output.text.endswith('{"time":"12:34"}It is 12:34 in Tokyo.')
    assert output.storage == {"answer": b"It is 12:34 in Tokyo."}
    assert 'called: Tokyo {"time":"12:34"}' in output.outputs[0].logs
    assert output.usage.rewound_tokens == 0


def test_a_human_is_asked_in_the_middle_of_a_text(
    run: Example, llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:  # `run`, so that the controller is compiled
    """The example program `human.py` reads a script's stream and answers its questions."""
    questions: list[str] = []
    human = runpy.run_path(str(FOLDER / "human.py"))
    with served(lent(llm.model)) as url:
        human["main"](url, lambda question: questions.append(question) or "Emma")
    assert questions == ["\nWhat is her name? "]
    text = re.sub(r"\d{4}-\d\d-\d\d [^\n]*\n", "", capsys.readouterr().out)  # the server logs there, too
    assert text.startswith("Once upon a time there was a girl named Emma.") and text.rstrip().endswith("."), text
