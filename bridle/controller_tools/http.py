"""HTTP as a tool: requests that match an operator's list of methods, hosts and paths, and nothing else.

    {"method": "GET", "url": "https://example.org/api/cities?name=Oslo"}

Redirects are not followed. Connections are made only to addresses that were checked. Sizes and times are limited. Each
request has a connection and a thread of its own, which end with the call.
"""

from __future__ import annotations

import asyncio
import codecs
import re
from dataclasses import dataclass
from typing import Any, Self

import msgspec

from bridle.controller_tools.executor import Arguments
from bridle.controller_tools.functions import Threads
from bridle.controller_tools.offer import ToolOffer
from bridle.errors import InvalidRequest, ToolFailed
from bridle.safe_http import HttpExchange, HttpLimits, HttpResponse, HttpTarget, OutboundFailed
from bridle.safe_repr import short_repr

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")
_FIELDS = ("method", "url", "body", "content_type")
_TYPE = re.compile(r"[A-Za-z0-9!#$&^_.+-]+/[A-Za-z0-9!#$&^_.+-]+(?:; ?charset=[A-Za-z0-9-]+)?")
_CHARSET = re.compile(r"charset=\"?([A-Za-z0-9_-]+)")
#: Character sets that are decoded. Others are rare, and decoding some of them is slow.
_ENCODINGS = frozenset({"utf-8", "utf-16", "ascii", "iso8859-1", "iso8859-15", "cp1252"})
_MAX_SHOWN = 300


@dataclass(frozen=True, slots=True)
class HttpRule:
    """A permitted method and origin, and the prefix of permitted paths."""

    method: str
    scheme: str
    host: str
    port: int
    prefix: str

    @classmethod
    def of(cls, text: Any) -> Self:
        """Read `GET https://example.org/api/`. Raises `InvalidRequest`."""
        method, _, url = str(text).partition(" ")
        try:
            target = HttpTarget.of(url.strip())
        except OutboundFailed as error:
            raise InvalidRequest(f"allow has the entry {short_repr(text)}: {error}", "allow") from None
        if method not in METHODS or "?" in target.path:
            raise InvalidRequest(
                f"allow has {short_repr(text)}; each must be a method ({', '.join(METHODS)}) and a URL without a query",
                "allow",
            )
        return cls(method, target.scheme, target.host, target.port, target.path)

    def allows(self, method: str, target: HttpTarget) -> bool:
        """Return whether a request matches: `/api/` allows paths below it, `/api` also allows itself."""
        if (method, target.scheme, target.host, target.port) != (self.method, self.scheme, self.host, self.port):
            return False
        path, prefix = target.path.partition("?")[0], self.prefix
        return path == prefix or path.startswith(prefix if prefix.endswith("/") else prefix + "/")


#: JSON schema of a request's arguments, for models.
_PARAMETERS = {
    "type": "object",
    "properties": {"method": {"enum": list(METHODS)}} | {name: {"type": "string"} for name in _FIELDS[1:]},
    "required": ["method", "url"],
    "additionalProperties": False,
}


class HttpTool:
    """HTTP requests that a list of rules allows."""

    def __init__(self, rules: tuple[HttpRule, ...], bounds: HttpLimits, threads: Threads, name: str = "http") -> None:
        self._rules, self._bounds, self._threads, self._name = rules, bounds, threads, name

    @property
    def description(self) -> str:
        """Return a description of the permitted requests."""
        return "HTTP: " + ", ".join(f"{rule.method} {rule.scheme}://{rule.host}{rule.prefix}" for rule in self._rules)

    async def offers(self) -> list[ToolOffer]:
        """Return the description of the tool and its arguments."""
        return [ToolOffer(self._name, self.description, _PARAMETERS)]

    async def call(self, member: str, arguments: Arguments) -> str:
        """Send the request, and return its answer. A status from 300 on is a failure."""
        if member:
            raise ToolFailed(f"an HTTP tool has no member {short_repr(member)}")
        exchange, target = self._checked(arguments)
        seconds = self._bounds.timeout
        try:
            async with asyncio.timeout(seconds):  # for the whole call: a socket's own limit restarts with each byte
                answer = await asyncio.wrap_future(self._threads.start(exchange.run, "bridle-tool-http"))
                return _text(target, answer)
        except OutboundFailed as error:
            raise ToolFailed(str(error)) from None
        except TimeoutError:
            raise ToolFailed(f"the HTTP server did not answer within {seconds:g} seconds (timeout)") from None
        finally:
            exchange.abort()

    def _checked(self, arguments: Arguments) -> tuple[HttpExchange, HttpTarget]:
        unknown = next((name for name in arguments if name not in _FIELDS), None)
        if unknown is not None:
            raise ToolFailed(f"the arguments have a field {short_repr(unknown)}; known are {', '.join(_FIELDS)}")
        method, target = arguments.get("method", "GET"), _target(arguments.get("url"))
        if method not in METHODS:
            raise ToolFailed(f"method is {short_repr(method)}; must be one of {', '.join(METHODS)}")
        body, kind = arguments.get("body"), arguments.get("content_type", "application/json")
        if not isinstance(kind, str) or not _TYPE.fullmatch(kind):
            raise ToolFailed(f"content_type is {short_repr(kind)}; must be a media type such as application/json")
        if not any(rule.allows(method, target) for rule in self._rules):
            raise ToolFailed(
                f"{method} {target.scheme}://{target.host}:{target.port}{target.path[:100]} is not allowed"
            )
        if body is not None:
            body = body.encode() if isinstance(body, str) else msgspec.json.encode(body)
        return HttpExchange(self._bounds, target, method, body, kind), target

    async def close(self) -> None:
        """Do nothing, because connections end with their calls."""


def _target(url: Any) -> HttpTarget:
    try:
        return HttpTarget.of(url)
    except OutboundFailed as error:
        raise ToolFailed(str(error)) from None


def _text(target: HttpTarget, answer: HttpResponse) -> str:
    text = answer.data.decode(_charset(answer.headers.get("content-type", "")), errors="replace")
    if answer.status >= 300:
        raise ToolFailed(f"{target.host} answered with status {answer.status}: {text[:_MAX_SHOWN]}")
    return text


def _charset(kind: str) -> str:
    found = _CHARSET.search(kind)
    try:
        name = "utf-8" if found is None else codecs.lookup(found[1]).name
    except LookupError:
        return "utf-8"
    return name if name in _ENCODINGS else "utf-8"
