"""Tests of output formats in the fields of other servers: each is enforced or refused by name, and none is ignored. The
tests also cover those servers' routes, and read streams like those servers' clients."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.http.harness import local_client, saying, scripted_model


@pytest.fixture(scope="module")
def server() -> Iterator[TestClient]:
    with local_client(scripted_model()) as client:
        yield client


def test_the_tokens_of_each_chunk_give_its_text() -> None:
    """A chunk may have several tokens, including the end token. Guidance's client joins the texts of all tokens."""
    reply = "Hello there, said the fox."
    fields = {"logprobs": True, "stream": True, "speculate": 16, "prediction": {"type": "content", "content": reply}}
    with local_client(scripted_model(next_token=saying(reply))) as client:
        told = client.post(
            "/v1/chat/completions", json={"messages": [{"role": "user", "content": "Hi"}], **fields}
        ).text
    chunks = [json.loads(line[6:]) for line in told.splitlines() if line.startswith("data: {")]
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["logprobs"] is not None]
    texts = ["".join(entry["token"] for entry in choice["logprobs"]["content"]) for choice in choices]
    assert "".join(texts) == reply + "</s>"
    assert len(choices) < len(reply) // 2, "nothing was drafted"
    assert texts == [choice["delta"]["content"] or "</s>" for choice in choices]


SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
#: Forms as other servers write them, and what fits them.
FORMS = [
    ({"type": "json_object", "schema": SCHEMA}, r'\{"a": [12]\}'),
    ({"type": "json_schema", "schema": SCHEMA}, r'\{"a": [12]\}'),
    ({"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}, r'\{"a": [12]\}'),
    ({"type": "regex", "pattern": "[xy]{3}"}, "[xy]{3}"),
    ({"type": "grammar", "grammar": 'root ::= "x" | "y"'}, "[xy]"),
]


@pytest.mark.parametrize(("form", "fits"), FORMS, ids=str)
def test_forms_as_other_servers_write_them(server: TestClient, form: dict[str, Any], fits: str) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 40, "seed": 1, "response_format": form}
    answer = server.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert re.fullmatch(fits, answer.json()["choices"][0]["message"]["content"])


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"response_format": {"type": "text", "regex": "a"}}, "of type text has 'regex'; it takes nothing else"),
        ({"response_format": {"type": "json_object", "json_schema": SCHEMA}}, "has 'json_schema'; it takes schema"),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA, "json_schema": {}}}, "'schema, json_schema'"),
        ({"response_format": {"type": "json_object", "schema": "{}"}}, "response_format.schema must be an object"),
        ({"nvext": {"guided_regex": "a"}}, "this route has no field 'nvext', which looks like a constraint"),
        ({"regex_pattern": "a"}, "this route has no field 'regex_pattern', which looks like a constraint"),
        ({"output_schema": SCHEMA}, "this route has no field 'output_schema', which looks like a constraint"),
    ],
)
def test_what_speaks_of_the_form_of_a_text_is_never_passed_over(
    server: TestClient, fields: dict[str, Any], told: str
) -> None:
    answer = server.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "Hi"}], **fields})
    assert answer.status_code == 400 and told in answer.json()["error"]["message"], answer.text
    harmless = {"regex_pattern": None, "nvext": {"ignore_eos": True}, "lark_user": 0, "max_tokens": 1}
    assert server.post("/v1/completions", json={"prompt": "a"} | harmless).status_code == 200


def test_guided_decoding_in_one_object(server: TestClient) -> None:
    body = {"prompt": "a", "max_tokens": 5, "seed": 1, "guided_decoding": {"choice": ["xx", "yy"], "json": None}}
    assert server.post("/v1/completions", json=body).json()["choices"][0]["text"] in ("xx", "yy")


def test_a_route_that_another_server_has_says_what_to_ask(server: TestClient) -> None:
    told = server.post("/completion", json={}).json()["error"]["message"]
    assert told == "there is no POST /completion here; use /v1/completions, which accepts the fields of /completion"
    assert server.get("/nowhere").json()["error"]["message"] == "there is no GET /nowhere here; see /docs"
