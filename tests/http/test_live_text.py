"""Text that goes to the connection past the application has the same bytes as text that goes through it."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import httpx
import pytest

from bridle.http.event_template import TextTemplate
from bridle.http.server import uvicorn_protocol
from bridle.http.sse import sse_event
from bridle.outputs import TokenEvent
from tests.http.harness import NAME, saying, scripted_model, served, tokenizer
from tests.waiting import PATIENCE

REPLY = 'He said "one", then two\nlines & thr\u00e9e.'
_USER = [{"role": "user", "content": "Hi"}]
_TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": ("/v1/completions", {"prompt": "Hi", "max_tokens": 60}),
    "usage": ("/v1/completions", {"prompt": "Hi", "stream_options": {"include_usage": True}, "max_tokens": 60}),
    "regex": ("/v1/completions", {"prompt": "Hi", "max_tokens": 60, "regex": "[^#]*"}),
    "stop": ("/v1/completions", {"prompt": "Hi", "max_tokens": 60, "stop": ["two\nlines"]}),
    "chat": ("/v1/chat/completions", {"messages": _USER}),
    "tools": ("/v1/chat/completions", {"messages": _USER, "tools": [_TOOL]}),
    "responses": ("/v1/responses", {"input": "Hi", "store": False}),
    "messages": ("/v1/messages", {"messages": _USER, "max_tokens": 60}),
    "generate": ("/api/generate", {"prompt": "Hi"}),
    "talk": ("/api/chat", {"messages": _USER}),
    "tgi": ("/generate_stream", {"inputs": "Hi", "parameters": {"max_new_tokens": 60, "top_n_tokens": 1}}),
}
_TEXT = re.compile(r'"(text|content|delta|response)":("(?:[^"\\]|\\.)*")')
#: What differs from one request, or from one token, to the next: ids, numbers and points in time.
_OWN = re.compile(r'[-_]?[0-9a-f]{24,}|-?\d[-\d.e:TZ]*|"item_id":"[^"]*"')


def _script(prefix: Any) -> Any:
    time.sleep(0.003)  # so that tokens come one by one, mostly
    return saying(REPLY)(prefix)


def _read(url: str, path: str, body: dict[str, Any]) -> tuple[list[str], str]:
    """The forms of the events of a stream, those in a row that are equal once, and all of their texts."""
    answer = httpx.post(url + path, json={"model": NAME, "stream": True, **body}, timeout=PATIENCE)
    assert answer.status_code == 200, answer.text
    events = re.split(r"\n\n|(?<=})\n", answer.text)
    forms = [_OWN.sub("", _TEXT.sub(r'"\1":', event)) for event in events]
    texts = [json.loads(match[2]) for match in _TEXT.finditer(answer.text)]
    return [form for form, _ in groupby(forms)], "".join(texts)


@contextmanager
def _counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bytes]]:
    """Notes what is written past the application."""
    written: list[bytes] = []
    write = uvicorn_protocol.DirectBody.write

    def note(self: Any, data: bytes) -> bool:
        written.append(data)
        return write(self, data)

    with monkeypatch.context() as patch:
        patch.setattr(uvicorn_protocol.DirectBody, "write", note)
        yield written


@pytest.mark.parametrize("name", BODIES)
def test_bytes_are_the_same_on_both_ways(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path, body = BODIES[name]
    with served(scripted_model(next_token=_script)) as url:
        with _counted(monkeypatch) as written:
            short = _read(url, path, body)
        monkeypatch.setattr(uvicorn_protocol, "DIRECT_BODY", "bridle.nowhere")
        long = _read(url, path, body)
    assert short == long
    assert len(written) > 5


@pytest.mark.parametrize("options", [{"n": 2}, {"logprobs": 1}, {"prompt": ["Hi", "He"], "echo": True, "logprobs": 0}])
def test_what_is_more_than_text_goes_through_the_application(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(scripted_model(next_token=_script)) as url, _counted(monkeypatch) as written:
        _, text = _read(url, "/v1/completions", {"prompt": "Hi", "max_tokens": 4} | options)
    assert text and not written


def test_a_slow_client_gets_everything() -> None:
    """The connection is full again and again, so the text changes between the two ways."""
    letter = tokenizer().encode("a" * 8, add_special_tokens=False)[0]
    model = scripted_model(next_token=lambda prefix: letter, max_model_len=8192, num_blocks=1024)
    with served(model) as url:
        host, port = url.removeprefix("http://").split(":")
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.settimeout(PATIENCE)
            sock.connect((host, int(port)))
            body = json.dumps({"model": NAME, "prompt": "Hi", "max_tokens": 4000, "stream": True, "ignore_eos": True})
            head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
            sock.sendall(f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
            data = b"".join(iter(lambda: sock.recv(512), b""))
    chunks = [json.loads(line[6:]) for line in data.split(b"\n") if line.startswith(b"data: {")]
    texts = [choice["text"] for chunk in chunks for choice in chunk["choices"]]
    assert "".join(texts) == tokenizer().decode([letter]) * 4000
    assert b"data: [DONE]" in data


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
