"""Tests of constraints over HTTP, with the official client: answers match their constraint, and an invalid constraint
gets status 400."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.http.harness import NAME, scripted_model, served
from tests.waiting import PATIENCE

HI: Any = [{"role": "user", "content": "Hi"}]
SCHEMA = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "blue"]}, "size": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["color", "size"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "thing", "strict": True, "schema": SCHEMA}}
TAGS: Any = {
    "type": "structural_tag",
    "structures": [
        {"begin": "<call=add>", "schema": {"enum": [1, 2]}, "end": "</call>"},
        {"begin": "<call=no>", "schema": {"type": "boolean"}, "end": "</call>"},
    ],
    "triggers": ["<call="],
}


@pytest.fixture(scope="module")
def steered() -> Iterator[openai.OpenAI]:
    with served(scripted_model()) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def fits(text: str) -> bool:
    thing = json.loads(text)
    return set(thing) == {"color", "size"} and thing["color"] in ("red", "blue") and 1 <= thing["size"] <= 9


def test_a_json_schema_in_a_chat(steered: openai.OpenAI) -> None:
    answer = steered.chat.completions.create(model=NAME, messages=HI, response_format=FORMAT, n=3, seed=1)
    assert all(fits(choice.message.content or "") for choice in answer.choices)
    assert {choice.finish_reason for choice in answer.choices} == {"stop"}
    assert answer.usage is not None
    details = answer.usage.completion_tokens_details
    assert details is not None and getattr(details, "forced_tokens") > 0  # noqa: B009 - a field of ours


def test_a_json_schema_in_a_stream(steered: openai.OpenAI) -> None:
    stream = steered.chat.completions.create(model=NAME, messages=HI, response_format=FORMAT, stream=True)
    pieces = [chunk.choices[0].delta.content or "" for chunk in stream]
    assert fits("".join(pieces))


def test_a_long_answer_streams_as_it_comes() -> None:
    """Each delta is sent as soon as it is certain, before the rest of the answer is known."""
    is_read = threading.Event()

    def next_token(prefix: Any) -> int:
        if len(prefix) > 100:
            assert is_read.wait(PATIENCE), "the client has not read what was decided long ago"
        return 70

    model = scripted_model(next_token=next_token)
    asked: Any = {"model": NAME, "messages": HI, "extra_body": {"regex": "[a-z]{200}"}, "max_tokens": 300}
    with served(model) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        pieces = []
        for chunk in client.chat.completions.create(**asked, stream=True):
            pieces.append(chunk.choices[0].delta.content or "")
            if pieces[-1]:
                is_read.set()
    assert re.fullmatch("[a-z]{200}", "".join(pieces))


def test_json_mode_begins_an_object(steered: openai.OpenAI) -> None:
    answer = steered.chat.completions.create(
        model=NAME, messages=HI, response_format={"type": "json_object"}, max_tokens=8
    )
    assert (answer.choices[0].message.content or "").startswith("{")


def test_plain_text_is_no_constraint(steered: openai.OpenAI) -> None:
    plain = steered.chat.completions.create(model=NAME, messages=HI, max_tokens=8, seed=1)
    same = steered.chat.completions.create(
        model=NAME, messages=HI, max_tokens=8, seed=1, response_format={"type": "text"}
    )
    assert plain.choices[0].message.content == same.choices[0].message.content


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"regex": "[a-c]{3}"}, "[a-c]{3}"),
        ({"guided_regex": "[a-c]{3}"}, "[a-c]{3}"),
        ({"choice": ["yes", "no"]}, "yes|no"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"grammar": 'start: "a" b\nb: "c" | "d"'}, "ac|ad"),
        ({"grammar": 'root ::= "a" b\nb ::= "c" | "d"'}, "ac|ad"),
        ({"ebnf": 'root ::= [x-z]{3} "!"?'}, "[x-z]{3}!?"),
        ({"guided_grammar": 'root ::= "a"'}, "a"),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, "a"),
        ({"guided_grammar": 'start: "a"'}, "a"),
        ({"guided_json": {"type": "boolean"}}, "true|false"),
        ({"guided_json": '{"type": "boolean"}'}, "true|false"),
        ({"structured_outputs": {"choice": ["yes", "no"], "json": None, "disable_fallback": True}}, "yes|no"),
        ({"structured_outputs": {"json": {"type": "boolean"}, "json_object": False}}, "true|false"),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, "a"),
        ({"json_schema": '{"type": "boolean"}'}, "true|false"),
        ({"structural_tag": {"type": "structural_tag", "format": {"type": "const_string", "value": "ab"}}}, "ab"),
        ({"response_format": {"type": "structural_tag", "format": {"type": "const_string", "value": "ab"}}}, "ab"),
        ({"constraint": {"sequence": ["x", {"regex": "[0-9]"}]}}, "x[0-9]"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "null"}}}}, "null"),
    ],
)
def test_every_field_on_completions(steered: openai.OpenAI, fields: dict[str, Any], pattern: str) -> None:
    answer = steered.completions.create(model=NAME, prompt=["Say", "Tell"], extra_body=fields)
    assert len(answer.choices) == 2
    assert all(re.fullmatch(pattern, choice.text) for choice in answer.choices)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"structured_outputs": {"structural_tag": "{}"}}, "structural_tag needs 'format', or the lists 'structures'"),
        (
            {"response_format": {"type": "structural_tag", "format": {}}},
            "structural_tag.format.type is None; this server",
        ),
        ({"response_format": TAGS | {"triggers": ["x"]}}, "begins with '<call=add>', which no trigger begins"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs has 'regex, choice'"),
        ({"structured_outputs": {}}, "structured_outputs has nothing"),
        ({"ebnf": 'root ::= "a"\n\nother ::= <[1]>'}, "the grammar in GBNF: line 3 has a syntax error at '<[1]>'"),
        ({"json_schema": {}, "regex": "a"}, "regex and json_schema were given"),
    ],
)
def test_forms_that_are_not_understood_are_refused(steered: openai.OpenAI, fields: dict[str, Any], told: str) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        steered.completions.create(model=NAME, prompt="Say", extra_body=fields)
    assert told in str(refusal.value)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"regex": "[a-"}, "regex"),
        ({"json_schema": {"type": "objekt"}}, "json_schema"),
        ({"response_format": FORMAT | {"json_schema": {"schema": {"type": "objekt"}}}}, "response_format"),
        ({"constraint": {"regex": "[a-"}}, "constraint"),
    ],
)
def test_an_unusable_constraint_is_refused_under_the_name_of_its_field(
    steered: openai.OpenAI, fields: dict[str, Any], field: str
) -> None:
    with pytest.raises(openai.BadRequestError, match="is not usable") as refusal:
        steered.chat.completions.create(model=NAME, messages=HI, extra_body=fields)
    assert refusal.value.param == field


def test_an_unusable_constraint_of_a_response_is_refused_under_the_name_of_its_field(steered: openai.OpenAI) -> None:
    form: Any = {"type": "json_schema", "name": "x", "schema": {"type": "objekt"}}
    with pytest.raises(openai.BadRequestError, match="is not usable") as refusal:
        steered.responses.create(model=NAME, input="Hi", text={"format": form})
    assert refusal.value.param == "text.format"


def test_a_response_of_plain_text_names_the_field_of_its_constraint(steered: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="is not usable") as refusal:
        steered.responses.create(model=NAME, input="Hi", text={"format": {"type": "text"}}, extra_body={"regex": "[a-"})
    assert refusal.value.param == "regex"


@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_compiled_is_refused(steered: openai.OpenAI, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        list(steered.completions.create(model=NAME, prompt="Say", stream=stream, extra_body={"regex": "(a"}))
    assert "unclosed group" in str(refusal.value)
    assert steered.completions.create(model=NAME, prompt="Say", extra_body={"regex": "a"}).choices[0].text == "a"
