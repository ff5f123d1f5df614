"""Streams of all APIs whose text bypasses the application, in a form that can be compared."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Callable
from itertools import groupby
from typing import Any

import httpx

from bridle.serving import LoadedModel
from tests.http.harness import NAME, saying, scripted_model, tokenizer
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


def script(prefix: Any) -> Any:
    time.sleep(0.003)  # so that tokens come one by one, mostly
    return saying(REPLY)(prefix)


def read_stream(
    url: str, path: str, body: dict[str, Any], post: Callable[..., httpx.Response] = httpx.post
) -> tuple[list[str], str]:
    """Return the forms of a stream's events, and the text of all events. Consecutive equal forms are listed once.
    Choices are sorted, because their order in the stream depends on the load of the server."""
    answer = post(url + path, json={"model": NAME, "stream": True, **body}, timeout=PATIENCE)
    assert answer.status_code == 200, answer.text
    events = sorted(re.split(r"\n\n|(?<=})\n", answer.text), key=_choice_of)
    forms = [_OWN.sub("", _TEXT.sub(r'"\1":', event)) for event in events]
    texts = [json.loads(match[2]) for event in events for match in _TEXT.finditer(event)]
    return [form for form, _ in groupby(forms)], "".join(texts)


def _choice_of(event: str) -> int:
    """Return the number of the choice to which an event belongs. Events without a choice come first."""
    found = re.match(r'data: \{.*"choices":\[\{.*?"index":(\d+)', event)
    return -1 if found is None else int(found[1])


_NUM_TOKENS = 4000


def one_token_model() -> tuple[LoadedModel, str]:
    """Return a model that repeats one token, and the text of 4,000 such tokens."""
    token = tokenizer().encode("a" * 8, add_special_tokens=False)[0]
    model = scripted_model(next_token=lambda prefix: token, max_model_len=8192, num_blocks=1024)
    return model, tokenizer().decode([token]) * _NUM_TOKENS


def read_slowly(url: str) -> str:
    """Return the text of a long stream that is read in small pieces over a connection with small buffers."""
    host, port = url.removeprefix("http://").split(":")
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.settimeout(PATIENCE)
        sock.connect((host, int(port)))
        fields = {"model": NAME, "prompt": "Hi", "max_tokens": _NUM_TOKENS, "stream": True, "ignore_eos": True}
        body = json.dumps(fields)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        sock.sendall(f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        data = b"".join(iter(lambda: sock.recv(512), b""))
    return text_of_completion(data)


def text_of_completion(data: bytes) -> str:
    """Return the text of a complete stream."""
    assert b"data: [DONE]" in data
    chunks = [json.loads(line[6:]) for line in data.split(b"\n") if line.startswith(b"data: {")]
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
