"""HTTP as a tool: requests that match an operator's list of methods, hosts and paths, and nothing else.

    {"method": "GET", "url": "https://example.org/api/cities?name=Oslo"}

Redirects are not followed. The connection goes to an address that was checked; sizes and times are bounded. Each
request has a connection and a thread of its own, which end when the call does.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import http.client
import re
import socket
import ssl
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self
from urllib.parse import unquote, urlsplit

import msgspec

from bridle.errors import InvalidRequest, ToolFailed
from bridle.shown import shown
from bridle.tools.addresses import Networks, checked_address
from bridle.tools.desk import Arguments
from bridle.tools.functions import Threads

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")
_PORTS = {"http": 80, "https": 443}
_FIELDS = ("method", "url", "body", "content_type")
_HOST = re.compile(r"[a-z0-9](?:[a-z0-9.-]{0,252}[a-z0-9])?")
_PLAIN = re.compile(r"[!-~]{1,8192}")
_TYPE = re.compile(r"[A-Za-z0-9!#$&^_.+-]+/[A-Za-z0-9!#$&^_.+-]+(?:; ?charset=[A-Za-z0-9-]+)?")
_CHARSET = re.compile(r"charset=\"?([A-Za-z0-9_-]+)")
_PIECE = 65_536
#: Others are rare by now, and some take long.
_ENCODINGS = frozenset({"utf-8", "utf-16", "ascii", "iso8859-1", "iso8859-15", "cp1252"})
_MAX_SHOWN = 300


@dataclass(frozen=True, slots=True)
class Target:
    """Where a request goes."""

    scheme: str
    host: str
    port: int
    path: str  # with the query

    @classmethod
    def of(cls, url: Any) -> Self:
        """Read a URL with distrust. Raises `ToolFailed`."""
        if not isinstance(url, str) or not _PLAIN.fullmatch(url) or "\\" in url:
            raise ToolFailed(f"url is {shown(url)}; must be a URL of printable ASCII characters")
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ToolFailed(f"url is {shown(url)}: {error}") from None
        host = parts.hostname or ""
        if parts.scheme not in _PORTS or "@" in parts.netloc or parts.fragment:
            raise ToolFailed(f"url is {shown(url)}; must be http or https, without a user and without a fragment")
        if not _HOST.fullmatch(host):
            raise ToolFailed(f"url is {shown(url)}; its host must be a name or an IPv4 address")
        path = parts.path or "/"
        if is_winding(path):
            raise ToolFailed(f"url is {shown(url)}; its path must not have '.' or '..' as parts, nor hidden slashes")
        return cls(parts.scheme, host, _PORTS[parts.scheme] if port is None else port, path + _query(parts.query))


def _query(text: str) -> str:
    return f"?{text}" if text else ""


def is_winding(path: str) -> bool:
    """Whether a server might read another path than is written here."""
    plain = unquote(path)
    is_hidden = plain.count("/") != path.count("/") or "\\" in plain or "%" in plain or not plain.isprintable()
    return is_hidden or any(part.partition(";")[0] in (".", "..") for part in plain.split("/"))


@dataclass(frozen=True, slots=True)
class Rule:
    """A method, an origin, and how paths begin there."""

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
            target = Target.of(url.strip())
        except ToolFailed as error:
            raise InvalidRequest(f"allow has {shown(text)}; {error}", "allow") from None
        if method not in METHODS or "?" in target.path:
            raise InvalidRequest(
                f"allow has {shown(text)}; must be a method ({', '.join(METHODS)}) and a URL without a query", "allow"
            )
        return cls(method, target.scheme, target.host, target.port, target.path)

    def allows(self, method: str, target: Target) -> bool:
        """Whether a request matches: `/api/` allows what is below, `/api` also itself."""
        if (method, target.scheme, target.host, target.port) != (self.method, self.scheme, self.host, self.port):
            return False
        path, prefix = target.path.partition("?")[0], self.prefix
        return path == prefix or path.startswith(prefix if prefix.endswith("/") else prefix + "/")


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """`max_bytes` bounds an answer, `timeout` its time in seconds; `private` are addresses that are not public, and may
    be connected to. `headers` go with every request."""

    max_bytes: int = 256 << 10
    timeout: float = 10.0
    private: Networks = ()
    headers: Mapping[str, str] = field(default_factory=dict)


class HttpTool:
    """Requests that a list of rules allows."""

    def __init__(self, rules: tuple[Rule, ...], limits: HttpLimits, threads: Threads) -> None:
        self._rules, self._limits, self._threads = rules, limits, threads

    @property
    def description(self) -> str:
        """What it may ask for."""
        return "HTTP: " + ", ".join(f"{rule.method} {rule.scheme}://{rule.host}{rule.prefix}" for rule in self._rules)

    async def call(self, member: str, arguments: Arguments) -> str:
        """Send the request, and read its answer. A status from 300 on is a failure."""
        if member:
            raise ToolFailed(f"it has no part {shown(member)}")
        method, target, body, kind = self._checked(arguments)
        exchange = _Exchange(self._limits, method, target, body, kind)
        seconds = self._limits.timeout
        try:
            async with asyncio.timeout(seconds):  # of all of it: a socket's own limit begins anew with each byte
                return await asyncio.wrap_future(self._threads.start(exchange.run, "bridle-tool-http"))
        except TimeoutError:
            raise ToolFailed(f"did not answer within {seconds:g} seconds (timeout)") from None
        finally:
            exchange.abort()

    def _checked(self, arguments: Arguments) -> tuple[str, Target, bytes | None, str]:
        unknown = next((name for name in arguments if name not in _FIELDS), None)
        if unknown is not None:
            raise ToolFailed(f"its arguments have a field {shown(unknown)}; known are {', '.join(_FIELDS)}")
        method, target = arguments.get("method", "GET"), Target.of(arguments.get("url"))
        if method not in METHODS:
            raise ToolFailed(f"method is {shown(method)}; must be one of {', '.join(METHODS)}")
        body, kind = arguments.get("body"), arguments.get("content_type", "application/json")
        if not isinstance(kind, str) or not _TYPE.fullmatch(kind):
            raise ToolFailed(f"content_type is {shown(kind)}; must be such as application/json")
        if not any(rule.allows(method, target) for rule in self._rules):
            raise ToolFailed(
                f"{method} {target.scheme}://{target.host}:{target.port}{target.path[:100]} is not allowed"
            )
        if body is None:
            return method, target, None, kind
        return method, target, body.encode() if isinstance(body, str) else msgspec.json.encode(body), kind

    async def close(self) -> None:
        """Connections end with their calls."""


class _Exchange:
    """One request and its answer, in a thread. `abort` ends it from another."""

    def __init__(self, limits: HttpLimits, method: str, target: Target, body: bytes | None, kind: str) -> None:
        self._limits, self._method, self._target = limits, method, target
        self._body, self._kind = body, kind
        self._deadline = time.monotonic() + limits.timeout
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._is_over = False

    def run(self) -> str:
        """Connect, send, read. Raises `ToolFailed`."""
        target = self._target
        address = checked_address(target.host, target.port, self._limits.private)
        connection = http.client.HTTPConnection(target.host, target.port)
        try:
            connection.sock = self._connect(address)
            headers = {"Accept-Encoding": "identity", "User-Agent": "bridle", **self._limits.headers}
            if self._body is not None:
                headers["Content-Type"] = self._kind
            connection.request(self._method, target.path, self._body, headers)
            self._keep_time()
            return self._read(connection.getresponse())
        except TimeoutError:
            raise ToolFailed(f"did not answer within {self._limits.timeout:g} seconds (timeout)") from None
        except (OSError, http.client.HTTPException) as error:
            raise ToolFailed(
                f"{target.host} cannot be asked: {type(error).__name__}: {str(error)[:_MAX_SHOWN]}"
            ) from None
        finally:
            connection.close()

    def _connect(self, address: str) -> socket.socket:
        target = self._target
        self._hold(None)
        sock: socket.socket = socket.create_connection((address, target.port), self._remaining)
        try:
            if target.scheme == "https":
                context = ssl.create_default_context()
                sock = context.wrap_socket(sock, server_hostname=target.host, do_handshake_on_connect=False)
            self._hold(sock)
            if isinstance(sock, ssl.SSLSocket):
                sock.do_handshake()
        except BaseException:
            sock.close()
            raise
        return sock

    def _hold(self, sock: socket.socket | None) -> None:
        """Note what `abort` is to end. Raises `ToolFailed` if it was called."""
        with self._lock:
            if self._is_over:
                raise ToolFailed("was cancelled")
            self._socket = sock

    def _read(self, response: http.client.HTTPResponse) -> str:
        limit = self._limits.max_bytes
        pieces: list[bytes] = []
        while sum(map(len, pieces)) <= limit:
            self._keep_time()
            piece = response.read1(_PIECE)
            if not piece:
                if response.length:
                    raise http.client.IncompleteRead(b"".join(pieces), response.length)
                break
            pieces.append(piece)
        data = b"".join(pieces)
        if len(data) > limit:
            raise ToolFailed(f"its answer has more than {limit} bytes (max_bytes)")
        if response.getheader("Content-Encoding", "identity") != "identity":
            raise ToolFailed(f"its answer is packed as {shown(response.getheader('Content-Encoding'))}")
        text = data.decode(_charset(response.getheader("Content-Type", "")), errors="replace")
        if response.status >= 300:
            raise ToolFailed(f"{self._target.host} answered {response.status}: {text[:_MAX_SHOWN]}")
        return text

    @property
    def _remaining(self) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left

    def _keep_time(self) -> None:
        if self._socket is not None:
            self._socket.settimeout(self._remaining)

    def abort(self) -> None:
        """End the connection, so that the thread ends. Idempotent."""
        with self._lock:
            self._is_over, sock = True, self._socket
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


def _charset(kind: str) -> str:
    found = _CHARSET.search(kind)
    try:
        name = "utf-8" if found is None else codecs.lookup(found[1]).name
    except LookupError:
        return "utf-8"
    return name if name in _ENCODINGS else "utf-8"
