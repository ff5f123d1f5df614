"""Fixtures for modules that send requests to their own model (their fixture `llm`), over HTTP and in Python."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from starlette.testclient import TestClient

    from bridle import LLM
    from bridle.engine.request import Request


@pytest.fixture(scope="module")
def http(llm: LLM) -> Iterator[TestClient]:
    """Yield a test client of the model's HTTP APIs."""
    from starlette.testclient import TestClient

    from bridle.http import create_app
    from bridle.serving import ModelRegistry

    with TestClient(create_app(ModelRegistry([llm.model])), base_url="http://127.0.0.1") as client:
        yield client


@pytest.fixture
def submitted(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """Return the list of requests that reach the engine."""
    found: list[Request] = []
    submit = llm.model.client.submit

    def note(request: Request) -> Any:
        found.append(request)
        return submit(request)

    monkeypatch.setattr(llm.model.client, "submit", note)
    return found
