"""Tests that on each API with conversations, reasoning is unconstrained, and the answer or call after it has the
requested format."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.waiting import PATIENCE

SUM = {
    "type": "object",
    "properties": {"sum": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["sum"],
    "additionalProperties": False,
}
ASKED = [{"role": "user", "content": "What is 3 + 4?"}]
BUDGET = 40
CHAT = {"messages": ASKED, "max_tokens": 200, "temperature": 0, "thinking_budget": BUDGET}
RESPONSE = {"input": ASKED, "max_output_tokens": 200, "temperature": 0, "thinking_budget": BUDGET}
THINKING = {"type": "enabled", "budget_tokens": BUDGET}
MESSAGE = {"messages": ASKED, "max_tokens": 200, "temperature": 0, "thinking": THINKING}
FUNCTION = {"name": "tell", "description": "Tell a sum."}
#: For each API: the body whose answer has a form, the one whose answer is a call.
BODIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "/v1/chat/completions": (
        CHAT | {"response_format": {"type": "json_schema", "json_schema": {"name": "sum", "schema": SUM}}},
        CHAT | {"tools": [{"type": "function", "function": FUNCTION | {"parameters": SUM, "strict": True}}],
                "tool_choice": "required", "parallel_tool_calls": False},
    ),
    "/v1/responses": (
        RESPONSE | {"text": {"format": {"type": "json_schema", "name": "sum", "schema": SUM}}},
        RESPONSE | {"tools": [{"type": "function", **FUNCTION, "parameters": SUM, "strict": True}],
                    "tool_choice": "required", "parallel_tool_calls": False},
    ),
    "/v1/messages": (
        MESSAGE | {"output_config": {"format": {"type": "json_schema", "schema": SUM}}},
        MESSAGE | {"tools": [FUNCTION | {"input_schema": SUM}],
                   "tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
    ),
}  # fmt: skip


def parts(route: str, answer: dict[str, Any]) -> tuple[str, str, list[Any]]:
    """Return the reasoning, the text, and the arguments of calls."""
    if route == "/v1/chat/completions":
        message = answer["choices"][0]["message"]
        calls = [json.loads(call["function"]["arguments"]) for call in message.get("tool_calls") or ()]
        return message.get("reasoning_content") or "", message.get("content") or "", calls
    if route == "/v1/messages":
        blocks = answer["content"]
        texts = ["".join(block.get(kind, "") for block in blocks) for kind in ("thinking", "text")]
        return texts[0], texts[1], [block["input"] for block in blocks if block["type"] == "tool_use"]
    items = answer["output"]
    thoughts = json.dumps([item for item in items if item["type"] == "reasoning"])
    texts = [part["text"] for item in items if item["type"] == "message" for part in item["content"]]
    calls = [json.loads(item["arguments"]) for item in items if item["type"] == "function_call"]
    return "" if thoughts == "[]" else thoughts, "".join(texts), calls


@pytest.mark.parametrize("route", BODIES)
@pytest.mark.parametrize("is_call", [False, True], ids=["form", "call"])
def test_after_the_thoughts_comes_what_was_asked_for(demo_server: str, route: str, is_call: bool) -> None:
    answer = httpx.post(demo_server + route, json=BODIES[route][is_call], timeout=PATIENCE)
    assert answer.status_code == 200, answer.text
    thoughts, text, calls = parts(route, answer.json())
    assert thoughts and "think>" not in text, answer.text
    (found,) = calls if is_call else [json.loads(text)]
    assert set(found) == {"sum"} and 0 <= found["sum"] <= 99


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/responses"])
def test_thinking_in_anthropics_words_is_the_same_on_openais_routes(demo_server: str, route: str) -> None:
    own = {key: value for key, value in BODIES[route][0].items() if key != "thinking_budget"}

    def thinks(thinking: Any) -> bool:
        answer = httpx.post(demo_server + route, json=own | {"thinking": thinking}, timeout=PATIENCE)
        assert answer.status_code == 200, answer.text
        return bool(parts(route, answer.json())[0])

    assert thinks(THINKING) and thinks(True)
    assert not thinks({"type": "disabled"}) and not thinks(False)
    refused = httpx.post(demo_server + route, json=own | {"thinking": {"type": "perhaps"}}, timeout=PATIENCE)
    assert refused.status_code == 400 and "reasoning.enabled" in refused.text
