"""Shared servers: starting one takes a moment, and no test leaves anything behind in it."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from bridle.config import ModelConfig
from bridle.serving import load_model
from tests.http.harness import saying, scripted_model, served

REPLY = "Hello there, é and the end."


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """A server whose model always says `REPLY`."""
    with served(scripted_model(next_token=saying(REPLY))) as url:
        yield url


@pytest.fixture(scope="module")
def random_server() -> Iterator[str]:
    """A server whose model's distribution is a hash of what it has read, spread over several tokens."""
    with served(scripted_model(spread=16)) as url:
        yield url


@pytest.fixture(scope="session")
def demo_server() -> Iterator[str]:
    """A server with the demo model, for what takes a model that has learned something."""
    with served(load_model(ModelConfig("demo", kv_memory=32 << 20))) as url:
        yield url


@pytest.fixture
def client(server: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server + "/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def random_client(random_server: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=random_server + "/v1", api_key="none", max_retries=0) as client:
        yield client
