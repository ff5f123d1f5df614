"""The APIs with conversations: the request of each for a turn with tools, and a reader of the turn in its answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from starlette.testclient import TestClient

from bridle.http.openai.tgi_client_chunks import NATIVE_FIELDS
from tests.http.harness import NAME
from tests.http.parked_chats import arguments_of, blocks_of

Object = dict[str, Any]


@dataclass(frozen=True)
class Turn:
    """A turn as an API reports it. `end` is `calls`, `stop` or `length`. The arguments of an incomplete call are an
    empty object on APIs that write objects, and the incomplete text on others."""

    thoughts: str = ""
    content: str = ""
    calls: tuple[tuple[str, Any], ...] = ()
    end: str = "stop"


@dataclass(frozen=True)
class TurnApi:
    """One API: its route, its field names, and readers of complete and streamed answers."""

    route: str
    body: Callable[[list[Object], list[Object]], Object]
    whole: Callable[[Any], Turn]
    streamed: Callable[[list[Any]], Turn]
    length: str = "max_tokens"
    further: Object = field(default_factory=dict)

    def ask(
        self, client: TestClient, messages: list[Object], tools: list[Object], is_stream: bool, **fields: Any
    ) -> Turn:
        """Return the turn that follows `messages`, which are in OpenAI's format."""
        fields = {self.length if name == "max_tokens" else name: value for name, value in fields.items()}
        body = {"model": NAME, "temperature": 0, **self.further, **self.body(messages, tools), **fields}
        answer = client.post(self.route, json=body | {"stream": is_stream})
        assert answer.status_code == 200, answer.text
        return self.streamed(list(_events(answer.text))) if is_stream else self.whole(answer.json())


def _events(text: str) -> Iterator[Any]:
    for line in text.splitlines():
        payload = line.removeprefix("data:").strip()
        if payload.startswith("{"):
            yield json.loads(payload)


_ENDS = {"tool_calls": "calls", "tool_use": "calls", "end_turn": "stop", "max_tokens": "length"}


# -- OpenAI's chats, and what text-generation-inference makes of them ------------------------------------------------


def _chat(messages: list[Object], tools: list[Object]) -> Object:
    return {"messages": messages, "tools": [{"type": "function", "function": each} for each in tools]}


def _whole_chat(got: Any) -> Turn:
    (choice,) = got["choices"]
    message = choice["message"]
    calls = [each["function"] for each in message.get("tool_calls") or ()]
    return Turn(
        message.get("reasoning_content") or "",
        message["content"] or "",
        tuple((each["name"], arguments_of(each["arguments"])) for each in calls),
        _ENDS.get(choice["finish_reason"], choice["finish_reason"]),
    )


def _streamed_chat(chunks: list[Any]) -> Turn:
    texts, names, arguments, end = {"reasoning_content": "", "content": ""}, {}, {}, ""
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        delta, end = choice["delta"], choice["finish_reason"] or end
        for name in texts:
            texts[name] += delta.get(name) or ""
        calls = delta.get("tool_calls") or []
        for call in [calls] if isinstance(calls, dict) else calls:
            names[call["index"]] = call["function"].get("name") or names[call["index"]]
            arguments[call["index"]] = arguments.get(call["index"], "") + (call["function"].get("arguments") or "")
    found = tuple((names[number], arguments_of(arguments[number])) for number in sorted(names))
    return Turn(texts["reasoning_content"], texts["content"], found, _ENDS.get(end, end))


# -- Responses -------------------------------------------------------------------------------------------------------


def _responses(messages: list[Object], tools: list[Object]) -> Object:
    return {"input": messages, "tools": [{"type": "function", **each} for each in tools]}


def _whole_response(got: Any) -> Turn:
    def texts(kind: str) -> str:
        return "".join(part["text"] for item in got["output"] if item["type"] == kind for part in item["content"])

    found = [item for item in got["output"] if item["type"] == "function_call"]
    calls = tuple((item["name"], arguments_of(item["arguments"])) for item in found)
    end = "length" if got["status"] == "incomplete" else "calls" if calls else "stop"
    return Turn(texts("reasoning"), texts("message"), calls, end)


def _streamed_response(events: list[Any]) -> Turn:
    """Return the turn in the last event, after a check that the earlier events have the same content."""
    turn = _whole_response(events[-1]["response"])
    said: dict[str, str] = {}
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind.endswith(".delta"):
            said[kind] = said.get(kind, "") + event["delta"]
    assert said.get("reasoning_text.delta", "") == turn.thoughts
    assert said.get("output_text.delta", "") == turn.content
    items = [item for item in events[-1]["response"]["output"] if item["type"] == "function_call"]
    assert said.get("function_call_arguments.delta", "") == "".join(item["arguments"] for item in items)
    return turn


# -- Anthropic's messages --------------------------------------------------------------------------------------------


def _messages(messages: list[Object], tools: list[Object]) -> Object:
    return {"messages": messages, "tools": [{"name": t["name"], "input_schema": t["parameters"]} for t in tools]}


def _turn_of(blocks: list[Any], reason: str) -> Turn:
    texts = ["".join(block.get(kind, "") for block in blocks) for kind in ("thinking", "text")]
    calls = tuple((block["name"], block["input"]) for block in blocks if block["type"] == "tool_use")
    return Turn(texts[0], texts[1], calls, _ENDS.get(reason, reason))


def _whole_message(got: Any) -> Turn:
    return _turn_of(got["content"], got["stop_reason"])


def _streamed_message(events: list[Any]) -> Turn:
    (end,) = [event["delta"]["stop_reason"] for event in events if event["type"] == "message_delta"]
    return _turn_of(blocks_of(events)[0], end)


# -- Ollama's chats --------------------------------------------------------------------------------------------------


def _streamed_rows(rows: list[Any]) -> Turn:
    messages = [row["message"] for row in rows]
    calls = [call["function"] for message in messages for call in message.get("tool_calls", ())]
    assert [call["index"] for call in calls] == list(range(len(calls)))
    end = rows[-1]["done_reason"]
    return Turn(
        "".join(message.get("thinking", "") for message in messages),
        "".join(message["content"] for message in messages),
        tuple((call["name"], call["arguments"]) for call in calls),
        "calls" if calls and end == "stop" else end,
    )


#: Every field that text-generation's client sends, null or not.
_NATIVE: Object = dict.fromkeys(NATIVE_FIELDS) | {"model": "tgi", "temperature": 0.0}
APIS: dict[str, TurnApi] = {
    "chat": TurnApi("/v1/chat/completions", _chat, _whole_chat, _streamed_chat),
    "tgi": TurnApi("/v1/chat/completions", _chat, _whole_chat, _streamed_chat, further=_NATIVE),
    "responses": TurnApi("/v1/responses", _responses, _whole_response, _streamed_response, "max_output_tokens"),
    "messages": TurnApi("/v1/messages", _messages, _whole_message, _streamed_message),
    "ollama": TurnApi("/api/chat", _chat, lambda row: _streamed_rows([row]), _streamed_rows),
}
