"""Tests of request fields that a route does not have: each has another name in bridle, is refused by name, or does not
affect the text."""

from __future__ import annotations

import dataclasses
import operator
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import bridle
from bridle import LLM
from bridle.cli.app import app
from bridle.cli.run_batch import BatchOptions
from bridle.compat.request_fields import BY_NAME, FIELDS
from bridle.compat.routes import ROUTES as ROUTES_THERE
from bridle.compat.schema import CompatField
from bridle.compat.suggestions import nearest
from bridle.http import HttpSettings, create_app
from bridle.http.fields import MAX_UNKNOWN, Fields
from bridle.http.openai.batch import BatchRequest, answer_batch
from bridle.http.openai.embeddings import EmbeddingsBody
from bridle.launch.ray.settings import RaySettings
from bridle.llm.options import RunOptions
from bridle.sampling import SamplingParams, meanings
from bridle.serving import ModelRegistry
from bridle.structured_output.request_fields import NAMES, SHORT
from dev.coming_from import paths
from dev.compat import WORDS
from tests.conftest import IS_FULL, examples
from tests.http.harness import scripted_model, served
from tests.http.routes import MESSAGES, ROUTES, post

BODIES = [kind for _, kind in ROUTES.values()]
ABSENT = [row for row in BY_NAME.values() if not row.here and not row.is_neutral]
NEUTRAL = [row for row in BY_NAME.values() if row.is_neutral]
NAMED = [row for row in BY_NAME.values() if row.here not in ("", row.name)]


@pytest.fixture(scope="module")
def server() -> Iterator[httpx.Client]:
    with served(scripted_model()) as url, httpx.Client(base_url=url, timeout=600) as client:
        yield client


@pytest.fixture(scope="module")
def strict_server() -> Iterator[httpx.Client]:
    with (
        served(scripted_model(), HttpSettings(strict_fields=True)) as url,
        httpx.Client(base_url=url, timeout=600) as client,
    ):
        yield client


