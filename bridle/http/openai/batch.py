"""Answers OpenAI's batch files with an ASGI application. Each line of the input is a request; each line of the output
is an answer.

The requests are passed to the application without a socket, so they are checked and answered exactly as over HTTP. Many
requests run at the same time and share the engine's batch.
"""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterable, Iterator
from functools import partial
from typing import Any, TypeVar

import msgspec
from starlette.types import ASGIApp, Message, Scope

from bridle.errors import InvalidRequest
from bridle.http.middleware.request_context import IDENTITY
from bridle.http.settings import BODY_BYTES, HttpSettings
from bridle.serving import new_request_id
from bridle.serving.tenancy.keys import Identity
from bridle.structured_output.request_fields import NAMES

T = TypeVar("T")
A = TypeVar("A")
Answer = dict[str, Any]
MAX_LINE_BYTES = 16 << 20
_NO_LIMIT = 1 << 62  # tokens
_WITHOUT_TEXT = frozenset({"/v1/embeddings", "/v1/score", "/v1/rerank", "/v1/classify"})
URLS = _WITHOUT_TEXT | {"/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses", "/generate"}
_NATIVE = frozenset({"/generate"})
_STEERS = ("controller", "controllers", *NAMES)


class BatchRequest(msgspec.Struct):
    """The request in one line of a batch file."""

    custom_id: str
    url: str
    body: dict[str, Any]
    method: str = "POST"

    @property
    def has_controllers(self) -> bool:
        """Return whether the body names a controller. False if the controllers in the body are invalid."""
        inner = self.body.get("parameters")
        fields = inner if isinstance(inner, dict) else self.body
        return bool(fields.get("controller") or fields.get("controllers"))

    @property
    def asks_its_client(self) -> bool:
        """Return whether the body has `client_tools`. Calls of client tools need a client that answers them, which a
        batch does not have."""
        inner = self.body.get("parameters")
        return bool(self.body.get("client_tools") or (isinstance(inner, dict) and inner.get("client_tools")))

    def steered(self, given: dict[str, Any]) -> BatchRequest:
        """Return the request with the constraint or controllers in `given`. A request that generates no text, or has
        its own constraint or controllers, stays unchanged."""
        inner = self.body.get("parameters") if self.url in _NATIVE else self.body
        fields = inner if isinstance(inner, dict) else {}
        if not given or self.url in _WITHOUT_TEXT or any(fields.get(name) is not None for name in _STEERS):
            return self
        body = self.body | ({"parameters": fields | given} if self.url in _NATIVE else given)
        return BatchRequest(self.custom_id, self.url, body, self.method)


class LineReader:
    """Checks the lines of a batch file one by one. `urls` are the allowed routes."""

    def __init__(self, urls: Collection[str] = URLS) -> None:
        self._urls = urls
        self._seen: set[str] = set()

    def read(self, number: int, line: bytes) -> BatchRequest | None:
        """Parse the request in a line; None for a blank line. Raises `InvalidRequest` that names the line."""
        line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
        if not line.strip():
            return None
        if len(line) > MAX_LINE_BYTES:
            raise InvalidRequest(f"line {number} has {len(line)} bytes; at most {MAX_LINE_BYTES}", "FILE")
        try:
            request = msgspec.json.decode(line, type=BatchRequest)
        except (ValueError, RecursionError) as error:  # also for invalid UTF-8 and too deep nesting
            raise InvalidRequest(f"line {number} is not a batch request: {error}", "FILE") from None
        self._check(number, request)
        self._seen.add(request.custom_id)
        return request

    def _check(self, number: int, request: BatchRequest) -> None:
        if request.method != "POST" or request.url not in self._urls:
            shown = f"{request.method} {request.url}"[:80]
            raise InvalidRequest(
                f"line {number} requests {shown!r}; a batch can only POST to {', '.join(sorted(self._urls))}", "FILE"
            )
        if request.asks_its_client:
            raise InvalidRequest(
                f"line {number} has client_tools, but in a batch no client answers tool calls. Remove client_tools",
                "FILE",
            )
        if request.custom_id in self._seen:
            raise InvalidRequest(
                f"line {number} repeats custom_id {request.custom_id[:80]!r}; give each line its own custom_id", "FILE"
            )


def read_requests(lines: Iterable[bytes]) -> Iterator[BatchRequest]:
    """Parse a file and yield its requests. Raises `InvalidRequest` that names the invalid line."""
    reader = LineReader()
    for number, line in enumerate(lines, 1):
        request = reader.read(number, line)
        if request is not None:
            yield request


def batch_settings(max_in_flight: int) -> HttpSettings:
    """Return server settings that allow `max_in_flight` concurrent requests."""
    num_requests = max_in_flight * HttpSettings().max_choices
    return HttpSettings(
        max_requests=num_requests, max_prompt_tokens=_NO_LIMIT, max_body_bytes=max(MAX_LINE_BYTES, BODY_BYTES)
    )


def answer_batch(
    app: ASGIApp, requests: Iterable[BatchRequest], max_in_flight: int, on_done: Callable[[], None] = lambda: None
) -> AsyncIterator[Answer]:
    """Yield answers in the order in which they end, each with the `custom_id` of its request. A failed request also
    gets an answer."""
    return answers_of(partial(answer_request, app), requests, max_in_flight, on_done)


async def answers_of(
    answer: Callable[[T], Coroutine[Any, Any, A]],
    requests: Iterable[T],
    max_in_flight: int,
    on_done: Callable[[], None] = lambda: None,
) -> AsyncIterator[A]:
    """Call `answer` for each request, and yield the results in the order in which they are ready."""
    waiting = iter(requests)
    running: set[asyncio.Task[A]] = set()
    try:
        while True:
            while len(running) < max_in_flight and (request := next(waiting, None)) is not None:
                running.add(asyncio.create_task(answer(request)))
            if not running:
                return
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                on_done()
                yield task.result()
    finally:
        for task in running:
            task.cancel()


async def answer_request(app: ASGIApp, request: BatchRequest, sender: Identity | None = None) -> Answer:
    """Send a request to the application. Returns the output line with the response. `sender` is the user (None: the
    local user)."""
    body = msgspec.json.encode(request.body | {"stream": False})
    status, headers, content = await _call(app, request.url, body, sender)
    answer = {"status_code": status, "request_id": headers.get(b"x-request-id", b"").decode()}
    return answer_line(request.custom_id, answer | {"body": msgspec.json.decode(content)})


def answer_line(custom_id: str, response: dict[str, Any] | None, error: dict[str, str] | None = None) -> Answer:
    """Return a line for OpenAI's output file or error file."""
    return {"id": f"batch_req_{new_request_id()}", "custom_id": custom_id, "response": response, "error": error}


async def _call(app: ASGIApp, path: str, body: bytes, sender: Identity | None) -> tuple[int, dict[bytes, bytes], bytes]:
    """Send one request to an application in this process. Returns the response's status, headers and body."""
    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json"), (b"host", b"batch")],
        "client": None,
        "server": ("batch", 80),
        IDENTITY: sender,
    }
    incoming: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    outgoing: list[Message] = []

    async def receive() -> Message:
        if incoming:
            return incoming.pop()
        await asyncio.Event().wait()  # the client does not disconnect
        raise AssertionError("unreachable")

    async def send(message: Message) -> None:
        outgoing.append(message)

    await app(scope, receive, send)
    start, *rest = outgoing
    return start["status"], dict(start["headers"]), b"".join(message.get("body", b"") for message in rest)
