"""OpenAI's batch files, answered offline: a line per request in, a line per answer out.

The requests go through the application without a socket, so they are checked and answered exactly as over HTTP. Many
are in flight at once and share the engine's batch.
"""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message, Scope

from bridle.errors import InvalidRequest
from bridle.http.settings import BODY_BYTES, HttpSettings
from bridle.serving import new_request_id
from bridle.structured_output.request_fields import NAMES

MAX_LINE_BYTES = 16 << 20
_NO_LIMIT = 1 << 62  # tokens
_WITHOUT_TEXT = frozenset({"/v1/embeddings", "/v1/score", "/v1/rerank", "/v1/classify"})
URLS = _WITHOUT_TEXT | {"/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses", "/generate"}
_NATIVE = frozenset({"/generate"})
_STEERS = ("controller", "controllers", *NAMES)


class BatchRequest(msgspec.Struct):
    """A line of a batch file."""

    custom_id: str
    url: str
    body: dict[str, Any]
    method: str = "POST"

    @property
    def has_controllers(self) -> bool:
        """Return whether the body names a controller, as far as it can be read."""
        inner = self.body.get("parameters")
        fields = inner if isinstance(inner, dict) else self.body
        return bool(fields.get("controller") or fields.get("controllers"))

    @property
    def asks_its_client(self) -> bool:
        """Return whether the body names tools that its client answers."""
        inner = self.body.get("parameters")
        return bool(self.body.get("client_tools") or (isinstance(inner, dict) and inner.get("client_tools")))

    def steered(self, given: dict[str, Any]) -> BatchRequest:
        """Return the request with the fields of a constraint or of controllers, if it generates text and has none
        itself."""
        inner = self.body.get("parameters") if self.url in _NATIVE else self.body
        fields = inner if isinstance(inner, dict) else {}
        if not given or self.url in _WITHOUT_TEXT or any(fields.get(name) is not None for name in _STEERS):
            return self
        body = self.body | ({"parameters": fields | given} if self.url in _NATIVE else given)
        return BatchRequest(self.custom_id, self.url, body, self.method)


def read_requests(lines: Iterable[bytes]) -> Iterator[BatchRequest]:
    """The requests of a file, checked one by one; raises `InvalidRequest` that names the line."""
    seen: set[str] = set()
    for number, line in enumerate(lines, 1):
        line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
        if not line.strip():
            continue
        if len(line) > MAX_LINE_BYTES:
            raise InvalidRequest(f"line {number} has {len(line)} bytes; at most {MAX_LINE_BYTES}", "FILE")
        try:
            request = msgspec.json.decode(line, type=BatchRequest)
        except (ValueError, RecursionError) as error:  # also for bytes that are no text, and lists without an end
            raise InvalidRequest(f"line {number} is not a batch request: {error}", "FILE") from None
        if request.method != "POST" or request.url not in URLS:
            shown = f"{request.method} {request.url}"[:80]
            raise InvalidRequest(
                f"line {number} asks for {shown!r}; a batch may POST to {', '.join(sorted(URLS))}", "FILE"
            )
        if request.asks_its_client:
            raise InvalidRequest(
                f"line {number} has client_tools; a batch has no client that could answer them", "FILE"
            )
        if request.custom_id in seen:
            raise InvalidRequest(f"line {number} repeats custom_id {request.custom_id[:80]!r}", "FILE")
        seen.add(request.custom_id)
        yield request


def batch_settings(max_in_flight: int) -> HttpSettings:
    """Return settings with room for this many lines, because there are no other users."""
    num_requests = max_in_flight * HttpSettings().max_choices
    return HttpSettings(
        max_requests=num_requests,
        max_prompt_tokens=_NO_LIMIT,
        max_body_bytes=max(MAX_LINE_BYTES, BODY_BYTES),
    )


async def answer_batch(
    app: ASGIApp, requests: Iterable[BatchRequest], max_in_flight: int, on_done: Callable[[], None] = lambda: None
) -> AsyncIterator[dict[str, Any]]:
    """Yield answers as they are ready, each with the `custom_id` of its request. A failed request also gets an
    answer."""
    waiting = iter(requests)
    running: set[asyncio.Task[dict[str, Any]]] = set()
    try:
        while True:
            while len(running) < max_in_flight and (request := next(waiting, None)) is not None:
                running.add(asyncio.create_task(_answer(app, request)))
            if not running:
                return
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                on_done()
                yield task.result()
    finally:
        for task in running:
            task.cancel()


async def _answer(app: ASGIApp, request: BatchRequest) -> dict[str, Any]:
    body = msgspec.json.encode(request.body | {"stream": False})
    status, headers, content = await _call(app, request.url, body)
    answer = {"status_code": status, "request_id": headers.get(b"x-request-id", b"").decode()}
    return {
        "id": f"batch_req_{new_request_id()}",
        "custom_id": request.custom_id,
        "response": answer | {"body": msgspec.json.decode(content)},
        "error": None,
    }


async def _call(app: ASGIApp, path: str, body: bytes) -> tuple[int, dict[bytes, bytes], bytes]:
    """One request to an application in this process: status, headers, body."""
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
    }
    incoming: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    outgoing: list[Message] = []

    async def receive() -> Message:
        if incoming:
            return incoming.pop()
        await asyncio.Event().wait()  # the client stays
        raise AssertionError("unreachable")

    async def send(message: Message) -> None:
        outgoing.append(message)

    await app(scope, receive, send)
    start, *rest = outgoing
    return start["status"], dict(start["headers"]), b"".join(message.get("body", b"") for message in rest)
