"""After a tool call the KV of a conversation is parked, and its next call computes only what is new: on every API with
conversations, in every format of calls, whatever the template makes of an answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import StringIO
from typing import Any

import pytest
from rich.console import Console
from starlette.testclient import TestClient

from bridle.cli.top_view import frame
from bridle.config import EngineConfig
from bridle.serving.models.loading import LoadedModel
from tests.http.harness import local_client, saying, scripted_model
from tests.http.tool_calls import (
    ARGUMENTS,
    BEGIN,
    BLOCK,
    CALLS,
    END,
    HERMES,
    NAME,
    PARAMETERS,
    QUESTION,
    TAGGED,
    a_tokenizer,
)
from tests.waiting import PATIENCE, until

THOUGHTS = "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
THINKING = HERMES.replace("{{ m.content }}" + CALLS, THOUGHTS + "{{ m.content }}" + CALLS)
LLAMA = BEGIN + CALLS + '{ "name" : ' + NAME + ' , "parameters": ' + ARGUMENTS + "}{% endfor %}" + END
LISTED = '[TOOL_CALLS]  [ {% for c in m.tool_calls %}{"name": ' + NAME + ', "arguments": ' + ARGUMENTS
MISTRAL = BEGIN + "{% if m.tool_calls %}" + LISTED + "ID}{% endfor %} ]{% endif %}" + END
SAID = {
    "hermes": (HERMES, TAGGED),
    "hermes with content": (HERMES, "Well. \n" + TAGGED),
    "thoughts": (THINKING, "<think>\nWhere?\n\n</think>\n" + TAGGED),
    "llama": (LLAMA, '{"name": "find", "parameters": {"city": "Rome"}}'),
    "mistral": (MISTRAL.replace("ID", ""), '[TOOL_CALLS][{"name": "find", "arguments": {"city": "Rome"}}]'),
}


@contextmanager
def an_app(template: str, said: str, **config: Any) -> Iterator[tuple[TestClient, LoadedModel]]:
    text = a_tokenizer(template)
    script = saying(said, text)
    model = scripted_model(text=text, next_token=script, max_model_len=2048, config=EngineConfig(**config))
    with local_client(model) as client:
        yield client, model


def flood(client: TestClient) -> None:
    """Fill the cache of 4,096 tokens with what others say, twice."""
    for i in range(6):
        body = {"prompt": [i, *range(5, 200)] * 7, "max_tokens": 1}
        assert client.post("/v1/completions", json=body).status_code == 200


class Talk:
    """A conversation on one API, as its clients hold it."""

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
        """The next answer: prompt tokens, those of them that were cached, and the tokens of the answer."""
        raise NotImplementedError

    def tell(self) -> None:
        """The result of the call."""
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
            block["input"] = json.loads(block.pop("json"))
    return blocks, next(event for event in events if event["type"] == "message_delta")["usage"]


ROUTES = [Chat, Responses, Messages]


@pytest.mark.parametrize(
    ("form", "talk", "is_stream"),
    [
        *((form, Chat, False) for form in SAID),
        *(("thoughts", talk, is_stream) for talk in ROUTES for is_stream in (False, True) if talk is not Chat),
        ("hermes with content", Chat, True),
    ],
)
def test_the_next_call_computes_what_is_new(form: str, talk: Callable[..., Talk], is_stream: bool) -> None:
    template, said = SAID[form]
    with an_app(template, said, park_memory=1 << 20) as (client, model):
        one = talk(client, is_stream)
        known = 0
        for number in range(3):
            num_prompt, cached, num_answer = one.say()
            assert known - cached <= BLOCK, (number, known, cached)
            assert num_prompt - known < 60 or not number  # the answer stands for itself, and is not written twice
            known = num_prompt + num_answer
            statistics = model.client.statistics()
            assert (statistics.num_parked, statistics.num_park_hits) == (1, number)
            flood(client)
            one.tell()


def test_ids_that_the_model_did_not_write_come_from_the_template() -> None:
    said = SAID["mistral"][1]
    with an_app(MISTRAL.replace("ID", ', "id": "{{ c.id }}"'), said, park_memory=1 << 20) as (client, model):
        one = Chat(client, False)
        num_prompt, _, _ = one.say()
        flood(client)
        one.tell()
        again, cached, _ = one.say()
        assert num_prompt - BLOCK <= cached <= num_prompt
        assert again == len(model.tokenizer.encode(rendered(model, one.said[:-1]), False))
        assert model.client.statistics().num_park_hits == 1  # all the same: the prompt was used


def rendered(model: LoadedModel, messages: list[Any]) -> str:
    told = [{**each, "content": each["content"] or ""} for each in messages]
    for each in told:
        for call in each.get("tool_calls") or ():
            call["function"] = {**call["function"], "arguments": json.loads(call["function"]["arguments"])}
    return model.tokenizer.chat_template.render(told, None, None, {})


CHANGES: dict[str, Callable[[Any], object]] = {
    "content": lambda message: message.update(content="Something else."),
    "name": lambda message: message["tool_calls"][0]["function"].update(name="other"),
    "arguments": lambda message: message["tool_calls"][0]["function"].update(arguments='{"city": "Oslo"}'),
    "another call": lambda message: message["tool_calls"].append(dict(message["tool_calls"][0])),
    "another field": lambda message: message.update(refusal="No."),
    "thoughts": lambda message: message.update(reasoning_content="I wonder."),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_client_changes_is_what_the_template_says(change: str) -> None:
    template, said = SAID["hermes with content"]
    with an_app(template, said) as (client, model):
        one = Chat(client, False)
        num_prompt, _, _ = one.say()
        CHANGES[change](one.said[-1])
        one.tell()
        expected = len(model.tokenizer.encode(rendered(model, json.loads(json.dumps(one.said))), False))
        again, cached, _ = one.say()
        assert again == expected
        assert num_prompt - BLOCK <= cached


def test_an_earlier_message_that_changed_is_what_the_template_says() -> None:
    template, said = SAID["hermes"]
    with an_app(template, said) as (client, model):
        one = Chat(client, False)
        one.say()
        one.said[0]["content"] = "No: " + QUESTION
        one.tell()
        expected = len(model.tokenizer.encode(rendered(model, json.loads(json.dumps(one.said))), False))
        assert one.say()[0] == expected


def test_answers_without_a_call_leave_nothing_parked() -> None:
    with an_app(HERMES, "No idea.") as (client, model):
        for talk in ROUTES:
            for is_stream in (False, True):
                talk(client, is_stream).say()
        until(lambda: model.client.statistics().num_parked == 0)
        assert len(model.answers) == 0


def test_without_tools_nothing_is_parked() -> None:
    with an_app(HERMES, SAID["hermes"][1]) as (client, model):
        body = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 100}
        assert client.post("/v1/chat/completions", json=body).status_code == 200
        assert model.client.statistics().num_parked == len(model.answers) == 0


def test_switched_off_the_template_says_everything() -> None:
    template, said = SAID["hermes"]
    with an_app(template, said, park_memory=0) as (client, model):
        one = Chat(client, False)
        one.say()
        one.tell()
        expected = len(model.tokenizer.encode(rendered(model, json.loads(json.dumps(one.said))), False))
        assert one.say()[0] == expected
        assert model.client.statistics().num_parked == len(model.answers) == 0


def shows_parked(client: TestClient, num_blocks: int) -> bool:
    """Return whether metrics and `bridle top` show one parked conversation of `num_blocks` blocks."""
    metrics = client.get("/metrics").text
    console = Console(width=160, record=True, file=StringIO())
    console.print(frame(client.get("/v1/status").json(), None, "here"))
    told = f'bridle_engine_parked_blocks{{model="scripted"}} {float(num_blocks)}' in metrics
    return told and f"({num_blocks} of them for 1 parked)" in console.export_text()


def ids_of(model: LoadedModel) -> list[str]:
    """The requests whose answers are remembered."""
    return [entry.value.request_id for entry in model.answers._store.entries.values()]


@pytest.mark.parametrize("awaits", [False, True])
def test_a_drain_ends_what_is_parked_or_waits_for_it(awaits: bool) -> None:
    template, said = SAID["hermes"]
    with an_app(template, said, park_memory=1 << 20) as (client, model):
        one, other = Chat(client, False), Chat(client, False)
        one.say()
        until(lambda: model.client.statistics().num_parked == 1)
        assert shows_parked(client, model.client.statistics().num_parked_blocks)
        http = client.app.state.http  # type: ignore[attr-defined]
        http.awaits_parked = awaits
        assert client.portal is not None
        client.portal.call(http.begin_drain)
        body = {"messages": other.said, "max_tokens": 5}
        assert client.post("/v1/chat/completions", json=body).status_code == 503
        assert client.post("/v1/completions", json={"prompt": "Say", "max_tokens": 1}).status_code == 503
        one.tell()
        if awaits:
            done = client.portal.start_task_soon(http.wait_drained)
            assert one.say()[1] > 0 and not done.done()
            for request_id in ids_of(model):
                model.client.release_retained_kv(request_id)
            done.result(PATIENCE)
        else:
            client.portal.call(http.wait_drained)
            assert client.post("/v1/chat/completions", json={"messages": one.said}).status_code == 503


def test_several_choices_are_parked_and_each_can_be_gone_on_from() -> None:
    template, said = SAID["hermes"]
    with an_app(template, said, park_memory=1 << 20) as (client, model):
        one = Chat(client, False)
        tools = [{"type": "function", "function": {"name": "find", "parameters": PARAMETERS}}]
        body = {"messages": one.said, "tools": tools, "max_tokens": 200, "n": 3, "seed": 1}
        answer = client.post("/v1/chat/completions", json=body).json()
        assert model.client.statistics().num_parked >= 1
        assert len(model.answers) == 3
        flood(client)
        one.said.append(answer["choices"][2]["message"])
        one.tell()
        _, cached, _ = one.say()
        assert answer["usage"]["prompt_tokens"] - BLOCK <= cached
