"""The formats of tool calls and reasoning are known when a model is loaded: they are logged, shown and traced. Unknown
formats are reported before the first request."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from starlette.testclient import TestClient

from bridle import LLM
from bridle.chat.tool_parsers import formats
from bridle.config import ModelConfig
from bridle.http import ServeSettings, create_app
from bridle.http.server.run import load_registry
from bridle.load_progress import Report
from bridle.serving import LoadedModel
from bridle.serving.models.model_memory import Needs
from bridle.tokenizer import Tokenizer
from bridle.tokenizer.chat_settings import ChatSettings
from tests.http.harness import saying, scripted_model, tokenizer_folder
from tests.tokenizer.templates import a_tokenizer

ODD = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c }}{% endfor %}{% endfor %}"
USER = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]


class Loader:
    """A loader of one model."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model

    def measure(self, config: ModelConfig, name: str) -> Needs:
        return Needs(0, 0)

    def make_room(self, config: ModelConfig) -> ModelConfig:
        return config

    def load(self, config: ModelConfig, name: str, progress: Report) -> LoadedModel:
        return self._model


@contextmanager
def started(text: Tokenizer) -> Iterator[TestClient]:
    """Yield a client of a server that loads its model with this tokenizer."""
    model = scripted_model(text=text, name="demo", next_token=saying("Yes.", text), max_model_len=2048)
    registry = load_registry(ServeSettings(make_loader=lambda *_: Loader(model), log_level="error"))
    with TestClient(create_app(registry), raise_server_exceptions=False) as client:
        yield client
    registry.close()


def fresh(**settings: Any) -> Tokenizer:
    text = Tokenizer.load(tokenizer_folder())
    text.chat_settings = ChatSettings(**settings)
    return text


def test_the_format_is_known_before_the_first_request(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with caplog.at_level("DEBUG"), started(fresh()) as client:
        assert "chat format of demo: tool calls in the format hermes" in caplog.text
        monkeypatch.setattr(formats, "infer_format", None)  # nothing is inferred any more
        shown = client.get("/v1/models/demo").json()["chat_format"]
        assert shown["tool_format"]["name"] == "hermes" and shown["tool_format"]["section_open"] == ""
        body = {"messages": USER, "tools": TOOLS, "max_tokens": 9, "trace": True}
        answer = client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        trace = client.get(f"/v1/traces/{answer.json()['id'].removeprefix('chatcmpl-')}")
        assert trace.status_code == 200 and '"chat_format":{"tool_format":{"name":"hermes"' in trace.text.split("\n")[0]


def test_an_unknown_format_is_said_at_load_and_refused_in_requests(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"), started(a_tokenizer(ODD)) as client:
        (warned,) = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
        assert "requests with tools are refused; --tool-format sets another format" in warned
        assert client.get("/v1/models/demo").json()["chat_format"]["tool_format"] == {"name": "unknown"}
        refused = client.post("/v1/chat/completions", json={"messages": USER, "tools": TOOLS})
        error = refused.json()["error"]
        assert refused.status_code == 400 and error["param"] == "tools"
        for part in ("tools: got functions", "unknown format", "Start the server with --tool-format"):
            assert part in error["message"]
        assert client.post("/v1/chat/completions", json={"messages": USER, "max_tokens": 9}).status_code == 200


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"tool_format": "harmony"}, "has no channels"),
        ({"reasoning_format": "qwen3"}, "has no tokens <think>"),
    ],
)
def test_what_the_operator_names_in_vain_is_said_at_load(
    settings: dict[str, str], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with started(fresh(**settings)):
        (warned,) = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
        assert warned.startswith("the chat format of demo cannot be used") and reason in warned


def test_llm_knows_the_format_once_it_is_there(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with caplog.at_level("DEBUG"), LLM("demo", max_model_len=2048) as llm:
        assert "chat format of demo: tool calls in the format hermes" in caplog.text
        assert llm.model.chat_format is not None
        monkeypatch.setattr(formats, "infer_format", None)  # nothing is inferred any more
        caplog.clear()
        assert llm.chat(USER, tools=TOOLS, max_tokens=9)
        assert "chat format" not in caplog.text


def test_llm_warns_of_a_format_that_was_named_in_vain(caplog: pytest.LogCaptureFixture) -> None:
    with LLM("demo", tool_format="harmony", max_model_len=2048):
        (warned,) = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
        assert warned.startswith("the chat format of demo cannot be used") and "has no channels" in warned
