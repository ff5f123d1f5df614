"""A server whose engine may retain the KV of prompts, and a text of some blocks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from starlette.testclient import TestClient

from bridle.config import EngineConfig
from bridle.serving.models.loading import LoadedModel
from tests.http.harness import local_client, saying, scripted_model
from tests.http.parked_chats import TOLD
from tests.http.tool_calls import HERMES, a_tokenizer

LONG = "You know all about the weather. " * 9


@contextmanager
def an_app(**config: Any) -> Iterator[tuple[TestClient, LoadedModel]]:
    text = a_tokenizer(TOLD + HERMES)
    config = {"park_memory": 1 << 20, **config}
    model = scripted_model(
        text=text, next_token=saying("Fine.", text), max_model_len=2048, config=EngineConfig(**config)
    )
    with local_client(model) as client:
        yield client, model
