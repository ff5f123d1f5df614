"""Tests that text that bypasses the application has the same bytes on the connection as text that passes through it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from bridle.http.event_template import TextTemplate
from bridle.http.server import uvicorn_protocol
from bridle.http.sse import sse_event
from bridle.outputs import TokenEvent
from tests.http.harness import scripted_model, served
from tests.http.plain_streams import BODIES, one_token_model, read_slowly, read_stream, script


@contextmanager
def _counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bytes]]:
    """Yield a list that records the data written to connections without the application."""
    written: list[bytes] = []
    write = uvicorn_protocol.DirectBody.write

    def note(self: Any, data: bytes) -> bool:
        written.append(data)
        return write(self, data)

    with monkeypatch.context() as patch:
        patch.setattr(uvicorn_protocol.DirectBody, "write", note)
        yield written


@pytest.mark.few(5)
@pytest.mark.parametrize("name", BODIES)
def test_bytes_are_the_same_on_both_ways(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path, body = BODIES[name]
    with served(scripted_model(next_token=script)) as url:
        with _counted(monkeypatch) as written:
            short = read_stream(url, path, body)
        monkeypatch.setattr(uvicorn_protocol, "DIRECT_BODY", "bridle.nowhere")
        long = read_stream(url, path, body)
    assert short == long
    assert len(written) > 5


@pytest.mark.parametrize("options", [{"n": 2}, {"logprobs": 1}, {"prompt": ["Hi", "He"], "echo": True, "logprobs": 0}])
def test_what_is_more_than_text_goes_through_the_application(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(scripted_model(next_token=script)) as url, _counted(monkeypatch) as written:
        _, text = read_stream(url, "/v1/completions", {"prompt": "Hi", "max_tokens": 4} | options)
    assert text and not written


def test_a_slow_client_gets_everything() -> None:
    """The connection's buffer is often full, so the text switches between the direct path and the application."""
    model, text = one_token_model()
    with served(model) as url:
        assert read_slowly(url) == text


def _event(text: str) -> bytes:
    return sse_event({"id": "x", "choices": [{"text": text, "finish_reason": None}]})


@pytest.mark.parametrize("texts", [["plain"], ['"\\\x00\u20ac\U0001f600', "\n"], ["", "late"], [""]])
def test_a_template_encodes_as_the_whole(texts: list[str]) -> None:
    told: list[str] = []
    note: Callable[[str], None] = told.append
    made = TextTemplate(_event, note)([TokenEvent("r", 0, 1, text) for text in texts])
    text = "".join(texts)
    assert made == (_event(text) if text else b"")
    assert told == ([text] if text else [])
