"""Tests of scripts and chats with real models' templates: conversations, tools that a template leaves out, the end of a
regex, and repeated tool calls."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from bridle import LLM, SamplingParams, WasmController
from tests.http.controlled import lent
from tests.http.harness import local_client
from tests.real.controlled import controlled

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

GREEDY = SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True)
TALK = [
    {"role": "system", "content": "You know geography."},
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "system", "content": "Answer with one word."},
]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Get the weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
#: Scripts that write a conversation, log it as `template` has it, and let the model answer.
PY = """
import pyaici.server as aici

async def main():
    said, tools = {0!r}, {1!r}
    await aici.chat(said, tools=tools)
    print(aici.template(said, tools=tools))
    await aici.gen_text(stop_at=".", max_tokens=12)
aici.start(main())
"""
JS = """
start(async () => {
  const [said, tools] = TALK
  await chat(said, { tools })
  console.log(template(said, { tools }))
  await gen({ stopAt: ".", maxTokens: 12 })
})
"""


def script(kind: str, tools: list[dict[str, Any]] | None) -> WasmController:
    if kind == "pyctrl":
        return WasmController(kind, PY.format(TALK, tools))
    return WasmController(kind, JS.replace("TALK", json.dumps([TALK, tools or []])))


@pytest.fixture(scope="module", params=["smollm2", "qwen2.5-coder:0.5b"])
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with controlled(request.param, request, tmp_path_factory.mktemp("store")) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def client(llm: LLM) -> Iterator[TestClient]:
    with local_client(lent(llm.model)) as made:
        yield made


@pytest.mark.parametrize("kind", ["pyctrl", "jsctrl"])
@pytest.mark.parametrize("tools", [None, [WEATHER]])
def test_a_script_writes_the_prompt_that_a_chat_gets(llm: LLM, kind: str, tools: list[dict[str, Any]] | None) -> None:
    (output,) = llm.generate(["\n"], GREEDY, controller=script(kind, tools))
    (found,) = output.outputs
    prompt = llm.chat_prompt(TALK, tools=tools)
    assert found.token_ids[: len(prompt)] == prompt
    assert llm.tokenizer.decode(prompt, skip_special_tokens=False) in (found.logs or "")
    answer = llm.tokenizer.decode(found.token_ids[len(prompt) :])
    assert answer.strip() and (tools or "Paris" in answer), answer


def run(client: TestClient, **body: Any) -> str:
    """Run a controller over HTTP; return the text of its outputs."""
    with client.stream("POST", "/v1/run", json=body) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: {")]
    forks = [fork for line in lines for fork in json.loads(line).get("forks", ())]
    assert forks and not any(fork.get("error") for fork in forks), lines
    return "".join(fork["text"] for fork in forks)


GEN = "import pyaici.server as aici\nasync def main():\n    {}\naici.start(main())\n"


def test_a_run_steers_the_answer_in_a_conversation(client: TestClient) -> None:
    arg = GEN.format("await aici.FixedTokens('The capital is'); await aici.gen_text(max_tokens=8, stop_at='.')")
    text = run(client, messages=TALK, controller="pyctrl", controller_arg=arg)
    assert text.startswith("The capital is") and "Paris" in text, text


@pytest.mark.parametrize(
    ("kind", "arg"),
    [
        ("pyctrl", GEN.format("await aici.gen_text(regex=' [A-Z][a-z]+', max_tokens=20)")),
        ("jsctrl", "start(async () => { await gen({ regex: / [A-Z][a-z]+/, maxTokens: 20 }) })"),
    ],
)
def test_a_regex_ends_with_the_word(client: TestClient, kind: str, arg: str) -> None:
    assert run(client, prompt="The capital of France is", controller=kind, controller_arg=arg) == " Paris"


def chat(client: TestClient, model: LLM, messages: list[dict[str, Any]], **body: Any) -> Any:
    given = {"model": model.model.name, "messages": messages, "temperature": 0, "max_tokens": 200}
    return client.post("/v1/chat/completions", json=given | body)


def test_tools_reach_the_prompt_or_are_refused(llm: LLM, client: TestClient) -> None:
    asked = [{"role": "user", "content": "Weather in Oslo?"}]
    lengths = [
        chat(client, llm, asked, tools=tools, max_tokens=1).json()["usage"]["prompt_tokens"]
        for tools in (None, [WEATHER])
    ]
    assert lengths[1] > lengths[0] + 80
    refused = chat(client, llm, asked, tools=[WEATHER], tool_prompt="refuse", max_tokens=1)
    if "tools" in llm.tokenizer.template_text:
        assert refused.status_code == 200
    else:
        assert refused.status_code == 400 and "does not write them" in refused.text


def test_a_call_is_made_once(llm: LLM, client: TestClient) -> None:
    """After turns with three equal calls, which SmolLM2 would copy, a required tool call is made only once."""
    said: list[dict[str, Any]] = []
    for city in ("Oslo", "Paris"):
        function = {"name": "weather", "arguments": json.dumps({"city": city})}
        calls = [{"type": "function", "id": "call00001", "function": function}] * 3
        said += [
            {"role": "user", "content": f"Weather in {city}?"},
            {"role": "assistant", "content": "", "tool_calls": calls},
            *[{"role": "tool", "tool_call_id": "call00001", "content": "rain"}] * 3,
            {"role": "assistant", "content": "It rains."},
        ]
    asked = [*said, {"role": "user", "content": "Weather in Rome?"}]
    (choice,) = chat(client, llm, asked, tools=[WEATHER], tool_choice="required").json()["choices"]
    functions = [each["function"] for each in choice["message"]["tool_calls"]]
    assert [json.loads(each["arguments"]) for each in functions] == [{"city": "Rome"}]
    assert choice["finish_reason"] == "tool_calls"
