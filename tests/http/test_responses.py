"""Tests of OpenAI's Responses API with the real client and the demo model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

CITIES = ["Rome", "Oslo", "Lima"]
WEATHER = {"type": "object", "properties": {"city": {"enum": CITIES}}, "required": ["city"],
           "additionalProperties": False}  # fmt: skip
TOOLS: Any = [{"type": "function", "name": "get_weather", "parameters": WEATHER, "strict": True}]
CAPITAL = "What is the capital of France?"


@pytest.fixture
def client(demo_server: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=demo_server + "/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(client: openai.OpenAI, said: Any, **options: Any) -> Any:
    return client.responses.create(  # type: ignore[call-overload]
        input=said, **({"model": "demo", "max_output_tokens": 120, "temperature": 0} | options)
    )


def test_an_answer_has_the_shape_of_responses(client: openai.OpenAI) -> None:
    response = ask(client, CAPITAL, instructions="You are brief.", metadata={"a": "b"})
    assert (response.object, response.status, response.model) == ("response", "completed", "demo")
    assert "Paris" in response.output_text
    assert [item.type for item in response.output] == ["message"]
    assert response.metadata == {"a": "b"}
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    parts = [{"role": "system", "content": "You are brief."},
             {"role": "user", "content": [{"type": "input_text", "text": CAPITAL}]}]  # fmt: skip
    again = ask(client, parts)
    assert again.output_text == response.output_text
    assert again.usage.input_tokens == response.usage.input_tokens
    assert again.usage.input_tokens_details.cached_tokens > 0


def test_an_answer_that_is_cut_off(client: openai.OpenAI) -> None:
    response = ask(client, "Tell me a short story.", max_output_tokens=4)
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.usage.output_tokens == 4


def test_a_stream_says_the_same(client: openai.OpenAI) -> None:
    whole = ask(client, CAPITAL)
    events = list(ask(client, CAPITAL, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == ["response.created", "response.in_progress", "response.output_item.added",
                         "response.content_part.added"]  # fmt: skip
    assert kinds[-4:] == ["response.output_text.done", "response.content_part.done", "response.output_item.done",
                          "response.completed"]  # fmt: skip
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text == events[-1].response.output_text
    assert events[-1].response.usage.output_tokens == whole.usage.output_tokens


def test_the_clients_own_accumulator_reads_the_stream(client: openai.OpenAI) -> None:
    said = "What is the weather in Oslo?"
    options: Any = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "temperature": 0}
    with client.responses.stream(model="demo", input=said, **options) as stream:
        final = stream.get_final_response()
    call: Any = final.output[0]
    assert (call.name, json.loads(call.arguments), call.status) == ("get_weather", {"city": "Oslo"}, "completed")


def test_tools_and_their_results(client: openai.OpenAI) -> None:
    said: list[Any] = [{"role": "user", "content": "What is the weather in Rome?"}]
    response = ask(client, said, tools=TOOLS)
    (call,) = response.output
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "get_weather", {"city": "Rome"})
    said += response.output
    said.append({"type": "function_call_output", "call_id": call.call_id, "output": '{"weather": "sunny"}'})
    assert "sunny" in ask(client, said, tools=TOOLS).output_text


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "get_weather"}, {
    "type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get_weather"}]}, {
    "type": "allowed_tools", "allowed_tools": {
        "mode": "required", "tools": [{"type": "function", "function": {"name": "get_weather"}}]}}])  # fmt: skip
def test_a_call_can_be_demanded(client: openai.OpenAI, choice: Any) -> None:
    for temperature in (0, 2):
        response = ask(client, "Tell me a story.", tools=TOOLS, tool_choice=choice, temperature=temperature,
                       parallel_tool_calls=False)  # fmt: skip
        assert json.loads(response.output[0].arguments)["city"] in CITIES


def test_an_answer_in_a_form(client: openai.OpenAI) -> None:
    form: Any = {"format": {"type": "json_schema", "name": "place", "schema": WEATHER, "strict": True}}
    assert json.loads(ask(client, "Which city?", text=form, temperature=1).output_text)["city"] in CITIES


@pytest.mark.parametrize("is_stream", [False, True])
def test_thoughts_are_items(client: openai.OpenAI, is_stream: bool) -> None:
    options: Any = {"extra_body": {"thinking_budget": 100}}
    if is_stream:
        events = list(ask(client, "What is 3 + 4?", stream=True, **options))
        response = events[-1].response
        told = "".join(event.delta for event in events if event.type == "response.reasoning_text.delta")
        assert told == response.output[0].content[0].text
    else:
        response = ask(client, "What is 3 + 4?", **options)
    assert [item.type for item in response.output] == ["reasoning", "message"]
    assert "3" in response.output[0].content[0].text
    assert response.output_text == "3 + 4 = 7"
    assert response.usage.output_tokens_details.reasoning_tokens > 3
    said = [{"role": "user", "content": "What is 3 + 4?"}, *response.output, {"role": "user", "content": CAPITAL}]
    assert "Paris" in ask(client, said).output_text


BAD: list[tuple[dict[str, Any], str]] = [
    ({"input": []}, "messages is empty"),
    ({"input": [5]}, "input must be a list of objects"),
    ({"input": [{}] * 5000}, "input has 5000 entries; at most 4096"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
     "input[0].content[0] is of type 'input_image'; 'demo' reads only text"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0] is of type 'item_reference'"),
    ({"input": [{"type": "function_call"}]}, "input[0].name is None"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt is not supported, because this server stores no prompts"),
    ({"text": {"verbosity": "low"}}, "text.verbosity is not supported here: models have no setting"),
    ({"reasoning": {"context": "all_turns"}}, "reasoning.context is not supported here: the checkpoint's chat"),
    ({"background": True}, "background is true"),
    ({"truncation": "auto"}, "truncation is 'auto'"),
    ({"tools": [{"type": "custom", "name": "x"}]}, "tools[0] is of type 'custom'; only tools of type function"),
    ({"tool_choice": "required"}, "there are no tools"),
    ({"temperature": -1}, "temperature is -1"),
    ({"text": {"format": {"type": "xml"}}}, "response_format is 'xml'"),
    ({"n": 2}, "n is 2"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), BAD)
def test_bad_requests_are_told(demo_server: str, change: dict[str, Any], message: str) -> None:
    answer = httpx.post(
        demo_server + "/v1/responses", json={"model": "demo", "input": "a", "max_output_tokens": 3} | change
    )
    assert answer.status_code == 400, answer.text
    assert message in answer.json()["error"]["message"]