def told(answer: httpx.Response) -> str:
    """Return the message of an error, which must have the shape of the route's API."""
    body = answer.json()
    route = answer.request.url.path
    assert answer.status_code == (422 if route == "/generate" else 400), body
    if route == "/generate":
        assert set(body) == {"error", "error_type"}
        return str(body["error"])
    assert route != "/v1/messages" or (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    return str(body["error"]["message"])


@pytest.mark.parametrize(("number", "route"), list(enumerate(ROUTES)))
def test_what_would_change_the_text_is_refused_by_name(server: httpx.Client, number: int, route: str) -> None:
    """Each request body's schema refuses all of these fields. Over HTTP, each route is tested with some of the
    fields."""
    base, kind = ROUTES[route]
    absent = [row for row in ABSENT if row.name not in kind.model_fields]
    for row in absent:
        with pytest.raises(ValueError, match=re.escape(row.why)):
            kind.model_validate({**base, row.name: row.example})
    for row in absent[number :: 1 if IS_FULL else len(ROUTES)]:
        assert told(post(server, route, {row.name: row.example})).endswith(f"is not supported here: {row.why}")
        for off in (None, *row.off):
            assert post(server, route, {row.name: off}).status_code == 200, row


@pytest.mark.parametrize("route", ROUTES)
def test_what_cannot_change_the_text_passes_unless_all_is_to_be_known(server: httpx.Client, route: str) -> None:
    kind = ROUTES[route][1]
    free = {row.name: row.example for row in NEUTRAL if row.name not in kind.model_fields}
    items = [*free.items(), ("from_the_future", [1, {}])]
    for start in range(0, len(items), MAX_UNKNOWN):
        part = dict(items[start : start + MAX_UNKNOWN])
        assert post(server, route, part).status_code == 200, part
    for name, value in [*list(free.items())[::7], ("from_the_future", 1)]:
        strictly = post(server, route, {name: value}, **{"x-strict-fields": "true"})
        assert f"this route has no field {name!r}" in told(strictly) and "strict_fields" in told(strictly)


def test_a_strict_server_can_be_told_otherwise(strict_server: httpx.Client) -> None:
    body = {"prompt": "Say", "max_tokens": 1}
    assert strict_server.post("/v1/completions", json=body).status_code == 200
    refusal = strict_server.post("/v1/completions", json=body | {"user": "me"})
    assert refusal.json()["error"] | {"message": ""} == {
        "message": "", "type": "invalid_request_error", "param": "user", "code": "unknown_field",
    }  # fmt: skip
    assert "API keys identify users" in refusal.json()["error"]["message"]
    loose = strict_server.post("/v1/completions", json=body | {"user": "me"}, headers={"x-strict-fields": "false"})
    assert loose.status_code == 200
    inner = strict_server.post("/v1/completions", json=body | {"stream_options": {"include_obfuscation": True}})
    assert inner.json()["error"]["param"] == "stream_options.include_obfuscation"
    assert strict_server.post("/v1/embeddings", json={"input": "a", "temperature": 1}).status_code == 400


@pytest.mark.parametrize("kind", BODIES, ids=lambda kind: str(kind.__name__))
def test_another_name_means_the_field(kind: type[Fields]) -> None:
    """Another system's name gives the same body as bridle's name, or is refused on routes without the field."""
    for row in NAMED:
        if row.name not in kind.model_fields:  # there it is what it says
            check_other_name(kind, row)


def check_other_name(kind: type[Fields], row: CompatField) -> None:
    needed = {"prompt": "x", "messages": MESSAGES, "input": "x", "controller": "none", "controller_arg": ""}
    least = {name: value for name, value in needed.items() if name in kind.model_fields}
    meaning = meanings().get(row.here)
    here = meaning.names.get(kind.api, row.here) if meaning is not None else row.here
    if here is not None and here in kind.model_fields:
        named = kind.model_validate(least | {here: row.value_here(row.example)})
        assert kind.model_validate(least | {row.name: row.example}) == named
        if here != row.name:
            with pytest.raises(ValueError, match="are names of the same field"):
                kind.model_validate(least | {row.name: row.example, here: row.example})
    elif row.here in SHORT and "constraint" in kind.model_fields:
        named = kind.model_validate(least | {row.name: row.example})
        assert getattr(named, "constraint") == {SHORT[row.here]: row.example}  # noqa: B009 -- of some bodies
    else:
        with pytest.raises(ValueError, match=f"{row.name} is .*, but this route does not accept it"):
            kind.model_validate(least | {row.name: row.example})


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions", "/generate"])
@pytest.mark.parametrize("name", ["n_predict", "max_new_tokens"])
def test_a_length_by_another_name_is_kept(server: httpx.Client, route: str, name: str) -> None:
    bare = {"inputs": "Say", "parameters": {name: 3, "details": True}} if route == "/generate" else (
        {key: value for key, value in ROUTES[route][0].items() if key != "max_tokens"} | {name: 3, "ignore_eos": True}
    )  # fmt: skip
    answer = server.post(route, json=bare).json()
    count = answer["details"]["generated_tokens"] if route == "/generate" else answer["usage"]["completion_tokens"]
    assert count == 3


def test_what_the_hubs_clients_send_to_completions(server: httpx.Client) -> None:
    """Clients of the Hugging Face hub send the fields of /generate to completions."""
    free = {"return_full_text": False, "do_sample": True, "details": True, "top_n_tokens": 2, "truncate": 2}
    assert post(server, "/v1/completions", free).status_code == 200
    whole = post(server, "/v1/completions", {"return_full_text": True}).json()["choices"][0]["text"]
    assert whole.startswith("Say")
    assert "this route does not accept it" in told(post(server, "/v1/completions", {"do_sample": False}))
    assert post(server, "/v1/chat/completions", {"return_full_text": False}).status_code == 200


def test_a_constraint_by_its_short_name_on_the_native_route(server: httpx.Client) -> None:
    for fields in ({"regex": "[x-z]{3}"}, {"guided_regex": "[x-z]{3}"}, {"grammar": None, "ebnf": "root ::= [x-z]{3}"}):
        text = post(server, "/generate", fields | {"max_new_tokens": 9}).json()["generated_text"]
        assert len(text) == 3 and set(text) <= set("xyz")


SLIPS = {
    "json_scheme": "json_schema", "guided_jsn": "guided_json", "gramar": "grammar", "regexp": "regex",
    "response_formt": "response_format", "temprature": "temperature", "choices": "choice", "constrain": "constraint",
    "max_token": "max_tokens", "Stop": "stop",
}  # fmt: skip


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_a_slip_is_refused_with_the_name_that_was_meant(server: httpx.Client, route: str) -> None:
    for slip, meant in SLIPS.items():
        assert told(post(server, route, {slip: 1})) == f"this route has no field {slip!r}; did you mean {meant!r}?"


def test_a_slip_within_an_object_is_named_by_its_path(server: httpx.Client) -> None:
    refusal = post(server, "/v1/chat/completions", {"reasoning": {"max_token": 3}})
    assert "did you mean 'max_tokens'" in told(refusal)
    assert refusal.json()["error"]["param"] == "reasoning.max_token"
    native = post(server, "/generate", {"temprature": 1})
    assert "did you mean 'temperature'" in told(native)


@pytest.mark.parametrize("name", ["seed", "n"])
def test_a_route_that_lacks_a_field_says_so(server: httpx.Client, name: str) -> None:
    assert f"{name} is " in told(post(server, "/v1/run", {name: "a"})) and EmbeddingsBody(input="x", **{name: 1})


def test_plain_generation_of_a_run_takes_a_constraint(server: httpx.Client) -> None:
    for fields in ({"regex": "[x-z]{3}"}, {"constraint": {"choice": ["zzz"]}}):
        answer = post(server, "/v1/run", fields | {"max_tokens": 9})
        text = "".join(re.findall(r'"text":"([a-z]*)"', answer.text))
        assert answer.status_code == 200 and len(text) == 3 and set(text) <= set("xyz")


def test_many_unknown_fields_are_not_all_looked_up(server: httpx.Client) -> None:
    many = {f"unknown_{number}": 1 for number in range(MAX_UNKNOWN + 1)}
    assert f"has {MAX_UNKNOWN + 1} unknown fields" in told(post(server, "/v1/completions", many))


async def test_lines_of_a_batch_are_as_strict() -> None:
    body, model = {"prompt": "Say", "max_tokens": 1}, scripted_model()
    others: list[dict[str, Any]] = [{"json_scheme": {}}, {"user": "me"}, {"n_predict": None}]
    lines = [BatchRequest(str(number), "/v1/completions", body | other) for number, other in enumerate(others)]
    for is_strict, codes in (False, [400, 200, 200]), (True, [400, 400, 200]):
        app = create_app(ModelRegistry([model]), BatchOptions(strict_fields=is_strict).settings())
        found = {each["custom_id"]: each["response"]["status_code"] async for each in answer_batch(app, lines, 3)}
        assert [found[line.custom_id] for line in lines] == codes
    model.close()


# -- the table ------------------------------------------------------------------------------------------------


def test_every_row_says_what_it_is() -> None:
    for row in FIELDS:
        assert row.here or row.why, row
        assert row.here or row.example is not None, row
        assert not row.is_off(row.example) or row.here, row
        assert len({(other.name, system) for other in (row,) for system in other.systems}) == len(row.systems)


@given(st.sampled_from(sorted(BY_NAME)), st.integers(0, 40), st.sampled_from("abcxyz_"))
@settings(max_examples=examples(60), deadline=None)
def test_a_slip_of_one_letter_is_found(name: str, place: int, letter: str) -> None:
    """A typo of one letter is always recognized in names of six letters or more, and not always in shorter names."""
    slip = name[:place] + letter + name[place:]
    if len(name) >= 6:
        assert nearest(slip, [name]) == name


def test_the_parameters_of_sampling_are_not_called_absent() -> None:
    own = set(SamplingParams.__slots__)
    assert not [row.name for row in ABSENT if row.name in own]


def test_words_of_libraries_lead_to_what_is_here() -> None:
    known = {each.name for each in dataclasses.fields(SamplingParams)} | {*NAMES, *RunOptions.__annotations__}
    flags = {name for argument in app["serve"].assemble_argument_collection() for name in argument.names}
    for word in WORDS:
        assert set(word.keywords) <= known and all(hasattr(LLM, name) for name in word.members), word
        assert set(word.settings) <= RaySettings.model_fields.keys(), word
        for name in word.exports:
            assert operator.attrgetter(name)(bridle) is not None, word
        assert set(word.flags) <= flags, word
        assert any((word.keywords, word.members, word.settings, word.exports, word.flags, word.why)), word


def test_routes_answer_as_the_page_says(server: httpx.Client) -> None:
    known = paths()
    paths_there = {route.path: route for route in ROUTES_THERE if not {"{", ":"} & set(route.path)}
    for path in paths_there:
        if path.startswith("/v1/responses/"):  # what follows is an id here
            continue
        is_here = server.get(path).status_code != 404 or server.post(path, json={}).status_code != 404
        assert is_here == (path in known), path


@pytest.mark.parametrize("truncate", [1, 3])
def test_a_prompt_is_cut_to_its_last_tokens(server: httpx.Client, truncate: int) -> None:
    body = {"prompt": [5, 6, 7, 8, 9], "max_tokens": 2, "temperature": 0, "echo": True}
    cut = server.post("/v1/completions", json=body | {"truncate_prompt_tokens": truncate}).json()
    whole = server.post("/v1/completions", json=body | {"prompt": [5, 6, 7, 8, 9][-truncate:]}).json()
    assert cut["usage"]["prompt_tokens"] == truncate
    assert cut["choices"][0]["text"] == whole["choices"][0]["text"]
    refusal = server.post("/v1/completions", json=body | {"truncate_prompt_tokens": 0})
    assert "truncate_prompt_tokens is 0; must be between 1 and" in told(refusal)


def test_a_final_message_is_continued(server: httpx.Client) -> None:
    said = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well, "}]
    body = {"messages": said, "max_tokens": 1, "continue_final_message": True, "add_generation_prompt": False}
    count = post(server, "/v1/chat/completions", body).json()["usage"]["prompt_tokens"]
    answered = post(server, "/v1/chat/completions", {"messages": said[:1]}).json()["usage"]["prompt_tokens"]
    asked = post(server, "/v1/chat/completions", {"messages": said}).json()["usage"]["prompt_tokens"]
    assert answered < count < asked  # no message ends, and none begins
    for wrong, message in (
        ({"add_generation_prompt": True}, "continue_final_message and add_generation_prompt are both true"),
        ({"messages": said[:1]}, "the last message must be an assistant text"),
        ({"continue_final_message": False}, "add_generation_prompt is false; this needs continue_final_message"),
    ):
        assert message in told(post(server, "/v1/chat/completions", body | wrong))
