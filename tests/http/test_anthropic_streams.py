"""Tests of Anthropic's streams whose first token is late, and of the fields that typed clients need."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types import Message, MessageDeltaUsage, TextBlock, ThinkingBlock, ToolUseBlock, Usage
from anthropic.types.beta import BetaMessage, BetaMessageDeltaUsage, BetaUsage
from anthropic.types.raw_message_delta_event import Delta

from bridle.http import HttpSettings
from tests.http.harness import saying, scripted_model, served
from tests.http.tool_calls import TOOLS
from tests.waiting import PATIENCE

BODY: dict[str, Any] = {"max_tokens": 8, "messages": [{"role": "user", "content": "Hi"}], "stream": True}
#: Fields that this server leaves out, since the service does so unless a beta feature asks for them.
OPTIONAL = {"input_transformations", "citations"}


def events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """Yield the events of a stream. Each event's type must be the name in its `event:` line."""
    name = ""
    for line in lines:
        assert not line.startswith(":"), "a comment is no event"
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line:
            event = json.loads(line.removeprefix("data: "))
            assert event["type"] == name
            yield event


@pytest.fixture
def is_read() -> threading.Event:
    return threading.Event()


@pytest.fixture
def late_server(is_read: threading.Event) -> Iterator[str]:
    """Yield the address of a server whose device computes nothing until `is_read` is set."""

    def wait(plan: object) -> None:
        assert is_read.wait(PATIENCE)

    model = scripted_model(next_token=saying("Hello!"), on_forward=wait)
    with served(model, HttpSettings(ping_interval=0.01)) as url:
        try:
            yield url
        finally:
            is_read.set()


def test_a_stream_begins_at_once_and_pings_until_its_first_token(late_server: str, is_read: threading.Event) -> None:
    names, start = [], None
    with httpx.stream("POST", late_server + "/v1/messages", json=BODY, timeout=PATIENCE) as answer:
        for event in events(answer.iter_lines()):
            names.append(event["type"])
            if event["type"] == "message_start":
                start = event["message"]
            elif event["type"] == "ping":
                assert event == {"type": "ping"}
                if names.count("ping") == 3:
                    is_read.set()
    first = names.index("content_block_start")
    assert names[:4] == ["message_start", "ping", "ping", "ping"]
    assert set(names[1:first]) == {"ping"}
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert start is not None and start["usage"]["input_tokens"] > 0
    assert start["content"] == []


def test_the_real_client_reads_a_late_stream(late_server: str, is_read: threading.Event) -> None:
    with (
        anthropic.Anthropic(base_url=late_server, api_key="none", max_retries=0) as client,
        client.messages.stream(model="scripted", max_tokens=8, messages=BODY["messages"]) as stream,
    ):
        kinds = []
        for event in stream:
            kinds.append(event.type)
            is_read.set()
        final = stream.get_final_message()
    assert kinds[0] == "message_start"
    assert final.content[0].text == "Hello!"  # type: ignore[union-attr]
    assert final.usage.input_tokens + (final.usage.cache_read_input_tokens or 0) > 0


# -- nullable fields -------------------------------------------------------------------------------------------


def has_all(found: dict[str, Any], *kinds: Any) -> None:
    """Check that the object has every field of the real client's types."""
    for kind in kinds:
        missing = set(kind.model_fields) - set(found) - OPTIONAL
        assert not missing, f"{kind.__name__} has {sorted(missing)}"
        kind.model_validate(found)


def whole(url: str, **fields: Any) -> dict[str, Any]:
    answer = httpx.post(
        url + "/v1/messages", json={**BODY, "max_tokens": 120, "stream": False, "temperature": 0} | fields
    )
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def streamed(url: str, **fields: Any) -> list[dict[str, Any]]:
    body = {**BODY, "max_tokens": 120, "temperature": 0} | fields
    with httpx.stream("POST", url + "/v1/messages", json=body, timeout=PATIENCE) as answer:
        return list(events(answer.iter_lines()))


KINDS = {"text": TextBlock, "thinking": ThinkingBlock, "tool_use": ToolUseBlock}
ASKED: list[dict[str, Any]] = [
    {},
    {"messages": [{"role": "user", "content": "What is 3 + 4?"}], "thinking": {"type": "enabled", "budget_tokens": 90}},
    {"tools": TOOLS, "tool_choice": {"type": "any"}},
]


@pytest.mark.parametrize("fields", ASKED)
def test_a_message_has_all_fields_of_the_real_types(demo_server: str, fields: dict[str, Any]) -> None:
    message = whole(demo_server, **fields)
    has_all(message, Message, BetaMessage)
    has_all(message["usage"], Usage, BetaUsage)
    assert message["content"]
    for block in message["content"]:
        has_all(block, KINDS[block["type"]])


@pytest.mark.parametrize("fields", ASKED)
def test_events_have_all_fields_of_the_real_types(demo_server: str, fields: dict[str, Any]) -> None:
    found = streamed(demo_server, **fields)
    by_type = {event["type"]: event for event in found}
    has_all(by_type["message_start"]["message"], Message, BetaMessage)
    has_all(by_type["message_start"]["message"]["usage"], Usage, BetaUsage)
    has_all(by_type["message_delta"]["delta"], Delta)
    has_all(by_type["message_delta"]["usage"], MessageDeltaUsage)
    assert set(BetaMessageDeltaUsage.model_fields) - {"iterations", "fallback_credit"} <= set(
        by_type["message_delta"]["usage"]
    )
    assert by_type["message_delta"]["context_management"] is None
    for event in found:
        if event["type"] == "content_block_start":
            has_all(event["content_block"], KINDS[event["content_block"]["type"]])
            assert "citations" not in event["content_block"]  # the AI SDK refuses null there


def test_models_and_counts_have_all_fields(demo_server: str) -> None:
    with anthropic.Anthropic(base_url=demo_server, api_key="none", max_retries=0) as client:
        model = client.models.retrieve("demo")
        counted = client.beta.messages.count_tokens(model="demo", messages=BODY["messages"])
    assert set(type(model).model_fields) <= model.model_fields_set
    assert set(type(counted).model_fields) <= counted.model_fields_set
    assert model.max_input_tokens is not None and model.max_input_tokens > 0
