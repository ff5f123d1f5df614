"""A server with `strict_fields` takes no unknown field on any route; the routes are asked of the application."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from starlette.testclient import TestClient

from bridle.http import HttpSettings
from bridle.http.app import ROUTERS
from bridle.http.fields import Fields
from tests.http.harness import local_client, scripted_model

#: Routes whose body is no JSON object with fields: a module's bytes, and a file that is read again.
NO_FIELDS = {"/v1/controllers", "/v1/policies/reload", "/v1/websocket_tickets"}
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
    """Each model of an object that a body holds knows its fields."""
    for path, kind in bodies():
        for name, field in kind.model_fields.items():
            for inner in [field.annotation, *getattr(field.annotation, "__args__", ())]:
                if isinstance(inner, type) and hasattr(inner, "model_fields"):
                    assert issubclass(inner, Fields), (path, name, inner)


def bodies() -> Iterator[tuple[str, type[Fields]]]:
    """The models of bodies, by route."""
    for router in ROUTERS:
        for route in router.routes:
            for parameter in getattr(getattr(route, "dependant", None), "body_params", ()):
                kind = parameter.field_info.annotation
                assert issubclass(kind, Fields), kind
                yield str(getattr(route, "path", "")), kind
