"""Tests that a repeated call ends the turn, and tools that a template leaves out are described or refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from starlette.testclient import TestClient

from bridle.tokenizer.chat_settings import ChatSettings
from tests.http.harness import NAME, local_client, saying, scripted_model
from tests.tokenizer.templates import PLAIN, TOOLS_TOLD, a_tokenizer

FUNCTION = {"name": "now", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
TOOL = {"type": "function", "function": FUNCTION}
USER = [{"role": "user", "content": "hi"}]


def call(city: str) -> str:
    return f'<tool_call>\n{{"name": "now", "arguments": {{"city": "{city}"}}}}\n</tool_call>\n'


def ask(client: TestClient, **body: Any) -> Any:
    given = {"model": NAME, "messages": USER, "tools": [TOOL], "max_tokens": 300, "temperature": 0}
    return client.post("/v1/chat/completions", json=given | body)


@pytest.mark.few(2)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("said", "cities"), [([call("Rome")] * 4, ["Rome"]), ([call("Rome"), call("Oslo"), call("Rome")], ["Rome", "Oslo"])]
)
def test_a_repeated_call_ends_the_turn(stream: bool, said: list[str], cities: list[str]) -> None:
    model = scripted_model(next_token=saying("".join(said)), text=a_tokenizer(TOOLS_TOLD), max_model_len=1024)
    with local_client(model) as client:
        answer = ask(client, stream=stream)
        assert answer.status_code == 200, answer.text
        if not stream:
            (choice,) = answer.json()["choices"]
            assert choice["finish_reason"] == "tool_calls"
            calls = [each["function"] for each in choice["message"]["tool_calls"]]
            assert [json.loads(each["arguments"])["city"] for each in calls] == cities
            assert answer.json()["usage"]["completion_tokens"] < 300
        else:
            rows = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
            deltas = [row["choices"][0] for row in rows if row["choices"]]
            names = [c for each in deltas for c in each["delta"].get("tool_calls") or () if c["function"].get("name")]
            assert len(names) == len(cities) and deltas[-1]["finish_reason"] == "tool_calls"


ROUTES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": USER, "tools": [TOOL]}),
    ("/v1/responses", {"input": "hi", "tools": [{"type": "function", **FUNCTION}]}),
    (
        "/v1/messages",
        {"messages": USER, "max_tokens": 9, "tools": [{"name": "now", "input_schema": {"type": "object"}}]},
    ),
    ("/api/chat", {"messages": USER, "tools": [TOOL], "stream": False}),
    ("/v1/run", {"messages": USER, "tools": [TOOL], "controller": "none", "controller_arg": None, "max_tokens": 2}),
]


@pytest.mark.few(3)
@pytest.mark.parametrize(("route", "body"), ROUTES)
def test_tools_that_the_template_leaves_out_are_described_or_refused(route: str, body: dict[str, Any]) -> None:
    text = a_tokenizer(PLAIN)
    prompts: list[int] = []

    def note(prefix: Any) -> int:
        prompts.append(len(prefix))
        return text.eos_token_ids[0]

    with local_client(scripted_model(next_token=note, text=text, max_model_len=2048)) as client:
        lengths = []
        for given in ({"tools": None}, {}):
            prompts.clear()
            answer = client.post(route, json={"model": NAME, **body, **given})
            assert answer.status_code == 200, answer.text
            lengths.append(min(prompts))
        assert lengths[1] > lengths[0] + 300
        refused = client.post(route, json={"model": NAME, **body, "tool_prompt": "refuse"})
        assert refused.status_code in (400, 501) and "does not write them" in refused.text
        text.chat_settings = ChatSettings(tool_prompt="refuse")
        assert client.post(route, json={"model": NAME, **body}).status_code in (400, 501)
        assert client.post(route, json={"model": NAME, **body, "tool_prompt": "describe"}).status_code == 200
