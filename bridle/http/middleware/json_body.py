"""Reads request bodies as strict JSON, with limits on size and time.

The standard library's parser has no limit on nesting, and accepts lone surrogates. The parser used here limits the
nesting, and refuses text that is not valid Unicode. Parsing blocks all other tasks. So the values of a large body are
counted first, and a body with too many values is refused without parsing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.responses import Response

from bridle.errors import InvalidRequest
from bridle.http.errors import RefusedBody
from bridle.http.fields import STRICTNESS
from bridle.http.middleware.content_coding import unpacker_of
from bridle.http.settings import BODY_BYTES
from bridle.http.state import HttpState, http_state
from bridle.serving.requests.json_size import MAX_INLINE_BYTES, json_size, limit_for
from bridle.structured_output.request_fields import field_with_constraint


class BoundedRequest(Request):
    """A request with limits on the size of its compressed and its decompressed body, from the application's
    `HttpSettings`."""

    async def body(self) -> bytes:
        """Return the whole body. Raises a 413 error if the body is too large, and a 408 error if it is too slow."""
        if hasattr(self, "_body"):
            return self._body
        http = http_state(self)
        settings, limit = http.settings, http.max_body_bytes
        announced = self.headers.get("content-length", "")
        if announced.isascii() and announced.isdigit() and int(announced) > limit:
            raise _too_large(announced + " bytes", limit)
        try:
            async with asyncio.timeout(settings.receive_timeout):
                self._body = await self._read_chunks(limit)
        except TimeoutError:
            message = f"the request body did not arrive within {settings.receive_timeout:g} seconds"
            raise RefusedBody(408, InvalidRequest(message)) from None
        return self._body

    async def json(self) -> Any:
        """Return the body as JSON. Raises a 400 error with the place of the first mistake."""
        return await parsed(http_state(self), await self.body())

    async def _read_chunks(self, limit: int) -> bytes:
        chunks, size, arrived = [], 0, 0
        unpacker = unpacker_of(self) if "content-encoding" in self.headers else None
        async for chunk in self.stream():
            made = unpacker.push(chunk, limit - size) if unpacker is not None and chunk else chunk
            size, arrived = size + len(made), arrived + len(chunk)
            if max(size, arrived) > limit:
                raise _too_large("more", limit)
            chunks.append(made)
        if unpacker is not None:
            unpacker.close()
        return b"".join(chunks)


class BoundedRoute(APIRoute):
    """A route whose handler gets a `BoundedRequest`. In an error about a constraint, the name of the client's field is
    added, because the constraint's compiler does not know it."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def bounded(request: Request) -> Response:
            STRICTNESS.set((request.headers, http_state(request).settings.strict_fields))
            read = BoundedRequest(request.scope, request.receive)
            try:
                return await handler(read)
            except InvalidRequest as error:
                if error.param == "constraint":
                    error.param = field_with_constraint(await read.json())
                raise

        return bounded


async def parsed(http: HttpState, body: bytes) -> Any:
    """Parse a client's JSON body. Raises a 400 error with the place of the first mistake."""
    if len(body) <= MAX_INLINE_BYTES:
        return _parse(body)
    async with http.parsing:
        return await asyncio.to_thread(_parse_large, body, http.settings.max_body_bytes or BODY_BYTES)


def _parse_large(body: bytes, max_bytes: int) -> Any:
    try:
        json_size(body).check(limit_for(max_bytes))
    except InvalidRequest as error:
        raise RefusedBody(400, error) from None
    return _parse(body)


def _parse(body: bytes) -> Any:
    try:
        return from_json(body)
    except ValueError as error:
        raise RefusedBody(400, InvalidRequest(f"the request body is not valid JSON: {error}")) from None


def _too_large(shown: str, limit: int) -> RefusedBody:
    message = f"the request body has {shown}; at most {limit} bytes are accepted"
    return RefusedBody(413, InvalidRequest(message))
