"""What the OpenAPI description allows, and much that it does not: never a bug, never a hang, nothing kept.

`BRIDLE_API_CASES` is the number of cases over all operations.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import schemathesis
from hypothesis import given, settings
from schemathesis import GenerationMode

from bridle.http import HttpSettings, create_app
from bridle.service import LoadedModel, ModelRegistry
from tests.conftest import IS_FULL
from tests.http.harness import scripted_model

_NUM_CASES = int(os.environ.get("BRIDLE_API_CASES", "20000" if IS_FULL else "5000"))
_LACKS = (501, 503)  # what this server has not, or has not now


@cache
def _model() -> LoadedModel:
    return scripted_model(spread=4)


@cache
def _operations() -> dict[str, Any]:
    app = create_app(ModelRegistry([_model()]), HttpSettings(max_choices=8, request_timeout=5.0))
    schema = schemathesis.openapi.from_asgi("/openapi.json", app)
    return {each.ok().label: each.ok() for each in schema.get_all_operations()}


@pytest.fixture(scope="module", autouse=True)
def _nothing_is_kept() -> Iterator[None]:
    yield
    statistics = _model().client.statistics()
    assert statistics.num_running == statistics.num_waiting == 0
    assert statistics.num_free_blocks == statistics.num_blocks
    _model().close()


def _cases() -> Iterator[Any]:
    for label, operation in sorted(_operations().items()):
        yield pytest.param(label, GenerationMode.POSITIVE, id=f"{label} as described")
        if operation.body or operation.query:  # there is something to be wrong about
            yield pytest.param(label, GenerationMode.NEGATIVE, id=f"{label} otherwise")


@pytest.mark.parametrize(("label", "mode"), list(_cases()))
def test_no_case_is_a_bug(label: str, mode: GenerationMode) -> None:
    operation = _operations()[label]

    @settings(max_examples=max(_NUM_CASES // (2 * len(_operations())), 5))
    @given(case=operation.as_strategy(mode))
    def check(case: Any) -> None:
        answer = case.call()
        assert answer.status_code < 500 or answer.status_code in _LACKS, answer.text
        if answer.status_code >= 400 and "json" in answer.headers.get("content-type", [""])[0]:
            assert answer.json()

    check()
