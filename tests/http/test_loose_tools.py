"""Tests of tools without `strict`, on every API with conversations: every reported call is a valid call."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.waiting import PATIENCE

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
QUESTION = [{"role": "user", "content": "What is the weather in Rome?"}]
FUNCTION = {"name": "lookup_customer_orders", "description": "Orders of a customer.", "parameters": PARAMETERS}
OPENAI = {"messages": QUESTION, "tools": [{"type": "function", "function": FUNCTION}], "max_tokens": 100}
Calls = list[tuple[str, Any]]


def of_chat(answer: Any) -> Calls:
    (choice,) = answer["choices"]
    calls = choice["message"].get("tool_calls") or ()
    assert (choice["finish_reason"] == "tool_calls") == bool(calls)
    assert all(call["type"] == "function" for call in calls)
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


def of_responses(answer: Any) -> Calls:
    return [(i["name"], json.loads(i["arguments"])) for i in answer["output"] if i["type"] == "function_call"]


def of_messages(answer: Any) -> Calls:
    return [(block["name"], block["input"]) for block in answer["content"] if block["type"] == "tool_use"]


ROUTES: list[tuple[str, dict[str, Any], Callable[[Any], Calls]]] = [
    ("/v1/chat/completions", OPENAI, of_chat),
    ("/invocations", OPENAI, of_chat),
    ("/v1/responses", {"input": QUESTION, "tools": [{"type": "function", **FUNCTION}], "max_output_tokens": 100},
     of_responses),
    ("/v1/messages", {"messages": QUESTION, "tools": [{"name": "lookup_customer_orders", "input_schema": PARAMETERS}],
                      "max_tokens": 100}, of_messages),
]  # fmt: skip


@pytest.mark.few(2)
@pytest.mark.parametrize(("route", "body", "calls_of"), ROUTES)
def test_calls_are_valid_whatever_the_temperature(
    demo_server: str, route: str, body: dict[str, Any], calls_of: Callable[[Any], Calls]
) -> None:
    found: Calls = []
    for seed in range(12):
        answer = httpx.post(demo_server + route, json=body | {"temperature": 1.0, "seed": seed}, timeout=PATIENCE)
        assert answer.status_code == 200, answer.text
        found += calls_of(answer.json())
    assert len(found) >= 8
    assert all(name == "lookup_customer_orders" and isinstance(arguments, dict) for name, arguments in found)
