"""Tests of the fields that routes know: those that real OpenAI and Anthropic clients send, and those that
`strict_fields` refuses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, get_args

import pytest
from starlette.testclient import TestClient

from bridle.compat.request_fields import BY_NAME
from bridle.compat.schema import System
from bridle.http import HttpSettings
from bridle.http.anthropic.schemas import MessagesBody, OutputFields, ThinkingFields
from bridle.http.app import ROUTERS
from bridle.http.fields import Fields
from bridle.http.openai.embeddings import EmbeddingsBody
from bridle.http.openai.responses.schemas import ResponsesBody, TextFields
from bridle.http.openai.schemas import ChatBody, CompletionBody, ReasoningFields, StreamOptions
from dev.coming_from import listed, names
from tests.http.harness import local_client, scripted_model

#: Routes whose body is no JSON object with fields: a module's bytes, a file that is read again, and none at all.
NO_FIELDS = {"/v1/controllers", "/v1/policies/reload", "/v1/websocket_tickets", "/v1/caches/{cache_id}/prefetch"}
#: No body, and a form.
NO_FIELDS |= {"/v1/batches/{batch_id}/cancel", "/v1/files"}
#: Ollama's routes that this server refuses with a reason.
NO_FIELDS |= {"/api/copy", "/api/create", "/api/push", "/api/blobs/{digest}"}
#: The least that a route needs to tell whose body it is, where more than one system has it.
LEAST = {
    "/generate": [{"text": "Say"}, {"inputs": "Say"}],
    "/": [{"inputs": "Say"}],
    "/invocations": [{"inputs": "Say"}],
}
ROUTES = sorted(
    {
        str(getattr(route, "path", ""))
        for router in ROUTERS
        for route in router.routes
        if {"POST", "PUT", "PATCH"} & set(getattr(route, "methods", None) or ())
    }
    - NO_FIELDS
)


@pytest.fixture(scope="module")
def strict() -> Iterator[TestClient]:
    with local_client(scripted_model(), HttpSettings(strict_fields=True)) as client:
        yield client


def test_every_route_refuses_what_it_does_not_know(strict: TestClient) -> None:
    assert len(ROUTES) > 25
    for path in ROUTES:
        for least in LEAST.get(path, [{}]):
            answer = strict.post(path.replace("{call_id}", "x"), json=least | {"from_the_future": 1})
            assert 400 <= answer.status_code < 500, path
            told = json.dumps(answer.json())
            assert "from_the_future" in told and "strict_fields" in told, (path, told)


def test_and_takes_it_where_nobody_is_strict() -> None:
    with local_client(scripted_model()) as loose:
        for path in ROUTES:
            for least in LEAST.get(path, [{}]):
                answer = loose.post(path.replace("{call_id}", "x"), json=least | {"from_the_future": 1})
                assert "from_the_future" not in json.dumps(answer.json()), path


def test_objects_within_bodies_are_as_strict() -> None:
    """The pydantic model of each object inside a body lists the object's fields."""
    for path, kind in bodies():
        for name, field in kind.model_fields.items():
            for inner in [field.annotation, *getattr(field.annotation, "__args__", ())]:
                if isinstance(inner, type) and hasattr(inner, "model_fields"):
                    assert issubclass(inner, Fields), (path, name, inner)


def bodies() -> Iterator[tuple[str, type[Fields]]]:
    """Yield the pydantic models of request bodies, by route."""
    for router in ROUTERS:
        for route in router.routes:
            for parameter in getattr(getattr(route, "dependant", None), "body_params", ()):
                kind = parameter.field_info.annotation
                assert issubclass(kind, Fields), kind
                yield str(getattr(route, "path", "")), kind


def of_openai() -> tuple[str, dict[type[Fields], tuple[Any, ...]]]:
    import openai
    from openai.types import CompletionCreateParams, EmbeddingCreateParams, chat, responses, shared_params

    return openai.__version__, {
        CompletionBody: (CompletionCreateParams,),
        ChatBody: (chat.CompletionCreateParams,),
        ResponsesBody: (responses.ResponseCreateParams,),
        EmbeddingsBody: (EmbeddingCreateParams,),
        StreamOptions: (chat.ChatCompletionStreamOptionsParam, responses.response_create_params.StreamOptions),
        TextFields: (responses.ResponseTextConfigParam,),
        ReasoningFields: (shared_params.Reasoning,),
    }


def of_anthropic() -> tuple[str, dict[type[Fields], tuple[Any, ...]]]:
    import anthropic
    from anthropic.types import MessageCreateParams, beta
    from anthropic.types.beta.message_create_params import MessageCreateParams as BetaParams

    return anthropic.__version__, {
        MessagesBody: (MessageCreateParams, BetaParams),
        OutputFields: (beta.BetaOutputConfigParam,),
        ThinkingFields: (beta.BetaThinkingConfigParam,),
    }


VENDORS = {"OpenAI": of_openai, "Anthropic": of_anthropic}


def fields_of(body: type[Fields], params: tuple[Any, ...]) -> set[str]:
    """Return the names of the client's parameters, each with the name of the object that has it."""
    kinds = [kind for each in params for kind in get_args(each) or (each,)]
    found = {name for kind in kinds for name in kind.__required_keys__ | kind.__optional_keys__}
    return {f"{body.within}.{name}" if body.within else name for name in found}


@pytest.mark.parametrize("system", VENDORS)
def test_the_list_has_the_fields_of_the_client(system: System) -> None:
    """A newer client may have more parameters. The list of fields must then be generated again."""
    version, bodies = VENDORS[system]()
    kept = listed(system)
    client = f"{system}'s client {version}, of which {kept['version'].split()[-1]} is listed"
    found = set().union(*(fields_of(body, params) for body, params in bodies.items()))
    assert not found - set(names(kept, "fields")), client
    if kept["version"].endswith(f" {version}"):
        assert found == set(names(kept, "fields")), client


@pytest.mark.parametrize("system", VENDORS)
def test_a_field_is_taken_or_told_of_where_the_client_sends_it(system: System) -> None:
    """A field that only some routes support is documented as such, and is refused on the other routes."""
    version, bodies = VENDORS[system]()
    for body, params in bodies.items():
        for name in fields_of(body, params) - {f"{body.within}.{own}".lstrip(".") for own in body.model_fields}:
            row = BY_NAME.get(name)
            assert row is not None and row.why and row.here != name, (version, body.__name__, name)
