"""Tests of Anthropic's Messages API with the real client and the demo model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest

from tests.http.tool_calls import CITIES, TOOLS


@pytest.fixture
def client(demo_server: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=demo_server, api_key="none", max_retries=0) as client:
        yield client


def ask(client: anthropic.Anthropic, text: str | list[Any], **options: Any) -> Any:
    messages: Any = [{"role": "user", "content": text}] if isinstance(text, str) else text
    further = {"temperature": options.pop("temperature", 0)} | options.pop("extra_body", {})
    options = {"model": "demo", "max_tokens": 120, "extra_body": further} | options
    return client.messages.create(messages=messages, **options)


def test_an_answer_has_the_shape_of_anthropic(client: anthropic.Anthropic) -> None:
    message = ask(client, "What is the capital of France?", system="You are brief.")
    assert (message.type, message.role, message.model) == ("message", "assistant", "demo")
    assert message.stop_reason == "end_turn"
    assert [block.type for block in message.content] == ["text"]
    assert "Paris" in message.content[0].text
    again = ask(client, "What is the capital of France?", system=[{"type": "text", "text": "You are brief."}])
    assert again.content == message.content
    usage, before = again.usage, message.usage  # how much was cached before depends on who asked the server before
    assert usage.cache_read_input_tokens > 0
    assert usage.input_tokens + usage.cache_read_input_tokens == before.input_tokens + before.cache_read_input_tokens
    assert usage.output_tokens == message.usage.output_tokens > 0
    assert message.id == f"msg_{message._request_id}"


def test_how_an_answer_ends(client: anthropic.Anthropic) -> None:
    cut = ask(client, "Tell me a short story.", max_tokens=4)
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 4)
    stopped = ask(client, "What is the capital of France?", stop_sequences=["Par"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "Par")
    assert "Par" not in stopped.content[0].text


def test_a_stream_says_the_same(client: anthropic.Anthropic) -> None:
    whole = ask(client, "What is the capital of France?")
    with client.messages.stream(
        model="demo", max_tokens=120, extra_body={"temperature": 0},
        messages=[{"role": "user", "content": "What is the capital of France?"}],
    ) as stream:  # fmt: skip
        texts = list(stream.text_stream)
        final = stream.get_final_message()
    assert "".join(texts) == whole.content[0].text == final.content[0].text  # type: ignore[union-attr]
    assert final.stop_reason == "end_turn"
    assert final.usage.output_tokens == whole.usage.output_tokens
    names = [event.type for event in ask(client, "Hello!", stream=True)]
    assert names[:2] == ["message_start", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]


def test_tools_and_their_results(client: anthropic.Anthropic) -> None:
    question = {"role": "user", "content": "What is the weather in Rome?"}
    message = ask(client, [question], tools=TOOLS)
    assert message.stop_reason == "tool_use"
    call = message.content[-1]
    assert (call.type, call.name, call.input) == ("tool_use", "get_weather", {"city": "Rome"})
    result = {
        "type": "tool_result",
        "tool_use_id": call.id,
        "content": [{"type": "text", "text": '{"weather": "sunny"}'}],
    }
    said = [question, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    answer = ask(client, said, tools=TOOLS)
    assert answer.stop_reason == "end_turn"
    assert "sunny" in answer.content[0].text


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_a_call_can_be_demanded(client: anthropic.Anthropic, choice: Any) -> None:
    choice = choice | {"disable_parallel_tool_use": True}
    for temperature in (0, 2):
        message = ask(client, "Tell me a story.", tools=TOOLS, tool_choice=choice, temperature=temperature)
        (call,) = message.content
        assert call.input["city"] in CITIES
    none = ask(client, "What is the weather in Rome?", tools=TOOLS, tool_choice={"type": "none"})
    assert [block.type for block in none.content] == ["text"]


def test_calls_stream_as_json(client: anthropic.Anthropic) -> None:
    with client.messages.stream(
        model="demo", max_tokens=120, extra_body={"temperature": 0}, tools=TOOLS, tool_choice={"type": "any"},  # type: ignore[arg-type]
        messages=[{"role": "user", "content": "What is the weather in Oslo?"}],
    ) as stream:  # fmt: skip
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        final = stream.get_final_message()
    assert json.loads("".join(pieces)) == {"city": "Oslo"}
    call: Any = final.content[0]
    assert (call.name, call.input, final.stop_reason) == ("get_weather", {"city": "Oslo"}, "tool_use")


@pytest.mark.parametrize("is_stream", [False, True])
def test_thoughts_within_a_budget(client: anthropic.Anthropic, is_stream: bool) -> None:
    options: Any = {"thinking": {"type": "enabled", "budget_tokens": 1024}}
    if is_stream:
        with client.messages.stream(
            model="demo",
            max_tokens=120,
            extra_body={"temperature": 0},
            messages=[{"role": "user", "content": "What is 3 + 4?"}],
            **options,
        ) as stream:
            message: Any = stream.get_final_message()
    else:
        message = ask(client, "What is 3 + 4?", **options)
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert "3" in message.content[0].thinking
    assert message.content[1].text == "3 + 4 = 7"
    cut = ask(client, "What is 3 + 4?", thinking={"type": "enabled", "budget_tokens": 2})
    assert cut.usage.output_tokens_details.reasoning_tokens == 5  # with tags and a line break
    # A client sends thoughts back with the turn.
    said = [{"role": "user", "content": "What is 3 + 4?"}, {"role": "assistant", "content": message.content},
            {"role": "user", "content": "What is the capital of France?"}]  # fmt: skip
    assert "Paris" in ask(client, said).content[0].text
    off = ask(client, "What is 3 + 4?", thinking={"type": "disabled"})
    assert [block.type for block in off.content] == ["text"]


def test_a_last_message_of_the_assistant_is_continued(client: anthropic.Anthropic) -> None:
    whole = ask(client, "What is the capital of France?").content[0].text
    begun = [
        {"role": "user", "content": "What is the capital of France?"},
        {"role": "assistant", "content": whole[:11]},
    ]
    assert whole[:11] + ask(client, begun).content[0].text == whole


def test_what_the_other_routes_have(client: anthropic.Anthropic) -> None:
    first = ask(client, "Pick.", temperature=1, extra_body={"choice": ["red", "blue"], "seed": 7})
    assert first.content[0].text in ("red", "blue")
    assert first.seed == 7


def test_an_answer_in_a_form(client: anthropic.Anthropic) -> None:
    schema = {"type": "object", "properties": {"city": {"enum": CITIES}}, "required": ["city"],
              "additionalProperties": False}  # fmt: skip
    form: Any = {"format": {"type": "json_schema", "schema": schema}}
    message = ask(client, "Which city?", output_config=form, temperature=1)
    assert json.loads(message.content[0].text)["city"] in CITIES


def test_tokens_are_counted(client: anthropic.Anthropic) -> None:
    messages: Any = [{"role": "user", "content": "What is the capital of Peru?"}]
    counted = client.messages.count_tokens(model="demo", messages=messages, tools=TOOLS)  # type: ignore[arg-type]
    usage = ask(client, messages, tools=TOOLS).usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


BAD: list[tuple[dict[str, Any], int, str, str]] = [
    ({"model": "gpt-4"}, 404, "not_found_error", "'gpt-4' is not served here"),
    ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens is required"),
    ({"max_tokens": 0}, 400, "invalid_request_error", "max_tokens"),
    ({"messages": []}, 400, "invalid_request_error", "messages is empty"),
    ({"messages": [{"role": "robot", "content": "a"}]}, 400, "invalid_request_error", "messages[0].role is 'robot'"),
    ({"messages": [{"role": "user", "content": 5}]}, 400, "invalid_request_error", "must be text or a list of blocks"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, 400, "invalid_request_error",
     "messages[0].content[0] is of type 'image'; 'demo' reads only text"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, 400, "invalid_request_error", "has no text"),
    ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": "f", "input": 3}]}]}, 400,
     "invalid_request_error", "must have a name, and an input"),
    ({"temperature": -1}, 400, "invalid_request_error", "temperature is -1"),
    ({"n": 2}, 400, "invalid_request_error", "n is 2"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, 400, "invalid_request_error", "tools[0] is of type"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "f"}}, 400, "invalid_request_error", "not among"),
    ({"tools": TOOLS, "tool_choice": {"type": "must"}}, 400, "invalid_request_error", "tool_choice.type is 'must'"),
    ({"thinking": {"type": "enabled"}}, 400, "invalid_request_error", "thinking.budget_tokens is None"),
    ({"thinking": {"type": "on"}}, 400, "invalid_request_error", "thinking.type is 'on'"),
    ({"stop_sequences": ["a"] * 100}, 400, "invalid_request_error", "stop"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "status", "kind", "message"), BAD)
@pytest.mark.parametrize("is_stream", [False, True])
def test_errors_have_the_apis_own_shape(
    demo_server: str, change: dict[str, Any], status: int, kind: str, message: str, is_stream: bool
) -> None:
    body = {"model": "demo", "max_tokens": 5, "messages": [{"role": "user", "content": "a"}], "stream": is_stream}
    answer = httpx.post(demo_server + "/v1/messages", json=body | change)
    assert answer.status_code == status, answer.text
    told = answer.json()
    assert told["type"] == "error"
    assert told["error"]["type"] == kind
    assert message in told["error"]["message"]


def test_the_client_raises_its_own_errors(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="not served here"):
        ask(client, "a", model="gpt-4")
    with pytest.raises(anthropic.BadRequestError, match="temperature is -1"):
        ask(client, "a", temperature=-1)
