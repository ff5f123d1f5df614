"""Tests of request bodies of any size on every route: errors are clear and cheap, and other requests do not wait. No
time is asserted. Parsers never build more values than the limits allow, and large bodies and texts are handled outside
the event loop. The longest delay of the event loop is printed (`pytest -rP`); `bridle bench refusals` measures it in a
separate process."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from itertools import cycle, islice
from typing import Any

import pytest
from pydantic_core import from_json
from starlette.testclient import TestClient

from bridle.http.middleware import json_body
from bridle.http.settings import BODY_BYTES
from bridle.serving.requests.json_size import MAX_INLINE_BYTES, json_size, limit_for
from bridle.serving.requests.prompts import MAX_INLINE_CHARS
from bridle.tokenizer import Tokenizer
from tests.conftest import IS_FULL
from tests.fakes.hostile_json import hostile_values
from tests.http.harness import local_client, scripted_model

SIZE = (480 if IS_FULL else 280) << 10  # bytes of a hostile value: enough to hold more than is taken
HOSTILE = hostile_values(SIZE)
#: What a good body has, by the names of fields that any route may demand.
GOOD: dict[str, bytes] = {
    "prompt": b'"a"',
    "inputs": b'"a"',
    "input": b'"a"',
    "messages": b'[{"role": "user", "content": "a"}]',
    "max_tokens": b"2",
    "controller": b'"none"',
    "controller_arg": b'""',
    "module_id": b'"f"',
    "tags": b'["a"]',
    "model": b'"scripted"',
}
#: Routes that read their bodies themselves: they take the fields of these.
READ_BY_HAND = {"/invocations": "/v1/completions", "/v1/controllers": "/v1/controllers/tags"}
LACKS = (501, 503)


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with local_client(scripted_model()) as client:
        yield client


def routes(client: TestClient) -> dict[str, dict[str, Any]]:
    """Return every route that takes a body, with the body's schema."""
    description = client.get("/openapi.json").json()
    found = {}
    for path, methods in description["paths"].items():
        for method in {"post", "put", "patch"} & set(methods):
            assert method == "post", f"{method} {path}: this test only knows POST"
            operation = description["paths"][READ_BY_HAND.get(path, path)]["post"]
            if "requestBody" not in operation:
                continue
            content = operation["requestBody"]["content"]
            if path == "/v1/files":  # a form; test_batches.py has damaged ones
                assert "multipart/form-data" in content
                continue
            schema = content["application/json"]["schema"]
            name = schema["$ref"].rsplit("/", 1)[-1] if "$ref" in schema else ""
            found[path] = description["components"]["schemas"][name] if name else schema
    assert "/v1/chat/completions" in found and "/generate" in found
    return found


