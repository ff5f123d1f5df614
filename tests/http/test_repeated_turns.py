"""Tests that an agent whose model repeats the same call with the same result in every turn finally gets an answer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from starlette.testclient import TestClient

from bridle.chat.repeated_calls import repeats_calls
from bridle.config import ModelConfig
from bridle.errors import InvalidRequest
from tests.http.harness import NAME, local_client, saying, scripted_model
from tests.http.parked_chats import TOLD
from tests.http.tool_calls import HERMES, PARAMETERS, TAGGED, a_tokenizer

CITY = '{"city": "Rome", "day": 1}'
TOOLS = [{"type": "function", "function": {"name": "find", "parameters": PARAMETERS}}]


def turn(arguments: str = CITY, result: str = "Nothing.") -> list[dict[str, Any]]:
    """Return a tool call and its result, in OpenAI's format."""
    made = {"id": "c", "type": "function", "function": {"name": "find", "arguments": arguments}}
    return [
        {"role": "assistant", "content": None, "tool_calls": [made]},
        {"role": "tool", "tool_call_id": "c", "content": result},
    ]


def anthropic_turn() -> list[dict[str, Any]]:
    """Return a tool call and its result, in Anthropic's format."""
    call = {"type": "tool_use", "id": "c", "name": "find", "input": {"city": "Rome", "day": 1}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": "Nothing."}
    return [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]


ASKED = [{"role": "user", "content": "Where?"}]


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        (ASKED, False),
        ([*ASKED, *turn()], False),
        ([*ASKED, *turn(), *turn()], True),
        ([*ASKED, *turn(), *turn('{"day":1,"city":"Rome"}')], True),
        ([*ASKED, *turn(), *turn(result="Here.")], False),
        ([*ASKED, *turn(), *turn('{"city": "Oslo", "day": 1}')], False),
        ([*ASKED, *turn(), *ASKED, *turn()], False),
        ([*ASKED, *turn(), *turn(), *ASKED], False),
        ([*ASKED, *turn("{"), *turn("{")], True),
        ([*ASKED, *turn("[" * 100_000), *turn("[" * 100_000)], True),
    ],
)
def test_equal_calls_with_equal_results_are_counted_in_a_row(messages: list[dict[str, Any]], expected: bool) -> None:
    assert repeats_calls(messages, 2) is expected


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    text = a_tokenizer(TOLD + HERMES)
    text.chat_settings = replace(text.chat_settings, max_repeated_calls=2)
    with local_client(scripted_model(text=text, next_token=saying(TAGGED, text), max_model_len=1024)) as made:
        yield made


@pytest.mark.parametrize("num_turns", [1, 2])
def test_a_chat_is_offered_no_tools_after_repeated_calls(client: TestClient, num_turns: int) -> None:
    body = {"model": NAME, "messages": [*ASKED, *turn() * num_turns], "tools": TOOLS, "max_tokens": 200}
    answer = client.post("/v1/chat/completions", json=body).json()
    assert (answer["choices"][0]["finish_reason"] == "tool_calls") is (num_turns == 1)
    insisting = client.post("/v1/chat/completions", json=body | {"tool_choice": "required"}).json()
    assert insisting["choices"][0]["message"]["tool_calls"]


@pytest.mark.parametrize("num_turns", [1, 2])
def test_anthropic_messages_count_repeated_calls(client: TestClient, num_turns: int) -> None:
    tools = [{"name": "find", "input_schema": PARAMETERS}]
    body = {"model": NAME, "messages": [*ASKED, *anthropic_turn() * num_turns], "tools": tools, "max_tokens": 200}
    answer = client.post("/v1/messages", json=body).json()
    assert (answer["stop_reason"] == "tool_use") is (num_turns == 1), answer


@pytest.mark.parametrize(
    "calls", [5, [1], [{"function": None}], [{"function": {"name": "find", "arguments": "[" * 9_999}}]]
)
def test_a_malformed_history_is_no_server_error(client: TestClient, calls: Any) -> None:
    said = [{"role": "assistant", "content": None, "tool_calls": calls}, turn()[1]] * 2
    body = {"model": NAME, "messages": [*ASKED, *said], "tools": TOOLS, "max_tokens": 20}
    assert client.post("/v1/chat/completions", json=body).status_code < 500


def test_a_negative_limit_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="max_repeated_calls is -1; must be at least 0"):
        ModelConfig("demo", max_repeated_calls=-1)
