"""Requests that the OpenAPI description allows, and many invalid requests, cause no internal error, no hang and no
leak.

`BRIDLE_API_CASES` is the number of requests over all operations. Each generated body is sent several times, because
generating a body takes longer than answering it. Every operation with the same schema gets the body, and gets it again
with `stream` inverted. Every operation also gets two mixtures of this body and the previous body.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import Phase, given, settings
from schemathesis import GenerationMode
from starlette.testclient import TestClient

from bridle.http import HttpSettings, create_app
from bridle.http.app import ROUTERS
from bridle.serving import LoadedModel, ModelRegistry
from tests.conftest import IS_FULL
from tests.http.harness import scripted_model
from tests.waiting import until

_NUM_CASES = int(os.environ.get("BRIDLE_API_CASES", "20000" if IS_FULL else "450"))
_JSON = {"content-type": "application/json"}
_LACKS = (501, 503)  # what this server has not, or has not now


@dataclass(frozen=True)
class Group:
    """Operations whose bodies have the same schema. Cases are generated for the first operation."""

    operation: Any
    paths: tuple[str, ...] = ()
    has_stream: bool = False

    @property
    def takes_input(self) -> bool:
        return bool(self.operation.body or self.operation.query or self.operation.path_parameters)

    @property
    def num_requests(self) -> int:
        """Return the number of requests that are sent for each generated case."""
        return 3 * len(self.paths) + self.has_stream if self.paths else 1


@cache
def _model() -> LoadedModel:
    return scripted_model(spread=4)


@cache
def _app() -> Any:
    return create_app(ModelRegistry([_model()]), HttpSettings(max_choices=8, request_timeout=1.5 if IS_FULL else 0.75))


def test_applications_share_their_routes_and_no_models() -> None:
    first, second = (create_app(ModelRegistry(models)) for models in ([_model()], []))
    shared = [route for route in first.routes if any(route is other for other in second.routes)]
    assert len(shared) >= len(ROUTERS)
    for app, names in ((first, ["scripted"]), (second, [])):
        with TestClient(app, base_url="http://127.0.0.1") as client:
            assert [each["id"] for each in client.get("/v1/models").json()["data"]] == names


@cache
def _groups() -> dict[str, Group]:
    """Return the groups of operations, by the label of the operation for which cases are generated."""
    schema: Any = schemathesis.openapi.from_asgi("/openapi.json", _app())
    operations = [each.ok() for each in schema.get_all_operations()]
    raw = schema.raw_schema
    alike = defaultdict(list)
    for each in operations:
        body = (
            raw["paths"][each.path][each.method].get("requestBody", {}).get("content", {}).get("application/json", {})
        )
        alike[body.get("schema", {}).get("$ref", each.label)].append(each)
    groups = {}
    for reference, members in alike.items():
        schemas = raw["components"]["schemas"].get(reference.rsplit("/", 1)[-1])
        paths = tuple(each.path for each in members) if schemas else ()
        groups[members[0].label] = Group(members[0], paths, "stream" in (schemas or {}).get("properties", ()))
    return groups


@pytest.fixture(scope="module", autouse=True)
def _nothing_is_kept() -> Iterator[None]:
    yield

    def is_free() -> bool:
        now = _model().client.statistics()
        return now.num_running == now.num_waiting == 0 and now.num_free_blocks == now.num_blocks

    until(is_free, "the end of all requests")
    _model().close()


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


def _cases() -> Iterator[Any]:
    for label, group in sorted(_groups().items()):
        yield pytest.param(label, GenerationMode.POSITIVE, id=f"{label} as described")
        has_form = any(body.media_type == "application/json" for body in group.operation.body)
        if has_form or group.operation.query:  # there is something to be wrong about
            yield pytest.param(label, GenerationMode.NEGATIVE, id=f"{label} otherwise")


@cache
def _num_examples() -> int:
    """Return the number of examples for each group and mode that leads to the wanted number of requests."""
    groups = [_groups()[each.values[0]] for each in _cases()]
    num_requests = sum(group.num_requests for group in groups if group.takes_input)
    return max(round(1.15 * _NUM_CASES / num_requests), 3)  # some bodies are no objects, and have nothing to cross


@pytest.mark.few(90)  # each operation in one way at least
@pytest.mark.parametrize(("label", "mode"), list(_cases()))
def test_no_case_is_a_bug(label: str, mode: GenerationMode, runner: asyncio.Runner) -> None:
    group = _groups()[label]
    client = httpx.AsyncClient(transport=httpx.ASGITransport(_app()), base_url="http://127.0.0.1")
    before: dict[str, Any] = {}

    @settings(max_examples=_num_examples(), phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink))
    @given(case=group.operation.as_strategy(mode))
    def check(case: Any) -> None:
        answer = case.call()
        _check(answer.status_code, answer.text, answer.headers.get("content-type", [""])[0])
        if isinstance(case.body, dict):
            for path, body in _further(group, case.body, before):
                found = runner.run(client.post(path, content=json.dumps(body), headers=_JSON))
                _check(found.status_code, found.text, found.headers.get("content-type", ""))

    check()
    runner.run(client.aclose())


def _further(group: Group, body: dict[str, Any], before: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Further requests made from one body and the previous body `before`. Afterwards `before` has the contents of this
    body."""
    for path in group.paths[1:]:
        yield path, body
    if group.has_stream:
        yield group.paths[0], body | {"stream": body.get("stream") is not True}
    for parents in ((body, before), (before, body)):
        crossed = {name: parents[number % 2].get(name) for number, name in enumerate(sorted({*body, *before}))}
        for path in group.paths:
            yield path, {name: value for name, value in crossed.items() if value is not None}
    before.clear()
    before.update(body)


def _check(status: int, text: str, kind: str) -> None:
    is_late = status == 504 and "deadline" in text  # a body may leave less time than it takes to read it
    assert status < 500 or status in _LACKS or is_late, text
    if status >= 400 and "json" in kind:
        assert text.strip().startswith("{")