class Watch:
    """A record of parsed values, tokenized texts, their threads, and the longest delay of the event loop."""

    def __init__(self, client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
        assert client.portal is not None
        self.loop_thread = client.portal.call(self._thread)
        self.longest = 0.0
        self.parsed: list[tuple[int, int]] = []  # thread, bytes
        self.encoded: list[tuple[int, int]] = []  # thread, characters
        self.too_much: list[int] = []
        monkeypatch.setattr(json_body, "from_json", self._from_json)
        encode = Tokenizer.encode

        def watched(tokenizer: Tokenizer, text: str, *options: Any, **named: Any) -> list[int]:
            self.encoded.append((threading.get_ident(), len(text)))
            return encode(tokenizer, text, *options, **named)

        monkeypatch.setattr(Tokenizer, "encode", watched)
        self.beat = client.portal.start_task_soon(self._beat)

    async def _thread(self) -> int:
        return threading.get_ident()

    async def _beat(self) -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(0.002)
            self.longest = max(self.longest, time.perf_counter() - before)

    def _from_json(self, text: bytes) -> Any:
        self.parsed.append((threading.get_ident(), len(text)))
        size = json_size(text)
        if size.num_nodes > max(limit_for(0).num_nodes, MAX_INLINE_BYTES // 2):
            self.too_much.append(size.num_nodes)
        return from_json(text)

    def check(self) -> None:
        """Check that large inputs were handled outside the event loop, and that inputs above the limits were not
        handled at all."""
        assert self.parsed and not self.too_much
        assert all(num <= MAX_INLINE_BYTES for thread, num in self.parsed if thread == self.loop_thread)
        assert all(num <= MAX_INLINE_CHARS for thread, num in self.encoded if thread == self.loop_thread)


@pytest.fixture
def watch(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    watch = Watch(client, monkeypatch)
    yield watch
    watch.beat.cancel()
    watch.check()
    print(f"the event loop was away for at most {1000 * watch.longest:.0f} ms")


def refused(client: TestClient, path: str, body: bytes) -> int:
    """Return the status, after a check that an error is short and has a reason."""
    answer = client.post(path, content=body)
    assert answer.status_code < 500 or answer.status_code in LACKS, (path, body[:80], answer.text[:500])
    if answer.status_code >= 400:
        assert len(answer.content) < 16_384
        assert answer.json()["error"], (path, body[:80])
    return answer.status_code


def test_bodies_that_are_large_or_no_json(client: TestClient, watch: Watch) -> None:
    """Every route gets some of the hostile values, as large as bodies may be; with `BRIDLE_FULL` all values."""
    values = hostile_values(BODY_BYTES - 64) if IS_FULL else HOSTILE
    names = cycle(values)
    for path in routes(client):
        for name in values if IS_FULL else islice(names, len(values) // 6):
            assert refused(client, path, values[name]) >= 400, (path, name)


def test_fields_that_are_large_or_no_numbers(client: TestClient, watch: Watch) -> None:
    """One third of each body's fields get one hostile value. With `BRIDLE_FULL`, each field gets all of them on each
    route with this body."""
    names = cycle(HOSTILE)
    schemas = routes(client)
    first_of = {schema["title"]: path for path, schema in reversed(schemas.items())}
    for path, schema in schemas.items():
        some = [*schema["properties"]][::3] if first_of[schema["title"]] == path else ()
        for field in schema["properties"] if IS_FULL else some:
            for name in HOSTILE if IS_FULL else (next(names),):
                base = {each: GOOD[each] for each in (*schema.get("required", ()), "max_tokens") if each in GOOD}
                fields = base | {field: HOSTILE[name]}
                body = b"{" + b",".join(b'"%s":%s' % (key.encode(), value) for key, value in fields.items()) + b"}"
                refused(client, path, body)


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v1/completions", b'{"prompt":"a","n":1000000}', "n is 1000000; must be between 1 and 64"),
        ("/v1/completions", b'{"prompt":"a","stop":%s}' % HOSTILE["texts"], "texts, names, lists and objects; at most"),
        ("/v1/completions", b'{"prompt":"a","logit_bias":%s}' % HOSTILE["biases"], "logit_bias holds token"),
        ("/generate", b'{"inputs":"a","parameters":{"best_of":1000000}}', "best_of is 1000000"),
        (
            "/v1/completions",
            b'{"prompt":"a","trace":"%s"}' % (b"a" * 50_000),
            "aaa...; must be true, false or 'events'",
        ),
        ("/v1/completions", b'{"prompt":' + b"[" * 50_000, "recursion limit exceeded"),
    ],
)
def test_what_a_refusal_says(client: TestClient, path: str, body: bytes, message: str) -> None:
    answer = client.post(path, content=body)
    assert answer.status_code in (400, 422)
    assert message in answer.text and len(answer.content) < 16_384


@pytest.mark.parametrize(("path", "field"), [("/v1/completions", "prompt"), ("/v1/embeddings", "input")])
def test_many_short_texts_are_long_together(client: TestClient, watch: Watch, path: str, field: str) -> None:
    client.post(path, json={field: ["some words and "] * 3, "max_tokens": 1})
    assert {thread for thread, _ in watch.encoded} == {watch.loop_thread}
    watch.encoded.clear()
    client.post(path, json={field: ["some words and more " * 4] * 100, "max_tokens": 1})
    assert len(watch.encoded) == 100 and watch.loop_thread not in {thread for thread, _ in watch.encoded}


def test_a_long_text_is_told_in_pieces(client: TestClient) -> None:
    """An answer with more rows than one write takes still has the complete text."""
    text = "ab " * 10_000
    rows = client.post("/tokenize", json={"inputs": text, "add_special_tokens": False}).json()
    assert "".join(row["text"] for row in rows) == text
    assert [row["start"] for row in rows[1:]] == [row["stop"] for row in rows[:-1]]
