"""Conversations that call a tool, on each API with conversations, for tests of retained KV."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from starlette.testclient import TestClient

from bridle.config import EngineConfig
from bridle.serving.models.loading import LoadedModel
from tests.fakes.call_templates import TEMPLATES, CallTemplate
from tests.http.harness import local_client, saying, scripted_model
from tests.http.tool_calls import (
    ARGUMENTS,
    BEGIN,
    CALLS,
    END,
    HERMES,
    NAME,
    PARAMETERS,
    QUESTION,
    TAGGED,
    a_tokenizer,
)

#: How these templates write the tools.
TOLD = "{% for tool in tools or [] %}{{ tool.function.name }}\n{% endfor %}"
THOUGHTS = "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
THINKING = HERMES.replace("{{ m.content }}" + CALLS, THOUGHTS + "{{ m.content }}" + CALLS)
LLAMA = BEGIN + CALLS + '{ "name" : ' + NAME + ' , "parameters": ' + ARGUMENTS + "}{% endfor %}" + END
LISTED = '[TOOL_CALLS]  [ {% for c in m.tool_calls %}{"name": ' + NAME + ', "arguments": ' + ARGUMENTS
MISTRAL = BEGIN + "{% if m.tool_calls %}" + LISTED + "ID}{% endfor %} ]{% endif %}" + END


def _written(source: str) -> str:
    return CallTemplate(source).calls([("find", {"city": "Rome", "day": 1})]).removesuffix("</s>")


#: Arguments between tags, and calls as Python writes them.
TAGS, PYTHON = (TEMPLATES[name].replace("<|im_end|>", "</s>") for name in ("functions with parameters", "Python calls"))
SAID = {
    "hermes": (HERMES, TAGGED),
    "hermes with content": (HERMES, "Well. \n" + TAGGED),
    "thoughts": (THINKING, "<think>\nWhere?\n\n</think>\n" + TAGGED),
    "llama": (LLAMA, '{"name": "find", "parameters": {"city": "Rome"}}'),
    "tags": (TAGS, _written(TAGS)),
    "python": (PYTHON, _written(PYTHON)),
    "mistral": (MISTRAL.replace("ID", ""), '[TOOL_CALLS][{"name": "find", "arguments": {"city": "Rome"}}]'),
}


@contextmanager
def an_app(template: str, said: str, **config: Any) -> Iterator[tuple[TestClient, LoadedModel]]:
    text = a_tokenizer(TOLD + template)
    script = saying(said, text)
    model = scripted_model(text=text, next_token=script, max_model_len=2048, config=EngineConfig(**config))
    with local_client(model) as client:
        yield client, model


def flood(client: TestClient) -> None:
    """Fill the KV cache of 4,096 tokens twice with the prompts of other requests."""
    for i in range(6):
        body = {"prompt": [i, *range(5, 200)] * 7, "max_tokens": 1}
        assert client.post("/v1/completions", json=body).status_code == 200


class Talk:
    """A conversation on one API, in the form that a client of the API stores."""

    route = ""

    def __init__(self, client: TestClient, is_stream: bool) -> None:
        self.client, self.is_stream = client, is_stream
        self.said: list[Any] = [{"role": "user", "content": QUESTION}]
        self.fields: dict[str, Any] = {}

    def post(self, body: dict[str, Any]) -> Any:
        answer = self.client.post(self.route, json=body | self.fields | {"stream": self.is_stream})
        assert answer.status_code == 200, answer.text
        if not self.is_stream:
            return answer.json()
        lines = (line.removeprefix("data:").strip() for line in answer.text.splitlines() if line.startswith("data:"))
        return [json.loads(line) for line in lines if line != "[DONE]"]

    def say(self) -> tuple[int, int, int]:
        """Request an answer, and return its counts: prompt tokens, cached prompt tokens, and tokens of the answer."""
        raise NotImplementedError

    def tell(self) -> None:
        """Add the result of the tool call to the conversation."""
        raise NotImplementedError


class Chat(Talk):
    route = "/v1/chat/completions"

    def say(self) -> tuple[int, int, int]:
        tools = [{"type": "function", "function": {"name": "find", "parameters": PARAMETERS}}]
        body = {"messages": self.said, "tools": tools, "max_tokens": 200, "temperature": 0}
        got = self.post(body | ({"stream_options": {"include_usage": True}} if self.is_stream else {}))
        self.said.append(message_of(got) if self.is_stream else got["choices"][0]["message"])
        usage = (got[-1] if self.is_stream else got)["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return usage["prompt_tokens"], cached, usage["completion_tokens"]

    def tell(self) -> None:
        call = self.said[-1]["tool_calls"][0]
        self.said.append({"role": "tool", "tool_call_id": call["id"], "content": "There."})


def message_of(chunks: list[Any]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    for chunk in chunks:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            if "reasoning_content" in delta:
                message["reasoning_content"] = message.get("reasoning_content", "") + delta["reasoning_content"]
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    message.setdefault("tool_calls", []).append({**call, "function": dict(call["function"])})
                else:
                    message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return message


class Responses(Talk):
    route = "/v1/responses"

    def say(self) -> tuple[int, int, int]:
        tools = [{"type": "function", "name": "find", "parameters": PARAMETERS}]
        got = self.post({"input": self.said, "tools": tools, "max_output_tokens": 200, "temperature": 0})
        response = got[-1]["response"] if self.is_stream else got
        self.said += response["output"]
        usage = response["usage"]
        return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"], usage["output_tokens"]

    def tell(self) -> None:
        result = {"type": "function_call_output", "call_id": self.said[-1]["call_id"], "output": "There."}
        self.said.append(result)


class Messages(Talk):
    route = "/v1/messages"

    def say(self) -> tuple[int, int, int]:
        tools = [{"name": "find", "input_schema": PARAMETERS}]
        got = self.post({"messages": self.said, "tools": tools, "max_tokens": 200, "temperature": 0})
        content, usage = blocks_of(got) if self.is_stream else (got["content"], got["usage"])
        self.said.append({"role": "assistant", "content": content})
        cached = usage["cache_read_input_tokens"]
        return usage["input_tokens"] + cached, cached, usage["output_tokens"]

    def tell(self) -> None:
        call = next(block for block in self.said[-1]["content"] if block["type"] == "tool_use")
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": "There."}
        self.said.append({"role": "user", "content": [result]})


def arguments_of(text: str) -> Any:
    """Return the parsed arguments of a call, or their text if the text is incomplete."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def blocks_of(events: list[Any]) -> tuple[list[Any], Any]:
    blocks: list[Any] = []
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append(dict(event["content_block"]))
        elif event["type"] == "content_block_delta":
            delta, block = event["delta"], blocks[event["index"]]
            name = {"text_delta": "text", "thinking_delta": "thinking"}.get(delta["type"])
            if name is not None:
                block[name] += delta[name]
            else:
                block["json"] = block.get("json", "") + delta["partial_json"]
    for block in blocks:
        if "json" in block:
            block["input"] = arguments_of(block.pop("json"))
    return blocks, next(event for event in events if event["type"] == "message_delta")["usage"]


ROUTES = [Chat, Responses, Messages]
