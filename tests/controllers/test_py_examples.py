"""Tests that the Python scripts in `examples` run unchanged on the demo model and write sensible text."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from bridle import LLM, ModelConfig, RequestOutput, SamplingParams, WasmController
from bridle.serving import ControlSettings, load_model
from tests.controllers.example_tools import example_tools
from tests.sources import ROOT

FOLDER = ROOT / "examples"

RunExample = Callable[..., RequestOutput]


@pytest.fixture(scope="module")
def run(py_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunExample]:
    """Yield a function that runs an example by its name."""
    limits = ("max_prepare_wait=800000", "max_init_time=10000")
    args = ("--wasm-max-step-time=2000", *(word for limit in limits for word in ("--limit", limit)))
    settings = ControlSettings("on", args=args, store=py_store)
    desk = example_tools(tmp_path_factory.mktemp("starts"))
    with closing(desk), LLM(load_model(ModelConfig("demo", num_blocks=512), control=settings, tools=desk)) as llm:

        def once(name: str, prompt: str = "") -> RequestOutput:
            controller = WasmController("pyctrl", (FOLDER / f"{name}.py").read_text(encoding="utf-8"))
            sampling = SamplingParams(max_tokens=300, temperature=0.0, ignore_eos=True)
            (output,) = llm.generate([prompt], sampling, controller=controller)
            return output

        yield once


def test_the_example_asks_for_one_word_alone(run: RunExample) -> None:
    output = run("yesno")
    assert output.text == "Q: Is Paris the capital of France?\nA: Yes, it is."
    assert output.usage.sampled_tokens == 0  # it is scored as a whole


def test_json_by_a_schema_is_read_by_the_script(run: RunExample) -> None:
    output = run("json_by_schema")
    record = json.loads(output.text.partition("A: ")[2])
    assert record == {"name": "Emma", "age": 34, "city": "Lisbon"}
    assert "Emma will be 35 next year" in output.outputs[0].logs


def test_a_chain_of_thought_is_taken_back_before_the_answer(run: RunExample) -> None:
    output = run("chain_of_thought")
    assert output.text.endswith("What is 47 + 38?The answer is 85.") and "<think>" not in output.text
    assert "ones: 7 + 8 = 15" in output.outputs[0].logs and output.usage.rewound_tokens > 20


def test_a_thinking_budget_ends_the_thought(run: RunExample) -> None:
    output = run("thinking_budget")
    assert output.text.endswith("tens\n</think>\n\n23 + 45 = 68")
    assert "enough thought" in output.outputs[0].logs and "answer: 68 '6'" in output.outputs[0].logs


@pytest.mark.parametrize(
    ("prompt", "text"),
    [("", "The capital of France is Paris."), ("The capital of Italy is Ro", " Rome.")],
)
def test_token_healing_generates_the_end_of_the_prompt_again(run: RunExample, prompt: str, text: str) -> None:
    """The last tokens of the prompt are rolled back and generated again, so they belong to the output."""
    assert run("token_healing", prompt).text == text


def test_the_tool_call_example_forces_its_form(run: RunExample) -> None:
    output = run("tool_call")
    call = json.loads(output.text.partition("<tool_call>\n")[2].removesuffix("\n</tool_call>"))
    assert call == {"name": "weather", "arguments": {"city": "Oslo"}}
    assert output.usage.sampled_tokens < 10 < output.usage.forced_tokens


def test_an_agent_calls_two_servers_of_tools(run: RunExample) -> None:
    """One tool call uses the result of another, and the KV of the text before the calls is never computed again."""
    output = run("agent")
    assert output.text.endswith('{"time": "12:34"}It is 12:34 in Oslo.')
    assert output.storage["answer"] == b"It is 12:34 in Oslo."
    assert "called: Oslo {'time': '12:34'}" in output.outputs[0].logs and output.usage.rewound_tokens == 0
