"""After a tool call the KV of a conversation is retained, so its next request computes only the new tokens. The tests
cover every API with conversations, every format of tool calls, and templates that write answers differently."""

from __future__ import annotations

import json
from collections.abc import Callable
from io import StringIO
from typing import Any

import pytest
from rich.console import Console
from starlette.testclient import TestClient

from bridle.cli.top_view import frame
from bridle.serving.models.loading import LoadedModel
from tests.http.parked_chats import MISTRAL, ROUTES, SAID, Chat, Talk, an_app, flood
from tests.http.tool_calls import (
    BLOCK,
    HERMES,
    PARAMETERS,
    QUESTION,
)
from tests.waiting import PATIENCE, until


@pytest.mark.few(6)
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


@pytest.mark.few(2)
@pytest.mark.parametrize("form", ["hermes", "tags", "python", "mistral"])
def test_arguments_may_come_back_in_another_layout(form: str) -> None:
    template, said = SAID[form]
    with an_app(template, said, park_memory=1 << 20) as (client, _):
        one = Chat(client, False)
        num_prompt, _, num_answer = one.say()
        function = one.said[-1]["tool_calls"][0]["function"]
        layout = json.dumps(dict(reversed(json.loads(function["arguments"]).items())), indent=3)
        assert layout != function["arguments"]
        function["arguments"] = layout
        flood(client)
        one.tell()
        assert one.say()[1] >= num_prompt + num_answer - BLOCK


@pytest.mark.parametrize("is_stream", [False, True])
def test_ollamas_clients_go_on_from_what_is_parked_if_they_return_ids(is_stream: bool) -> None:
    template, said = SAID["hermes"]
    with an_app(template, said, park_memory=1 << 20) as (client, model):
        tools = [{"type": "function", "function": {"name": "find", "parameters": PARAMETERS}}]
        messages: list[Any] = [{"role": "user", "content": QUESTION}]
        for number in range(3):
            body = {"model": model.name, "messages": messages, "tools": tools, "stream": is_stream}
            rows = [json.loads(line) for line in client.post("/api/chat", json=body).text.splitlines()]
            (call,) = [each for row in rows for each in row["message"].get("tool_calls", ())]
            assert model.client.statistics().num_park_hits == number
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
            messages.append({"role": "tool", "tool_name": "find", "content": "There."})
            flood(client)


def rendered(model: LoadedModel, messages: list[Any]) -> str:
    told = [{**each, "content": each["content"] or ""} for each in messages]
    for each in told:
        for call in each.get("tool_calls") or ():
            call["function"] = {**call["function"], "arguments": json.loads(call["function"]["arguments"])}
    return model.tokenizer.chat_template.render(told, [{"function": {"name": "find"}}], None, {})


CHANGES: dict[str, Callable[[Any], object]] = {
    "content": lambda message: message.update(content="Something else."),
    "name": lambda message: message["tool_calls"][0]["function"].update(name="other"),
    "arguments": lambda message: message["tool_calls"][0]["function"].update(arguments='{"city": "Oslo"}'),
    "another call": lambda message: message["tool_calls"].append(dict(message["tool_calls"][0])),
    "another field": lambda message: message.update(refusal="No."),
    "thoughts": lambda message: message.update(reasoning_content="I wonder."),
}


@pytest.mark.few(3)
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
    """Return whether metrics and `bridle top` show one retained conversation of `num_blocks` KV blocks."""
    metrics = client.get("/metrics").text
    console = Console(width=160, record=True, file=StringIO())
    console.print(frame(client.get("/v1/status").json(), None, "here"))
    told = f'bridle_engine_parked_blocks{{model="scripted"}} {float(num_blocks)}' in metrics
    return told and f"({num_blocks} of them for 1 parked)" in console.export_text()


def ids_of(model: LoadedModel) -> list[str]:
    """Return the ids of the requests whose exact output tokens are stored."""
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
